"""Compiled programs inside PyTorch's autograd.

bridge        forward and backward as one node of the autograd graph
gradients     results with nodes of their own; gradients as programs, to be differentiated or ahead
torch_engine  adapter: hooks, batches, and tensors handed over, which others may have changed
"""
