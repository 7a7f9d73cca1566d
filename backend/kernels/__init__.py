"""Kernels for one leaf closure, by TorchInductor or by PyTorch's own.

lower             kernels for each different leaf closure, once
eager_kernel      a leaf run by PyTorch's own kernels, operator by operator
torch_inductor    adapter: TorchInductor as a kernel maker for one ATen graph
torch_builds      adapter: how Inductor has its C++ built
bundles           many C++ kernels, built by one run of the compiler
built_index       which kernels are built already, by content
scatters          complex numbers written into a part of a tensor
source            the text of Inductor's C++ kernels
parallel_regions  parallel regions of kernels, made safe for whatever happens in them
torch_divisions   adapter: integers divided by zero
torch_draws       adapter: random operators are drawn in the order of the graph
torch_index       adapter: the indices of Inductor's kernels
torch_layouts     adapter: the layouts of a graph, kept through Inductor's passes
torch_recorder    adapter: the kernel list of a closure, recorded in one run on fake tensors
torch_attention   adapter: small attentions as plain products
"""
