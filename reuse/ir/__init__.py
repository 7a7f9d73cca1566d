"""The program that all passes work on.

program           closures, calls on them, and the values that flow between
types             types of program values: tensors with a layout, and structs of them
operators         what an operator is: a view, in place, random, elementwise
leaf              leaf bodies: building ATen graphs, comparing them, running them
primitives        the operators that programs reduce to: core ATen and what it lacks
printer           programs as text: the same bytes for the same program
costs             FLOPs, bytes and seconds of operators and programs; a device is a row of rates
verify            whether a program keeps the rules of its level; which operators it holds
rewrite           each different leaf rewritten once; calls replaced by bodies (the early inliner)
interpreter       the reference interpreter
constants         closures that differ in Python numbers only become one closure
scalar_inputs     which operators take a 0-d tensor for a number, with the same bits
torch_graphs      adapter: graphs whose Python code is written when somebody runs it
torch_size_nodes  adapter: sizes computed by the nodes of a graph
torch_symbols     adapter: sizes that are expressions of symbols
transfer          how one tensor travels between ranks
"""
