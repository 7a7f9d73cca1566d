"""A step over a device mesh, data and tensor parallel, by the rules of PyTorch's DTensor.

plan               what lies where: parameters, the batch, and the tensors of closures
given              a plan by hand: parallel styles of modules, and pins of parameters
torch_sharding     adapter: a leaf's graph of local shapes, by a run on DTensors
torch_collectives  adapter: collectives as operators whose results a plan of memory places
sharded            a program of local shapes, each different leaf once, split at its collectives
traffic            the collectives of a step, and the bytes that they move
"""
