"""Whether a compiled program still fits the inputs and the model's present state.

guard  the guard of one compiled program; which programs are kept, and keep memory while idle
"""
