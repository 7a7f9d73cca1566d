"""``advise(model)``: which classes to mark, and what keeps blocks apart.

advise   the search
advice   what it found
"""
