"""``pipeline(model, args)``: a model over several ranks, fed with micro-batches.

pipeline  the pipeline that users hold
batch     a batch, split into micro-batches
"""
