"""Leaves traced: a forward taken apart, or forward and backward as one graph, and cuts of that.

joint_trace         a leaf traced: its forward alone, or forward and backward as one graph
torch_partition     adapter: a joint graph split in two, by PyTorch's partitioners or our cuts
pure_memory         graphs that do nothing but compute, laid out as traced: no writes, no marks
torch_interpreters  adapter: what runs a leaf while it is traced, and notes origins and stops
torch_make_fx       adapter: a function traced into a graph, on fake tensors of given types
torch_user_rules    adapter: rules of users that take an operator of theirs apart
"""
