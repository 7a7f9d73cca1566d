"""Adapter: the Dynamo backend, ``torch.compile(backend="lazyinline")``.

Dynamo calls :func:`compile_graph` with each graph that it captured, and runs its result. Dynamo
handles graph breaks and its guards; a program's own guard runs as for any compiled module. A graph
that cannot be compiled is handed on to Inductor or to eager mode, with a warning that says why.

A Dynamo graph records module calls in ``meta``. It enters and leaves modes by operators. Calls of
``torch.utils.checkpoint`` and ``torch.compiler.nested_compile_region`` are higher-order operators
on a graph. Each symbolic size is an input next to the tensors that have it. Programs of
``torch.export`` are read in the same way, to find repeated regions.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, NoReturn

import torch
import torch.fx
import torch.utils.checkpoint
from torch import nn
from torch._dynamo import lookup_backend
from torch._guards import tracing
from torch._higher_order_ops import wrap
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.export import ExportedProgram

from ...reuse import torch_pytree
from ...reuse.errors import CaptureError, LazyInlineError, PlanError
from ...reuse.ir.fx_form import program_in
from ...reuse.ir.program import Program
from ...reuse.ir.torch_symbols import expression_of
from ...reuse.ir.types import contiguous_stride
from ...reuse.ir.verify import verify
from ..capture.assemble import OutputTree
from ..capture.capture import Subject, capture_model
from ..dispatch.dispatcher import ModuleDispatcher
from ..options import Options
from ..report import CompileReport
from ..sizes.torch_input_sizes import InputSizes
from ..tracing.torch_patches import CONTROL_FLOW
from .outline import ModuleCall, ModuleCalls, held, outlined, take_over, value_of

Node = torch.fx.Node

_EXITS = {_exit_autocast: _enter_autocast, _exit_inference_mode: _enter_inference_mode}
_set_grad_enabled = torch._C._set_grad_enabled
_SWITCHES = {*_EXITS, *_EXITS.values(), _set_grad_enabled}
_CONTEXT_FN = "_checkpoint_context_fn"
_REGION_OPTIONS = "nested_region_config"
_TRANSFORMS = ("torch._functorch", "torch._C._functorch")


class HandedOnError(Exception):
    """Raised, with the reason, for a graph that another compiler must take."""


@dataclass(frozen=True)
class DynamoGraph:
    """A Dynamo graph in a form that can be captured.

    It has calls of ``torch.utils.checkpoint``, and of ``Tensor.size`` in place of size inputs.
    """

    module: torch.fx.GraphModule
    calls: ModuleCalls
    inputs: tuple[int, ...]  # their positions among Dynamo's
    names: tuple[tuple[str, ...], ...]  # of the sizes of their dimensions, empty if static


def read_graph(module: torch.fx.GraphModule) -> DynamoGraph:
    """Reads a Dynamo graph; raises HandedOnError if it cannot be captured."""
    for inner in module.modules():
        if isinstance(inner, torch.fx.GraphModule):
            _refuse(inner)
            _switch_pairs(inner)  # refuses a region that does not leave a mode it entered
    pairs = _switch_pairs(module)
    copy, nodes = _rewritten(module)
    calls = _calls(module, pairs)
    placeholders = module.graph.find_nodes(op="placeholder")
    _ask_tensors_for_sizes(copy, placeholders, nodes)
    inputs = tuple(i for i, node in enumerate(placeholders) if not _is_size(node))
    names = tuple(size_names(placeholders[i]) for i in inputs)
    copied = {nodes[node]: found for node, found in calls.items() if node in nodes}
    asked = {node: () for node in copy.graph.nodes if node not in copied}
    return DynamoGraph(copy, {**copied, **asked}, inputs, names)


def _refuse(module: torch.fx.GraphModule) -> None:
    for node in module.graph.nodes:
        target = node.target
        if target is wrap.tag_activation_checkpoint:
            if _CONTEXT_FN in held(module, node.args[0]).meta:
                raise HandedOnError("torch.utils.checkpoint is given a context_fn")
        elif target is invoke_subgraph:
            if held(module, node.args[0]).meta.get(_REGION_OPTIONS) is not None:
                raise HandedOnError("a nested_compile_region has options for another compiler")
        elif isinstance(target, HigherOrderOperator) and target not in _KNOWN:
            raise HandedOnError(f"the graph has the higher-order operator {target.name()}")
        elif node.op == "call_function" and str(getattr(target, "__module__", "")).startswith(
            _TRANSFORMS
        ):
            raise HandedOnError("the graph has a transform of torch.func")
        elif node.op == "placeholder" and isinstance(
            node.meta.get("example_value"), torch.SymFloat | torch.SymBool
        ):
            raise HandedOnError(f"the input {node.name} is a symbolic float or bool")


def _switch_pairs(module: torch.fx.GraphModule) -> list[tuple[Node, Node]]:
    """Returns the nodes that enter modes, each with the node that leaves it."""
    pairs: list[tuple[Node, Node]] = []
    waiting: list[tuple[Node, Any]] = []  # with the operand of the node that will leave it
    grad = torch.is_grad_enabled()
    for node in filter(_is_switch, module.graph.nodes):
        opens = node.target is _set_grad_enabled or node.target not in _EXITS
        opens_only = node.target in _EXITS.values()
        if waiting and not opens_only and waiting[-1][1] == node.args[0]:
            pairs.append((waiting.pop()[0], node))
        elif opens:
            waiting.append((node, grad if node.target is _set_grad_enabled else node))
        else:
            raise HandedOnError(f"{node.name} leaves a mode that the graph did not enter last")
        if node.target is _set_grad_enabled:
            grad = bool(node.args[0])
    if waiting:
        raise HandedOnError(f"{waiting[-1][0].name} enters a mode that the graph does not leave")
    return pairs


def _is_switch(node: Node) -> bool:
    return node.op == "call_function" and node.target in _SWITCHES


def _calls(module: torch.fx.GraphModule, pairs: Sequence[tuple[Node, Node]]) -> ModuleCalls:
    """Returns the module calls around each operator."""
    found = {node: tuple(_calls_of(node)) for node in module.graph.nodes}
    operators = [node for node in module.graph.nodes if node.op.startswith("call_")]
    place = {node: index for index, node in enumerate(operators)}
    for first, last in pairs:
        inside = operators[place[first] : place[last]]
        between = [found[node] for node in inside if not _is_switch(node)]
        # Dynamo records no module for nodes that switch modes. They belong to the innermost call
        # around all nodes between them.
        both = zip(between[0], between[-1], strict=False) if between else ()
        same = takewhile(lambda pair: pair[0] == pair[1], both)
        found[first] = found[last] = tuple(call for call, _ in same)
    for node in module.graph.find_nodes(op="get_attr"):  # the module calls of its user
        user = next(iter(node.users), node)
        found[node] = found[node] or found[user]
    for node in module.graph.find_nodes(op="call_function", target=invoke_subgraph):
        # A region may be a plain function, so each call of one counts as a module call.
        path = ".".join([*(one.path for one in found[node][-1:]), str(node.args[1])])
        call = ModuleCall(node.name, path, "Region", is_marked=True)
        found |= dict.fromkeys((node.args[0], node, *node.users), (*found[node], call))
    return found


def _calls_of(node: Node) -> Iterator[ModuleCall]:
    for key, (path, kind) in node.meta.get("nn_module_stack", {}).items():
        name = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
        yield ModuleCall(str(key), _path(path), name)


def _path(text: str) -> str:
    """Returns the path of a module, ``layers.0`` for ``L['self'].layers.0``."""
    inner = re.sub(r"^[LG]\['(\w+)'\]\.?", "", text) or text
    return inner if re.fullmatch(r"\w+(\.\w+)*", inner) else re.sub(r"\W+", "_", inner).strip("_")


# ---- calls in a form that capture sees -----------------------------------------------------


def enter_autocast(*settings: Any) -> torch.autocast:
    """Enters autocast, as a ``with`` statement does."""
    region = torch.autocast(*settings)
    region.__enter__()
    return region


def exit_autocast(region: torch.autocast) -> None:
    """Leaves autocast."""
    region.__exit__(None, None, None)


def call_region(body: torch.fx.GraphModule, identifier: str, *operands: Any) -> Any:
    """Runs one call of a ``torch.compiler.nested_compile_region``."""
    return body(*operands)


def call_with_grad(enabled: bool, body: torch.fx.GraphModule, *operands: Any) -> Any:
    """Runs part of an exported program with gradients enabled or disabled."""
    with torch.set_grad_enabled(enabled):
        return body(*operands)


def call_in_autocast(
    kind: str, dtype: Any, enabled: bool, cached: bool, body: torch.fx.GraphModule, *operands: Any
) -> Any:
    """Runs part of an exported program under autocast."""
    with torch.autocast(kind, dtype, enabled, cached):
        return body(*operands)


# A pre-dispatch trace would only record PyTorch's own functions, which would not switch modes.
_PLAIN_CALLS = {
    wrap.tag_activation_checkpoint: torch.utils.checkpoint.checkpoint,
    invoke_subgraph: call_region,
    wrap.wrap_with_set_grad_enabled: call_with_grad,
    wrap.wrap_with_autocast: call_in_autocast,
    _enter_autocast: enter_autocast,
    _exit_autocast: exit_autocast,
}
_KNOWN = (*CONTROL_FLOW, *_PLAIN_CALLS)


def _rewritten(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, dict[Node, Node]]:
    """Returns a copy of a graph with modes and checkpoints as a model has them, and its nodes."""
    graph, root = torch.fx.Graph(), nn.Module()
    nodes: dict[Node, Node] = {}
    take_over(root, module, module.graph.nodes)
    for node in module.graph.nodes:
        nodes[node] = copy = graph.node_copy(node, nodes.__getitem__)
        copy.target = _PLAIN_CALLS.get(node.target, node.target)
        if node.target is wrap.tag_activation_checkpoint:
            copy.kwargs = {**node.kwargs, "use_reentrant": False}
        elif node.op == "get_attr" and isinstance(held(module, node), torch.fx.GraphModule):
            root.add_module(str(node.target), _rewritten(held(module, node))[0])
    return torch.fx.GraphModule(root, graph), nodes


def _ask_tensors_for_sizes(
    copy: torch.fx.GraphModule, placeholders: Sequence[Node], nodes: Mapping[Node, Node]
) -> None:
    """Replaces size inputs by ``Tensor.size`` of the input that has the size."""
    first = next((n for n in copy.graph.nodes if n.op != "placeholder"), None)
    assert first is not None  # a graph has an output
    for size in filter(_is_size, placeholders):
        given = nodes[size]
        if given.users:
            tensor, dim = _with_size(size, placeholders)
            with copy.graph.inserting_before(first):
                asked = copy.graph.call_method("size", (nodes[tensor], dim))
            asked.meta["example_value"] = size.meta["example_value"]
            given.replace_all_uses_with(asked)
        copy.graph.erase_node(given)
    copy.recompile()


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.SymInt)


def _with_size(size: Node, placeholders: Sequence[Node]) -> tuple[Node, int]:
    wanted = expression_of(size.meta["example_value"])
    for node in placeholders:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            for dim, length in enumerate(value.shape):
                if expression_of(length) == wanted:
                    return node, dim
    raise HandedOnError(f"the input {size.name} is a symbolic number, and no input has this size")


def size_names(node: Node) -> tuple[str, ...]:
    """Returns, for each dimension of an input, the name of its size, or "" if it is static."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return ()
    if tuple(value.stride()) != contiguous_stride(tuple(value.shape)):
        return ("",) * value.dim()
    expressions = [expression_of(length) for length in value.shape]
    return tuple(str(e) if getattr(e, "is_symbol", False) else "" for e in expressions)


Run = Callable[..., Any]

_OPTIONS = ("backend", "recompute", "reuse")


class HandedOnWarning(UserWarning):
    """Warns that a Dynamo graph is handed on to another compiler."""


class CompiledGraph:
    """The compiled form of a Dynamo graph."""

    def __init__(self, graph: DynamoGraph, options: Options) -> None:
        module = graph.module if options.reuse == "off" else outlined(graph.module, graph.calls)
        self._calls = ModuleDispatcher(module, options, names=graph.names)
        self._inputs = graph.inputs

    @property
    def last_report(self) -> CompileReport | None:
        """The report of the newest compile."""
        return self._calls.last_report

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Compiles for the layout of these inputs; raises LazyInlineError if that fails."""
        self._calls.prepare(*(inputs[index] for index in self._inputs))

    def __call__(self, *inputs: Any) -> Any:
        """Runs the program."""
        return self._calls(*(inputs[index] for index in self._inputs))


def compile_graph(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Run:
    """Compiles a graph that Dynamo captured; PyTorch calls it, see ``torch.compile``.

    ``options`` are ``backend``, ``recompute`` and ``reuse``, as :func:`compile` takes them; an
    option that does not exist raises PlanError or ReuseError.

    Example:
        >>> model = torch.compile(model, backend="lazyinline", options={"recompute": "full"})
    """
    chosen = _checked(options or {}, mode)
    try:
        with tracing(None):  # hides the context of Dynamo's own trace
            graph = CompiledGraph(read_graph(module), chosen)
            # Fake inputs have no values to compile with, so the first call compiles.
            if not any(isinstance(x, FakeTensor) for x in inputs):
                graph.prepare(inputs)
        return graph
    except (HandedOnError, LazyInlineError) as error:
        return _handed_on(module, inputs, chosen, str(error))


def _checked(options: Mapping[str, Any], mode: str | None) -> Options:
    unknown = [*(f"options[{name!r}]" for name in options if name not in _OPTIONS)]
    if mode not in (None, "default"):
        unknown.append(f"mode={mode!r}")
    if unknown:
        raise PlanError(
            f"backend='lazyinline' does not know {', '.join(unknown)}. It takes options= with "
            f"{', '.join(_OPTIONS)}."
        )
    return Options(**{"cache": "disk", **options})


def _handed_on(
    module: torch.fx.GraphModule, inputs: Sequence[Any], options: Options, reason: str
) -> Run:
    other = "PyTorch's own kernels" if options.backend == "eager" else "TorchInductor"
    warnings.warn(
        f"A graph that torch.compile captured is handed on to {other}: {reason}",
        HandedOnWarning,
        stacklevel=2,
    )
    if options.backend == "eager":
        return module.forward
    return lookup_backend("inductor")(module, list(inputs))  # type: ignore[arg-type]


# ---- programs of torch.export --------------------------------------------------------------------


def module_of_exported(exported: ExportedProgram) -> nn.Module:
    """Returns a module with the exported model's signature, and repeated regions as blocks."""
    module: torch.fx.GraphModule = exported.module()  # type: ignore[assignment]
    # Only ``_guards_fn`` checks the shapes of inputs.
    if not hasattr(module, "_guards_fn"):
        raise CaptureError(
            "This exported program has no example_inputs, without which PyTorch makes no check of "
            "its inputs: set them."
        )
    for node in module.graph.find_nodes(op="call_module"):
        node.meta.pop("nn_module_stack", None)  # the check of the inputs belongs to no block
    try:
        graph = read_graph(module)
    except HandedOnError as error:
        raise CaptureError(f"This exported program cannot be captured: {error}.") from error
    made = outlined(graph.module, graph.calls)
    made.graph.set_codegen(module.graph._codegen)  # keeps the model's arguments and results
    made.recompile()
    vars(made).update(train=_refuse_mode, eval=_refuse_mode)
    return made


def _refuse_mode(*_: Any) -> NoReturn:
    raise NotImplementedError("The train or eval mode of an exported program is fixed.")


def target_in(file: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Returns the module of a file of ``torch.export.save``, and its example inputs."""
    try:
        exported = torch.export.load(file)
    except Exception as error:
        raise LazyInlineError(f"{file} cannot be loaded: {error}") from error
    return module_of_exported(exported), *exported.example_inputs


def program_of_exported(exported: ExportedProgram, *, train: bool) -> Program:
    """Returns the program; see :func:`lazyinline.from_exported`."""
    # If lazyinline exported it, it contains the program's text, and blocks need no search.
    read = program_in(exported)
    if read is not None:
        spec = torch_pytree.flatten(exported.call_spec.out_spec.unflatten(range(len(read[1]))))[1]
        return replace(read[0], output_tree=OutputTree(read[1], spec))
    model = module_of_exported(exported)
    leaves, spec = torch_pytree.flatten(exported.example_inputs)
    leaves = [_plain(leaf) for leaf in leaves]
    args, kwargs = torch_pytree.unflatten(leaves, spec)
    subject = Subject(model, args, kwargs, effects="undo")
    given = set(exported.graph_signature.user_inputs)
    # Parameters are inputs of the exported graph, too; only user inputs may vary in size.
    inputs = exported.graph.find_nodes(op="placeholder")
    names = tuple(size_names(node) for node in inputs if node.name in given)
    if any(map(any, names)):
        subject = replace(subject, sizes=partial(InputSizes, leaves, names))
    return verify(capture_model(subject, train=train).program)


def _plain(example: Any) -> Any:
    """Returns an example input without the attributes that loading leaves on tensors."""
    if not isinstance(example, torch.Tensor):
        return example
    return example.detach().requires_grad_(example.requires_grad)
