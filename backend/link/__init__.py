"""The deferred inline: calls laid out on one timeline, memory placed, programs written.

link             a program of calls becomes one flat list of launches
layout           kernel lists relocated to their calls, on one timeline, and who owns results
unit_layout      the layout of a pipeline stage: its parts once, for many micro-batches
placement        where programs run; offsets of buffers, in an arena or in gradients' memory
torch_generated  adapter: a generated function, its binding to memory, its use of PyTorch
program_writer   the generated function of one part of a layout; control flow as one launch
estimate         how much memory a program will need, before its kernels are made
"""
