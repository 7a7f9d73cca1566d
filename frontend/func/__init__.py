"""``lazyinline.func``: derivatives of functions and modules, to any order.

transforms    ``grad``, ``vjp``, ``jvp``, ``hvp``: signatures as in PyTorch
rows          ``jacobian`` and ``hessian``, by products with directions, where they are asked for
coordinates   ``laplacian`` and ``derivative``: by the coordinates of points
lines         derivatives along lines: Taylor mode, where a capture follows
"""
