"""Runs a model's calls: compiled programs, or eagerly where none can be.

dispatcher         the programs of one module; its calls, and which of them run it eagerly
model_dispatcher   the calls of a whole model, also where it runs eagerly around compiled parts
torch_slot         adapter: where a module's own calls look first for something compiled
"""
