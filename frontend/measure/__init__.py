"""``measure(model)`` and ``lazyinline bench``: what a compile saves, against eager.

measure   compiles a model late and early, runs both and eager, and compares
workload  a copy of a model that runs a step, and how far two steps are apart
report    the numbers, as a table, JSON and a page
bench     a row for each number of layers
"""
