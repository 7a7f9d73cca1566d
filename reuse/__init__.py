"""The core: programs, the evidence for sharing, and what every folder needs.

ir            programs: closures, calls on them, values, types; printed, verified, rewritten
evidence      what Python read, and whether another instance agrees or the same one still does
errors        the exceptions a user can meet
freeze        what Python code read, to compare it later: frozen values, snapshots of objects
kinds         how the contents of an object are read, by one table of kinds of objects
once          results that an object computes once for equal arguments, and keeps
process       PyTorch and Python; lazyinline's files; room on the stack; a lock that forks find open
torch_names   adapter: the few private PyTorch names that the core needs, of graphs too
torch_pytree  adapter: nested arguments, results and caches of transformers, flattened

It imports nothing else of lazyinline.
"""
