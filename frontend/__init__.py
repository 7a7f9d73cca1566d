"""What users call: the mark, compile, reports. The only folder that sees everything.

lazyinline           the public names
marks                ``lazy_inline`` and ``recompute``: marks on classes and modules
compiler             the list of passes, from a model to something that runs
compiled_module      ``compile(model)``
training_step        ``compile_step(model)``
report               what a compile did
reuse_table          the part of a report that shows which blocks share
progress             a progress bar
requests             what to differentiate, and with respect to what
recomputing          the recompute pass
unused_outputs       derivatives for losses that leave outputs unused
parts                a program and its derivative, as they are linked
command_line         the ``lazyinline`` command
cache_command        ``lazyinline cache``
plan_memory_command  ``lazyinline plan-memory``
checks               whether what a user hands in can be compiled at all
tracing              how PyTorch is made to show what a model runs
capture              from a model to a program
guards               whether a compiled program still fits
autograd             compiled programs inside PyTorch's autograd
sizes                sizes that vary
onnx                 ``export_onnx``
pipeline             ``pipeline(model, args)``
measure              ``measure`` and ``lazyinline bench``
advise               ``advise(model)``
"""
