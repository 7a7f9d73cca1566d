"""Derivatives of derivatives: the gradients of a program as a program.

gradient_program  the gradients of a program, to be differentiated like any other
derivation        what stands for a gradient that a forward takes
derive            such gradients, made once per closure
expand            series along lines that a forward takes, made once per closure
repeats           operators that repeat become calls on one closure
paths             which calls lead from some values to others
flat_structs      programs without struct values
"""
