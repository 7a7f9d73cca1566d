"""Chooses, per call, which tensors are saved for backward and which are computed again.

solver      what saving values of a leaf means; exact cuts of it; exact spread over any calls
planner     what a user asks for, the choice of that, and the frontier of each closure
fit_budget   a budget that the linked program keeps
summary     what is saved and computed again, for people

It imports ``reuse`` and ``autodiff`` only.
"""
