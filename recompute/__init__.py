"""Chooses, per call, which tensors are saved for backward and which are computed again.

solver      what saving values of a leaf means; exact cuts of it; exact spread over any calls
planner     what a user asks for, the choice of that, each closure's frontier; what is saved, listed
fit_budget  a budget that the linked program keeps

It imports ``reuse`` and ``autodiff`` only.
"""
