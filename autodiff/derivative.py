"""``vjp``: the derivative of a closure as a pair of closures, made once per closure.

The forward closure returns the primal's results and a struct of saved values. The backward closure
takes that struct, the inputs and results that it needs (handed over, not saved), and cotangents; it
returns gradients. A *choice* says which forward values are saved and which are recomputed in the
backward. Each call has its own; calls of one closure with equal choices share one derivative, which
is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.fx

from ..reuse.ir import program as ir
from ..reuse.ir.leaf import flat_types, is_active, without_autocast
from ..reuse.ir.rewrite import packed, unpacked
from ..reuse.ir.torch_symbols import environment_of
from ..reuse.ir.types import HOST, StructType, TensorType
from ..reuse.once import once
from .leaf_derivative import (
    Cut,
    Derivative,
    PerCall,
    Request,
    Whole,
    control_derivative,
    cotangent_type,
    hand_over_views,
    make_pair,
    save_memory_once,
)
from .run_again import Rerunner, run_again
from .traces.joint_trace import JointTrace
from .traces.torch_interpreters import Gradients, stop_what_has_no_gradient
from .traces.torch_make_fx import TO_COPY, Decompositions, traced_operator
from .traces.torch_partition import PartitionPolicy, cut_joint, partition

Remember = Callable[[Request, Callable[[], Derivative | None]], Derivative | None]


def _unchanged(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    return module


@dataclass(frozen=True)
class Recipe:
    """Says how leaf closures are differentiated for a backend."""

    # Of composite operators, used after differentiation.
    decompositions: Decompositions = field(default_factory=dict)
    # How a joint graph splits into forward and backward (see ``partition``).
    policy: PartitionPolicy = "save"
    # A backend's rewrite of the joint graph before it is split.
    joint_pass: Callable[[torch.fx.GraphModule], torch.fx.GraphModule] | None = None
    # Which kernels the two halves get, ``"backend"`` or ``"eager"``.
    kernels: ir.Kernels = "backend"
    # A backend's rewrite of composite operators, before differentiation.
    rewrite: Callable[[torch.fx.GraphModule], torch.fx.GraphModule] = _unchanged
    # ``"differentiated"`` makes halves that can be differentiated again.
    gradients: Gradients = "final"


class Differentiator:
    """Makes derivatives by each leaf's recipe, or a cache of leaves', and keeps them by closure."""

    def __init__(
        self, recipe_for: Callable[[ir.Leaf], Recipe], remember: Remember | None = None
    ) -> None:
        self._recipe_for = recipe_for
        self._remember = remember
        # The graph of a leaf with symbolic sizes, if there is one: all have one shape environment.
        self._sized: torch.fx.GraphModule | None = None
        self._sites: dict[Request, tuple[Request | None, ...]] = {}
        self._rerunner = Rerunner()

    def vjp(
        self, closure: ir.Closure, inputs: Sequence[int], outputs: Sequence[int]
    ) -> Derivative | None:
        """Returns the derivative of outputs by inputs, by position; None if no gradient flows."""
        return self.of(Request(closure, tuple(inputs), tuple(outputs)))

    @once
    def of(self, request: Request) -> Derivative | None:
        """Returns the derivative for a request; see :meth:`vjp`."""
        leaf = request.closure
        # Often no gradient flows: a block behind frozen layers, a result that no loss reads.
        if not request.inputs or not request.outputs:
            return None
        # Checked first, since leaves and composites alike can be recomputed whole.
        if isinstance(request.choice, Whole):
            return self._called_again(request)
        if isinstance(leaf, ir.Composite):
            reversal = _Reversal(self, request, leaf)
            made = reversal.derivative()
            self._sites[request] = reversal.sites()
            return made
        assert isinstance(leaf, ir.Leaf), "pack and unpack come from differentiation"
        if leaf.control is not None:
            return control_derivative(self, request, leaf.control)
        if self._remember is not None:
            return self._remember(request, partial(self._leaf, request, leaf))
        return self._leaf(request, leaf)

    def sites(self, request: Request) -> tuple[Request | None, ...]:
        """Returns the request that a composite's derivative makes for each of its calls."""
        self.of(request)
        return self._sites.get(request, ())

    # ---- leaves --------------------------------------------------------------------------

    @without_autocast()
    def joint(self, request: Request) -> JointTrace | None:
        """Returns the joint graph of a leaf, ready to be cut; None if no gradient flows."""
        joint, _ = self._traced(replace(request, choice=None))
        return joint if joint.tangent_outputs and joint.grad_inputs else None

    @once
    def _traced(self, plain: Request) -> tuple[JointTrace, Recipe]:
        """Traces a leaf's joint graph, for a request without a choice."""
        # Tracing is expensive, and a choice only cuts the traced graph: a solver that tries many
        # choices traces a leaf once.
        leaf = plain.closure
        assert isinstance(leaf, ir.Leaf)
        if environment_of(leaf.module) is not None:
            self._sized = leaf.module
        types, recipe = flat_types(leaf.input_types), self._recipe_for(leaf)
        # Before the trace: the form that the backend prefers is the one to differentiate.
        module = recipe.rewrite(leaf.module)
        joint = JointTrace(
            module, types, plain.inputs, plain.outputs, recipe.decompositions, recipe.gradients
        )
        if recipe.joint_pass is not None and joint.tangent_outputs and joint.grad_inputs:
            joint.graph_module = recipe.joint_pass(joint.graph_module)
        return joint, recipe

    @without_autocast()
    def _leaf(self, request: Request, leaf: ir.Leaf) -> Derivative | None:
        joint, recipe = self._traced(replace(request, choice=None))
        if not joint.tangent_outputs or not joint.grad_inputs:
            return None
        graph, number = joint.graph_module, joint.num_outputs
        if isinstance(request.choice, Cut):
            forward, backward = cut_joint(graph, number, request.choice.saved)
        else:
            forward, backward = partition(graph, number, recipe.policy)
            if recipe.policy == "save" and recipe.gradients == "final":
                save_memory_once(forward, backward)
        hand_over_views(forward, backward)
        if recipe.gradients == "final":
            pair = make_pair(leaf, forward, backward, joint, recipe.kernels)
            offloaded = request.choice.offloaded if isinstance(request.choice, Cut) else ()
            names = [node.name for node in ir.outputs_of(forward)[number:]]
            return replace(
                pair, offloaded=tuple(i for i, name in enumerate(names) if name in offloaded)
            )
        pair = make_pair(leaf, forward, backward, joint, recipe.kernels, "composite")
        # Autograd has no gradient for, say, a norm's statistics: the next derivative asks for none.
        stop_what_has_no_gradient(forward, flat_types(leaf.input_types), request.inputs)
        return pair

    # ---- programs ------------------------------------------------------------------------

    def _called_again(self, request: Request) -> Derivative | None:
        """Returns the derivative whose backward first recomputes the forward."""
        plain = self.of(replace(request, choice=None))
        return None if plain is None else run_again(request.closure, plain, self._rerunner)

    @once
    def active_outputs(self, closure: ir.Closure, active: tuple[bool, ...]) -> tuple[bool, ...]:
        """Says which results of a closure may carry a gradient back to the active operands."""
        if isinstance(closure, ir.Leaf):
            return is_active(closure, active)
        assert isinstance(closure, ir.Composite)
        values = active_values(self, closure.program, active)
        return tuple(v in values for v in closure.program.outputs)

    @once
    def adder(self, type_: TensorType, added: TensorType) -> ir.Leaf:
        """Returns the closure that adds a value to one of a type."""
        types, sized = (type_, added), self._sized if type_.is_symbolic else None
        module = traced_operator(torch.ops.aten.add.Tensor, types, type_, sized=sized)
        return ir.Leaf("add", module, types, (type_,), level="aten", kernels="eager")

    @once
    def copier(self, type_: TensorType, copied: TensorType) -> ir.Leaf:
        """Returns the closure that copies a value to another device or dtype."""
        name = "offload" if copied.device == HOST else "reload"
        name = "cast" if copied.device == type_.device else name
        wanted: dict[str, Any] = {"device": copied.device, "dtype": copied.dtype}
        options = {key: value for key, value in wanted.items() if getattr(type_, key) != value}
        module = traced_operator(TO_COPY, [type_], copied, options=options)
        return ir.Leaf(name, module, (type_,), (copied,), level="aten", kernels="eager")


def active_values(
    differentiator: Differentiator, program: ir.Program, active: Sequence[bool]
) -> set[ir.Value]:
    """Returns the values of a program that may carry a gradient back to an active input."""
    found = {v for v, flag in zip(program.inputs, active, strict=True) if flag}
    for call in program.calls:
        flags = tuple(v in found for v in call.args)
        if any(flags):
            results = differentiator.active_outputs(call.closure, flags)
            found.update(v for v, flag in zip(call.results, results, strict=True) if flag)
    return found


def passed_through(program: ir.Program) -> dict[ir.Value, ir.Value]:
    """Maps each result that is an unchanged operand to that operand."""
    same: dict[ir.Value, ir.Value] = {}
    for call in program.calls:
        if isinstance(call.closure, ir.Composite):
            body = call.closure.program
            inner = passed_through(body)
            place = {v: i for i, v in enumerate(body.inputs)}
            for result, output in zip(call.results, body.outputs, strict=True):
                index = place.get(inner.get(output, output))
                if index is not None:
                    same[result] = same.get(call.args[index], call.args[index])
    return same


class _Reversal:
    """Differentiates a program: forward calls that save, and their backwards in reverse."""

    def __init__(
        self, differentiator: Differentiator, request: Request, closure: ir.Composite
    ) -> None:
        self._make = differentiator
        self._closure = closure
        self._program = closure.program
        self._wanted = inputs = request.inputs
        choices = request.choice.choices if isinstance(request.choice, PerCall) else ()
        self._choices = dict(zip(self._program.calls, choices, strict=bool(choices)))
        self._asked: dict[ir.Call, Request] = {}
        flags = [i in set(inputs) for i in range(len(self._program.inputs))]
        self._active = active_values(differentiator, self._program, flags)
        self._cotangents: dict[ir.Value, ir.Value] = {}
        self._backward: list[ir.Call] = []
        self._derivatives: dict[ir.Call, tuple[Derivative, ir.Value]] = {}
        self._offloads: dict[ir.Call, list[ir.Call]] = {}
        # For each forward value that the backward reads, the value of the backward program.
        self._kept: dict[ir.Value, ir.Value] = {}
        self._same = passed_through(self._program)
        self._seeds: list[tuple[int, ir.Value]] = []
        for index in request.outputs:
            value = self._program.outputs[index]
            if value in self._active:
                seed = ir.Value(cotangent_type(value.type), f"ct_{value.hint}")
                self._seeds.append((index, seed))
                self._add_cotangent(value, seed)

    def _add_cotangent(self, value: ir.Value, cotangent: ir.Value) -> None:
        """Adds a cotangent to the sum of a value's cotangents: it may have several uses."""
        # The first one is the sum itself: adding it to zeros would cost a kernel.
        present = self._cotangents.get(value)
        if present is None:
            self._cotangents[value] = cotangent
            return
        assert isinstance(cotangent.type, TensorType)
        total = ir.Value(cotangent.type, cotangent.hint)
        adder = self._make.adder(cotangent.type, cotangent.type)
        self._backward.append(ir.Call(adder, (present, cotangent), (total,)))
        self._cotangents[value] = total

    def derivative(self) -> Derivative | None:
        """Builds the pair."""
        for call in reversed(self._program.calls):
            asked = self._request(call)
            derivative = self._make.of(asked)
            if derivative is not None:
                self._asked[call] = asked
                self._reverse(call, derivative)
        gradients = [i for i in self._wanted if self._program.inputs[i] in self._cotangents]
        if not gradients:
            return None
        forward_calls = [
            made
            for call in self._program.calls
            for made in (self._forward_call(call), *self._offloads.get(call, ()))
        ]
        return self._assemble(forward_calls, gradients)

    def sites(self) -> tuple[Request | None, ...]:
        """Returns the request for each call; None where no gradient flows."""
        return tuple(self._asked.get(call) for call in self._program.calls)

    def _request(self, call: ir.Call) -> Request:
        # Calls of one closure may differ in their active operands: equal patterns share a
        # derivative, others are a request of their own.
        wanted = [i for i, v in enumerate(call.args) if v in self._active]
        seeded = [i for i, v in enumerate(call.results) if v in self._cotangents]
        return Request(call.closure, tuple(wanted), tuple(seeded), self._choices.get(call))

    def _reverse(self, call: ir.Call, derivative: Derivative) -> None:
        saved = ir.Value(derivative.saved_type, "saved")
        self._derivatives[call] = (derivative, saved)
        operands = [self._held(call, saved, derivative.offloaded)]
        operands += [self._keep(call.args[i]) for i in derivative.kept_inputs]
        operands += [self._keep(call.results[i]) for i in derivative.kept_outputs]
        operands += [self._cotangents[call.results[i]] for i in derivative.cotangent_outputs]
        targets = [call.args[i] for i in derivative.gradient_inputs]
        results = tuple(ir.Value(cotangent_type(v.type), f"ct_{v.hint}") for v in targets)
        self._backward.append(ir.Call(derivative.backward, tuple(operands), results, call.path))
        for target, result in zip(targets, results, strict=True):
            self._add_cotangent(target, result)

    def _held(self, call: ir.Call, saved: ir.Value, offloaded: Sequence[int]) -> ir.Value:
        """Returns a call's saved struct for its backward; reloads what was offloaded."""
        if not offloaded:
            return self._keep(saved)
        # Copied to the host right after the forward call, and back right before the backward call.
        type_ = saved.type
        assert isinstance(type_, StructType)
        home = {i: field.device for i, field in enumerate(type_.fields)}  # type: ignore[union-attr]
        away, on_host = self._copied(saved, dict.fromkeys(offloaded, HOST), call.path)
        back, again = self._copied(self._keep(on_host), {i: home[i] for i in offloaded}, call.path)
        self._offloads[call] = away
        self._backward += back
        return again

    def _copied(
        self, struct: ir.Value, devices: Mapping[int, torch.device], path: str
    ) -> tuple[list[ir.Call], ir.Value]:
        """Returns calls that copy fields of a struct to devices, and the struct with the copies."""
        calls = [unpacked(struct)]
        fields = list(calls[0].results)
        for index, device in devices.items():
            given = fields[index]
            assert isinstance(given.type, TensorType)
            fields[index] = ir.Value(replace(given.type, device=device), "copied")
            copier = self._make.copier(given.type, replace(given.type, device=device))
            calls.append(ir.Call(copier, (given,), (fields[index],), path))
        calls.append(packed(fields, struct.hint))
        return calls, calls[-1].results[0]

    def _keep(self, value: ir.Value) -> ir.Value:
        # Else a result that is an unchanged operand would be saved a second time.
        value = self._same.get(value, value)
        if value not in self._kept:
            self._kept[value] = ir.Value(value.type, value.hint)
        return self._kept[value]

    def _forward_call(self, call: ir.Call) -> ir.Call:
        if call not in self._derivatives:
            return call
        derivative, saved = self._derivatives[call]
        return ir.Call(derivative.forward, call.args, (*call.results, saved), call.path)

    def _assemble(self, forward_calls: list[ir.Call], gradients: list[int]) -> Derivative:
        program = self._program
        kept_inputs = [i for i, v in enumerate(program.inputs) if v in self._kept]
        inputs = set(program.inputs)
        kept_outputs, seen = [], set(inputs)
        for index, value in enumerate(program.outputs):
            if value in self._kept and value not in seen:
                kept_outputs.append(index)
                seen.add(value)
        # The caller holds inputs and results anyway; only the rest is saved.
        held = [v for v in self._kept if v not in seen]
        pack = packed(held)
        forward = ir.Program(
            program.inputs, (*forward_calls, pack), (*program.outputs, *pack.results)
        )
        entry = ir.Value(pack.results[0].type, "saved")
        unpack = unpacked(entry, (self._kept[v] for v in held))
        backward = ir.Program(
            (
                entry,
                *(self._kept[program.inputs[i]] for i in kept_inputs),
                *(self._kept[program.outputs[i]] for i in kept_outputs),
                *(seed for _, seed in self._seeds),
            ),
            (unpack, *self._backward),
            tuple(self._cotangents[program.inputs[i]] for i in gradients),
        )
        name = self._closure.name
        return Derivative(
            ir.Composite(f"{name}.forward", forward, self._closure.input_names),
            ir.Composite(f"{name}.backward", backward),
            tuple(kept_inputs),
            tuple(kept_outputs),
            tuple(i for i, _ in self._seeds),
            tuple(gradients),
        )
