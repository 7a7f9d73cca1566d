"""The reads of the model's Python: does another instance agree, is it still so at a call?

evidence       what a traced block depended on, and whether another instance agrees
reads          what the Python of one traced instance read
functions      the functions that ran: names in their code, captures, uses of ``id`` and the like
module_state   what a module and its tree hold, read without running the user's code
slots          what a block reads and writes of a cache among its arguments, and its index in it
root_evidence  what the whole model's Python read, compared at each call by one function
"""
