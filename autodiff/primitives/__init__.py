"""Programs reduced to the stated set of primitives, to be looked at, checked and counted.

reduction     reduces programs, each different closure once
torch_leaves  adapter: PyTorch's decomposition tables, and a leaf traced with them
torch_rules   adapter: rules for operators that PyTorch has none for
"""
