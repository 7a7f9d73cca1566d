"""lazyinline: a graph compiler for large transformer models, in Python on PyTorch.

Mark the layer class, compile the model, train or run it as before::

    import lazyinline
    from lazyinline import lazy_inline

    @lazy_inline
    class Block(nn.Module): ...

    compiled = lazyinline.compile(model)
"""

from lazyinline.reuse.process import check_supported

check_supported()  # first, because the imports below need a supported version of PyTorch

import lazyinline.func as func
from lazyinline.frontend.advise import Advice, advise
from lazyinline.frontend.compiled_module import CompiledModule, compile, last_report, restore
from lazyinline.frontend.fit import Fit, fit
from lazyinline.frontend.inspection import capture, from_exported
from lazyinline.frontend.marks import lazy_inline, place, recompute, shard, stage
from lazyinline.frontend.measure import MeasureReport, measure
from lazyinline.frontend.onnx_file import ExportReport, export_onnx
from lazyinline.frontend.operators import decomposition
from lazyinline.frontend.parallel import ParallelStep, for_checkpoint, parallelize
from lazyinline.frontend.pipeline import Pipeline, pipeline
from lazyinline.frontend.report import CompileReport
from lazyinline.frontend.saved.load import load
from lazyinline.frontend.saved.save import save
from lazyinline.frontend.training_step import StepStats, TrainingStep, compile_step
from lazyinline.pipeline_parallel.mesh.layouts import measure_links
from lazyinline.recompute.planner import Budget
from lazyinline.reuse.errors import (
    CacheError,
    CaptureError,
    DecompositionError,
    ExportError,
    FileError,
    LazyInlineError,
    NoProgramError,
    PipelineError,
    PlanError,
    ReuseError,
    VerifyError,
)
from lazyinline.reuse.ir.operators import Primitive, primitives
from lazyinline.reuse.ir.program import Program

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "Budget",
    "CacheError",
    "CaptureError",
    "CompileReport",
    "CompiledModule",
    "DecompositionError",
    "ExportError",
    "ExportReport",
    "FileError",
    "Fit",
    "LazyInlineError",
    "MeasureReport",
    "NoProgramError",
    "ParallelStep",
    "Pipeline",
    "PipelineError",
    "PlanError",
    "Primitive",
    "Program",
    "ReuseError",
    "StepStats",
    "TrainingStep",
    "VerifyError",
    "advise",
    "capture",
    "compile",
    "compile_step",
    "decomposition",
    "export_onnx",
    "fit",
    "for_checkpoint",
    "from_exported",
    "func",
    "last_report",
    "lazy_inline",
    "load",
    "measure",
    "measure_links",
    "parallelize",
    "pipeline",
    "place",
    "primitives",
    "recompute",
    "restore",
    "save",
    "shard",
    "stage",
]
