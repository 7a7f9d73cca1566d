"""Rules that take an operator of the user's apart into PyTorch's.

check          a rule against its operator: values, layouts, gradients
decomposition  ``@lazyinline.decomposition(operator)``
"""
