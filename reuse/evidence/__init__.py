"""What the model's Python read: does another instance agree, and is it still so?

evidence            what a traced block depended on, and whether another instance agrees
reads               what the Python of one traced instance read
captured_functions  the functions that ran, where they have captured variables
module_state        what a module holds, read past any code of the user's
structure           the structure of a module tree
telling_apart       ways to tell instances apart that no comparison can see
bytecode            what the compiled code of a function names
slots               what a block reads and writes of a cache that it is given
snapshot            what objects hold, all the way down: to see later whether they hold it still
root_evidence       what the whole model's Python read: is it still so?
identity_checks     many checks by identity as one function
"""
