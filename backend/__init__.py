"""From closures to something that runs: lower (kernels), link (the deferred inline), execute.

arena     the static memory planner
files     files and folders that several processes share
launches  kernel launches, and how they run natively
gpu       GPU programs, made with or without a GPU at hand
cache     what compiles keep on disk
kernels   kernels for one leaf closure
link      the deferred inline: calls laid out, memory placed, programs written
run       linked programs, run
onnx      programs as ONNX models

It imports ``reuse`` and ``autodiff`` only.
"""
