"""The reads of the model's Python: does another instance agree, is it still so at a call?

evidence       what a traced block depended on, and whether another instance agrees
reads          what the Python of one traced instance read
functions      the functions that ran: names in their code, captures, ways to tell apart
module_state   what a module holds and what its tree is built of, past any code of the user's
slots          what a block reads and writes of a cache that it is given, and its index in it
root_evidence  what the whole model's Python read: is it still so, asked in one function?
"""
