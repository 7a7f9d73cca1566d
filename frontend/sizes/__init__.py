"""Sizes that vary: symbols in place of numbers, and a link for each further shape.

shapes                finds or compiles the program for the sizes of a call
torch_known_sizes     adapter: the symbols of a capture and of inputs; conditions of a program
torch_input_sizes     adapter: which dimensions are symbols, learned from calls or declared
"""
