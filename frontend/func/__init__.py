"""``lazyinline.func``: derivatives of functions and modules, to any order.

transforms    ``grad``, ``vjp``, ``jvp``, ``hvp``; derivatives along lines, and their modes
rows          ``jacobian`` and ``hessian``, by products with directions, where they are asked for
coordinates   ``laplacian`` and ``derivative`` by the coordinates of points; energy and forces
"""
