"""Passes on programs, from capture to kernels; each visits every different closure once.

A trained module has two programs, its ``PARTS``: a forward and a backward.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...autodiff.derivative import Derivative, Differentiator, Recipe, Request
from ...autodiff.flows import Draws
from ...autodiff.inner_gradients import takes_gradients
from ...autodiff.training_program import (
    own_derivative,
    step_program,
    training_program,
    with_updates,
)
from ...reuse.errors import CaptureError, ExportError, NotDifferentiatedError, PlanError
from ...reuse.ir import program as ir
from ...reuse.ir.leaf import flat_types
from ...reuse.ir.masks import Masks, has_masks
from ...reuse.ir.rewrite import map_leaves
from ...reuse.ir.rotate import rotate, seams_of
from ...reuse.ir.torch_symbols import refuse_inexact
from ..capture.assemble import OutputTree
from ..capture.capture import capture_model
from ..compile_record import nothing_shared
from ..refusals import DIFFERENTIATES, check_batch_is_kept
from ..tracing.frames import model_name
from .state import Compilation, GoalKind, State, compile_pass

PARTS = ("forward", "backward")
CAPTURED: tuple[GoalKind, ...] = ("module", "step", "rank", "file", "primitives")
RUN: tuple[GoalKind, ...] = ("module", "step", "rank")
WITH_KERNELS: tuple[GoalKind, ...] = ("module", "step", "rank", "gradients")


def programs_of(derivative: Derivative) -> dict[str, ir.Program]:
    """Returns the programs that run, by name."""
    assert isinstance(derivative.forward, ir.Composite)
    assert isinstance(derivative.backward, ir.Composite)
    programs = (derivative.forward.program, derivative.backward.program)
    return dict(zip(PARTS, programs, strict=True))


def returned_of(
    program: ir.Program, derivative: Derivative | None
) -> tuple[list[int], list[tuple[str, Any]]]:
    """Returns how many outputs of each part the user gets, and where backward inputs come from."""
    num_results = len(program.outputs)
    if derivative is None:
        return [num_results], []
    num_saved = len(flat_types([derivative.saved_type]))
    types = derivative.backward.input_types[-len(derivative.cotangent_outputs) :]
    sources: list[tuple[str, Any]] = [("output", num_results + i) for i in range(num_saved)]
    sources += [("input", i) for i in derivative.kept_inputs]
    sources += [("output", i) for i in derivative.kept_outputs]
    sources += [("new", t) for t in types]
    return [num_results, len(derivative.gradient_inputs)], sources


@compile_pass("capture", goals=CAPTURED, wanted=lambda state: state.subject is not None)
def capture(state: State) -> State:
    """Runs the model's Python once: traces each different block, makes every other one a call."""
    subject = state.subject
    assert subject is not None
    seen = capture_model(
        subject,
        reuse=state.context.options.reuse,
        train=state.goal.train,
        for_gpu=state.context.options.target is not None,
    )
    # Kernels may evaluate size arithmetic in another order, so no float may depend on a size.
    if subject.sizes and state.goal.kind != "file":
        for closure in ir.walk_closures(seen.program):
            if isinstance(closure, ir.Leaf):
                refuse_inexact(closure.module)
    # A symbol belongs to one capture, so symbolic leaves equal no leaf of an earlier one.
    program = seen.program if subject.sizes else state.context.known(seen.program)
    state.report.model = model_name(subject.model)
    state.report.describe(seen)
    state.report.nothing_shared = nothing_shared(
        subject.model, seen.decisions, state.context.options.reuse
    )
    return replace(state, seen=seen, programs={PARTS[0]: program})


def _captured_as(state: State, program: ir.Program) -> State:
    """Returns the state with another program in place of the captured one."""
    seen = replace(state.captured, program=program)
    return replace(state, seen=seen, programs={PARTS[0]: program})


@compile_pass("masks", goals=RUN, wanted=lambda state: has_masks(state.programs[PARTS[0]]))
def tell_masks(state: State) -> State:
    """Replaces constant attention masks by is_causal, or by no mask, where that means the same."""
    masks = Masks()
    program = masks.program(state.programs[PARTS[0]])
    if not masks.num_removed:
        return state
    state.report.told_masks = [f"{count} of @{name}" for name, count in masks.num_removed.items()]
    program = state.context.known(program)
    return _captured_as(state, program)


@compile_pass(
    "derive", goals=CAPTURED, wanted=lambda state: takes_gradients(state.programs[PARTS[0]])
)
def derive(state: State) -> State:
    """Turns gradients that the forward takes into calls of derivatives, once per closure."""
    assert state.subject is not None
    modes = state.captured.modes
    try:
        program, fallbacks = state.context.derive.program(state.programs[PARTS[0]])
    except Exception as error:  # PyTorch may fail to trace it in any way: the model runs eagerly
        if any(choice.mode != "reverse" for choice in modes):
            # The user left the mode open, and reverse mode supports more (dropout, a custom
            # backward). The calls of the forward then differ as well, so it is captured again.
            subject = replace(state.subject, only_reverse=str(error))
            again = capture.function(replace(state, subject=subject))
            return derive.function(again)  # type: ignore[no-any-return]
        raise CaptureError(
            f"{state.report.model} {DIFFERENTIATES} in a way that cannot be followed: {error}"
        ) from error
    state.report.nested_forward = list(map(str, fallbacks))
    state.report.modes = list(modes)
    return _captured_as(state, program)


@compile_pass(
    "rotate",
    goals=("module", "step"),
    wanted=lambda state: state.context.options.boundaries == "fused",
)
def fuse_boundaries(state: State) -> State:
    """Makes the end of a block and the start of the next one closure (where asked for)."""
    program = rotate(state.programs[PARTS[0]])
    state.report.fused_boundaries = [
        f"{num} of {name}" for name, num in seams_of(program).items()
    ] or [
        "none: it takes three equal blocks in a row, without marks, that hand one tensor on and "
        "begin and end with what kernels can fuse"
    ]
    if state.captured.sizes is None:
        program = state.context.known(program)
    return _captured_as(state, program)


@compile_pass("autodiff", goals=("module", "step", "gradients", "primitives"))
def differentiate(state: State) -> State:
    """Makes two programs for gradients: a forward, and a backward with the calls reversed."""
    if not state.goal.train:
        return state
    program = state.programs[PARTS[0]]
    if state.goal.kind == "primitives":  # each operator keeps the derivative it has
        request = differentiation(program)
        return with_derivative(state, request, state.context.reducer.derivative(request))
    is_step = state.goal.kind == "step"
    if is_step:
        check_batch_is_kept(program)
    request = differentiation(program, of_loss=is_step)
    derivative = state.context.differentiator.of(request)
    if is_step and derivative is None:
        raise PlanError("The loss depends on no parameter that requires grad.")
    return with_derivative(state, request, derivative)


def with_derivative(state: State, request: Request, derivative: Derivative | None) -> State:
    """Returns the state with the derivative of a request, which is None if no gradient flows."""
    if derivative is None:
        return replace(state, request=request)
    programs = programs_of(derivative)
    return replace(state, request=request, derivative=derivative, programs=programs)


@compile_pass("repeat", goals=("step",))
def repeat_micro_batches(state: State) -> State:
    """Makes one program that calls forward and backward once per micro-batch."""
    assert state.derivative is not None
    batching = state.goal.batching
    composed = step_program(
        state.captured.program,
        state.derivative,
        state.context.differentiator,
        micro_batches=batching.micro_batches,
        order=batching.order,
        sums=batching.sums,
    )
    return replace(state, composed=composed, programs={"step": composed.program})


@compile_pass("update", goals=("step",), wanted=lambda state: bool(state.goal.updates))
def update_parameters(state: State) -> State:
    """Adds the optimizer's updates, each after its gradient is complete (where asked for)."""
    composed = with_updates(state.step, state.goal.updates)
    return replace(state, composed=composed, programs={"step": composed.program})


@compile_pass("decompose", "aten", goals=WITH_KERNELS, verified="always")
def decompose(state: State) -> State:
    """Decomposes composite operators, once per leaf."""
    programs = {n: state.context.decomposed(p) for n, p in state.programs.items()}
    return replace(state, programs=programs)


@compile_pass("lower", "aten", goals=WITH_KERNELS)
def lower(state: State) -> State:
    """Makes the kernels, once per leaf."""
    context, counted = state.context, state.programs
    if state.goal.late_backward and state.derivative is not None:
        late = PARTS if state.derivative.has_one_cotangent else PARTS[1:]
        counted = {part: p for part, p in state.programs.items() if part not in late}
        plain = partial(replace, kernels="eager")
        eager = {p: map_leaves(state.programs[p], plain) for p in late}
        state = replace(state, programs={**counted, **eager})
    new = context.lower(counted.values())
    context.lower(state.programs.values())
    made = [(leaf, context.kernels[leaf]) for leaf in new if leaf in context.kernels]
    failed = [f"@{leaf.name}: {one.why_eager}" for leaf, one in made if one.why_eager]
    if failed:
        message = "The backend failed to compile a closure, so PyTorch runs its operators: "
        warnings.warn(message + "; ".join(failed), stacklevel=2)
        state.report.eager_kernels += failed
    state.report.num_kernels += len(new)
    state.report.num_operators += sum(leaf.num_nodes for leaf in new)
    return replace(state, kernels="made")


@compile_pass("lower", "aten", goals=WITH_KERNELS)
def estimate(state: State) -> State:
    """Estimates the memory of kernels instead of making them; the result cannot run."""
    return replace(state, kernels="estimated")


@compile_pass("reduce", "aten", goals=("primitives",))
def reduce_to_primitives(state: State) -> State:
    """Decomposes operators into primitives, once per leaf, as far as rules are known."""
    programs = {n: state.context.reducer.of(p) for n, p in state.programs.items()}
    return replace(state, programs=programs)


# ---- requests: which outputs of a captured program to differentiate, by which inputs ------------


def differentiable_inputs(program: ir.Program) -> list[int]:
    """Returns the positions of the parameters and user inputs that require grad."""
    return [index for index, source in enumerate(program.sources) if ir.wants_gradient(source)]


def differentiation(program: ir.Program, *, of_loss: bool = False) -> Request:
    """Requests the derivative of a captured model by every input that requires grad.

    That of a micro-batch's loss is by the model's tensors alone.
    """
    written, inputs = {output for output, _ in program.writes}, differentiable_inputs(program)
    if of_loss:
        inputs = [i for i in inputs if isinstance(program.sources[i], ir.ModelTensor)]
    outputs = tuple(i for i in range(len(program.outputs)) if i not in written)
    # A closure, without the model's tensors.
    closure = ir.Composite("micro_batch" if of_loss else "main", replace(program, sources=()))
    return Request(closure, tuple(inputs), outputs)


def tensor_name(name: str) -> str:
    """Returns a tensor's name in the user's model, which a module that computes the loss wraps."""
    return name.removeprefix("model.")


@compile_pass("data", goals=("file",))
def require_data(state: Compilation) -> Compilation:
    """Refuses parameters on the meta device: a file needs their values."""
    for source in state.programs[PARTS[0]].sources:
        if isinstance(source, ir.ModelTensor) and source.tensor.is_meta:
            raise ExportError(
                f"{source.name} is on the meta device and has no data to write. Materialize the "
                "model first: model.to_empty(device=...) and load a state_dict."
            )
    return state


@compile_pass("autodiff", goals=("file",), wanted=lambda state: state.goal.train)
def add_gradients(state: Compilation) -> Compilation:
    """Adds the gradients of the loss to the program's outputs, in training."""
    from ...backend.onnx.torch_onnx import exact_attention, exact_decompositions

    program = state.programs[PARTS[0]]
    loss = loss_output(program)
    table = exact_decompositions(state.goal.opset)
    make, wanted = Differentiator(lambda leaf: Recipe(table)), differentiable_inputs(program)
    with exact_attention():
        derivative = make.vjp(ir.Composite("main", program), wanted, [loss])
    if derivative is None:
        raise ExportError(
            "train=True: the loss depends on no parameter that requires grad. (A program has to "
            "be captured with train=True.)"
        )
    type_ = ir.tensor_type(program.outputs[loss])
    seed = ir.ModelTensor(
        "loss.seed", torch.ones(type_.shape, dtype=type_.dtype, device=type_.device)
    )
    programs = {PARTS[0]: training_program(program, derivative, [seed])}
    return replace(state, programs=programs, derivative=derivative)


def loss_output(program: ir.Program) -> int:
    """Returns which output of a program is its loss."""
    tree = program.output_tree
    assert isinstance(tree, OutputTree)
    leaves = zip(tree.names, tree.leaves, strict=True)
    outputs = [(name, i) for name, (kind, i) in leaves if kind == "output"]
    found = [i for name, i in outputs if name == "loss"] or [i for _, i in outputs][:1]
    types = [ir.tensor_type(output) for output in program.outputs]
    if not found or types[found[0]].num_bytes != types[found[0]].dtype.itemsize:
        returned = ", ".join(f"{n}: {program.outputs[i].type}" for n, i in outputs)
        raise ExportError(
            "train=True: the model has to return a scalar loss, or an output with .loss; it "
            f"returns {returned or 'no tensor'}."
        )
    return found[0]


# ---- create_graph=True: gradients as a program, with a backward -------------------------------


class NoGradientsError(PlanError):
    """No gradients exist, so falling back to autograd would not help."""


@compile_pass("gradients", goals=("gradients",))
def take_gradients(state: Compilation) -> Compilation:
    """Makes a program that computes results and gradients, once per different closure."""
    program, request = state.captured.program, state.goal.gradients
    assert request is not None
    function = own_derivative(program)
    if function:
        raise NotDifferentiatedError(
            f"It has {function}, which has a derivative of its own (torch.autograd.Function)."
        )
    wanted = differentiable_inputs(program)
    sources = [
        ir.UserInput(i, f"input_{i}", requires_grad=i in wanted) for i in range(len(program.inputs))
    ]
    sources += [
        ir.UserInput(len(sources), f"cotangent_{o}", requires_grad=o in request.moving)
        for o in request.outputs
    ]
    made = state.context.gradient_programs.of(program, request.inputs, request.outputs, sources)
    if made is None:
        raise NoGradientsError("No gradient flows to an input or a parameter that requires grad.")
    _require_same_draws(program, made.program)
    return replace(_captured_as(state, made.program), gradients=made)


def _require_same_draws(program: ir.Program, gradients: ir.Program) -> None:
    """Checks that a forward that runs again for its gradients draws the same random numbers."""
    first, again = Draws().of(program.calls), Draws().of(gradients.calls)
    if first == again and first.keys() <= {"cpu"}:
        return
    counts = " and ".join(
        ", ".join(f"{number} on {device}" for device, number in counts.items()) or "none"
        for counts in (first, again)
    )
    raise NotDifferentiatedError(
        "It draws random numbers, and its gradient cannot draw the same again as compiled code: "
        f"that is possible on a CPU, and for as many. Forward and gradient draw {counts}."
    )
