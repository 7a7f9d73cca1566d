"""GPU programs, made with or without a GPU at hand.

targets       what is known of each GPU
torch_graph   adapter: a program as one CUDA graph
torch_gpu     adapter: what Inductor asks of a GPU, answered for one that is not here
torch_triton  adapter: Triton kernels as machine code, and as something to launch
roofline      how long a GPU will need at least
"""
