"""Checks whether a compiled program fits the inputs and the present state of the model.

guard  the guard of one compiled program; which programs are kept, and keep memory while idle
"""
