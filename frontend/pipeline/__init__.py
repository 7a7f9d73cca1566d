"""``pipeline(model, args)``: a model over several ranks, fed with micro-batches.

pipeline    the pipeline that users hold
shown_plan  its plan, as text and as a page
batch       a batch, split into micro-batches
"""
