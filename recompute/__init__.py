"""Chooses, per call, which tensors are saved for backward and which are computed again.

cut_problem  one leaf's forward values, what saving some of them means, what operators take here
solver       exact cuts of one closure; exact spread over the calls of any number
planner      what a user asks for, the choice of that, and the frontier of each closure
fit_budget   a budget that the linked program keeps
summary      what is saved and computed again, for people

It imports ``reuse`` and ``autodiff`` only.
"""
