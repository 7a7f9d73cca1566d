"""The core: programs, the evidence for sharing, and what every folder needs.

ir            programs: closures, calls on them, values, types; printed, verified, rewritten
evidence      what Python read, and whether another instance agrees or the same one still does
containers    objects that hold tensors and are changed in place, such as caches
errors        the exceptions a user can meet
folding       text that fits a screen, for all that is printed
freeze        what Python code read, as a value that can be compared later
kinds         the one table of kinds of objects: how each is read, reached and put back
objects       what an object is and holds by itself, read past any code of its class
own_code      where our code lies: what the cache goes by, which frames are ours
own_storage   tensors on a part of a larger memory, with a storage of that part alone
open_index    a whole number handed to Python code that notes what it tells
process_lock  a lock that a forked child finds open
supported     which PyTorch and which Python this package was made for
torch_names   adapter: the few private PyTorch names that the core needs
torch_pytree  adapter: nested arguments and results, flattened
transformers_caches  which objects are caches of keys and values, as transformers names them
transformers_outputs  which set holds all its classes of outputs, as transformers names it

It imports nothing else of lazyinline.
"""
