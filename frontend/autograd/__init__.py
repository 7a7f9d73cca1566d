"""Compiled programs inside PyTorch's autograd.

bridge        forward and backward as one node of the autograd graph
gradients     gradients as programs: to be differentiated, or computed ahead with the forward
results       results that others are computed from: gradients come to each as in eager
torch_engine  adapter: hooks, batches, and tensors handed over, which others may have changed
"""
