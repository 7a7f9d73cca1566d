"""The public face: its names, their documentation, and what importing it costs."""

import json
import re
import subprocess
import sys

import pytest

import lazyinline

# Changing this list changes what users may rely on: say so in CHANGELOG.md.
NAMES = """
    Advice Budget CacheError CaptureError CompileReport CompiledModule DecompositionError
    ExportError ExportReport FileError Fit LazyInlineError MeasureReport ParallelStep Pipeline
    PipelineError
    PlanError
    Primitive Program ReuseError StepStats TrainingStep VerifyError advise capture compile
    compile_step decomposition export_onnx fit for_checkpoint from_exported func
    last_report lazy_inline load measure
    measure_links parallelize pipeline place primitives recompute restore save shard
    stage
"""
PUBLIC = set(NAMES.split())


def test_public_names_are_defined_and_documented() -> None:
    assert set(lazyinline.__all__) == PUBLIC
    assert lazyinline.__all__ == sorted(lazyinline.__all__), "keep __all__ sorted"
    missing = [name for name in lazyinline.__all__ if not hasattr(lazyinline, name)]
    assert not missing, f"in __all__ but not defined: {missing}"
    texts = {name: (getattr(lazyinline, name).__doc__ or "").strip() for name in PUBLIC}
    assert not [name for name, text in texts.items() if not text], "has no docstring"
    assert not [name for name, text in texts.items() if text.startswith(f"{name}(")]


def test_errors_share_one_base() -> None:
    errors = [getattr(lazyinline, name) for name in PUBLIC if name.endswith("Error")]
    assert all(issubclass(error, lazyinline.LazyInlineError) for error in errors)


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+([a-z]+\d+)?", lazyinline.__version__)


# Prints, for each module of those named that `import lazyinline` loads and `import torch` does not,
# the lines of ours that led to it and the first line of others.
WATCH_IMPORTS = """
import json, sys, traceback
import torch
before, stacks = set(sys.modules), {}
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in sys.argv[1:] and name not in stacks:
            frames = [f for f in traceback.extract_stack() if "importlib" not in f.filename][1:-1]
            ours = [f for f in frames if "site-packages" not in f.filename]
            shown = frames[: len(ours) + 1]
            stacks[name] = [f"{f.filename}:{f.lineno} {f.line}" for f in shown]
sys.meta_path.insert(0, Watch())
import lazyinline
loaded = set(sys.modules) - before
print(json.dumps({name: stack for name, stack in stacks.items() if name in loaded}))
"""
HEAVY = ["torch._dynamo", "torch._inductor", "onnx", "onnxscript", "networkx", "scipy"]
HEAVY += ["transformers", "triton"]


def test_import_is_light() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WATCH_IMPORTS, *HEAVY], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    report = [f"{name}:\n  " + "\n  ".join(stack) for name, stack in sorted(seen.items())]
    if report:
        pytest.fail("importing lazyinline also loads\n" + "\n".join(report), pytrace=False)
