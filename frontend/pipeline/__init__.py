"""``pipeline(model, args)``: a model over several ranks, fed with micro-batches.

pipeline         the pipeline that users hold
batch            a batch, split into micro-batches
split            where a model is cut into stages
rank_compile     a rank's stages as one planned program
stage_recompute  what stages hold, and what they compute again so that it fits
"""
