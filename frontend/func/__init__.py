"""``lazyinline.func``: derivatives of functions and modules, to any order.

transforms    ``grad``, ``vjp``, ``jvp``, ``hvp``: signatures as in PyTorch
rows          ``jacobian`` and ``hessian``, computed by rows where they are asked for
products      what such a row is computed by: products with directions
coordinates   ``laplacian`` and ``derivative``: by the coordinates of points
lines         derivatives along lines: Taylor mode, where a capture follows
arguments     names of their own for what is differentiated, in arguments of any nesting
"""
