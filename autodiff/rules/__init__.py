"""Rules of users that take an operator of theirs apart into PyTorch's.

torch_rules  adapter: which operators have a rule, and which a derivative of their own
in_traces    what stands for an operator with a rule while a graph is traced
"""
