"""Compares what lazyinline compiled with the same model run by PyTorch.

``assert_equals_eager`` is the whole comparison. What stands before it are its parts, for tests that
do something between them. At the end: how far two right answers may lie apart, and work counted.
"""

import copy
import functools
import math
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

import lazyinline
from lazyinline import CompileReport
from lazyinline.reuse import torch_pytree

Model = TypeVar("Model", bound=nn.Module)
Door = Literal["compile", "in place", "step", "torch.compile"]
DOORS: tuple[Door, ...] = ("compile", "in place", "step", "torch.compile")

# Float32 kernels that add up in another order differ by about 1e-6 in norm; a wrong gradient
# differs by 1e-2 and more.
TOLERANCE = 1e-5

# In float64 only the order of sums may differ.
DOUBLE_TOLERANCE = 1e-10


def twin(model: Model) -> Model:
    """Returns a copy that shares nothing, for eager PyTorch to run."""
    return copy.deepcopy(model)


def seed_all(seed: int = 0) -> None:
    """Seeds the generators of PyTorch, numpy and Python.

    `torch.manual_seed` notes who calls it for each device that is not used, in milliseconds.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed)
    random.seed(seed)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Returns ||actual - expected|| / ||expected||."""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    difference = torch.linalg.vector_norm((actual.to(wide) - expected.to(wide)).flatten()).item()
    if difference == 0:
        return 0.0
    size = torch.linalg.vector_norm(expected.to(wide).flatten()).item()
    return difference / size if size else math.inf


def assert_close(actual: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """Compares results: tensors norm-wise and in layout, everything else exactly."""
    leaves, spec = torch_pytree.flatten(actual)
    wanted, wanted_spec = torch_pytree.flatten(expected)
    assert spec == wanted_spec
    for leaf, want in zip(leaves, wanted, strict=True):
        if not isinstance(want, Tensor):
            assert type(leaf) is type(want)
            assert leaf == want
            continue
        assert type(leaf) is type(want), f"{type(leaf)} and not {type(want)}"
        assert (leaf.dtype, leaf.shape, leaf.stride()) == (want.dtype, want.shape, want.stride())
        assert leaf.requires_grad == want.requires_grad
        error = relative_error(leaf.detach(), want.detach())
        assert error <= tolerance, f"relative error {error:.1e}"


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def gradient_errors(
    actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
) -> dict[str, float]:
    """Returns the error of each gradient; one on one side only is infinitely wrong."""
    assert actual.keys() == expected.keys()
    errors = {}
    for name, want in expected.items():
        have = actual[name]
        if have is None or want is None:
            errors[name] = 0.0 if have is want else math.inf
        else:
            assert have.dtype == want.dtype
            errors[name] = relative_error(have, want)
    return errors


def assert_same_gradients(
    model: nn.Module, expected: nn.Module, tolerance: float = TOLERANCE
) -> None:
    """Every gradient equals, and where one model has none, the other has none either."""
    found = gradient_errors(gradients(model), gradients(expected))
    wrong = {name: error for name, error in found.items() if not error <= tolerance}
    assert not wrong, f"gradients differ: {wrong}"
    assert any(parameter.grad is not None for parameter in expected.parameters())


def assert_same_buffers(model: nn.Module, expected: nn.Module) -> None:
    buffers = dict(model.named_buffers())
    for name, want in expected.named_buffers():
        assert_close(buffers[name], want)


# ---- a model and its twin, call by call --------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The model as it was compiled, and what the compile decided.

    Attributes:
        compiled: what was called.
        report: of the newest compile; None where each graph has its own, or a test opened it.
        seen: what was noted after each call.
    """

    compiled: Any
    report: CompileReport | None
    seen: list[Any] = field(default_factory=list)

    @property
    def told(self) -> CompileReport:
        assert self.report is not None, "nothing was compiled through this door"
        return self.report

    @property
    def shared(self) -> int:
        """How many blocks were shared."""
        return sum(decision.shared for decision in self.told.decisions)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the others were not."""
        return tuple(d.reason for d in self.told.decisions if d.reason)


def assert_equals_eager(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    batches: Iterable[Sequence[Any]] = (),
    calls: int = 2,
    door: Door | Callable[..., Any] = "compile",
    backend: str = "eager",
    use: Callable[..., Any] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    reference: nn.Module | None = None,
    tolerance: float | None = None,
    note: Callable[[Any], Any] | None = None,
    loss_fn: Callable[[Any], Tensor] | None = None,
    micro_batches: int = 1,
    **options: Any,
) -> Outcome:
    """Runs a compiled model and a copy of it in PyTorch, call by call; all must be equal.

    All: outputs with their layout, inputs after the call, gradients of inputs and parameters,
    buffers, and how far each generator of random numbers has moved.

    Args:
        model: the model that is compiled.
        args: positional inputs; those that require grad get one.
        kwargs: keyword inputs.
        batches: positional inputs of each call, in place of args and calls.
        calls: how often both run, so that state carried from call to call is compared.
        door: how the model is compiled; a step computes a loss of all elements. A function is
            given the model, backend and options, and returns what is called.
        backend: which kernels run.
        use: is given what runs and the inputs, and calls it; its result counts as the output, and
            in memory results and gradients may lie in another order than eager's.
        optimizer: made of the parameters of each; steps after each call. Without one gradients
            add up.
        reference: the model to run in PyTorch; a deep copy unless given.
        tolerance: relative, norm-wise; by the dtypes of the model and inputs unless given.
        note: is asked after each call about what was compiled.
        loss_fn: of a step's output; of all its elements unless given.
        micro_batches: into how many parts a step splits its batch; its loss is their mean.
        **options: further ones of the compile, as ``reuse="off"``.
    """
    reference = copy.deepcopy(model) if reference is None else reference
    opened = door if callable(door) else functools.partial(_opened, door)
    is_step = door == "step"
    of_steps: dict[str, Any] = {"loss_fn": loss_fn or _loss_of, "micro_batches": micro_batches}
    run = opened(model, backend=backend, **(of_steps if is_step else {}), **options)
    owner = run if door == "compile" else model  # a wrapper shows the model's own state
    train: Callable[..., Any] = _run_step if is_step else run_once
    ours, theirs = (one if use is None else functools.partial(use, one) for one in (run, reference))
    optimizers = [optimizer(m.parameters()) for m in (model, reference)] if optimizer else []
    compare = functools.partial(assert_same, strides=use is None)
    data, seen = list(batches) or [args] * calls, []
    if tolerance is None:
        tolerance = _tolerance_of(model, data)
    for call, inputs in enumerate(data):
        for one in optimizers:
            one.zero_grad()
        if is_step:  # its gradients are those of this step alone
            reference.zero_grad()
        alone = functools.partial(_run_parts, **of_steps) if is_step else run_once
        expected = alone(theirs, inputs, kwargs or {}, call)
        found = train(ours, inputs, kwargs or {}, call)
        for name, have, want in zip(PARTS, found, expected, strict=True):
            compare(have, want, f"call {call}: {name}", tolerance)
        compare(state_of(owner), state_of(reference), f"call {call}: state", tolerance)
        for one in optimizers:
            one.step()
        if note is not None:
            seen.append(note(run))
    compare(state_of(owner), state_of(reference), "at the end: state", tolerance)
    has_report = door != "torch.compile" and not callable(door)
    return Outcome(run, lazyinline.last_report(run) if has_report else None, seen)


PARTS = ("outputs", "inputs after the call", "gradients of inputs", "generators after the call")


def _tolerance_of(model: nn.Module, inputs: Any) -> float:
    leaves = [*model.parameters(), *model.buffers(), *torch_pytree.flatten(inputs)[0]]
    floats = [x for x in leaves if isinstance(x, Tensor) and x.dtype.is_floating_point]
    is_double = all(x.dtype is torch.float64 for x in floats)
    return DOUBLE_TOLERANCE if is_double else TOLERANCE


def _opened(door: Door, model: nn.Module, backend: str, **options: Any) -> Any:
    if door == "torch.compile":
        return torch.compile(model, backend="lazyinline", options={"backend": backend, **options})
    if door == "step":
        return lazyinline.compile_step(model, backend=backend, **options)
    return lazyinline.compile(model, backend=backend, in_place=door == "in place", **options)


def run_once(
    model: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], seed: int
) -> Any:
    """Calls a model and its backward; returns what PARTS names."""
    inputs, keywords, copies, given = _copied(args, kwargs)
    seed_all(seed)
    output = model(*inputs, **keywords)
    generators = _generators()
    loss = _loss_of(output)
    if loss.requires_grad:
        loss.backward()
    return output, [x.detach() for x in given], [x.grad for x in copies], generators


def _run_parts(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    seed: int,
    *,
    loss_fn: Callable[[Any], Tensor],
    micro_batches: int,
) -> Any:
    """Takes a step's gradients as PyTorch does, by a backward for each part of the batch."""
    inputs, keywords, _, given = _copied(args, kwargs)
    seed_all(seed)
    parts: Any = [inputs]
    if micro_batches > 1:
        parts = zip(*(x.tensor_split(micro_batches) for x in inputs), strict=True)
    losses = []
    for part in parts:
        loss = loss_fn(model(*part, **keywords))
        if loss.requires_grad:
            (loss / micro_batches).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean(), [x.detach() for x in given], [], _generators()


def _run_step(step: Any, args: Sequence[Any], kwargs: dict[str, Any], seed: int) -> Any:
    inputs, keywords, _, given = _copied(args, kwargs)
    seed_all(seed)
    loss = step(*inputs, **keywords)
    return loss, [x.detach() for x in given], [], _generators()


def _copied(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Copies inputs; a tensor that is passed twice stays one."""
    leaves, spec = torch_pytree.flatten((tuple(args), kwargs))
    copies: dict[int, Tensor] = {}
    for x in leaves:
        if isinstance(x, Tensor) and id(x) not in copies:
            copies[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
    fresh = [copies[id(x)] if isinstance(x, Tensor) else x for x in leaves]
    inputs, keywords = torch_pytree.unflatten(fresh, spec)
    return inputs, keywords, list(copies.values()), [x for x in fresh if isinstance(x, Tensor)]


def _generators() -> tuple[float, ...]:
    """Returns the next number of each generator: equal if as many were drawn."""
    return float(torch.rand(1)), float(np.random.rand()), random.random()


def _loss_of(output: Any) -> Tensor:
    """Returns a loss that tells every element of every output apart."""
    tensors = [t for t in torch_pytree.flatten(output)[0] if isinstance(t, Tensor)]
    losses = [_weigh(t) for t in tensors if t.requires_grad]
    return torch.stack(losses).sum() if losses else torch.zeros(())


def as_it_is(output: Tensor) -> Tensor:
    """Returns a loss that the model has computed."""
    return output


def _weigh(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    weights = torch.linspace(0.5, 1.5, real.numel(), dtype=torch.float64, device=real.device)
    return (real.double().reshape(-1) * weights).sum()


def state_of(model: nn.Module) -> dict[str, Any]:
    """Returns the tensors of a model's state, and its gradients."""
    tensors = {n: t.detach() for n, t in model.state_dict().items()}
    return {**tensors, **{f"{n}.grad": p.grad for n, p in model.named_parameters()}}


def is_near(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Says whether numbers equal norm-wise; what is no number has to stand at the same place."""
    if torch.equal(actual, expected):
        return True
    if not (expected.is_floating_point() or expected.is_complex()):
        return False
    finite = expected.isfinite()
    if not torch.allclose(actual[~finite], expected[~finite], equal_nan=True):
        return False
    if not finite.any():
        return True
    actual, expected = actual[finite], expected[finite]
    # A gradient that is zero but for rounding has no size to compare with.
    largest = float((actual - expected).abs().max())
    return relative_error(actual, expected) <= tolerance or largest <= tolerance / 10


def assert_same(
    ours: Any, theirs: Any, what: str, tolerance: float = TOLERANCE, *, strides: bool = True
) -> None:
    """Compares trees of results: tensors in numbers and layout, everything else exactly."""
    left, left_spec = torch_pytree.flatten(ours)
    right, right_spec = torch_pytree.flatten(theirs)
    assert left_spec == right_spec, f"{what}: another structure"
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        where = f"{what}, leaf {index}"
        assert type(a) is type(b), f"{where}: {type(a)} instead of {type(b)}"
        if isinstance(a, Tensor):
            assert a.requires_grad == b.requires_grad, f"{where}: requires_grad"
            have, want = ((x.dtype, x.shape, strides and x.stride()) for x in (a, b))
            assert have == want, f"{where}: {have} instead of {want}"
            assert is_near(a.detach(), b.detach(), tolerance), f"{where}: {a} instead of {b}"
        else:
            assert a is b or a == b, f"{where}: {a!r} instead of {b!r}"


# ---- how far apart right answers may lie -------------------------------------------------------
#
# Where a program runs the very kernel that eager runs, on operands that lie alike, both give the
# same bits on every CPU, and a test may say so. A sum that is made in another order is only as
# close as here: whose order it is, and whether products are rounded before they are added, depends
# on the CPU, on its vectors' width, on the number of threads, and, in a BLAS, on where operands
# lie.


def product_tolerance(a: Tensor, b: Tensor, bias: Tensor | None = None) -> dict[str, float]:
    """Returns tolerances for the matrix product ``a @ b``, with or without a bias.

    A sum is off by no more than half a unit in the last place per term, on either side.
    """
    sizes = a.abs() @ b.abs()
    if bias is not None:
        sizes = sizes + bias.abs()
    num_terms = a.shape[-1] + (bias is not None)
    return {"rtol": 0.0, "atol": num_terms * torch.finfo(a.dtype).eps * float(sizes.max())}


# ---- work, counted: what the clock says depends on the machine and on who else is using it -------


def num_calls(function: Callable[[], object]) -> int:
    """Counts the calls, of Python and of C, that a function makes in this thread."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
