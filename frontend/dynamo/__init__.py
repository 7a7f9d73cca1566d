"""Flat graphs that PyTorch captured: ``torch.compile(backend="lazyinline")``, ``torch.export``.

torch_dynamo_backend  adapter: what Dynamo calls with which graphs, and what it gets back
torch_exported        adapter: programs of torch.export as models with blocks
outline               repeated regions of a flat graph become blocks of a module
"""
