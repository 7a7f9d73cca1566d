"""The deferred inline: calls laid out on one timeline, memory placed, programs written.

link             a program of calls becomes one flat list of launches
control          control flow as one launch, in which the launches of its bodies are
layout           kernel lists relocated to their calls, on one timeline, and who owns results
unit_layout      parts that take turns for many flights, laid out once
placement        where programs run, and where buffers lie: in an arena, or in gradients' memory
torch_generated  adapter: a generated function, how it is bound, what it asks of PyTorch
program_writer   the generated function of one part of a layout
estimate         how much memory a program will need, before its kernels are made
"""
