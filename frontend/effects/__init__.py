"""Side effects of a forward: found after a run, undone, or a reason to run eagerly.

effects              what a run changes, how that is undone, and what else a program would not do
kept                 what it leaves in arguments and attributes, left there by each call
given_objects        which parts of a cache the blocks that are given it read and write
torch_allowed_calls  the functions in C that a forward may call: what only computes
"""
