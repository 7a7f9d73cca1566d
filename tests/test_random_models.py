"""Random models and random changes of them: compiled equals eager, or it is refused with a reason.

``LAZYINLINE_EXAMPLES=2000 pytest tests/test_random_models.py`` draws that many new models; without
it, a few that are the same each time.
"""

import copy
import itertools
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from model_trees import HANDED, RUN_EAGERLY, Built, ModelPlan, build, model_plans, mutate
from models import example
from torch import Tensor, nn

import lazyinline
from lazyinline import CaptureError, CompiledModule

_EXAMPLES = int(os.environ.get("LAZYINLINE_EXAMPLES", "0"))


@dataclass
class Tally:
    """What happened to the models drawn, so that the test can tell that it tests something."""

    counts: Counter[str] = field(default_factory=Counter)

    def share(self, what: str, *, of: str = "models") -> float:
        return self.counts[what] / max(1, self.counts[of])


@dataclass(frozen=True)
class Run:
    """Everything that one call leaves behind."""

    output: Tensor
    gradient: Tensor | None
    state: dict[str, Any]
    generator: Tensor


def run(model: nn.Module, x: Tensor, handed: tuple[str, str], *, grad: bool) -> Run:
    """Calls a model, and its backward, under a seed."""
    torch.manual_seed(3)
    given_x = x.clone().requires_grad_(grad)
    kind, cotangent_kind = handed
    with torch.set_grad_enabled(grad):
        output = model(HANDED[kind](given_x))
    if output.requires_grad:
        weights = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype)
        output.backward(HANDED[cotangent_kind](weights.view(output.shape)))
    state: dict[str, Any] = {n: t.detach().clone() for n, t in model.state_dict().items()}
    state |= {f"{n}.grad": p.grad for n, p in model.named_parameters()}
    return Run(output, given_x.grad, state, torch.get_rng_state())


def assert_equal_runs(ours: Run, theirs: Run) -> None:
    assert torch.equal(ours.generator, theirs.generator), "random numbers drawn"
    assert ours.output.requires_grad == theirs.output.requires_grad
    assert ours.output.stride() == theirs.output.stride()
    assert type(ours.output) is type(theirs.output)
    assert_near(ours.output, theirs.output, "output")
    assert_near(ours.gradient, theirs.gradient, "gradient of the input")
    assert ours.state.keys() == theirs.state.keys()
    for name, want in theirs.state.items():
        assert_near(ours.state[name], want, name)


def assert_near(have: Tensor | None, want: Tensor | None, name: str) -> None:
    """Equal to rounding; float32 where a mutation made a layer so."""
    assert (have is None) == (want is None), f"{name}: {have} and not {want}"
    if have is not None and want is not None:
        tolerance = 1e-10 if want.dtype != torch.float32 else 1e-5
        have, want = have.detach(), want.detach()
        scale = want.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item() if want.numel() else 0.0
        torch.testing.assert_close(
            have,
            want,
            rtol=tolerance,
            atol=tolerance * (1 + scale),
            equal_nan=True,
            msg=lambda text: f"{name}: {text}",
        )


def check(plan: ModelPlan, tally: Tally) -> None:
    """Compiles the model of a plan, changes it, and compares with eager all the way."""
    ours, theirs = build(plan), None
    theirs = Built(copy.deepcopy(ours.model), ours.scope)
    compiled = lazyinline.compile(ours.model, backend="eager", fallback="error")
    tally.counts["models"] += 1
    held: list[tuple[Tensor, Tensor]] = []
    handed = itertools.cycle(plan.handed)
    tally.counts["hostile"] += any(kinds != ("plain", "plain") for kinds in plan.handed)
    for _ in range(2):
        if not compare(compiled, ours, theirs, tally, held, next(handed)):
            return
    tally.counts["shared"] += any(d.shared for d in compiled.last_report.decisions)
    changed_and_compiled = False
    for mutation in plan.later:
        before, kinds = compiled.last_report, next(handed)
        mutate(ours, mutation)
        mutate(theirs, mutation)
        if not compare(compiled, ours, theirs, tally, held, kinds):
            break
        if kinds[0] not in RUN_EAGERLY:  # whatever has changed
            changed_and_compiled = True
            tally.counts["noticed"] += compiled.last_report is not before
    else:
        compare(compiled, ours, theirs, tally, held, next(handed), grad=False)
    tally.counts["changed and compiled"] += changed_and_compiled
    for tensor, copied in held:
        assert torch.equal(tensor.nan_to_num(), copied.nan_to_num()), (
            "a tensor the user holds changed"
        )


def compare(
    compiled: CompiledModule,
    ours: Built,
    theirs: Built,
    tally: Tally,
    held: list[tuple[Tensor, Tensor]],
    kinds: tuple[str, str],
    *,
    grad: bool = True,
) -> bool:
    """Runs both; False if eager fails, or if compiling is refused, marked or not."""
    x, before = example(grad=False), copy.deepcopy(ours.model)
    try:
        expected = run(theirs.model, x, kinds, grad=grad)
    except (RuntimeError, IndexError):
        tally.counts["eager fails"] += 1
        return False
    try:
        found = run(compiled, x, kinds, grad=grad)
    except CaptureError as error:
        tally.counts["refused"] += 1
        assert_refused_without_marks(before, x, kinds, grad=grad, error=error)
        assert_unchanged(ours.model, before)
        return False
    assert_equal_runs(found, expected)
    tensors = [found.output, found.gradient]
    held += [(t.detach(), t.detach().clone()) for t in tensors if t is not None]
    return True


def assert_refused_without_marks(
    model: nn.Module, x: Tensor, handed: tuple[str, str], *, grad: bool, error: CaptureError
) -> None:
    """A mark never makes a working model fail."""
    try:
        plain = lazyinline.compile(model, backend="eager", reuse="off", fallback="error")
        run(plain, x, handed, grad=grad)
    except CaptureError:
        return
    raise AssertionError(f"refused only because of marks: {error}")


def assert_unchanged(model: nn.Module, before: nn.Module) -> None:
    for name, want in before.state_dict().items():
        assert_near(model.state_dict()[name], want, name)


# Eager warns about hooks and layouts of random models; that is not what is compared.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("usual", [6, pytest.param(16, marks=pytest.mark.sweep)])
def test_random_models_equal_eager_before_and_after_random_changes(usual: int) -> None:
    num_models, tally = _EXAMPLES or usual, Tally()

    @settings(
        max_examples=num_models,
        derandomize=not _EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(model_plans())
    def each(plan: ModelPlan) -> None:
        check(plan, tally)

    each()
    print(tally)
    assert tally.counts["models"] >= num_models
    assert tally.share("hostile") > 0.5
    assert tally.share("shared") > 0.2
    assert tally.share("noticed", of="changed and compiled") > 0.5
    assert tally.share("refused") < 0.2
    assert tally.share("eager fails") < 0.2
