"""Splits a program over pipeline stages and runs them under ``torch.distributed``.

schedule  what each rank does, in which order, and what that costs
split     which stage each call belongs to, and one program per stage
stages    stages as programs and steps, and the ranks that run them

It imports ``reuse`` and ``autodiff`` only.
"""
