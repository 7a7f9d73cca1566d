"""Reports as one page: a file that needs nothing else, every number from the report itself.

write     a page as text: one template, data, style, script, charts; numbers as people read them
page      the pages of a compile, of measurements, of a pipeline's plan
sections  memory, program, who shares, passes, steps, recompute, pipeline, predicted, measured
"""
