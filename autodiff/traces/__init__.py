"""Leaves traced: a forward taken apart, or forward and backward as one graph, and cuts of that.

forwards              forwards, traced: composite operators taken apart, no derivative
joint_trace           forward and backward of a leaf as one graph
torch_differentiable  adapter: operators in graphs whose gradients are differentiated
torch_partition       adapter: PyTorch's partitioners
joint_cut             cuts of a joint graph: any set of forward values may be the saved ones
pure_memory           graphs that do nothing but compute: nothing in place, no marks on memory
layouts               results and gradients that lie in memory as it was traced
detach_points         where no gradient flows: what the user stops, and what autograd gives none
origins               where the operators of a joint graph come from
torch_make_fx         adapter: a function traced into a graph, on fake tensors of given types
torch_user_rules      adapter: rules of users that take an operator of theirs apart
torch_lazy            adapter: operators whose result is a mark on memory
"""
