"""GPU programs, made with or without a GPU at hand.

targets     the facts of each GPU, and the least time that one needs
torch_gpu   adapter: a GPU that is not here, as PyTorch, Inductor and Triton see it
torch_cuda  adapter: Triton kernels as machine code and loaded, a program as one CUDA graph
"""
