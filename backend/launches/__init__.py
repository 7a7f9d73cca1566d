"""Kernel launches, and how they run without Python between them.

kernel_list   the launches of one closure over named buffers, relocated; as the loop's words
torch_native  adapter: our C++ (native_*.cpp), kernels and tensors by their addresses
torch_facts   adapter: names and facts of PyTorch that cached things depend on
"""
