"""Side effects of a forward: found after a run, undone, or a reason to run eagerly.

effects              all that a program would not do at each call
changes              what a run changes, outside the model and in its modules, and how it is undone
given_objects        which parts of a cache the blocks that are given it read and write
torch_allowed_calls  the functions in C that a forward may call: what only computes
"""
