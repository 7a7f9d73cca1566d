"""Compiled programs inside PyTorch's autograd.

bridge        forward and backward as one node of the autograd graph, by the outputs a loss used
second        gradients that are differentiated in their turn (create_graph=True)
tensors       cotangents, saved tensors and handed gradients, which others may have changed
torch_engine  adapter: hooks where a gradient arrives, and cotangents in a batch, one by one
"""
