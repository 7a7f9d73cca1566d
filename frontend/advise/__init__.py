"""``advise(model)``: which classes to mark, and what keeps blocks apart.

advise             the search
advice             what it found
differences        where two graphs of one block class part
attribute_sources  where a class sets and reads an attribute
"""
