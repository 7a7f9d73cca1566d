"""Kernels for one leaf closure, by TorchInductor or by PyTorch's own.

lower                 kernels for each different leaf closure, once; also by eager operators
torch_inductor        adapter: TorchInductor as a kernel maker for one ATen graph
torch_corrections     adapter: corrections of Inductor where it differs from eager, or is slow
torch_decompositions  adapter: its table of decompositions, corrected likewise
bundles               C++ kernels, their text made safe, many built by one run of the compiler
torch_recorder        adapter: the kernel list of a closure, recorded in one run on fake tensors
torch_attention       adapter: which attention runs on a CPU and on a GPU, and its scratch
"""
