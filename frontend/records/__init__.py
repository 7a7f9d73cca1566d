"""What a compile did and made: numbers, decisions, and programs to be looked at.

compile_record  the numbers of one compile
gpu_record      a program for a GPU that is not here
made            the programs and the memory plan that it made
reuse_table     which blocks share a closure, and where their keys said otherwise
"""
