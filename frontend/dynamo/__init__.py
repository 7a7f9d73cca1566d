"""Flat graphs that PyTorch captured: ``torch.compile(backend="lazyinline")``, ``torch.export``.

torch_dynamo_backend  adapter: the backend that Dynamo calls with graphs; programs of torch.export
outline               repeated regions of a flat graph become blocks of a module
"""
