"""Splits a program over pipeline stages and runs them under ``torch.distributed``.

coloring, partition   which stage each call belongs to
cut                   one program per stage; composites that span stages are cut inside
stage, halves         forward, and backward whole or in two halves, as programs and as steps
actions, plan         what each rank does, and what that costs
torch_pipelining      PyTorch's schedules run the steps (adapter)
process_groups        ranks agree, and sum gradients of what they share
"""
