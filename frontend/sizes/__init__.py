"""Sizes that vary: symbols in place of numbers, and a link for each further shape.

shapes                finds or compiles the program for the sizes of a call
torch_known_sizes     adapter: the symbols of inputs, and the conditions of a program
torch_input_sizes     adapter: symbols in a capture; which dimensions they are, learned or declared
"""
