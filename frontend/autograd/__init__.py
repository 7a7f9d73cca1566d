"""Compiled programs inside PyTorch's autograd.

bridge        forward and backward as one node of the autograd graph
gradients     autograd nodes for single results; gradients as programs, for second derivatives
torch_engine  adapter: the autograd engine, hooks, batched cotangents; checks of saved tensors
"""
