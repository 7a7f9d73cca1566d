"""Whether what a user hands in can be compiled at all.

capturable      what no capture can take
example_inputs  a model that is given with example inputs is a module, and they are a tuple
runnable        what must hold before a captured model can be run
operand_types   products of tensors of unequal types
refusals        what a model takes or returns that no call could watch
plain_inputs    inputs whose memory does not hold their numbers, or that are more than numbers
torch_own_memory  adapter: whether a tensor has memory of its own
wrappers        modules that train a model on several devices
torch_modes     adapter: what around a call sees or changes every operator
"""
