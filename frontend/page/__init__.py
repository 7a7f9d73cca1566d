"""Reports as one page: a file that needs nothing else, every number from the report itself.

write         a page as text: one template, data, style, script, charts; where it was made
compile_page  the page of one compile: verdict, figures, sections
measured      the page of measurements, late against early
sections      program, who shares, passes, recompute, pipeline, predicted beside measured
arena         the memory plan as a picture, of a program or of a rank of a pipeline
texts         numbers as people read them
"""
