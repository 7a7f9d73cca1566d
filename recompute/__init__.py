"""Chooses, per call, which saved tensors are kept for backward and which are computed again.

By design this folder owns the cuts of a closure's joint graph (none, full, selective, or within a
byte budget), the Pareto frontier of one closure, and the choice of one variant for each of its
calls. It imports ``reuse`` and ``autodiff`` only. It is empty until that part lands.
"""
