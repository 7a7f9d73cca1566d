"""Derivatives of derivatives: the gradients of a program as a program.

gradient_program  the gradients of a program, to be differentiated like any other
derivation        marks for derivatives that a forward takes, and the calls between their values
inner_gradients   gradients and series that a forward takes, made once per closure
repeats           operators that repeat become calls on one closure
"""
