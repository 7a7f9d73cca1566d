"""``torch.compile(model, backend="lazyinline")``: graphs that Dynamo captured.

torch_dynamo_backend  adapter: what Dynamo calls, and what it gets back
torch_dynamo_graph    adapter: what Dynamo's graph says of sizes, modes and checkpoints
outline               repeated regions of a flat graph become blocks of a module
graph_key             what two regions are compared by
"""
