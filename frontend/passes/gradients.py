"""Passes for gradients: in a file, with the loss; and as programs, to be differentiated."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...autodiff.derivative import Differentiator, Recipe
from ...autodiff.flows import Draws, used_inputs
from ...autodiff.higher_order.gradient_program import own_derivative
from ...autodiff.training_program import training_program
from ...reuse.errors import ExportError, PlanError
from ...reuse.ir.leaf import Leaf
from ...reuse.ir.program import Composite, ModelTensor, Program, UserInput, tensor_type
from ..capture.assemble import OutputTree
from .programs import PARTS, differentiable_inputs
from .state import Compilation, compile_pass


@compile_pass("data", goals=("file",))
def require_data(state: Compilation) -> Compilation:
    """Refuses parameters on the meta device: a file needs their values."""
    for source in state.programs[PARTS[0]].sources:
        if isinstance(source, ModelTensor) and source.tensor.is_meta:
            raise ExportError(
                f"{source.name} is on the meta device and has no data to write. Materialize the "
                "model first: model.to_empty(device=...) and load a state_dict."
            )
    return state


@compile_pass("autodiff", goals=("file",), wanted=lambda state: state.goal.train)
def add_gradients(state: Compilation) -> Compilation:
    """Adds every gradient of the loss to the program, in training."""
    from ...backend.onnx.torch_onnx import exact_attention, exact_decompositions

    program = state.programs[PARTS[0]]
    loss = loss_output(program)
    table = exact_decompositions(state.goal.opset)

    def recipe(leaf: Leaf) -> Recipe:
        return Recipe(table)

    wanted = differentiable_inputs(program)
    with exact_attention():
        derivative = Differentiator(recipe).vjp(Composite("main", program), wanted, [loss])
    if derivative is None:
        raise ExportError(
            "train=True: the loss depends on no parameter that requires grad. (A program has to "
            "be captured with train=True.)"
        )
    type_ = tensor_type(program.outputs[loss])
    seed = ModelTensor("loss.seed", torch.ones(type_.shape, dtype=type_.dtype, device=type_.device))
    programs = {PARTS[0]: training_program(program, derivative, [seed])}
    return replace(state, programs=programs, derivative=derivative)


def loss_output(program: Program) -> int:
    """Returns which output of a program is its loss.

    Raises:
        ExportError: if there is none.
    """
    tree = program.output_tree
    assert isinstance(tree, OutputTree)
    leaves = zip(tree.names, tree.leaves, strict=True)
    outputs = [(name, i) for name, (kind, i) in leaves if kind == "output"]
    found = [i for name, i in outputs if name == "loss"] or [i for _, i in outputs][:1]
    types = [tensor_type(output) for output in program.outputs]
    if not found or types[found[0]].num_bytes != types[found[0]].dtype.itemsize:
        returned = ", ".join(f"{n}: {program.outputs[i].type}" for n, i in outputs)
        raise ExportError(
            "train=True: the model has to return a scalar loss, or an output with .loss; it "
            f"returns {returned or 'no tensor'}."
        )
    return found[0]


# ---- create_graph=True: gradients as a program, with a backward -------------------------------


@compile_pass("gradients", goals=("gradients",))
def take_gradients(state: Compilation) -> Compilation:
    """Makes the program of a program's gradients, once per different closure."""
    program, request = state.captured.program, state.goal.gradients
    assert request is not None
    function = own_derivative(program)
    if function:
        raise PlanError(
            f"There is no second derivative of a program with {function}, which has a derivative "
            "of its own (torch.autograd.Function). Call the model itself where its gradient is "
            "differentiated."
        )
    wanted = differentiable_inputs(program)
    sources = [
        UserInput(i, f"input_{i}", requires_grad=i in wanted) for i in range(len(program.inputs))
    ]
    sources += [
        UserInput(len(sources), f"cotangent_{o}", requires_grad=o in request.moving)
        for o in request.outputs
    ]
    made = state.context.gradient_programs.of(program, wanted, request.outputs, sources)
    if made is None:
        raise PlanError("No gradient flows to an input or a parameter that requires grad.")
    _require_same_draws(program, made.program)
    if not used_inputs(made.program).isdisjoint(target for _, target in program.writes):
        raise PlanError(
            "There is no second derivative of a forward that changes a buffer it computes with: "
            "the gradient would be taken from what it is now. Call model.eval(), or call the model "
            "itself where its gradient is differentiated."
        )
    seen = replace(state.captured, program=made.program)
    return replace(state, seen=seen, gradients=made, programs={PARTS[0]: made.program})


def _require_same_draws(program: Program, gradients: Program) -> None:
    """Checks that a forward run again for gradients draws the same numbers.

    Raises:
        PlanError: if it would draw others.
    """
    first, again = Draws().of(program.calls), Draws().of(gradients.calls)
    if first == again and first.keys() <= {"cpu"}:
        return
    counts = " and ".join(
        ", ".join(f"{number} on {device}" for device, number in counts.items()) or "none"
        for counts in (first, again)
    )
    raise PlanError(
        "There is no second derivative of a model that draws random numbers, unless its gradient "
        f"can draw the same again: on a CPU, and as many. Forward and gradient draw {counts}. Call "
        "model.eval() or set its dropout to 0; or call the model itself where its gradient is "
        "differentiated."
    )
