"""Kernel launches, and how they run without Python between them.

kernel_list     the launches of one closure over named buffers, relocated per call
native_ops      launches as words that the native loop runs
torch_native    adapter: our C++ (native_*.cpp), and the addresses of what it calls
torch_facts     adapter: names and facts of PyTorch that cached things depend on
built_kernel    a C++ kernel inside a shared object that holds several
present_memory  refuses tensors whose memory was taken away
"""
