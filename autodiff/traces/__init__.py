"""Leaves traced: a forward taken apart, or forward and backward as one graph, and cuts of that.

joint_trace           a leaf traced: its forward alone, or forward and backward as one graph
torch_differentiable  adapter: operators in graphs whose gradients are differentiated
torch_partition       adapter: PyTorch's partitioners
joint_cut             cuts of a joint graph: any set of forward values may be the saved ones
pure_memory           graphs that do nothing but compute, laid out as traced: no writes, no marks
origins               what is noted while a leaf is traced: origins, and where a gradient stops
torch_make_fx         adapter: a function traced into a graph, on fake tensors of given types
torch_user_rules      adapter: rules of users that take an operator of theirs apart
torch_lazy            adapter: operators whose result is a mark on memory
"""
