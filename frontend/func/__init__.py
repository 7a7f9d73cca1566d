"""``lazyinline.func``: derivatives of functions and modules, to any order.

transforms    ``grad``, ``vjp``, ``jvp``, ``hvp``; derivatives along directions, and their modes
rows          ``jacobian`` and ``hessian``, which compute rows on demand
coordinates   ``laplacian`` and ``derivative`` by the coordinates of points; energy and forces
"""
