"""Measures one mode once, in this process; ``compile_time.py`` starts it and reads its last line.

Counted: preparing the model for the mode, and one forward and backward. Not counted: importing
torch (and transformers) and building the model. Dynamo and Inductor are imported lazily, inside
what is counted; ``import lazyinline`` brings some of that forward, so it is counted too.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config
from measurement import MODELS, MODES, Measurement, PassTime, Stopwatch
from subjects import Batch, Step, Subject, family, mean_loss
from torch import Tensor, nn


class LazyInlineStep:
    """A step of the model compiled by lazyinline; keeps what was compiled for its report.

    Of several micro-batches lazyinline makes one program, forward and backward, as
    ``torch.compile`` does here of the loop over them.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        lazyinline = importlib.import_module("lazyinline")
        if subject.micro_batches > 1:
            self.compiled = lazyinline.compile_step(
                subject.model, micro_batches=subject.micro_batches
            )
        else:
            self.compiled = lazyinline.compile(subject.model)

    def __call__(self) -> Tensor:
        if self.subject.micro_batches > 1:
            loss: Tensor = self.compiled(*self.subject.args, **self.subject.kwargs)
            return loss
        return self.subject.loss(self.compiled)


def prepare(mode: str, subject: Subject) -> Step:
    """Makes the step of a mode; compilation itself happens in the first step."""
    model, blocks = subject.model, subject.blocks
    if mode == "lazyinline":
        return LazyInlineStep(subject)
    if mode == "deduplicated":
        torch._dynamo.config.use_graph_deduplication = True
    if mode == "nested-kept":
        # A region that is used again may overwrite what its caller saved. (pytorch#192840)
        torch._functorch.config.donated_buffer = False
    if mode in ("nested", "nested-kept", "nested-here"):
        block_class: Any = type(blocks[0])
        block_class.forward = torch.compiler.nested_compile_region(block_class.forward)
    if mode in ("full", "deduplicated", "nested", "nested-kept"):
        return whole_step(subject, "inductor")
    if mode == "nested-here":
        return whole_step(subject, "lazyinline")
    if mode in ("per-block", "per-part"):
        for block in blocks:
            block.compile(fullgraph=True)
    run = subject.compile_head() if mode == "per-part" else model
    return lambda: subject.loss(run)


def whole_step(subject: Subject, backend: str) -> Step:
    """Compiles the model as one graph; of several micro-batches, the unrolled loop over them."""
    model = subject.model
    if subject.micro_batches == 1:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        return lambda: subject.loss(compiled)

    def unrolled(parts: Sequence[Batch]) -> Tensor:
        return mean_loss(model, parts)

    loop, parts = torch.compile(unrolled, fullgraph=True, backend=backend), subject.parts()
    return lambda: loop(parts)


def measure(mode: str, model_name: str, layers: int, micro_batches: int) -> Measurement:
    """Compiles and runs one training step, and compares it with eager."""
    models = family(model_name)
    preparation = Stopwatch()
    if mode == "lazyinline":
        with preparation.running():
            importlib.import_module("lazyinline").lazy_inline(models.block_class())
    subject = models.build(layers, micro_batches)
    parameters = dict(subject.model.named_parameters())
    expected_loss, expected = train(lambda: subject.loss(subject.model), parameters)

    objects, first, later = count_objects(), Stopwatch(), Stopwatch()
    with first.running():
        step = prepare(mode, subject)
        loss, gradients = train(step, parameters)
    objects = count_objects() - objects
    loss_error = relative_error(loss, expected_loss)
    grad_error = max(relative_error(gradients[name], expected[name]) for name in expected)
    with later.running():
        train(step, parameters)
    report = step.compiled.last_report if isinstance(step, LazyInlineStep) else None
    return Measurement(
        mode=mode,
        layers=layers,
        cpu_s=preparation.cpu_s + first.cpu_s,
        wall_s=preparation.wall_s + first.wall_s,
        child_cpu_s=first.child_cpu_s,
        step_cpu_s=later.cpu_s,
        import_cpu_s=preparation.cpu_s,
        objects_built=objects,
        loss=loss.item(),
        loss_error=loss_error,
        grad_error=grad_error,
        passes=tuple(
            PassTime(p.name, p.cpu_s, p.wall_s, p.num_nodes) for p in getattr(report, "passes", ())
        ),
        nodes_held=getattr(report, "num_nodes", 0),
        nodes_if_inlined=getattr(report, "num_nodes_if_inlined", 0),
    )


def train(
    step: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter]
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Runs forward and backward; takes the gradients away from the parameters."""
    loss = step()
    if loss.requires_grad:  # a compiled step has filled the gradients itself
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    return loss.detach(), gradients


def relative_error(actual: Tensor | None, expected: Tensor | None) -> float:
    """Returns the norm of the difference over the norm of what is expected."""
    if actual is None or expected is None:
        return 0.0 if actual is expected else math.inf
    difference: float = torch.linalg.vector_norm(actual.double() - expected.double()).item()
    return difference / torch.linalg.vector_norm(expected.double()).item() if difference else 0.0


def count_objects() -> int:
    """Counts the C++ objects in Inductor's cache directory."""
    directory = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return sum(1 for _ in pathlib.Path(directory).rglob("*.so")) if directory else 0


def main() -> None:
    """Measures what the command line says and prints it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--model", choices=MODELS, default="own")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = measure(options.mode, options.model, options.layers, options.micro_batches)
    print(measured.to_json())


if __name__ == "__main__":
    main()
