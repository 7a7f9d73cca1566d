"""Reports as one page: a file that needs nothing else, every number from the report itself.

write         a page as text: data, template, style, script, charts
compile_page  the page of one compile
program       the program as a strip, and its closures
reuse         which blocks share, and why others do not
passes        seconds per pass, and over the number of layers
arena         the memory plan as a picture, of a program or of a rank of a pipeline
boxes         buffers over time and address, and fewer boxes where there are too many
recompute     what is saved, what is computed again, what else could be
pipeline      the schedule of a pipeline, memory per rank
gpu           a program for a GPU that is not here
predicted     what was predicted beside what was measured
about         machine, versions, command
texts         numbers as people read them
"""
