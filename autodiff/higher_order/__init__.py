"""Derivatives of derivatives: the gradients of a program as a program.

gradient_program  the gradients of a program, to be differentiated like any other
inner_gradients   derivatives that a forward takes: their marks, and what is put in their place
repeats           operators that repeat become calls on one closure
"""
