"""Compiled programs inside PyTorch's autograd.

bridge        forward and backward as one node of the autograd graph; gradients of gradients
torch_engine  adapter: hooks, batches, and tensors handed over, which others may have changed
"""
