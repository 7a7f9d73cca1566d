"""Compiled programs as files: ``lazyinline.save`` and ``lazyinline.load``.

saved_model    a model without Python: its tensors by name; arguments and results as plain data
parts          one program as the parts of a file, and back
ranks          a pipeline as the parts of a file, and back; where ranks that open it meet
mesh           a step over a device mesh: the placements, and the parts of each rank
save           ``save(compiled, path)``
load           ``load(path)``
"""
