"""From a model to a program: one run under fake tensors, each different block traced once.

capture          one run of the model, which leaves everything as it was; the order of attempts
surroundings     what stands still around a capture
watcher          what the model's Python does meanwhile: noted, replaced, or refused
recording        what has been recorded so far: the outer graph, its regions, the reads
block_calls      one instance of a block traced as a region, and calls of it by others
control_flow     what cond, scan, map and while_loop run, as closures
blocks           which module calls may share
regions          the vocabulary: keys of blocks and of calls, regions, decisions; numbers asked for
outside_tensors  tensors that come from outside a trace
assemble         from a finished run to a program
"""
