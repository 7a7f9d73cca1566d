"""Sizes that vary: symbols in place of numbers, and a link for each further shape.

shapes                which call gets which program
torch_sizes           adapter: symbols in place of sizes, in a capture and in each of its regions
torch_input_sizes     adapter: which dimensions of the inputs are symbols, learned from calls
torch_declared_sizes  adapter: sizes that the user declares, as torch.export has them
"""
