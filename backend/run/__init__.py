"""Linked programs, run.

runtime         how a compiled forward, and the backward of the same flight, are run
planned         a planned program: every buffer has an address
executable      a flat program as one Python function
unplanned_step  a training step whose memory is not planned
cuda_graph      many launches as one CUDA graph
rank_program    what a pipeline rank runs, and where everything lies
"""
