"""Side effects of a forward: found after a run, undone, or a reason to run eagerly.

effects              finds and undoes what a run changes, and refuses output such as printing
kept                 values that a forward leaves in arguments and attributes at each call
given_objects        which parts of a given object, such as a cache, a block reads and writes
torch_allowed_calls  the C functions that a forward may call, because they only compute
"""
