"""Reports as self-contained HTML pages; every number is from the report itself.

write     writes the file: template, data, style, script, charts; formats numbers
page      the data of pages on a compile, measurements, a pipeline's plan
sections  memory, program, sharing, passes, steps, recompute, pipeline, predicted and measured
"""
