"""Compiled programs as files: ``lazyinline.save`` and ``lazyinline.load``.

trees          the nested arguments and results of a call, as plain data
parts          one program as the parts of a file, and back
ranks          a pipeline as the parts of a file, and back; where ranks that open it meet
mesh           a step over a device mesh: the placements, and the parts of each rank
saved_model    the model of a file: its tensors by name, and no Python
save           ``save(compiled, path)``
load           ``load(path)``
"""
