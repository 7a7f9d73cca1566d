"""The core: programs, the evidence for sharing, and what every folder needs.

ir            programs: closures, calls on them, values, types; printed, verified, rewritten
evidence      what Python read, and whether another instance agrees or the same one still does
containers    objects that hold tensors and are changed in place: the caches of transformers
errors        the exceptions a user can meet
freeze        what Python code read, as a value that can be compared later
kinds         the one table of kinds of objects: how each is read, reached and put back
objects       what an object is and holds by itself, read past any code of its class
process       which PyTorch and Python run; the files of lazyinline; a lock that a fork finds open
open_index    a whole number handed to Python code that notes what it tells
torch_names   adapter: the few private PyTorch names that the core needs, of graphs too
torch_pytree  adapter: nested arguments and results, flattened

It imports nothing else of lazyinline.
"""
