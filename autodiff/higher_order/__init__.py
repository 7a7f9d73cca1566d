"""Derivatives of derivatives: the gradients of a program as a program.

gradient_program  the gradients of a program, to be differentiated like any other
flat_structs      programs without struct values
"""
