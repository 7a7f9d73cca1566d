"""GPU programs, made with or without a GPU at hand.

targets       the facts of each GPU, and the least time that one needs
torch_graph   adapter: a program as one CUDA graph
torch_gpu     adapter: a GPU that is not here, as PyTorch, Inductor and Triton see it
torch_triton  adapter: Triton kernels as machine code, and loaded for launches
"""
