"""Whether a compiled program still fits the inputs and the model's present state.

guard           the guard of one compiled program
kept_programs   which programs are kept, and which keep memory while idle
"""
