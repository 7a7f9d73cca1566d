"""Compiled programs inside PyTorch's autograd.

bridge        forward and backward as one node of the autograd graph, by the outputs a loss used
second        gradients that are differentiated in their turn (create_graph=True)
torch_engine  adapter: hooks, batches, and tensors handed over, which others may have changed
"""
