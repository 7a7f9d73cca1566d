"""A step, or the stages of a pipeline, over a device mesh by the rules of PyTorch's DTensor.

plan                  layouts of parameters, of the batch, and of the tensors of closures
given                 a plan by hand: parallel styles of modules, and pins of parameters
planner               finds a plan, the cheapest by the costs of a device and of a mesh; its text
folding               a step, each different closure once, with the slots between calls
layouts               layouts on the axes of a mesh, and what it costs to change them
links                 rates of a mesh's links: measured once, kept in a file
torch_sharding_rules  adapter: the ways to split an operator over one axis
choices               operators in groups, each with its options and their seconds
problem               the choice of options as a linear program
torch_sharding        adapter: a leaf's graph of local shapes, by a run on DTensors
torch_parts           adapter: tensors of which a dimension consists of parts, each split by itself
torch_collectives     adapter: collectives as two operators; a mesh without processes
split                 a leaf split at its collectives; those run beside other work
sharded               a program of local shapes, each different leaf once; stages of a pipeline so
traffic               collectives of one rank's step, their bytes, and the rank's memory
"""
