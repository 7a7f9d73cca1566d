"""From a model to a program: one run under fake tensors, each different block traced once.

capture          one run of the model, and the order of attempts
init_key         the key of a block: its class and what its constructor was given
recorder         watches the run, and decides which blocks become calls
blocks           which module calls may share
regions          the vocabulary: regions of the outer graph, call sites, decisions
shared_calls     what a traced instance leaves behind, and how another one calls it
signatures       arguments by name, and what about them decides whether a closure fits
outside_tensors  tensors that come from outside a trace
outside_changes  what a run changes outside the model
effects          what a forward does besides computing
inside_changes   what a run changes in the model's modules
assemble         from the outer graph to a program
float_inputs     Python floats that varied, as inputs of the program
"""
