"""A step, or the stages of a pipeline, over a device mesh by the rules of PyTorch's DTensor.

plan                  what lies where: parameters, the batch, and the tensors of closures
given                 a plan by hand: parallel styles of modules, and pins of parameters
planner               finds a plan, the cheapest by the costs of a device and of a mesh; its text
folding               a step, each different closure once, with the slots between calls
layouts               layouts on the axes of a mesh, and what it costs to change them
links                 what the links of a mesh sustain: measured once, kept in a file
torch_sharding_rules  adapter: the ways to split an operator over one axis
choices               operators in groups, each with its options and their seconds
problem               the choice of options as a linear program
torch_sharding        adapter: a leaf's graph of local shapes, by a run on DTensors
torch_parts           adapter: tensors of which a dimension consists of parts, each split by itself
torch_collectives     adapter: collectives as two operators; a mesh of ranks that are not there
split                 a leaf split at its collectives; those run beside other work
sharded               a program of local shapes, each different leaf once; stages of a pipeline so
traffic               what one rank moves and holds: collectives of a step, and its memory
"""
