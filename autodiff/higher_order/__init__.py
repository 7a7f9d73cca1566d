"""Derivatives that a forward takes, to be differentiated like anything else in it.

inner_gradients  their marks, and what is put in their place
repeats          operators that repeat become calls on one closure
"""
