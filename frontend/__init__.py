"""The functions users call: compile, marks, reports. The only folder that imports all others.

lazyinline           the public names
lazyinline_command   the ``lazyinline`` command: help and errors, without importing PyTorch
marks                the marks ``lazy_inline``, ``recompute``, ``stage``, ``shard`` and ``place``
compiler             the one list of passes, and the compiler that runs them
options              the options of a compile, checked; micro-batches; a model and its loss
compiled             the results of a compile
compiled_module      ``compile(model)``
training_step        ``compile_step(model)``
torch_optimizer      adapter: the user's optimizer in a training step
report               the progress of a compile, and its report as text and as a page
compile_record       the numbers and programs of a compile, for reports; which blocks share graphs
refusals             models that cannot be captured; inputs and results that no program can have
guard                whether a compiled program fits a call; which programs are kept
inspection           a model by its name: its captured program, and what a pass changed
operators            the user's rules that decompose an operator
tracing              how a model's operators and Python are traced
effects              side effects of a forward
capture              from a model to a program
page                 reports as one page
autograd             compiled programs inside PyTorch's autograd
passes               the passes, and the runner of a list of them
sizes                sizes that vary
dispatch             runs a model's calls: by compiled programs, or eagerly
func                 ``lazyinline.func``: derivatives to any order
dynamo               ``torch.compile(model, backend="lazyinline")``
onnx_file            ``export_onnx``: a program as an ONNX file, checked by onnxruntime
pipeline             ``pipeline(model, args)``
parallel             ``parallelize(model, args, mesh=...)``; also for ranks on other machines
mesh_placement       the placements of a step over a mesh, and a model's parameters so, as DTensors
fit                  ``lazyinline.fit``: the memory of a rank of a mesh, without the ranks
saved                compiled programs as files: ``save`` and ``load``
measure              ``measure``: late and early inlining beside eager and ``torch.compile``
advise               ``advise(model)``
commands             the commands of the command line
"""
