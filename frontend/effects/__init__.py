"""Side effects of a forward: found after a run, undone, or a reason to run eagerly.

effects              finds and undoes what a run changes, refuses output; values that calls leave
given_objects        which parts of a given object, such as a cache, a block reads and writes
torch_allowed_calls  the C functions that a forward may call, because they only compute
"""
