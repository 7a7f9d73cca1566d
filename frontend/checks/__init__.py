"""Checks whether a model and its inputs can be compiled at all.

refusals     models that cannot be captured; inputs and results that no program can have
torch_state  adapter: states that programs depend on: modes, tensor classes, memory, layouts
"""
