"""Reports as self-contained HTML pages; every number is from the report itself.

page      the data of pages on a compile, measurements, a pipeline's plan; writes the file
sections  memory, program, sharing, passes, steps, recompute, pipeline, predicted and measured
"""
