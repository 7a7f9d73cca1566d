"""``measure(model)`` and ``lazyinline bench``: what a compile saves, against eager.

measure       late against early inlining, both against eager
measurement   the numbers, and what a reader of them should know
measure_page  what a page of measurements shows
report        what was measured, as a table, JSON and a page
saved         what a user saved of a measurement, shown again
workload      one step of a model: run it, compare it with eager
timing        the time of a step, and whether it is to be trusted
torch_memory  the memory that a step takes, told by PyTorch's profiler
bench         row by row over the number of layers
large_models  a whole training program compiled, and nothing executed
rank_bench    one rank's pipeline program compiled, and nothing executed
models        the project's own models
target        ``package.module:function``: how the command line names a model
"""
