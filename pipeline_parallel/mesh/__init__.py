"""A step, or the stages of a pipeline, over a device mesh by the rules of PyTorch's DTensor.

plan                  the placements of a step's tensors
given                 makes a plan of what the user says: styles of modules, pins of parameters
planner               finds a plan, the cheapest by the costs of a device and of a mesh; its text
folding               a step for planning: each different leaf once, tensors of one layout as slots
layouts               layouts on the axes of a mesh, the cost of redistributing, measured links
torch_sharding_rules  adapter: DTensor's rules, as ways to compute an operator on one axis
choices               groups of operators, each with its options and their seconds
problem               chooses an option for each group, by a linear program
torch_sharding        adapter: a leaf's graph of local shapes, by a run on DTensors
torch_parts           adapter: tensors with a dimension of several parts, each sharded by itself
torch_collectives     adapter: a collective as two operators; a mesh without processes
split                 splits a local graph at its collectives, so that they overlap with other work
sharded               rewrites a step, or stages, to local shapes, each different leaf once
traffic               lists a rank's collectives with their bytes, and counts its memory
"""
