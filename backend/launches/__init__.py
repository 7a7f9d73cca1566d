"""Kernel launches, and the native loop that runs them without Python in between.

kernel_list   the launches of one closure over named buffers, relocated; as words of the loop
torch_native  adapter: our C++ (native_*.cpp), kernels and tensors by their addresses
torch_facts   adapter: names and facts of PyTorch that cached things depend on
"""
