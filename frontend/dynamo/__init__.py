"""``torch.compile(model, backend="lazyinline")``: graphs that Dynamo captured.

torch_dynamo_backend  adapter: what Dynamo calls with which graphs, and what it gets back
outline               repeated regions of a flat graph become blocks of a module
"""
