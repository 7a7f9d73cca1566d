"""Sizes that vary: symbols in place of numbers, and a link for each further shape.

shapes                which call gets which program
symbolic_compiler     programs of symbolic sizes: compiled once, linked for each shape
symbolic_step         training steps of symbolic sizes, in the same way
at_numbers            a captured program of symbolic sizes, with numbers in place of them
region_sizes          each region computes the sizes it uses from its own inputs' shapes
torch_sizes           adapter: symbols in place of sizes, while a call is captured
torch_input_sizes     adapter: which dimensions of the inputs are symbols, learned from calls
torch_declared_sizes  adapter: sizes that the user declares, as torch.export has them
"""
