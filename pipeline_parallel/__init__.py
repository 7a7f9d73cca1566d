"""Splits a program over pipeline stages and runs them under ``torch.distributed``.

actions           the action table of a schedule of PyTorch
cut               one program per stage; composites that span stages are cut inside
coloring          the stage of each call: by marks, by order, or balanced by what calls cost
stage_derivative  one stage's programs; a backward in two halves; the random numbers of forwards
plan              the plan of a pipeline: stages, costs, memory, a step in time; a rank's order
process_groups    ranks agree, sum gradients of what they share, and load what others saved
torch_pipelining  adapter: PyTorch's schedules and runtime of pipelines
mesh              a step over a device mesh, data and tensor parallel

It imports ``reuse`` and ``autodiff`` only.
"""
