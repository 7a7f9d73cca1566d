"""Splits a program over pipeline stages and runs them under ``torch.distributed``.

By design this folder owns the colouring of calls by stage, the exact balanced split, the cutting
of shared closures that span stages, the send and recv at their boundaries, and the stage that
``torch.distributed.pipelining`` schedules. It imports ``reuse`` and ``autodiff`` only. It is empty
until that part lands.
"""
