"""Adapter: PyTorch's autograd, functionalization and partitioners, traced on fake tensors.

Every private name that differentiation needs is used here and nowhere else.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
import torch.fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..reuse.errors import CaptureError
from ..reuse.ir.leaf import ModalInterpreter, is_view, mutated_args, stamp_of, without_autocast
from ..reuse.ir.program import input_nodes
from ..reuse.ir.torch_symbols import (
    SizedInterpreter,
    environment_of,
    environment_of_tensor,
    size_in,
    sizes_as_literals,
    sizes_in,
)
from ..reuse.ir.types import TensorType
from .joint_cut import cut_joint, is_draw, late_draws, may_draw, outputs_of, read_by_backward
from .origins import NotingInterpreter
from .rules.in_traces import rules_above_autograd, rules_beneath_autograd
from .stops import StoppingInterpreter, is_stop, stopped
from .torch_lazy import PLAIN_ZEROS, WRITTEN, drop_copies, drop_pairs, is_lazy, mark_after_strided

Decompositions = Mapping[Any, Callable[..., Any]]

Gradients: TypeAlias = Literal["final", "differentiated"]
"""What becomes of gradients: whether they are differentiated in their turn."""

CHANGED_IN_PLACE = "has been modified by an inplace operation"
"""What PyTorch's autograd says of a saved value that is no longer what was saved."""


def new_fake_mode(module: torch.fx.GraphModule | None = None) -> FakeTensorMode:
    """Returns a fake mode for one compilation (Inductor's passes bring real constants).

    Sizes of its tensors may be those of the module's shape environment.
    """
    environment = None if module is None else environment_of(module)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment, static_shapes=True)
    if environment is not None:
        # The mode's cache of results hardly ever fits where sizes are symbols.
        mode.cache_enabled = False
    return mode


def sizes_kept_open(mode: FakeTensorMode) -> AbstractContextManager[Any]:
    """Within it operators that would read a size as a number leave it a symbol, if there are any.

    ``constant_pad_nd`` is one: in C++ it reads numbers, and PyTorch has it in Python beside.
    """
    return nullcontext() if mode.shape_env is None else enable_python_dispatcher()


def fake_tensor(mode: FakeTensorMode, type_: TensorType) -> torch.Tensor:
    """Returns a fake tensor of a type."""
    shape, stride = ([size_in(mode.shape_env, n) for n in ns] for ns in (type_.shape, type_.stride))
    with mode:
        return torch.empty_strided(shape, stride, dtype=type_.dtype, device=type_.device)


def _traced(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    sizes: Sequence[Any],
    decompositions: Decompositions,
) -> torch.fx.GraphModule:
    """Traces a function; what computes sizes becomes literals with :func:`_flat_signature`."""
    table = {**decompositions, **PLAIN_ZEROS}
    return make_fx(lambda *groups: function(*groups[:-1]), decomposition_table=table)(
        *inputs, list(sizes)
    )


@without_autocast
def trace_forward(
    module: torch.fx.GraphModule, types: Sequence[TensorType], decompositions: Decompositions
) -> torch.fx.GraphModule:
    """Takes composite operators of a leaf body apart; no derivative, no in-place operators."""
    mode = new_fake_mode(module)
    inputs = [fake_tensor(mode, t) for t in types]
    with sizes_kept_open(mode):
        return trace_forward_on(module, inputs, mode, decompositions, sizes_in(module))


@without_autocast
def trace_forward_on(
    module: torch.fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    decompositions: Decompositions,
    sizes: Sequence[Any] = (),
) -> torch.fx.GraphModule:
    """Does :func:`trace_forward` on given fake inputs.

    Without ``sizes`` the traced graph computes those that are no numbers itself.
    """

    def forward(flat: list[torch.Tensor]) -> tuple[Any, ...]:
        interpreter = NotingInterpreter(module, growing_graph())
        results = interpreter.run_flat(flat)
        interpreter.write()
        return results

    decompositions = {**decompositions, **rules_beneath_autograd()}
    with mode, torch.no_grad():
        traced = _flat_signature(_traced(forward, [inputs], sizes, decompositions), sizes)
        return of_pure_memory(traced, inputs, decompositions, sizes)


@without_autocast
def trace_taken_apart(
    module: torch.fx.GraphModule, types: Sequence[TensorType], decompositions: Decompositions
) -> torch.fx.GraphModule:
    """Does :func:`trace_forward` for rules of derivatives: what stops a gradient stays, marked.

    Attention is in plain form: the fused one has neither forward mode nor a second derivative.
    """
    mode = new_fake_mode(module)
    inputs, sizes = [fake_tensor(mode, t) for t in types], sizes_in(module)
    # A derivative of an operator's own goes backwards only: no rule stands for it here.
    decompositions = {**decompositions, **rules_above_autograd()}

    def forward(flat: list[torch.Tensor]) -> tuple[Any, ...]:
        interpreter = StoppingInterpreter(module, growing_graph(), _attention_as_traced)
        outputs = interpreter.run_flat(flat)
        interpreter.write()
        return outputs

    with mode, torch.no_grad(), sizes_kept_open(mode), sdpa_kernel(SDPBackend.MATH):
        traced = _flat_signature(_traced(forward, [inputs], sizes, decompositions), sizes)
        return of_pure_memory(traced, inputs, decompositions, sizes, gradients="differentiated")


@without_autocast
def trace_function(
    function: Callable[[list[torch.Tensor]], tuple[Any, ...]],
    types: Sequence[TensorType],
    module: torch.fx.GraphModule,
) -> torch.fx.GraphModule:
    """Traces a function of tensors into a graph that has derivatives of its own.

    Args:
        function: takes its inputs as one list. What it detaches by :func:`stop_in_trace` stays.
        types: of the inputs.
        module: what it runs; sizes are those of its shape environment.
    """
    mode = new_fake_mode(module)
    inputs, sizes = [fake_tensor(mode, t) for t in types], sizes_in(module)
    with mode, torch.no_grad(), sizes_kept_open(mode):
        traced = _flat_signature(_traced(function, [inputs], sizes, DIFFERENTIABLE), sizes)
    _strip_detach(traced)
    return traced


def growing_graph() -> torch.fx.Graph:
    """Returns the graph of the trace that is under way."""
    proxy_mode = get_proxy_mode()
    assert proxy_mode is not None
    graph: torch.fx.Graph = proxy_mode.tracer.graph
    return graph


def stop_in_trace(tensor: torch.Tensor) -> torch.Tensor:
    """Detaches a tensor while it is traced, for good."""
    return stopped(tensor, growing_graph())


class JointTrace:
    """Forward and backward of a leaf as one graph.

    ``grad_inputs`` lists the flat inputs that get a gradient, ``tangent_outputs`` the flat outputs
    that take a cotangent: both may be fewer than asked, where autograd says nothing flows.

    Gradients that will be differentiated are traced with ``create_graph``: each operator's
    derivative is then itself made of operators that have one. So is attention, in plain form.
    """

    @without_autocast
    def __init__(
        self,
        module: torch.fx.GraphModule,
        input_types: Sequence[TensorType],
        wanted_inputs: Sequence[int],
        wanted_outputs: Sequence[int],
        decompositions: Decompositions,
        gradients: Gradients = "final",
    ) -> None:
        # One that has a derivative of its own keeps it for the next derivative.
        rules = rules_beneath_autograd() if gradients == "final" else rules_above_autograd()
        decompositions = {**decompositions, **rules}
        self._gradients: Gradients = gradients
        self.grad_inputs: tuple[int, ...] = ()
        self.tangent_outputs: tuple[int, ...] = ()
        self.num_outputs = 0
        self.graph_module = module
        self._forward: set[str] = set()
        self._module = module
        mode = new_fake_mode(module)
        sizes = sizes_in(module)
        primals = [fake_tensor(mode, t) for t in input_types]
        for index in wanted_inputs:
            primals[index].requires_grad_()
        with self._attention():
            tangents = self._find_tangents(mode, primals, wanted_outputs)
        if not self.tangent_outputs:
            return
        with (
            mode,
            self._attention(),
            sizes_kept_open(mode),
            torch.enable_grad(),
            _changes_of_saved_values_refused(module),
        ):
            self.graph_module = _traced(
                lambda p, t: self._joint(p, t, wanted_inputs),
                [primals, tangents],
                sizes,
                decompositions,
            )
            self._tag_forward()
            names = _renameinput_nodes(_flat_signature(self.graph_module, sizes), len(primals))
            detached = [p.detach() for p in primals]
            inputs = [*detached, *tangents]
            self.graph_module = of_pure_memory(
                self.graph_module, inputs, decompositions, sizes, names, gradients=gradients
            )

    def _attention(self) -> AbstractContextManager[Any]:
        """Fused attention has one derivative only."""
        return sdpa_kernel(SDPBackend.MATH) if self._is_differentiated else nullcontext()

    @property
    def _is_differentiated(self) -> bool:
        return self._gradients == "differentiated"

    def _find_tangents(
        self, mode: FakeTensorMode, primals: Sequence[torch.Tensor], wanted: Sequence[int]
    ) -> list[torch.Tensor]:
        with mode, sizes_kept_open(mode), torch.enable_grad():
            outputs = ModalInterpreter(self._module, _attention_as_traced).run_flat(primals)
        self.num_outputs = len(outputs)
        self.tangent_outputs = tuple(i for i in wanted if outputs[i].requires_grad)
        types = [TensorType.of(outputs[i]).cotangent() for i in self.tangent_outputs]
        return [fake_tensor(mode, t) for t in types]

    def _joint(
        self, primals: list[torch.Tensor], tangents: list[torch.Tensor], wanted: Sequence[int]
    ) -> tuple[Any, ...]:
        graph = growing_graph()
        interpreter_class = StoppingInterpreter if self._is_differentiated else NotingInterpreter
        interpreter = interpreter_class(self._module, graph, _attention_as_traced)
        outputs = interpreter.run_flat(primals)
        self._forward = {n.name for n in graph.nodes}
        gradients = torch.autograd.grad(
            [outputs[i] for i in self.tangent_outputs],
            [primals[i] for i in wanted],
            tangents,
            allow_unused=True,
            create_graph=self._is_differentiated,
        )
        interpreter.write()
        pairs = [(i, g) for i, g in zip(wanted, gradients, strict=True) if g is not None]
        self.grad_inputs = tuple(i for i, _ in pairs)
        return (
            *outputs,
            *(laid_out_as(g, TensorType.of(primals[i]).cotangent()) for i, g in pairs),
        )

    def _tag_forward(self) -> None:
        """Tells the default partitioner where the forward ends."""
        for node in self.graph_module.graph.nodes:
            if node.name in self._forward:
                node.meta["partitioner_tag"] = "is_forward"


NOT_DIFFERENTIABLE = "is not differentiable with respect to argument"


@without_autocast
def stop_what_has_no_gradient(
    module: torch.fx.GraphModule, types: Sequence[TensorType], active: Sequence[int]
) -> None:
    """Detaches those results of a graph that autograd gives no gradient (a norm's statistics).

    Where they are operands of another graph, no gradient of theirs must be asked for.

    Args:
        module: a forward, functional; it is changed.
        types: of its inputs.
        active: positions of the inputs that want a gradient now. Others may at another order.
    """
    flags = _with_gradients(module, types, active)
    output = module.graph.output_node()
    new = list(outputs_of(module))
    with module.graph.inserting_before(output):
        for index, (node, has_gradient) in enumerate(zip(new, flags, strict=True)):
            if not has_gradient:
                new[index] = module.graph.call_function(torch.ops.aten.detach.default, (node,))
                new[index].meta["val"] = node.meta["val"]
    output.args = (tuple(new),)
    module.recompile()


def _with_gradients(
    module: torch.fx.GraphModule, types: Sequence[TensorType], active: Sequence[int]
) -> list[bool]:
    """Says of each result whether autograd gives it a gradient if every input wants one.

    Some inputs cannot (a norm's running statistics): PyTorch says so where one does.
    """
    mode = new_fake_mode(module)

    def run(wanting: Collection[int]) -> list[bool]:
        inputs = [fake_tensor(mode, t).requires_grad_(i in wanting) for i, t in enumerate(types)]
        with mode, sizes_kept_open(mode), torch.enable_grad():
            results = ModalInterpreter(module).run_flat(inputs)
        return [not isinstance(x, torch.Tensor) or x.requires_grad for x in results]

    wanting = {i for i, type_ in enumerate(types) if type_.is_differentiable}
    try:
        return run(wanting)
    except RuntimeError as error:
        if NOT_DIFFERENTIABLE not in str(error):
            raise
    for index in wanting - set(active):
        try:
            run({*active, index})
        except RuntimeError:
            wanting.discard(index)
    return run(wanting)


@contextmanager
def _changes_of_saved_values_refused(module: torch.fx.GraphModule) -> Iterator[None]:
    """Says in our words that a value which the backward reads is changed in place afterwards.

    Eager PyTorch refuses only the backward, and under ``checkpoint`` does not even look: a module
    that runs itself is right wherever eager is.

    Raises:
        CaptureError: with the lines that change something in place.
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


def _flat_signature(module: torch.fx.GraphModule, sizes: Sequence[Any]) -> torch.fx.GraphModule:
    """Makes a traced graph take its tensors as positional arguments, one each."""
    if sizes:
        sizes_as_literals(module.graph)
    module.graph.set_codegen(torch.fx.graph.CodeGen())
    module.recompile()
    return module


def laid_out_as(gradient: torch.Tensor, type_: TensorType) -> torch.Tensor:
    """Gives a gradient its primal's layout, so that one backward serves every caller."""
    if gradient.layout is not torch.strided:
        raise CaptureError(
            f"The gradient of a {type_} tensor is sparse, and compiled programs have dense ones "
            "only. Use sparse=False in the embedding."
        )
    if TensorType.of(gradient).stride == type_.stride or gradient.numel() <= 1:
        return gradient
    environment = environment_of_tensor(gradient)
    shape, stride = ([size_in(environment, n) for n in ns] for ns in (type_.shape, type_.stride))
    repeated = [d for d, (n, step) in enumerate(zip(shape, stride, strict=True)) if step == 0]
    if repeated:  # elements that are one in memory: written once
        for dim in repeated:
            gradient = gradient.narrow(dim, 0, 1)
        once = [1 if d in repeated else n for d, n in enumerate(shape)]
        return _copied(gradient, once, stride).expand(shape)
    return _copied(gradient, shape, stride)


def _copied(tensor: torch.Tensor, shape: Sequence[Any], stride: Sequence[Any]) -> torch.Tensor:
    target = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
    return torch.ops.aten.copy.default(target, tensor)


def _differentiable_copy(target: torch.Tensor, source: torch.Tensor, _: bool = False) -> Any:
    """Decomposes ``copy``, which has no derivative, into operators that lay out as it does."""
    value = source.to(target.dtype).expand(target.shape)
    strides = target.stride()
    order = sorted(range(target.dim()), key=lambda d: (-strides[d], d))
    dense = value.permute(order).clone(memory_format=torch.contiguous_format)
    return dense.permute([order.index(d) for d in range(target.dim())])


DIFFERENTIABLE: Decompositions = {torch.ops.aten.copy.default: _differentiable_copy}
"""Operators that have no derivative, made of those that have one."""


def _renameinput_nodes(module: torch.fx.GraphModule, num_primals: int) -> list[str]:
    """Gives placeholders the names that the partitioners know."""
    names = []
    placeholders = input_nodes(module)
    for index, node in enumerate(placeholders):
        is_primal = index < num_primals
        name = f"primals_{index + 1}" if is_primal else f"tangents_{index - num_primals + 1}"
        node.name = node.target = name
        names.append(name)
    return names


def of_pure_memory(
    module: torch.fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    decompositions: Decompositions,
    sizes: Sequence[Any],
    names: Sequence[str] = (),
    *,
    gradients: Gradients = "final",
) -> torch.fx.GraphModule:
    """Rewrites operators that memory alone does not show: in place on temporaries, or lazy."""
    _strip_detach(module)
    drop_pairs(module)
    mark_after_strided(module)
    if not any(mutated_args(n) or is_lazy(n) for n in module.graph.nodes):
        return module
    tags = {
        n.name: n.meta["partitioner_tag"] for n in module.graph.nodes if "partitioner_tag" in n.meta
    }
    last = [n.name for n in module.graph.nodes if n.name in tags][-1:]
    forward: set[str] = set()

    layouts = [
        TensorType.of(n.meta["val"]) if isinstance(n, torch.fx.Node) else None
        for n in module.graph.output_node().args[0]  # type: ignore[union-attr]
    ]

    def run(flat: list[torch.Tensor]) -> tuple[Any, ...]:
        results = _Boundary(module, last, forward).run(*flat)
        # An out-of-place operator may lay its result out in another way (masked_fill).
        pairs = zip(results, layouts, strict=True)
        return tuple(r if t is None else laid_out_as(r, t) for r, t in pairs)

    table = {torch.ops.aten.bernoulli.p: draw_mask, **decompositions, **WRITTEN}
    functionalized = torch.func.functionalize(run, remove="mutations")
    sizes = sizes_in(module) if sizes else ()
    functional = _traced(functionalized, [list(inputs)], sizes, table)
    for node in functional.graph.nodes:
        if node.name in forward:
            node.meta["partitioner_tag"] = "is_forward"
    _flat_signature(functional, sizes)
    drop_copies(functional)
    for node, name in zip(input_nodes(functional), names, strict=False):
        node.name = node.target = name
    if gradients == "final":  # else what is left of them stops a gradient
        _strip_detach(functional)
    return functional


def draw_mask(tensor: torch.Tensor, p: float = 0.5, generator: Any = None) -> torch.Tensor:
    """Decomposes ``bernoulli.p`` into an operator that draws what ``bernoulli_`` draws in place.

    ``bernoulli.p`` itself draws in the order of a contiguous tensor, whatever the layout.
    """
    if generator is not None or not tensor.is_floating_point():
        return NotImplemented
    _, mask = torch.ops.aten.native_dropout.default(tensor, 1.0 - p, True)
    return mask.to(tensor.dtype)


class _Boundary(SizedInterpreter):
    """Runs a graph and notes what the new trace holds when its forward part ends."""

    def __init__(
        self, module: torch.fx.GraphModule, last: Sequence[str], forward: set[str]
    ) -> None:
        super().__init__(module)
        self._last = set(last)
        self._forward = forward

    def run_node(self, n: torch.fx.Node) -> Any:
        graph = growing_graph()
        last = next(reversed(graph.nodes), None)
        result = lying_as_traced(super().run_node(n), n)
        if "origin" in n.meta:
            for new in itertools.takewhile(lambda node: node is not last, reversed(graph.nodes)):
                new.meta["origin"] = n.meta["origin"]
        if n.name in self._last:
            self._forward.update(n.name for n in growing_graph().nodes)
        return result


def lying_as_traced(result: Any, node: torch.fx.Node) -> Any:
    """Gives a result the layout that its node was traced with, unless it is somebody's memory."""
    if node.op != "call_function" or is_view(node) or mutated_args(node):
        return result
    return _lying_as(result, node.meta.get("val"))


def _lying_as(result: Any, traced: Any) -> Any:
    """Gives results the layouts that they were traced with, which views of them rely on.

    Some operators lay theirs out by an operand's mark (a solver, if its matrix is conjugated).
    """
    if isinstance(traced, (tuple, list)):
        return type(traced)(map(_lying_as, result, traced))
    if not isinstance(traced, torch.Tensor) or traced.layout is not torch.strided:
        return result
    return laid_out_as(result, TensorType.of(traced))


def _attention_as_traced(result: Any, node: torch.fx.Node) -> Any:
    """Gives attention the layout that it was traced with, which differs from backend to backend."""
    traced = node.meta.get("val")
    if node.target is not torch.ops.aten.scaled_dot_product_attention.default or traced is None:
        return result
    stride = TensorType.of(traced).stride
    if TensorType.of(result).stride == stride or not all(isinstance(n, int) for n in stride):
        return result
    order = sorted(range(traced.dim()), key=lambda dim: -stride[dim])
    return result.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])


def _strip_detach(module: torch.fx.GraphModule) -> None:
    """Removes detach: below autograd it is the identity. One that stops a gradient stays."""
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.detach.default and not is_stop(node):
            operand = node.args[0]
            assert isinstance(operand, torch.fx.Node)
            node.replace_all_uses_with(operand)
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()


PartitionPolicy: TypeAlias = Literal["save", "min_cut"]


def partition(
    joint: torch.fx.GraphModule, num_outputs: int, policy: PartitionPolicy
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Splits a joint graph into forward and backward.

    Args:
        joint: placeholders ``primals_*`` and ``tangents_*``; outputs, then gradients.
        num_outputs: how many of the outputs belong to the forward.
        policy: ``"save"`` keeps what autograd would; ``"min_cut"`` recomputes cheap operators to
            save fewer bytes. Random operators are never run twice. One whose backward draws itself
            is cut where autograd cuts it.
    """
    if late_draws(joint):  # both partitioners would draw them in the forward
        return cut_joint(joint, num_outputs, read_by_backward(joint, num_outputs))
    # Imported late: it brings in Inductor, which inference on eager kernels never needs.
    from torch._functorch.partitioners import (
        default_partition,
        min_cut_rematerialization_partition,
    )

    _drop_unread_picks(joint)
    split = default_partition if policy == "save" else min_cut_rematerialization_partition
    forward, backward = split(joint, (), num_fwd_outputs=num_outputs)
    _drop_second_draws(backward)
    return forward, backward


def _drop_unread_picks(joint: torch.fx.GraphModule) -> None:
    """Removes picks that nobody reads: a gradient that was not asked for is no tensor."""
    for node in reversed(joint.graph.nodes):
        if node.target is operator.getitem and not node.users:
            joint.graph.erase_node(node)


def _drop_second_draws(backward: torch.fx.GraphModule) -> None:
    """Removes random operators that a partitioner copied into the backward.

    Nobody reads them there (what they drew is saved), but running them would move the generator on
    and every later mask would differ from eager's. One may feed another: all that leads to them
    goes as well, from the last to the first.
    """
    for node in reversed(backward.graph.nodes):
        if not node.users and (may_draw(node) or not node.is_impure()):
            backward.graph.erase_node(node)
        else:
            assert not is_draw(node), f"{node.target} would be drawn twice"
    backward.recompile()


@contextmanager
def plain_autograd() -> Iterator[None]:
    """Autograd inside runs without anomaly checks and without hooks on saved tensors."""
    with contextlib.ExitStack() as stack:
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
            stack.enter_context(hooks)  # the innermost hooks count
        yield


def graph_is_kept() -> bool:
    """Whether the running backward was started with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
