"""Adapter: pre-dispatch tracing with fake tensors. Every private tracing name is named here.

The trace records operators before autograd and before decomposition, so ``linear`` and
``scaled_dot_product_attention`` stay whole. Nothing is computed.

PyTorch functionalizes its own in-place operators; custom ones
(``torch.library.custom_op(mutates_args=...)``) are refused. For a few operators, PyTorch's rule for
fake tensors gives other strides than the kernel; their fakes are corrected here. (For any operator
not known here, the recorded kernel copies its result to the strides of the fake.)
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.fx
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.function import FunctionCtx, _SingleLevelFunction
from torch.autograd.graph import get_gradient_edge
from torch.fx import Node
from torch.fx.experimental import proxy_tensor as proxies
from torch.fx.node import _side_effectful_need_to_be_preserved_pre_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary

from ...autodiff.traces.torch_user_rules import OWN_NAMESPACES, rules_above_autograd
from ...reuse import torch_names
from ...reuse.errors import CaptureError
from ...reuse.ir.leaf import Stamp, current_autocast, memory_of, stamp_of
from ...reuse.ir.operators import is_view, mutated_args
from ...reuse.ir.torch_fake_rules import errors_unlogged, with_strides_of_kernel
from ...reuse.ir.torch_symbols import SIZE_TYPES, size_in
from ...reuse.ir.types import TensorType
from .frames import frame_text, user_frame, user_line
from .torch_gpu_autocast import GpuCasts
from .torch_patches import replaced

Made = TypeVar("Made")

_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_TRANSFORMS = "torch._functorch.predispatch"  # traced as functions, before torch 2.13


LEAVES_PYTORCH = ".numpy() is not supported"
"""Text of PyTorch's error for ``.numpy()`` of a fake tensor."""

_PYTORCHS_NAMESPACES = """
    _c10d_functional _c10d_functional_autograd _dtensor _native _quantized _test aten c10d cuda
    debug_mode_ops debugprims export fsdp higher_order inductor inductor_prims mkl
    mkldnn mkldnn_prepacked onednn prepacked prim prims profiler quantization quantized
    quantized_decomposed rngprims sparse static_runtime streams symm_mem xnnpack
"""
_PYTORCHS = frozenset(_PYTORCHS_NAMESPACES.split())
_READERS = (
    torch.ops.aten.item.default,
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.allclose.default,
)


def is_mode_switch(node: Node) -> bool:
    """Whether a node only switches grad mode or autocast, which the stamps of nodes record."""
    return node.target in _side_effectful_need_to_be_preserved_pre_dispatch


def follower() -> Any:
    """Returns the watcher of the running trace, if it is one of ours."""
    mode = proxies.get_proxy_mode()
    return None if mode is None else getattr(mode.tracer, "lazyinline_follower", None)


def feeds_only_lifts(node: Node) -> bool:
    """Whether a constant was made from Python data inside the forward (``torch.tensor(...)``)."""
    users = list(node.users)
    return bool(users) and all(u.target is torch.ops.aten.lift_fresh_copy.default for u in users)


def _dispatch_unprofiled(
    dispatch: Callable[..., Any], func: Any, types: Any, args: Any, kwargs: Any
) -> Any:
    """Dispatches an operator to a mode; for PyTorch's own, without :func:`profiled_calls`."""
    profile: Any = sys.getprofile()
    # Inside PyTorch's own operators only PyTorch's code runs: most of the 386,000 profile events of
    # a Llama of two layers. A custom operator or a tensor subclass may run a user's function, which
    # the profiler has to see.
    is_own = func.namespace in OWN_NAMESPACES and all(kind is FakeTensor for kind in types)
    if not (is_own and callable(profile)):
        return dispatch(func, types, args, kwargs)
    sys.setprofile(None)
    try:
        return dispatch(func, types, args, kwargs)
    finally:
        sys.setprofile(profile)


class TracingFakeMode(FakeTensorMode):
    """A fake mode that refuses in-place changes of real tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator on fake tensors."""
        if func._schema.is_mutable:
            _refuse_real(func, args, kwargs or {})
        result = _dispatch_unprofiled(super().__torch_dispatch__, func, types, args, kwargs)
        if isinstance(result, Tensor):
            _refuse_unstrided(func, result)
        return with_strides_of_kernel(func, args, result)


def _refuse_unstrided(func: Any, made: Tensor) -> None:
    """Refuses a sparse or quantized tensor: programs hold memory that strides describe."""
    # A fake quantized tensor says that it holds floats.
    kind = "quantized" if func.name().startswith("aten::quantize_per_") else str(made.layout)
    if kind != "torch.strided":
        raise CaptureError(
            f"The model's forward makes a {kind.removeprefix('torch.')} tensor at {user_line()}, "
            "and compiled programs hold strided ones only."
        )


_COUNTING = torch.ops.aten.arange.start_step


def _in_whole_steps(start: Any, end: Any, step: Any = 1, **options: Any) -> Any:
    """Gives ``arange`` an integer for a float step without a fraction (``arange(n, -n, -1.0)``).

    The number of its elements is then a whole-number expression of a symbolic size, where PyTorch
    would divide and round floats, of which neither it nor a kernel knows anything.
    """
    is_of_sizes = all(isinstance(x, (int, torch.SymInt)) for x in (start, end))
    is_whole = type(step) is float and step.is_integer() and step != 0
    if not (is_of_sizes and is_whole and torch.SymInt in map(type, (start, end))):
        return NotImplemented
    options["dtype"] = options.get("dtype") or torch.get_default_dtype()
    return _COUNTING(start, end, int(step), **options)


_STRIDED = (
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_copy.default,
    torch.ops.aten.as_strided_scatter.default,
)


def _refuse_strides_of_part(node: Node) -> None:
    """Refuses ``as_strided`` that reads or writes memory beside or between a tensor's elements.

    It counts elements in a storage, and a program holds those of its tensors only. A storage offset
    counts from the start of that storage: an input may stand anywhere in the one of its caller.
    """
    source: Any = node.args[0]
    value = source.meta["val"]
    while is_view(source):
        source = source.args[0]
    _, size, stride, offset = _strided_arguments(node)
    if value.untyped_storage().nbytes() == value.numel() * value.element_size():
        is_held = offset is None or source.op == "call_function"
    else:
        reach = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        is_held = offset is None and value.is_contiguous() and reach <= value.numel()
    if not is_held:
        raise CaptureError(
            f"The model's forward calls as_strided at {user_line()} on a part of a tensor's memory "
            "or on a place in an input's, and a compiled program holds only the tensor. Take "
            "slices, or as_strided of a copy: x.clone()."
        )


def _strided_arguments(node: Node) -> list[Any]:
    """Returns the tensor, sizes, strides and offset of an ``as_strided``, or of its scatter."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    values = [given.get(name) for name in ("self", "size", "stride", "storage_offset")]
    return torch.fx.node.map_arg(values, lambda n: n.meta["val"])  # type: ignore[no-any-return]


def _refuse_real(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuses an operator that writes to a real tensor (one from a list of the model's).

    With real operands only, PyTorch would run it and change the tensor during the capture.
    """
    for number, argument in enumerate(func._schema.arguments):
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        written = given if isinstance(given, (list, tuple)) else [given]
        if argument.is_write and any(type(one) in _PLAIN_TENSORS for one in written):
            raise CaptureError(
                f"The model's forward changes a tensor at {user_line()} that is no parameter, "
                "buffer or input. Register it as a buffer."
            )


def new_fake_mode() -> TracingFakeMode:
    """Returns a new fake mode, in which operators convert real operands to fake ones."""
    return TracingFakeMode(allow_non_fake_inputs=True)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor is fake."""
    return isinstance(tensor, FakeTensor)


def is_traced(tensor: Tensor) -> bool:
    """Whether a tensor is a fake of one of our traces; a user may have fakes of their own."""
    return isinstance(tensor, FakeTensor) and isinstance(tensor.fake_mode, TracingFakeMode)


def plain_tensor_access() -> AbstractContextManager[Any]:
    """Makes reads of a tensor's metadata inside skip the tracing modes (10 us each)."""
    return torch._C.DisableTorchFunction()


def untraced_numbers() -> AbstractContextManager[Any]:
    """Makes operators inside compute with real tensors while a trace runs."""
    return torch._C._DisableTorchDispatch()  # type: ignore[no-any-return]


def is_context(value: Any) -> bool:
    """Whether a value is the context of a ``torch.autograd.Function`` that is being applied.

    Contexts of PyTorch's own functions, as for custom operators, do not count.
    """
    if not isinstance(value, FunctionCtx):
        return False
    function = getattr(type(value), "_forward_cls", None)
    return not getattr(function, "__module__", "").startswith("torch._")


class Tracer:
    """Runs one trace, and maps fake tensors to graph nodes.

    For a GPU that is not here, ``casts`` makes the casts of its autocast. ``answer`` returns the
    number that a node computes, if a guard can compute it at each call.
    """

    def __init__(self, fake_mode: TracingFakeMode, on_node: Callable[[Node], None]) -> None:
        self.fake_mode = fake_mode
        self._has_sizes = fake_mode.shape_env is not None  # PyTorch then drops dead size operators
        self._on_node = on_node
        self._tracer: Any = None
        self._num_inputs = 0
        self._nodes = _NodeTable({})
        self.casts: GpuCasts | None = None
        self.answer: Callable[[Node], int | bool | None] = lambda node: None

    def run(self, function: Callable[[Sequence[Any]], Made], inputs: Sequence[Tensor]) -> Made:
        """Runs ``function`` on tracked fake inputs; every operator becomes a node."""
        made: list[Made] = []

        def traced(flat: list[Tensor]) -> tuple[()]:
            started()
            mode = proxies.get_proxy_mode()
            assert mode is not None
            self._tracer = mode.tracer
            self._tracer.tensor_tracker = self._nodes = _NodeTable(self._tracer.tensor_tracker)
            graph = self._tracer.graph
            graph.create_node = self._stamping(graph.create_node)
            dispatch = self._unprofiled(mode.__torch_dispatch__)
            if self.casts is not None:
                dispatch = self.casts.around(dispatch, mode)
            mode.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
            try:
                made.append(function(flat))
            finally:
                del graph.create_node
            if self._has_sizes:
                return ()
            raise _Finished  # only the graph is needed; building a GraphModule takes time per node

        with (
            self.fake_mode,
            torch_names.lazy_modules(),
            torch_names.modules_left(),
            suppress(_Finished),
            errors_unlogged(),
            torch_names.wrapped_globals_left() as started,
        ):
            readers = {operator_: self._refusing_real(operator_) for operator_ in _READERS}
            table = {**rules_above_autograd(), **readers, _COUNTING: _in_whole_steps}
            proxies.make_fx(traced, table, tracing_mode="real", pre_dispatch=True)(list(inputs))
        return made[0]

    def _unprofiled(self, dispatch: Callable[..., Any]) -> Callable[..., Any]:
        """Dispatches without the profiler; refuses what a program cannot do as the call does."""

        def traced(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace not in _PYTORCHS and func._schema.is_mutable:
                raise CaptureError(
                    f"The model's forward calls {func} at {user_line()}, which changes what it is "
                    "given, and a program only knows how PyTorch's own operators do that. Let it "
                    "return new tensors (mutates_args=())."
                )
            below = _get_current_dispatch_mode()
            if below is not self.fake_mode and below is not None:
                raise CaptureError(
                    f"The model's forward enters a TorchDispatchMode ({type(below).__name__}), "
                    f"which sees the operators at {user_line()}, and a compiled program would run "
                    "them without it. Enter it around the call: the model then runs eagerly."
                )
            return _dispatch_unprofiled(dispatch, func, types, args, kwargs)

        return traced

    def _refusing_real(self, operator_: Any) -> Callable[..., Any]:
        """Refuses an operator that gives Python the value of a real tensor."""

        # The tracer would run it: the number of a tensor in a list or object of the model's, or of
        # one computed from it, would become a constant of the program, the same at every call.
        def read(*args: Any, **kwargs: Any) -> Any:
            operands = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            node = self.node_of(operands[0]) if is_fake(operands[0]) else None
            known = self.answer(node) if node is not None and len(operands) == 1 else None
            if known is not None:
                return known
            if not all(map(self._is_of_literals, operands)):
                raise DataDependentOutputException(operator_)
            return NotImplemented

        return read

    def _is_of_literals(self, tensor: Tensor) -> bool:
        """Whether a tensor is computed from Python literals alone (``torch.tensor(1.5) * 2``)."""
        node = self.node_of(tensor) if is_fake(tensor) else None
        if node is None:
            tracked = (getattr(proxy, "constant", None) for proxy in self._nodes.values())
            return any(constant is tensor for constant in tracked)
        return all(n.op == "call_function" or feeds_only_lifts(n) for n in made_of(node))

    def _stamping(self, create: Callable[..., Node]) -> Callable[..., Node]:
        def create_node(*args: Any, **kwargs: Any) -> Node:
            node = create(*args, **kwargs)
            if node.op != "call_function":
                return node
            frame = user_frame(sys._getframe(1))
            if getattr(node.target, "__module__", "") == _TRANSFORMS:
                raise CaptureError(
                    f"What torch.func does at {'' if frame is None else frame_text(frame)} cannot "
                    "be followed to operators. Write it as operators on the whole batch."
                )
            own_device = torch_names.own_device_type()
            if torch.is_autocast_enabled(own_device):
                raise CaptureError(
                    f"Autocast of {own_device!r} is on, and casts of that device are not known. "
                    "Cast by .to(dtype), or run the model without it."
                )
            node.meta["stamp"] = Stamp(
                torch.is_grad_enabled(),
                current_autocast(("cpu", "cuda") if self.casts is None else ()),
                "" if frame is None else frame_text(frame),
            )
            if node.target in _STRIDED:
                _refuse_strides_of_part(node)
            self._on_node(node)
            return node

        return create_node

    def set_follower(self, follower: Any) -> None:
        """Sets the watcher that :func:`follower` returns within this trace."""
        self._tracer.lazyinline_follower = follower

    @property
    def root(self) -> torch.nn.Module:
        """The module on which the tracer keeps its own constants."""
        return self._tracer.root

    def node_of(self, tensor: Tensor) -> Node | None:
        """Returns the node that represents a tensor, or None if it is not traced."""
        proxy = self._tracer.unwrap_proxy(tensor)
        return proxy.node if isinstance(proxy, torch.fx.Proxy) else None

    def add_outside_tensor(self, tensor: Tensor) -> Node:
        """Adds a node for a tensor that comes from outside the trace."""
        name = f"outside_{self._num_inputs}"
        self._num_inputs += 1
        # Not by ``nn.Module.__setattr__``, which would register a parameter.
        object.__setattr__(self._tracer.root, name, tensor)
        if self._has_sizes:
            return self._tracer.graph.create_node("get_attr", name, (), {})  # type: ignore[no-any-return]
        return Node(self._tracer.graph, name, "get_attr", name, (), {})

    def given_node(self) -> Node:
        """Returns a placeholder for an input of a control-flow body, which no operator makes."""
        self._num_inputs += 1
        name = f"given_{self._num_inputs}"
        return Node(self._tracer.graph, name, "placeholder", name, (), {})

    def attribute(self, node: Node) -> Any:
        """Returns the outside tensor (or other object) of a ``get_attr`` node."""
        return getattr(self._tracer.root, str(node.target))

    def track(self, tensor: Tensor, node: Node) -> None:
        """Makes a node represent a fake tensor from now on."""
        proxy = torch.fx.Proxy(node, self._tracer)
        with replaced(self._nodes, is_renaming=True):
            proxies.track_tensor_tree(tensor, proxy, constant=None, tracer=self._tracer)

    def track_size(self, size: Any) -> None:
        """Makes a symbolic number input usable in operators; its node becomes a literal."""
        if isinstance(size, SIZE_TYPES):
            node = self.call(operator.index, ())
            node.meta["val"] = size
            self.track(size, node)  # type: ignore[arg-type]

    def track_new(self, type_: TensorType, history: Sequence[Tensor], node: Node) -> Any:
        """Returns a new fake tensor for a node, ten times faster than by running an operator.

        Autograd treats ``history`` as its inputs; see :func:`with_history`.
        """
        environment = self.fake_mode.shape_env
        shape, stride = (
            [size_in(environment, n) for n in ns] for ns in (type_.shape, type_.stride)
        )
        with torch._C._DisableTorchDispatch():
            memory = torch.empty_strided(shape, stride, dtype=type_.dtype, device="meta")
        # Two fakes of one storage, because the model may change the shape of its own in-place.
        fake = FakeTensor(self.fake_mode, memory, type_.device)
        node.meta["val"] = FakeTensor(self.fake_mode, memory, type_.device)
        new = with_history(fake, history)
        proxy = torch.fx.Proxy(node, self._tracer)
        proxies.track_tensor(new, proxy, constant=None, tracer=self._tracer)
        return new

    def write(self, tensor: Tensor, history: Sequence[Tensor]) -> None:
        """Tells autograd that a call node changed a fake tensor in-place."""
        with self.untraced(), torch.enable_grad():
            new = tensor.new_empty(())
            tensor.add_(with_history(new, history))

    def call(self, target: Callable[..., Any], operands: Sequence[Node]) -> Node:
        """Adds a call of a Python function, such as a call node of a closure."""
        return self._tracer.graph.create_node("call_function", target, tuple(operands), {})  # type: ignore[no-any-return]

    def item(self, node: Node, index: int) -> Node:
        """Adds a ``getitem`` node for one result of a call, with the call's stamp."""
        create = type(self._tracer.graph).create_node
        picked = create(self._tracer.graph, "call_function", operator.getitem, (node, index), {})
        picked.meta["stamp"] = node.meta["stamp"]
        self._on_node(picked)
        return picked  # type: ignore[no-any-return]

    def constants(self) -> list[Node]:
        """Returns every node that represents an outside tensor or a constant."""
        return [n for n in self._tracer.graph.nodes if n.op == "get_attr"]

    def to_fake(self, tensor: Tensor) -> Tensor:
        """Returns a fake tensor with the metadata of a real one."""
        with self.untraced():
            if tensor.is_meta:
                # Meta tensors are traced as CPU tensors, so a model without data compiles as one
                # with data.
                convert = self.fake_mode.fake_tensor_converter.from_meta_and_device
                return convert(self.fake_mode, tensor, torch.device("cpu"))
            if tensor.is_leaf:
                return self.fake_mode.from_tensor(tensor)
            with warnings.catch_warnings():  # from_tensor reads .grad of a non-leaf, which warns
                warnings.simplefilter("ignore", UserWarning)
                return self.fake_mode.from_tensor(tensor)

    def forget_tensors(self) -> None:
        """Drops references to the real tensors of the trace's fakes and constants."""
        # PyTorch refuses to swap tensors with weak references, as this table holds
        # (``torch.utils.swap_tensors``; conversions and ``load_state_dict`` may swap).
        describer = self.fake_mode.fake_tensor_converter.meta_converter.describer
        describer.lookup_tensor.clear()
        describer.lookup_storage.clear()
        if self._tracer is None:
            return  # interrupted before it began
        for node in self.constants():
            vars(self.root).pop(str(node.target), None)
        for name, held in list(vars(self.root).items()):
            if isinstance(held, Tensor):
                delattr(self.root, name)

    @cached_property
    def fake_names(self) -> frozenset[str]:
        """The attributes that every fake tensor has; others are the user's."""
        return frozenset(vars(self.to_fake(torch.nn.Parameter(torch.empty(1, device="cpu")))))

    def untraced(self) -> AbstractContextManager[Any]:
        """Makes operators inside run on fake tensors without becoming nodes."""
        return proxies.disable_proxy_modes_tracing()  # type: ignore[no-any-return]


class _NodeTable(WeakTensorKeyDictionary):
    """The tracer's table from tensors to nodes; only an in-place operator replaces a node.

    While it ``is_renaming``, any new node for a tensor is allowed.
    """

    is_renaming = False

    def __setitem__(self, tensor: Tensor, proxy: Any) -> None:
        # An operator that returns its operand (``x.to(x.dtype)``, ``dropout`` in eval mode) must
        # not replace its node: under ``no_grad`` the tensor would lose its gradient.
        if self.is_renaming or tensor not in self or mutated_args(proxy.proxy.node):
            super().__setitem__(tensor, proxy)


class _Finished(BaseException):
    """Leaves PyTorch's tracer when the model has run."""


class _History(torch.autograd.Function):
    """Makes a tensor that is not an autograd leaf, so that it may be changed in-place."""

    @staticmethod
    def forward(context: Any, new: list[Tensor], *history: Tensor) -> Tensor:
        return new[0]


def with_history(new: Tensor, history: Sequence[Tensor]) -> Tensor:
    """Makes a new tensor depend on others for autograd, if one of them requires grad."""
    if not any(x.requires_grad for x in history):
        return new
    with torch.enable_grad():
        made: Tensor = super(_SingleLevelFunction, _History).apply([new], *history)
    return made


WRITES = "writes"
"""Key in ``meta`` for the operands that a call node writes to; operators have a schema instead."""


def made_of(
    *nodes: Node,
    operands: Callable[[Node], Sequence[Node]] | None = None,
) -> Collection[Node]:
    """Returns nodes and all nodes that they were computed from, by all operands or by some."""
    found = dict.fromkeys(nodes)
    memory = set(map(memory_of, nodes))
    for node in reversed(nodes[0].graph.nodes) if nodes else ():
        # A tensor also depends on what was written before into its storage, through any view.
        if node in found or not memory.isdisjoint(map(memory_of, written_by(node))):
            given = operands(node) if operands else node.all_input_nodes
            found.update(dict.fromkeys((node, *given)))
            memory.update(map(memory_of, given))
    return found


def differentiated(node: Node) -> Sequence[Node]:
    """Returns the operands that gradients of a node may flow back to."""
    # Without grad mode, no gradient flows to the operands, but still to what was written to.
    return node.all_input_nodes if stamp_of(node).grad_enabled else written_by(node)


def written_by(node: Node) -> Sequence[Node]:
    """Returns the operands that a node changes in-place."""
    return node.meta.get(WRITES) or mutated_args(node)


def leads_to(outputs: Sequence[Tensor], tensor: Tensor) -> bool:
    """Whether autograd's graph leads from any of some tensors back to another one."""
    pending: list[Any] = [tuple(get_gradient_edge(y)) for y in outputs]
    sought, seen = tuple(get_gradient_edge(tensor))[:2], set()
    while pending:
        edge = pending.pop()[:2]
        if edge == sought:
            return True
        if edge in seen or edge[0] is None:
            continue
        seen.add(edge)
        pending += edge[0].next_functions
    return False
