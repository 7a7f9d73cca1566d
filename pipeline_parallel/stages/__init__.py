"""Stages as programs and steps, and the ranks that run them.

stage_derivative   one stage's forward and backward as programs
stage_steps        what a schedule asks of a stage
unplanned_steps    a stage's steps on tensors that PyTorch allocates
gradient_sums      the gradients of micro-batches, summed
split_backward     a backward in two halves: for what travels, and for parameters
planned_steps      a stage's steps in an arena planned for the whole schedule
make_plan          the plan of derived stages
torch_pipelining   adapter: PyTorch's schedules and runtime of pipelines
process_groups     ranks agree, and sum gradients of what they share
checkpoint         what the ranks saved, loaded into another pipeline
"""
