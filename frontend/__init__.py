"""The functions users call: compile, marks, reports. The only folder that imports all others.

lazyinline           the public names
lazyinline_command   the ``lazyinline`` command, up to where it needs PyTorch
marks                ``lazy_inline``, ``recompute``, ``stage``, ``shard``, ``place``: marks
compiler             the one list of passes, and the compiler that runs them
options              the options of a compile, checked
compiled             the results of a compile
compiled_module      ``compile(model)``
training_step        ``compile_step(model)``
torch_optimizer      adapter: what a step does with the user's optimizer
report               what is seen of a compile: meanwhile, and then as text and as a page
compile_record       what a compile did and made, in numbers, for reports
reuse_table          who shares, in words: a table, and why blocks were traced anew
inspection           a model by its name: its program as captured, and what a pass changed
checks               whether what a user hands in can be compiled at all
operators            rules that take an operator of the user's apart
tracing              how PyTorch is made to show what a model runs
effects              what a forward does besides computing
capture              from a model to a program
page                 reports as one page
guards               whether a compiled program still fits
autograd             compiled programs inside PyTorch's autograd
passes               the passes, and what runs a list of them
sizes                sizes that vary
dispatch             runs a model's calls: by compiled programs, or eagerly
func                 ``lazyinline.func``: derivatives to any order
dynamo               ``torch.compile(model, backend="lazyinline")``
onnx                 ``export_onnx``
batch                a batch in micro-batches; a model and its loss as one module
pipeline             ``pipeline(model, args)``
parallel             ``parallelize(model, args, mesh=...)``
parallel_elsewhere   the same for ranks that are not here, to be saved
mesh_parameters      a model's parameters over a mesh: DTensors in place of what was captured
mesh_planner         what finds the plan of a step over a mesh, by hand or the cheapest
fit                  ``lazyinline.fit``: what a rank of a mesh would hold, without the ranks
saved                compiled programs as files: ``save`` and ``load``
measure              ``measure``: late and early inlining beside eager and ``torch.compile``
advise               ``advise(model)``
commands             what the commands do
"""
