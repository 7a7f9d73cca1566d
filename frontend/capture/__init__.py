"""From a model to a program: one run under fake tensors, each different block traced once.

capture          runs the model without lasting effects; what to try if a capture fails
surroundings     holds off other threads, interrupts, random numbers and garbage collection
watcher          receives what the model's Python does in the run: notes, replaces or refuses it
recording        the record of the run so far: the outer graph, its regions, the reads
block_calls      traces one instance of a block as a region, and makes other instances calls of it
control_flow     the bodies of cond, scan, map and while_loop as closures
blocks           which module calls may share
regions          data types: keys of blocks and calls, regions, decisions, questions to inputs
outside_tensors  tensors that come from outside a trace
assemble         from a finished run to a program
"""
