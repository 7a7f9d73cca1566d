"""Sizes that vary: symbols in place of numbers, and a link for each further shape.

shapes                which call gets which program
torch_known_sizes     adapter: the symbols of inputs, and the conditions of a program
torch_sizes           adapter: symbols in place of sizes, in a capture and in each of its regions
torch_input_sizes     adapter: which dimensions are symbols, learned from calls or declared
"""
