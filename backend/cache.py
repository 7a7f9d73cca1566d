"""Results that a compile takes from the cache: derivatives, decompositions, kernels, memory plans.

Each is kept per closure (a plan: per set of live ranges), under a key of everything that it depends
on: the graph with its constants, layouts and modes, the request, and the facts about PyTorch, this
package, the CPU and the settings. So a deeper model, another batch order or a pipeline rank finds
the results of any earlier process for the same blocks.

What an operator with a user's rule computes, and what its derivative does, is not known from its
name or from the text of the rule. So the key has the graphs that both are traced to, without a
backend: to trace them costs little compared with kernels.

An entry is JSON. Encoding is exact or it fails: anything unknown (a custom operator, a symbolic
size, a tensor) raises :class:`NotCacheableError`, and the closure is compiled as if there were no
cache. Decoding builds only known objects, so that an entry cannot run code.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any, TypeVar

import numpy as np
import sympy
import torch
import torch.fx

from ..autodiff.derivative import Derivative, Request
from ..autodiff.traces.joint_trace import JointTrace, trace_forward
from ..autodiff.traces.torch_user_rules import rules_in
from ..reuse.ir.leaf import DEFAULT_STAMP, Stamp, flat_types, node_type, stamp_of
from ..reuse.ir.program import Leaf, input_nodes, outputs_of
from ..reuse.ir.types import StructType, TensorType
from ..reuse.process import package_digest
from ..reuse.torch_names import memory_id, module_of
from .arena import ALIGNMENT, ArenaPlan, Buffers
from .files.torch_store import DiskCache, open_cache
from .gpu.torch_cuda import TritonKernel, triton_version
from .launches import torch_facts, torch_native
from .launches.kernel_list import BufferInfo, KernelList, Launch, SymbolicList, View, with_native
from .launches.torch_native import BuiltKernel, loaded_kernel

Encode = Callable[[Any], Any]
Decode = Callable[[str, Any], Any]
Coded = tuple[str, Callable[[Any], Any], Callable[[Any], Any]]


class NotCacheableError(Exception):
    """A closure holds something that the cache cannot; the message says what."""


# ---- values --------------------------------------------------------------------------------


def _one_of_few(kind: type) -> Coded:
    """Returns the coding of a class whose objects are all attributes of ``torch``, as dtypes."""
    known = {str(value): value for value in vars(torch).values() if isinstance(value, kind)}
    return kind.__name__, str, known.__getitem__


def _record(kind: type) -> Coded:
    """Returns the coding of a dataclass by its fields."""
    names = [field.name for field in fields(kind)]
    return kind.__name__, lambda x: map(partial(getattr, x), names), lambda made: kind(*made)


# Written as in JSON; a list in JSON is a tuple.
_PLAIN = frozenset((type(None), bool, int, str))
# The name, the writer and the reader of each class: of single values, and of values with parts.
_WHOLE: dict[type, Coded] = {
    # Hexadecimal is exact, and has infinities and NaN, which JSON lacks.
    float: ("float", float.hex, float.fromhex),
    complex: (
        "complex",
        lambda z: [z.real.hex(), z.imag.hex()],
        lambda parts: complex(*map(float.fromhex, parts)),
    ),
    bytes: ("bytes", lambda b: base64.b64encode(b).decode(), base64.b64decode),
    torch.device: ("device", str, torch.device),
    **{kind: _one_of_few(kind) for kind in (torch.dtype, torch.layout, torch.memory_format)},
}
_PARTS: dict[type, Coded] = {
    list: ("list", list, list),
    dict: ("dict", lambda d: list(d.items()), dict),
    slice: ("slice", lambda s: [s.start, s.stop, s.step], lambda made: slice(*made)),
    **{kind: _record(kind) for kind in (TensorType, StructType, Stamp, View, BufferInfo)},
    **{kind: _record(kind) for kind in (Launch, KernelList, SymbolicList, TritonKernel)},
}
_READ_WHOLE = {name: read for name, _, read in _WHOLE.values()}
_READ_PARTS = {name: read for name, _, read in _PARTS.values()}


def encode_value(value: Any, own: Encode = lambda value: None) -> Any:
    """Writes a value with its type; ``own`` writes values that only the caller knows, else None."""
    kind: type = type(value)
    if isinstance(value, (list, dict)):  # torch.fx has its own subclasses of them
        kind = list if isinstance(value, list) else dict
    if kind in _PLAIN:
        return value
    if kind is tuple or kind is torch.Size:
        return [encode_value(part, own) for part in value]
    if (encoded := own(value)) is not None:
        return encoded
    if kind in _WHOLE:
        name, write, _ = _WHOLE[kind]
        return {name: write(value)}
    if kind in _PARTS:
        name, write, _ = _PARTS[kind]
        return {name: [encode_value(part, own) for part in write(value)]}
    if callable(value):
        if (function := torch_facts.function_name(value)) is None:
            raise NotCacheableError(f"the operator {value}")
        return {"torch": function}
    if isinstance(value, (torch.SymInt, sympy.Expr)):
        raise NotCacheableError("a symbolic size")
    raise NotCacheableError(f"an operand of type {kind.__name__}")


def decode_value(data: Any, own: Decode | None = None) -> Any:
    """Reads a value of :func:`encode_value`; ``own`` reads values that only the caller knows."""
    if type(data) in _PLAIN:
        return data
    if isinstance(data, list):
        return tuple([x if type(x) in _PLAIN else decode_value(x, own) for x in data])
    ((name, inner),) = data.items()  # any other shape raises, and the entry is made anew
    if name in _READ_WHOLE:
        return _READ_WHOLE[name](inner)
    if name in _READ_PARTS:
        return _READ_PARTS[name](list(decode_value(inner, own)))
    if name == "torch":
        return torch_facts.function_named(inner)
    if own is None:
        raise ValueError(f"{name} is not expected here")
    return own(name, inner)


# ---- leaves and derivatives ----------------------------------------------------------------


def leaf_content(leaf: Leaf) -> Any:
    """Encodes all of a leaf that decides what is computed: no names and no source lines."""
    number = {node: i for i, node in enumerate(leaf.module.graph.nodes)}
    rows = []
    for node in number:
        if node.op not in ("placeholder", "call_function", "output"):
            raise NotCacheableError(f"a node of kind {node.op}")
        target = node.target if node.op == "call_function" else None
        # Where a line stands says nothing of what it computes.
        stamp = replace(stamp_of(node), source="")
        shown = None if stamp == DEFAULT_STAMP else stamp
        rows.append((node.op, target, node.args, node.kwargs, shown))
    content = (leaf.input_types, leaf.output_types, leaf.level, leaf.kernels, tuple(rows))
    return encode_value(content, partial(_of_graph, number))


def _of_graph(number: Mapping[torch.fx.Node, int], value: Any) -> Any:
    if isinstance(value, TensorType) and value.device.type not in ("cpu", "cuda"):
        raise NotCacheableError(f"a tensor on {value.device}")
    return {"node": number[value]} if isinstance(value, torch.fx.Node) else None


def encode_leaf(leaf: Leaf) -> Any:
    """Encodes a leaf with the names of its nodes, and the layout and the memory of each value."""
    memories: dict[int, int] = {}

    def described(value: Any) -> Any:
        if isinstance(value, (tuple, list)):  # of an operator with several results
            return [described(part) for part in value]
        if not isinstance(value, torch.Tensor):
            return None
        memory = memories.setdefault(memory_id(value), len(memories))
        return (TensorType.of(value), memory, int(value.storage_offset()))

    nodes = list(leaf.module.graph.nodes)
    values = [described(node.meta.get("val")) for node in nodes]
    names = [node.name for node in nodes]
    return [leaf_content(leaf), names, encode_value(values, partial(_of_graph, {}))]


def decode_leaf(data: Any, name: str, input_names: tuple[str, ...]) -> Leaf:
    """Rebuilds a leaf, its nodes' fake values with it."""
    (inputs, outputs, level, kernels, rows), names, layouts = data
    graph = torch.fx.Graph()
    nodes: list[torch.fx.Node] = []

    def node_of(kind: str, inner: Any) -> Any:
        if kind != "node":
            raise ValueError(f"{kind} is not an operand of a graph")
        return nodes[inner]

    values = torch_facts.fake_values(decode_value(layouts))
    for row, own, value in zip(rows, names, values, strict=True):
        op, target, args, kwargs, stamp = decode_value(row, node_of)
        nodes.append(graph.create_node(op, target or own, args, kwargs, own))
        if stamp is not None:
            nodes[-1].meta["stamp"] = stamp
        if value is not None:
            nodes[-1].meta["val"] = value
    types = (decode_value(inputs), decode_value(outputs))
    return Leaf(name, module_of(graph), *types, input_names, level, kernels)


_NONE = "none"
_BOUNDARY = ("kept_inputs", "kept_outputs", "cotangent_outputs", "gradient_inputs")


def encode_derivative(derivative: Derivative | None) -> Any:
    """Encodes a leaf's derivative, or that there is none."""
    if derivative is None:
        return _NONE
    pair: Any = (derivative.forward, derivative.backward)
    return [*map(encode_leaf, pair), *(getattr(derivative, name) for name in _BOUNDARY)]


def decode_derivative(data: Any, primal: Leaf) -> Derivative | None:
    """Rebuilds the derivative of a leaf, if it has one."""
    if data == _NONE:
        return None
    forward, backward, *boundary = data
    return Derivative(
        decode_leaf(forward, f"{primal.name}.forward", primal.input_names),
        decode_leaf(backward, f"{primal.name}.backward", ()),
        *(tuple(map(int, positions)) for positions in boundary),
    )


# ---- kernel lists --------------------------------------------------------------------------


def encode_kernels(kernels: KernelList, object_of: Callable[[BuiltKernel], Any]) -> Any:
    """Encodes a leaf's launches; ``object_of`` keeps a kernel and returns data that finds it."""

    def own(value: Any) -> Any:
        if isinstance(value, sympy.Basic):
            return {"size": str(value)}
        if not isinstance(value, BuiltKernel):
            return None
        reference = object_of(value)
        if reference is None:
            raise NotCacheableError("a kernel whose object was not kept")
        return {"kernel": reference}

    # The native form holds addresses of this process; it is made again from the launch.
    launches = tuple(replace(launch, native=None) for launch in kernels.launches)
    return encode_value(replace(kernels, name="", launches=launches), own)


def decode_kernels(
    data: Any,
    name: str,
    kernel_of: Callable[[Any], BuiltKernel],
    size_of: Callable[[str], Any] | None = None,
    *,
    is_native: bool,
) -> KernelList:
    """Rebuilds the launches of a leaf.

    ``kernel_of`` loads a compiled kernel by what ``object_of`` returned; ``size_of`` reads an
    expression of symbols. ``is_native`` if the native loop may run them.
    """

    def own(kind: str, inner: Any) -> Any:
        if kind == "size" and size_of is not None:
            return size_of(inner)
        if kind != "kernel":
            raise ValueError(f"{kind} is not a part of a launch")
        return kernel_of(inner)

    kernels = decode_value(data, own)
    if not isinstance(kernels, KernelList):
        raise ValueError("no launches")
    launches = kernels.launches
    if is_native and not isinstance(kernels, SymbolicList):
        launches = tuple(map(with_native, launches))
    return replace(kernels, name=name, launches=launches)


# ---- results -------------------------------------------------------------------------------------


T = TypeVar("T")
Trace = Callable[[], tuple[Leaf, Any]]


@dataclass
class CacheUse:
    """Counts the results that one compile took from the cache."""

    directory: str = ""  # of the cache; empty if there is none
    num_loaded: int = 0  # results of passes (derivatives, kernel lists, plans) taken from the cache
    num_made: int = 0  # results that were not there, and were made
    not_kept: list[str] = field(default_factory=list)  # the reasons why closures could not be kept

    def __str__(self) -> str:
        if not self.directory:
            return "cache: off"
        total = self.num_loaded + self.num_made
        lines = [f"cache: {self.num_loaded} of {total} results from {self.directory}"]
        return "\n".join([*lines, *(f"  not kept: {reason}" for reason in self.not_kept)])


class CompileCache:
    """Results of passes on disk (None keeps nothing), for a backend and maybe an absent GPU."""

    def __init__(self, disk: DiskCache | None, backend: str, target: str = "") -> None:
        self._disk = disk
        self.directory = str(disk.directory) if disk else ""
        self._use = CacheUse(self.directory)
        self._backend = backend
        self._target = target
        self._contents: dict[Leaf, str | None] = {}
        self._native: torch_native.NativeLibrary | None = None

    @classmethod
    def of_user(cls, backend: str, target: str = "") -> CompileCache:
        """Opens the user's cache; the eager backend has no results worth keeping."""
        return cls(open_cache() if backend == "inductor" else None, backend, target)

    def begin(self) -> None:
        """Starts a compile: reads the settings again."""
        self._use = CacheUse(self.directory)
        vars(self).pop("_facts", None)

    @cached_property
    def _facts(self) -> str | None:
        """Digest of all facts besides the graph that results depend on; None keeps nothing."""
        # Computed when first needed: Inductor's settings take longer to import than a file to load.
        if self._disk is None:
            return None
        facts = torch_facts.facts()
        if facts is None:  # no key can describe a function of the user's
            self._use.not_kept.append("a setting of Inductor holds code, which no key describes")
        return None if facts is None else self._with_own(facts)

    def _with_own(self, facts: Mapping[str, Any]) -> str:
        # Objects depend on the version of Python: our native library is an extension module.
        own: dict[str, Any] = {"package": package_digest(), "python": EXTENSION_SUFFIXES[0]}
        if self._target or torch.cuda.is_initialized():
            own["target"] = [self._target, triton_version()]
        return _digest({**facts, **own, "backend": self._backend})

    def finish(self) -> CacheUse:
        """Ends a compile; returns the counts of its use of the cache."""
        if self._disk is not None and self._use.num_made:
            self._disk.trim()
        return self._use

    # ---- results -------------------------------------------------------------------------

    def derivative(
        self, request: Request, make: Callable[[], Derivative | None]
    ) -> Derivative | None:
        """Returns the derivative of a leaf."""
        leaf = request.closure
        assert isinstance(leaf, Leaf)
        asked = [list(request.inputs), list(request.outputs)]
        trace = partial(_derivative_traced, leaf, request)
        # Only derivatives by the backend's recipe are kept: the key does not describe a choice.
        key = self._key("derivative", leaf, asked, trace) if request.choice is None else None
        return self._of(key, partial(decode_derivative, primal=leaf), make, encode_derivative)

    def decomposed(self, leaf: Leaf, make: Callable[[], Leaf]) -> Leaf:
        """Returns a leaf decomposed, without a derivative."""
        if leaf.level == "aten":  # costs nothing to make
            return make()
        key = self._key("decomposed", leaf, None, partial(_forward_traced, leaf))
        decode = partial(decode_leaf, name=leaf.name, input_names=leaf.input_names)
        return self._of(key, decode, make, encode_leaf)

    def kernels(self, leaf: Leaf, unaligned: Collection[int] = ()) -> KernelList | None:
        """Returns the launches of an ATen leaf, if cached; ``unaligned`` are inputs for a GPU."""
        key = self._key("kernels", leaf, sorted(unaligned))
        devices = {t.device.type for t in flat_types((*leaf.input_types, *leaf.output_types))}
        is_native = not self._target and devices <= {"cpu"}
        decode = partial(
            decode_kernels, name=leaf.name, kernel_of=self._kernel, is_native=is_native
        )
        found = self._load(key, decode)
        return found[0] if found else None

    def machine_code(
        self,
        kernels: Sequence[TritonKernel],
        make: Callable[[Iterable[TritonKernel]], dict[str, bytes]],
    ) -> dict[str, bytes]:
        """Returns the machine code of Triton kernels, by their contents; makes what is missing."""
        keys = {
            k.content: self._facts and _digest(["code", self._facts, k.content]) for k in kernels
        }
        loaded = {content: self._load(key, decode_value) for content, key in keys.items()}
        missing = {k.content: k for k in kernels if loaded[k.content] is None}
        made = make(missing.values()) if missing else {}
        for content, code in made.items():
            self._store(keys[content], partial(encode_value, code))
        return {content: found[0] for content, found in loaded.items() if found} | made

    def keep_kernels(
        self, leaf: Leaf, kernels: KernelList, unaligned: Collection[int] = ()
    ) -> None:
        """Stores the launches of an ATen leaf."""
        key = self._key("kernels", leaf, sorted(unaligned))
        self._store(key, partial(encode_kernels, kernels, self._object))

    # ---- results in files of compiled programs -------------------------------------------

    @property
    def facts(self) -> str:
        """Digest of the facts that results of another machine depend on; "" without a cache."""
        return "" if self._disk is None else self._with_own(torch_facts.machine_facts())

    def packed(self, kernels: KernelList) -> tuple[Any, dict[str, bytes]]:
        """Returns launches as JSON, and the objects that they need; may raise NotCacheableError."""
        objects: dict[str, bytes] = {}

        def object_of(kernel: BuiltKernel) -> Any:
            reference = self._object(kernel)
            path = self._disk.object_path(reference[0]) if self._disk and reference else None
            if path is None:
                return None
            objects[reference[0]] = path.read_bytes()
            return reference

        return encode_kernels(kernels, object_of), objects

    def unpacked(self, data: Any, name: str, size_of: Callable[[str], Any]) -> KernelList:
        """Returns launches whose objects are in the cache; ``size_of`` reads symbolic sizes."""
        return decode_kernels(data, name, self._kernel, size_of, is_native=not self._target)

    def plan(
        self, buffers: Buffers, asked: Sequence[int], make: Callable[[], ArenaPlan]
    ) -> ArenaPlan:
        """Returns the places of buffers."""
        key = None
        if self._disk is not None:
            arrays = (buffers.birth, buffers.death, buffers.size)
            ranges = [hashlib.sha256(a.astype("<i8").tobytes()).hexdigest() for a in arrays]
            # No other facts: a plan depends only on the buffers and on our planner.
            key = _digest(["plan", package_digest(), len(buffers), ranges, list(asked)])
        return self._of(key, plan_of, make, plan_data)

    def native(self) -> torch_native.NativeLibrary:
        """Returns the native loop."""
        if self._native is None:
            num_made = self._use.num_made
            self._native = self._found_native()
            if self._disk is not None and self._use.num_made > num_made:
                self._disk.trim()  # the loop is built when a program is bound, after its compile
        return self._native

    def _found_native(self) -> torch_native.NativeLibrary:
        source = hashlib.sha256(torch_native.native_source().encode()).hexdigest()
        key = _digest(["native", self.facts, source]) if self.facts else None

        def decode(digest: Any) -> torch_native.NativeLibrary:
            assert self._disk is not None
            return self._disk.loaded(digest, torch_native.loaded_native)

        def encode(_: torch_native.NativeLibrary) -> Any:
            built = torch_native.native_file()
            digest = self._disk.write_object(built) if self._disk and built else None
            if digest is None:
                raise NotCacheableError("the native loop")
            return digest

        return self._of(key, decode, torch_native.native_library, encode)

    # ---- keys, entries, objects ----------------------------------------------------------

    def _key(
        self, kind: str, leaf: Leaf, asked: Any = None, trace: Trace | None = None
    ) -> str | None:
        """Returns the key of a result, or None; ``trace`` is for leaves with users' rules."""
        if self._disk is None or self._facts is None:
            return None
        content = self._content(leaf, trace if rules_in(leaf.nodes) else None)
        return None if content is None else _digest([kind, self._facts, content, asked])

    def _content(self, leaf: Leaf, trace: Trace | None) -> str | None:
        if trace is None and leaf in self._contents:
            return self._contents[leaf]
        content = None
        try:
            if trace is None:
                content = _digest(leaf_content(leaf))
            else:
                traced, more = trace()
                content = _digest([leaf_content(traced), more])
        except NotCacheableError as reason:
            self._use.not_kept.append(f"@{leaf.name} has {reason}")
        if trace is None:
            self._contents[leaf] = content
        return content

    def _of(
        self,
        key: str | None,
        decode: Callable[[Any], T],
        make: Callable[[], T],
        encode: Callable[[T], Any],
    ) -> T:
        """Returns the stored result, or makes and stores it."""
        found = self._load(key, decode)
        if found:
            return found[0]
        made = make()
        self._store(key, partial(encode, made))
        return made

    def _load(self, key: str | None, decode: Callable[[Any], T]) -> tuple[T] | None:
        """Returns the stored result in a tuple, since the result may be None."""
        if key is None:
            return None
        assert self._disk is not None
        found = self._disk.decoded(key, decode)
        self._use.num_loaded += found is not None
        return found

    def _store(self, key: str | None, encode: Callable[[], Any]) -> None:
        if key is None:
            return
        assert self._disk is not None
        self._use.num_made += 1
        try:
            self._disk.write(key, encode())
        except NotCacheableError as reason:
            self._use.not_kept.append(str(reason))

    def _object(self, kernel: BuiltKernel) -> Any:
        """Keeps a kernel's object; returns its digest, and which kernel of several it is."""
        assert self._disk is not None
        digest = self._disk.write_object(kernel.path)
        return digest and [digest, kernel.symbol, list(kernel.argument_types)]

    def _kernel(self, reference: Any) -> BuiltKernel:
        assert self._disk is not None
        digest, symbol, types = reference
        return self._disk.loaded(digest, lambda path: loaded_kernel(path, symbol, types))


def plan_data(made: ArenaPlan) -> Any:
    """Returns a plan as JSON."""
    numbers = map(int, (made.peak_bytes, made.lower_bound_bytes))
    return [(made.offsets // ALIGNMENT).tolist(), *numbers, made.method]


def plan_of(data: Any) -> ArenaPlan:
    """Returns the plan of :func:`plan_data`."""
    offsets, peak, bound, method = data
    return ArenaPlan(np.array(offsets, np.int64) * ALIGNMENT, peak, bound, method)


def _forward_traced(leaf: Leaf) -> tuple[Leaf, Any]:
    """Returns a leaf as PyTorch's own operators, without users' ones."""
    return replace(
        leaf, module=trace_forward(leaf.module, flat_types(leaf.input_types), {}), level="aten"
    ), "forward"


def _derivative_traced(leaf: Leaf, request: Request) -> tuple[Leaf, Any]:
    """Returns a leaf with its gradients as PyTorch's own operators, and where gradients flow."""
    types = flat_types(leaf.input_types)
    joint = JointTrace(leaf.module, types, request.inputs, request.outputs, {})
    if not joint.tangent_outputs:
        return _forward_traced(leaf)
    module = joint.graph_module
    traced = replace(
        leaf,
        module=module,
        input_types=tuple(map(node_type, input_nodes(module))),
        output_types=tuple(map(node_type, outputs_of(module))),
        level="aten",
    )
    return traced, [list(joint.tangent_outputs), list(joint.grad_inputs)]


def _digest(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
