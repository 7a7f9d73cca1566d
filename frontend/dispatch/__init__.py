"""Runs a model's calls: by compiled programs, or eagerly where that is not possible.

dispatcher         the programs of one module, and how its calls run
limits             the kinds of calls that run eagerly: not to be captured, or compiled too often
model_dispatcher   the calls of a whole model, which may run eagerly around compiled sub-modules
torch_slot         adapter: the attribute in which ``nn.Module.__call__`` looks for a compiled call
"""
