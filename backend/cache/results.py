"""Results that a compile takes from the cache: derivatives, decompositions, kernels, memory plans.

Each is kept per closure (a plan: per set of live ranges), under a key of everything that it depends
on: the graph with its constants, layouts and modes, the request, and the facts about PyTorch, this
package, the CPU and the settings. So a deeper model, another batch order or a pipeline rank finds
the results of any earlier process for the same blocks.

What an operator with a user's rule computes, and what its derivative does, is not known from its
name or from the text of the rule. So the key has the graphs that both are traced to, without a
backend: to trace them costs little compared with kernels.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from ...autodiff.derivative import Derivative, Request
from ...autodiff.traces.joint_trace import JointTrace, trace_forward
from ...autodiff.traces.torch_user_rules import rules_in
from ...reuse.ir.leaf import flat_types, node_type
from ...reuse.ir.program import Leaf, input_nodes, outputs_of
from ...reuse.process import package_digest
from ..arena import ALIGNMENT, ArenaPlan, Buffers
from ..files.torch_store import DiskCache, MissingObjectError, open_cache
from ..gpu.torch_cuda import TritonKernel, triton_version
from ..launches import torch_facts, torch_native
from ..launches.kernel_list import KernelList
from ..launches.torch_native import BuiltKernel, loaded_kernel
from . import codec

T = TypeVar("T")
Trace = Callable[[], tuple[Leaf, Any]]

# The errors of decoding a malformed entry. An entry is data from a disk: no content of it may end a
# compile.
_BAD_ENTRY = (
    codec.MalformedError,
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
    AssertionError,
)


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
        self._use = CacheUse(str(disk.directory) if disk else "")
        self._backend = backend
        self._target = target
        self._contents: dict[Leaf, str | None] = {}
        self._native: torch_native.NativeLibrary | None = None

    @classmethod
    def of_user(cls, backend: str, target: str = "") -> CompileCache:
        """Opens the user's cache; the eager backend has no results worth keeping."""
        return cls(open_cache() if backend == "inductor" else None, backend, target)

    @property
    def directory(self) -> str:
        """The directory of the cache; empty if there is none."""
        return self._use.directory

    def begin(self) -> None:
        """Starts a compile: reads the settings again."""
        self._use = CacheUse(self._use.directory)
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

        def decode(data: Any) -> Derivative | None:
            return codec.decode_derivative(data, leaf) if data != "none" else None

        def encode(made: Derivative | None) -> Any:
            return "none" if made is None else codec.encode_derivative(made)

        return self._of(key, decode, make, encode)

    def decomposed(self, leaf: Leaf, make: Callable[[], Leaf]) -> Leaf:
        """Returns a leaf decomposed, without a derivative."""
        if leaf.level == "aten":  # costs nothing to make
            return make()

        def decode(data: Any) -> Leaf:
            return codec.decode_leaf(data, leaf.name, leaf.input_names)

        key = self._key("decomposed", leaf, None, partial(_forward_traced, leaf))
        return self._of(key, decode, make, codec.encode_leaf)

    def kernels(self, leaf: Leaf, unaligned: Collection[int] = ()) -> KernelList | None:
        """Returns the launches of an ATen leaf, if cached; ``unaligned`` are inputs for a GPU."""
        key = self._key("kernels", leaf, sorted(unaligned))
        devices = {t.device.type for t in flat_types((*leaf.input_types, *leaf.output_types))}
        is_native = not self._target and devices <= {"cpu"}
        runs: Literal["native", "python"] = "native" if is_native else "python"
        found = self._load(
            key, lambda data: codec.decode_kernels(data, leaf.name, self._kernel, runs)
        )
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
        loaded = {content: self._load(key, codec.decode_value) for content, key in keys.items()}
        missing = {k.content: k for k in kernels if loaded[k.content] is None}
        made = make(missing.values()) if missing else {}
        for content, code in made.items():
            self._store(keys[content], partial(codec.encode_value, code))
        return {content: found[0] for content, found in loaded.items() if found} | made

    def keep_kernels(
        self, leaf: Leaf, kernels: KernelList, unaligned: Collection[int] = ()
    ) -> None:
        """Stores the launches of an ATen leaf."""
        key = self._key("kernels", leaf, sorted(unaligned))
        self._store(key, partial(codec.encode_kernels, kernels, self._object))

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

        return codec.encode_kernels(kernels, object_of), objects

    def unpacked(self, data: Any, name: str, size_of: Callable[[str], Any]) -> KernelList:
        """Returns launches whose objects are in the cache; ``size_of`` reads symbolic sizes."""
        runs: Literal["native", "python"] = "python" if self._target else "native"
        return codec.decode_kernels(data, name, self._kernel, runs, size_of)

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
            return self._loaded(digest, torch_native.loaded_native)

        def encode(_: torch_native.NativeLibrary) -> Any:
            built = torch_native.native_file()
            digest = self._disk.write_object(built) if self._disk and built else None
            if digest is None:
                raise codec.NotCacheableError("the native loop")
            return digest

        found: torch_native.NativeLibrary = self._of(
            key, decode, torch_native.native_library, encode
        )
        return found

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
                content = _digest(codec.leaf_content(leaf))
            else:
                traced, more = trace()
                content = _digest([codec.leaf_content(traced), more])
        except codec.NotCacheableError as reason:
            self._use.not_kept.append(f"@{leaf.name} has {reason}")
        if trace is None:
            self._contents[leaf] = content
        return content

    def _of(
        self,
        key: str | None,
        decode: Callable[[Any], Any],
        make: Callable[[], Any],
        encode: Callable[[Any], Any],
    ) -> Any:
        """Returns the stored result, or makes and stores it."""
        found = self._load(key, decode)
        if found:
            return found[0]
        made = make()
        self._store(key, partial(encode, made))
        return made

    def _load(self, key: str | None, decode: Callable[[Any], Any]) -> tuple[Any] | None:
        """Returns the stored result in a tuple, since the result may be None."""
        if key is None:
            return None
        assert self._disk is not None
        data = self._disk.read(key)
        if data is None:
            return None
        try:
            decoded = decode(data)
        except MissingObjectError:
            return None
        except _BAD_ENTRY as error:
            self._disk.reject(key, f"it cannot be read ({type(error).__name__}: {error})")
            return None
        self._use.num_loaded += 1
        return (decoded,)

    def _store(self, key: str | None, encode: Callable[[], Any]) -> None:
        if key is None:
            return
        assert self._disk is not None
        self._use.num_made += 1
        try:
            self._disk.write(key, encode())
        except codec.NotCacheableError as reason:
            self._use.not_kept.append(str(reason))

    def _object(self, kernel: BuiltKernel) -> Any:
        """Keeps a kernel's object; returns its digest, and which kernel of several it is."""
        assert self._disk is not None
        digest = self._disk.write_object(kernel.path)
        return digest and [digest, kernel.symbol, list(kernel.argument_types)]

    def _kernel(self, reference: Any) -> BuiltKernel:
        digest, symbol, types = reference
        return self._loaded(digest, lambda path: loaded_kernel(path, symbol, types))

    def _loaded(self, digest: str, load: Callable[[pathlib.Path], T]) -> T:
        assert self._disk is not None
        return self._disk.loaded(digest, load)


def plan_data(made: ArenaPlan) -> Any:
    """Returns a plan as JSON."""
    return [
        (made.offsets // ALIGNMENT).tolist(),
        int(made.peak_bytes),
        int(made.lower_bound_bytes),
        made.method,
    ]


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
