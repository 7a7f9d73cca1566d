"""Traces of leaves: of a forward alone, or of forward and backward as one :class:`JointTrace`.

A traced graph is functional: no operator writes in place or sets a lazy bit (``conj``). Results and
gradients keep the layouts that were recorded in the capture, whichever operators compute them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...reuse.errors import CaptureError
from ...reuse.ir.leaf import Relayout, stamp_of, without_autocast
from ...reuse.ir.operators import is_view, mutated_args
from ...reuse.ir.program import input_nodes, outputs_of
from ...reuse.ir.torch_symbols import SizedInterpreter, environment_of_tensor, size_in, sizes_in
from ...reuse.ir.types import TensorType
from .torch_interpreters import (
    DIFFERENTIABLE,
    DifferentiableInterpreter,
    Gradients,
    NotingInterpreter,
    StoppingInterpreter,
    is_stop,
)
from .torch_make_fx import (
    WRITTEN,
    Decompositions,
    FakeTensorMode,
    compute_anew,
    drop_copies,
    drop_pairs,
    fake_tensor,
    growing_graph,
    is_lazy,
    new_fake_mode,
    refuse_strides_of_lazy,
    sizes_kept_open,
    traced,
)
from .torch_user_rules import dense_as, rules_above_autograd, rules_beneath_autograd


def with_layout_of(gradient: Tensor, type_: TensorType) -> Tensor:
    """Copies a gradient into the layout of its primal, so that one backward fits every caller."""
    if gradient.layout is not torch.strided:
        raise CaptureError(
            f"The gradient of a {type_} tensor is sparse, and compiled programs have dense ones "
            "only. Use sparse=False in the embedding."
        )
    # The strides of a single element do not matter.
    if TensorType.of(gradient).stride == type_.stride or gradient.numel() <= 1:
        return gradient
    environment = environment_of_tensor(gradient)
    shape, stride = ([size_in(environment, n) for n in ns] for ns in (type_.shape, type_.stride))
    repeated = [d for d, (n, step) in enumerate(zip(shape, stride, strict=True)) if step == 0]
    if repeated:  # an expanded dimension holds one element: write it once
        for dim in repeated:
            gradient = gradient.narrow(dim, 0, 1)
        once = [1 if d in repeated else n for d, n in enumerate(shape)]
        return _copied(gradient, once, stride).expand(shape)
    return _copied(gradient, shape, stride)


def _copied(tensor: Tensor, shape: Sequence[Any], stride: Sequence[Any]) -> Tensor:
    target = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
    return torch.ops.aten.copy.default(target, tensor)


def with_traced_layout(result: Any, node: Node) -> Any:
    """Copies a result into the layout of its node, unless it is a view or an operand."""
    if node.op != "call_function" or is_view(node) or mutated_args(node):
        return result
    return _with_layouts_of(result, node.meta.get("val"))


def captured_results(module: GraphModule) -> list[Any]:
    """Returns the fake results that the capture recorded for a leaf; None where it has none."""
    nodes = outputs_of(module)
    return [n.meta.get("val") if isinstance(n, Node) else None for n in nodes]


def with_captured_layouts(module: GraphModule, results: Sequence[Any]) -> tuple[Any, ...]:
    """Permutes a leaf's results into the layouts of the capture, which later leaves rely on.

    A new trace may lay them out in another way, by decompositions and rules for fake tensors.
    """
    pairs = zip(results, captured_results(module), strict=True)
    return tuple(r if t is None else _permuted_like(r, t) for r, t in pairs)


def _with_layouts_of(result: Any, traced: Any) -> Any:
    """Copies results into the layouts that they were traced with, which views of them rely on.

    The layout of some depends on an operand's lazy bit: of a solver, if its matrix is conjugated.
    """
    if isinstance(traced, (tuple, list)):
        return type(traced)(map(_with_layouts_of, result, traced))
    if not isinstance(traced, Tensor) or traced.layout is not torch.strided:
        return result
    return with_layout_of(result, TensorType.of(traced))


def attention_with_traced_layout(result: Any, node: Node) -> Any:
    """Permutes attention's result into the layout of its node: backends of attention differ."""
    traced = node.meta.get("val")
    if node.target is not torch.ops.aten.scaled_dot_product_attention.default or traced is None:
        return result
    return _permuted_like(result, traced)


def _permuted_like(result: Any, traced: Any) -> Any:
    """Permutes a result into the order of dimensions of its trace, by differentiable operators."""
    if not isinstance(result, Tensor) or not isinstance(traced, Tensor):
        return result
    type_ = TensorType.of(traced)
    found, stride = TensorType.of(result).stride, type_.stride
    # To sort symbolic strides would fix the symbols: such results stay as they are.
    is_open = not all(isinstance(n, int) for n in (*stride, *found))
    if found == stride or is_open or not type_.is_dense:
        return result
    return dense_as(result, stride)


def of_pure_memory(
    module: GraphModule,
    inputs: Sequence[Tensor],
    decompositions: Decompositions,
    sizes: Sequence[Any],
    names: Sequence[str] = (),
    *,
    gradients: Gradients = "final",
) -> GraphModule:
    """Functionalizes a trace: replaces in-place operators on temporaries and lazy bits."""
    strip_detach(module)
    drop_pairs(module)
    refuse_strides_of_lazy(module)
    # Ours last, so that they win: a backend's rule for a draw is for new memory only.
    table = {**decompositions, **_IN_PLACE_DRAWS, **WRITTEN}
    compute_anew(module, table)
    if not any(mutated_args(n) or is_lazy(n) for n in module.graph.nodes):
        return module
    _refuse_draws_into_gaps(module)
    functional = _functionalized(module, inputs, table, sizes_in(module) if sizes else ())
    drop_copies(functional)
    for node, name in zip(input_nodes(functional), names, strict=False):
        node.name = node.target = name
    if gradients == "final":  # else the detaches that are left stop gradients
        strip_detach(functional)
    return functional


def _refuse_draws_into_gaps(module: GraphModule) -> None:
    """Raises CaptureError for ``normal_`` of a view with gaps, which draws in another order.

    In memory without gaps PyTorch's kernel fills sixteen numbers at a time. If an input is written,
    the trace has a clone of it, without gaps.
    """
    draws = module.graph.find_nodes(op="call_function", target=torch.ops.aten.normal_.default)
    operands = [n.args[0] for n in draws]
    operands += [x.args[0] for x in operands if x.target is torch.ops.aten.clone.default]
    if not all(TensorType.of(x.meta["val"]).is_dense for x in operands):
        raise CaptureError(
            "normal_ of a view with gaps draws in an order of its own, which has no form to "
            "compile. Draw into a tensor of its own (torch.randn), and copy it there."
        )


def _functionalized(
    module: GraphModule,
    inputs: Sequence[Tensor],
    decompositions: Decompositions,
    sizes: Sequence[Any],
) -> GraphModule:
    """Traces a graph again by ``torch.func.functionalize``, and tags its forward part again."""
    # The new trace loses tags, and a partitioner needs to know where the forward ends.
    last = [n.name for n in module.graph.nodes if "partitioner_tag" in n.meta][-1:]
    forward: set[str] = set()
    layouts = [
        TensorType.of(n.meta["val"]) if isinstance(n, Node) else None for n in outputs_of(module)
    ]

    def run(flat: list[Tensor]) -> tuple[Any, ...]:
        results = _Boundary(module, last, forward).run(*flat)
        # An out-of-place operator may give its result another layout (masked_fill).
        pairs = zip(results, layouts, strict=True)
        return tuple(r if t is None else with_layout_of(r, t) for r, t in pairs)

    # Only mutations are removed: views stay views, so layouts are those of the first trace.
    without_changes = torch.func.functionalize(run, remove="mutations")
    functional = traced(without_changes, [list(inputs)], sizes, decompositions)
    for node in functional.graph.nodes:
        if node.name in forward:
            node.meta["partitioner_tag"] = "is_forward"
    return functional


def draw_mask(tensor: Tensor, p: float = 0.5, generator: Any = None) -> Tensor:
    """Decomposes ``bernoulli.p``, which draws in the order of a contiguous tensor."""
    layout = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return _mask_in(layout, p, generator)


def _mask_in(layout: Tensor, p: float = 0.5, generator: Any = None) -> Tensor:
    """Draws what ``bernoulli_`` draws: in the order of memory, with the same layout."""
    if generator is not None or not layout.is_floating_point():
        return NotImplemented
    _, mask = torch.ops.aten.native_dropout.default(layout, 1.0 - p, True)
    return mask.to(layout.dtype)


def _integers_in(layout: Tensor, low: int, high: int | None, generator: Any = None) -> Tensor:
    """Draws what ``random_`` draws between two bounds."""
    high = _end_of(layout.dtype) if high is None else high
    if generator is not None or high > torch.iinfo(torch.int64).max:
        raise CaptureError("random_ of all integers, or from a generator, has no form to compile.")
    return torch.randint_like(layout, low, high)


def _end_of(dtype: torch.dtype) -> int:
    """Returns the upper bound of ``random_`` without one: below it, all integers are exact."""
    last = round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max
    return last + 1


_OUT_OF_PLACE_DRAWS: Mapping[Any, Callable[..., Tensor]] = {torch.ops.aten.bernoulli.p: draw_mask}
"""Out-of-place draws of a graph; in-place draws are functionalized to the same names."""

_IN_PLACE_DRAWS: Mapping[Any, Callable[..., Tensor]] = {
    torch.ops.aten.bernoulli.p: _mask_in,
    getattr(torch.ops.aten.random, "from"): _integers_in,
}
"""Decompositions for the names that in-place draws are functionalized to.

``bernoulli`` draws in another order than ``bernoulli_``. The name ``random.from`` has a keyword of
Python, which generated code must not contain.
"""


class _Boundary(SizedInterpreter):
    """Runs a graph while it is traced again, and notes which new nodes are its forward part."""

    def __init__(self, module: GraphModule, last: Sequence[str], forward: set[str]) -> None:
        super().__init__(module)
        self._last = set(last)
        self._forward = forward

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        own = _OUT_OF_PLACE_DRAWS.get(target)
        found = NotImplemented if own is None else own(*args, **kwargs)
        return super().call_function(target, args, kwargs) if found is NotImplemented else found

    def run_node(self, n: Node) -> Any:
        graph = growing_graph()
        last = next(iter(reversed(graph.nodes)), None)
        result = with_traced_layout(super().run_node(n), n)
        if "origin" in n.meta:
            for new in itertools.takewhile(lambda node: node is not last, reversed(graph.nodes)):
                new.meta["origin"] = n.meta["origin"]
        if n.name in self._last:
            self._forward.update(n.name for n in growing_graph().nodes)
        return result


def strip_detach(module: GraphModule) -> None:
    """Removes ``detach``, the identity below autograd, unless it is marked as a stop."""
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.detach.default and not is_stop(node):
            operand = node.args[0]
            assert isinstance(operand, Node)
            node.replace_all_uses_with(operand)
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()


# ---- traces --------------------------------------------------------------------------------------


CHANGED_IN_PLACE = "has been modified by an inplace operation"
"""Autograd's error for a saved value that was changed in place since."""


class _OtherTangentsError(Exception):
    """Raised when the results that take a cotangent, or their types, are not as expected."""

    def __init__(self, types: Mapping[int, TensorType]) -> None:
        super().__init__()
        self.types = types


class JointTrace:
    """Traces forward and backward of a leaf as one graph.

    ``grad_inputs`` lists the flat inputs that get a gradient, ``tangent_outputs`` the flat outputs
    that take a cotangent: fewer than requested where autograd finds no path.

    Gradients that are differentiated again are traced with ``create_graph``, by operators whose
    derivatives are differentiable, too; attention is decomposed for that.
    """

    @without_autocast()
    def __init__(
        self,
        module: GraphModule,
        input_types: Sequence[TensorType],
        wanted_inputs: Sequence[int],
        wanted_outputs: Sequence[int],
        decompositions: Decompositions,
        gradients: Gradients = "final",
    ) -> None:
        # An operator with a derivative of its own keeps it for the next derivative.
        rules = rules_beneath_autograd() if gradients == "final" else rules_above_autograd()
        decompositions = {**decompositions, **rules}
        self._gradients: Gradients = gradients
        self._is_differentiated = gradients == "differentiated"
        self.grad_inputs: tuple[int, ...] = ()
        self.tangent_outputs: tuple[int, ...] = ()
        self.graph_module = module
        self._forward: set[str] = set()
        self._module = module
        mode = new_fake_mode(module)
        primals = [fake_tensor(mode, t) for t in input_types]
        # Only for these: autograd then skips branches that lead to no wanted input.
        for index in wanted_inputs:
            primals[index].requires_grad_()
        self.num_outputs = len(outputs_of(module))
        self._wanted = tuple(wanted_inputs), tuple(wanted_outputs)
        # Tangents are inputs of the trace, with the types of its results, which are known only
        # after it. They are nearly always those of the capture: then one trace is enough.
        tangents = self._captured_tangents()
        try:
            self._trace(mode, primals, tangents, decompositions)
        except _OtherTangentsError as found:
            self.tangent_outputs = tuple(found.types)
            if found.types:
                self._trace(mode, primals, found.types, decompositions)

    def _captured_tangents(self) -> dict[int, TensorType]:
        """Returns the types of tangents if results are as captured, and all depend on an input."""
        captured = captured_results(self._module)
        known = {i: captured[i] for i in self._wanted[1] if isinstance(captured[i], Tensor)}
        moving = {i: t for i, t in known.items() if t.is_floating_point() or t.is_complex()}
        return {i: TensorType.of(t).cotangent() for i, t in moving.items()}

    def _trace(
        self,
        mode: FakeTensorMode,
        primals: list[Tensor],
        types: Mapping[int, TensorType],
        decompositions: Decompositions,
    ) -> None:
        """Traces with tangents of these types; _OtherTangentsError if the results have others."""
        tangents, sizes = [fake_tensor(mode, t) for t in types.values()], sizes_in(self._module)
        self.tangent_outputs = tuple(types)
        with (
            mode,
            # Fused kernels have no second derivative.
            sdpa_kernel(SDPBackend.MATH) if self._is_differentiated else nullcontext(),
            sizes_kept_open(mode),
            torch.enable_grad(),
            _changes_of_saved_values_refused(self._module),
        ):
            function = partial(self._joint, types)
            joint = traced(function, [primals, tangents], sizes, decompositions)
            for node in joint.graph.nodes:  # tagged for whatever cuts the graph
                if node.name in self._forward:
                    node.meta["partitioner_tag"] = "is_forward"
            names = _rename_inputs(joint, len(primals))
            inputs = [*(p.detach() for p in primals), *tangents]
            self.graph_module = of_pure_memory(
                joint, inputs, decompositions, sizes, names, gradients=self._gradients
            )

    def _joint(
        self, types: Mapping[int, TensorType], primals: list[Tensor], tangents: list[Tensor]
    ) -> tuple[Any, ...]:
        graph, (wanted, outputs_wanted) = growing_graph(), self._wanted
        kind = DifferentiableInterpreter if self._is_differentiated else NotingInterpreter
        interpreter = kind(self._module, graph, attention_with_traced_layout)
        outputs = interpreter.run_flat(primals)
        found = {i: TensorType.of(outputs[i]) for i in outputs_wanted if outputs[i].requires_grad}
        captured = captured_results(self._module)
        for i in (i for i in found if captured[i] is not None):
            # The shape, too: a trace may have another expression for a size that is the same.
            known = TensorType.of(captured[i])
            found[i] = replace(found[i], shape=known.shape, stride=known.stride)
        found = {i: type_.cotangent() for i, type_ in found.items()}
        if found != types or not found:
            raise _OtherTangentsError(found)
        outputs = with_captured_layouts(self._module, outputs)
        # The nodes so far are the forward; autograd appends those of the backward.
        self._forward = {n.name for n in graph.nodes}
        with interpreter.errors_located():
            gradients = torch.autograd.grad(
                [outputs[i] for i in self.tangent_outputs],
                [primals[i] for i in wanted],
                tangents,
                allow_unused=True,
                create_graph=self._is_differentiated,
            )
        interpreter.write()
        # None, not zeros: no path leads there, and an optimizer has to skip such a parameter.
        pairs = [(i, g) for i, g in zip(wanted, gradients, strict=True) if g is not None]
        self.grad_inputs = tuple(i for i, _ in pairs)
        return (
            *outputs,
            *(with_layout_of(g, TensorType.of(primals[i]).cotangent()) for i, g in pairs),
        )


def _rename_inputs(module: GraphModule, num_primals: int) -> list[str]:
    """Gives placeholders the names that the partitioners know."""
    names = []
    placeholders = input_nodes(module)
    for index, node in enumerate(placeholders):
        is_primal = index < num_primals
        name = f"primals_{index + 1}" if is_primal else f"tangents_{index - num_primals + 1}"
        node.name = node.target = name
        names.append(name)
    return names


@contextmanager
def _changes_of_saved_values_refused(module: GraphModule) -> Iterator[None]:
    """Raises CaptureError, with the lines, if a saved value is changed in place.

    Eager PyTorch raises in the backward only, and not at all under ``checkpoint``: so the module
    runs eagerly, and fails only where eager does.
    """
    try:
        yield
    except RuntimeError as error:
        if CHANGED_IN_PLACE not in str(error):
            raise
        changing = [node for node in module.graph.nodes if mutated_args(node)]
        lines = dict.fromkeys(stamp_of(n).source or str(n.target) for n in changing)
        raise CaptureError(
            f"A value that the backward reads is changed in place after it was computed (changes "
            f"in place: {', '.join(lines)}). Make a new tensor instead, such as x = x * 2."
        ) from error


@without_autocast()
def trace_forward(
    module: GraphModule,
    types: Sequence[TensorType],
    decompositions: Decompositions,
    relayout: Relayout | None = None,
    gradients: Gradients = "final",
) -> GraphModule:
    """Traces a leaf body into a functional graph with composite operators decomposed."""
    mode = new_fake_mode(module)
    inputs = [fake_tensor(mode, t) for t in types]
    with sizes_kept_open(mode):
        return trace_forward_on(
            module, inputs, mode, decompositions, sizes_in(module), relayout, gradients
        )


@without_autocast()
def trace_forward_on(
    module: GraphModule,
    inputs: Sequence[Tensor],
    mode: FakeTensorMode,
    decompositions: Decompositions,
    sizes: Sequence[Any] = (),
    relayout: Relayout | None = None,
    gradients: Gradients = "final",
) -> GraphModule:
    """Does :func:`trace_forward` on given fake inputs.

    Without ``sizes`` the traced graph computes symbolic sizes itself.
    """
    is_final = gradients == "final"

    def run(flat: list[Tensor]) -> tuple[Any, ...]:
        kind = NotingInterpreter if is_final else StoppingInterpreter
        interpreter = kind(module, growing_graph(), relayout)
        results = with_captured_layouts(module, interpreter.run_flat(flat))
        interpreter.write()
        return results

    # A user's derivative has a backward only, so before autograd the operator's rule is traced.
    rules = rules_beneath_autograd() if is_final else rules_above_autograd()
    table = {**decompositions, **rules}
    with mode, torch.no_grad():
        plain = traced(run, [inputs], sizes, table)
        return of_pure_memory(plain, inputs, table, sizes, gradients=gradients)


def trace_for_rules(
    module: GraphModule, types: Sequence[TensorType], decompositions: Decompositions
) -> GraphModule:
    """Does :func:`trace_forward` for derivative rules: a detach that stops a gradient stays.

    Attention is decomposed: the fused one has neither forward mode nor a second derivative.
    """
    relayout = attention_with_traced_layout
    with sdpa_kernel(SDPBackend.MATH):
        return trace_forward(module, types, decompositions, relayout, "differentiated")


@without_autocast()
def trace_function(
    function: Callable[[list[Tensor]], tuple[Any, ...]],
    types: Sequence[TensorType],
    module: GraphModule,
) -> GraphModule:
    """Traces a function of a list of tensors into a graph that can be differentiated.

    What it detaches by :func:`stop_in_trace` stays. ``module``, the graph that it runs, has the
    symbols of sizes.
    """
    mode = new_fake_mode(module)
    inputs, sizes = [fake_tensor(mode, t) for t in types], sizes_in(module)
    with mode, torch.no_grad(), sizes_kept_open(mode):
        made = traced(function, [inputs], sizes, DIFFERENTIABLE)
    strip_detach(made)
    return made
