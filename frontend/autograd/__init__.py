"""Compiled programs inside PyTorch's autograd.

bridge            forward and backward as one node of the autograd graph
backwards         one backward for each set of outputs that a loss used
cotangents        cotangents in the layout that a backward was compiled for
second            gradients that are differentiated in their turn (create_graph=True)
saved_tensors     what autograd gives back of saved tensors
handed_gradients  the gradients that parameters of a compiled step have
torch_batched     adapter: cotangents in a batch, one by one
torch_hooks       adapter: hooks that the engine runs where a gradient arrives
"""
