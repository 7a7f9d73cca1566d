"""Rules that take an operator of the user's apart into PyTorch's.

made_inputs    inputs for an operator, made from its schema
check          a rule against its operator: values, layouts, gradients
decomposition  ``@lazyinline.decomposition(operator)``
"""
