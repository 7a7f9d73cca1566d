"""Chooses, per call, which tensors are saved for backward and which are recomputed.

solver      exact integer programs: what a leaf saves, and how many calls take which variant
planner     policies, the variants of each closure, the choice of calls; reports of what is saved
fit_budget  a budget that the linked program keeps

It imports ``reuse`` and ``autodiff`` only.
"""
