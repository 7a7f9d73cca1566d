"""Traces of leaves: a forward decomposed, or forward and backward as one joint graph; its splits.

joint_trace         a leaf traced as a functional graph: its forward, or with its backward
torch_partition     adapter: a joint graph split in two, by PyTorch's minimum cut or our cuts
torch_interpreters  adapter: interpreters that run a leaf in a trace, and record origins and stops
torch_make_fx       adapter: a function traced on fake tensors; graphs at given sizes
torch_user_rules    adapter: users' decomposition rules for operators of theirs
"""
