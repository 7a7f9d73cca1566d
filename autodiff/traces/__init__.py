"""Leaves traced: a forward taken apart, or forward and backward as one graph, and cuts of that.

joint_trace         a leaf traced as a graph that only computes: its forward, or with its backward
torch_partition     adapter: a joint graph split in two, by PyTorch's partitioners or our cuts
torch_interpreters  adapter: what runs a leaf while it is traced, and notes origins and stops
torch_make_fx       adapter: a function traced on fake tensors; graphs with numbers for sizes
torch_user_rules    adapter: rules of users that take an operator of theirs apart
"""
