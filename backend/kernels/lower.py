"""Lower: kernels for each different leaf closure, once.

Backends:

* ``eager``: PyTorch's own kernels, operator by operator. Needs no compiler; the reference.
* ``inductor``: TorchInductor kernels. A leaf of one or two operators runs on eager kernels, since
  compiling it would not pay, unless one is a layer norm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, Literal, TypeAlias

import torch
import torch.fx

from ...autodiff.derivative import Recipe
from ...autodiff.traces.joint_trace import trace_forward
from ...autodiff.traces.torch_user_rules import rules_in
from ...reuse.errors import PlanError
from ...reuse.ir import torch_symbols
from ...reuse.ir.leaf import flat_types, without_autocast
from ...reuse.ir.program import Leaf, input_nodes
from ...reuse.ir.torch_updates import is_update
from ...reuse.ir.types import TensorType, strides_that_matter
from ...reuse.torch_names import RESHAPES, module_of, own_device_type
from ..gpu.targets import Target, target_named
from ..gpu.torch_cuda import TritonKernel, is_interpreting, machine_code
from ..gpu.torch_gpu import gpu_described, moved_leaf
from ..launches.kernel_list import BufferInfo, KernelList, Launch, SymbolicList, View
from . import torch_decompositions, torch_inductor
from .torch_attention import as_on_a_gpu, with_plain_attention
from .torch_recorder import Traced, record_graph, record_wrapper
from .torch_recorder import can_record as can_record_wrapper

BackendName: TypeAlias = Literal["inductor", "eager"]  # the name of a backend

_aten = torch.ops.aten
_STRIDED = (_aten.as_strided.default, _aten.as_strided_scatter.default)
_TINY_NODES = 2
_LAYER_NORMS = frozenset({_aten.layer_norm.default, _aten.native_layer_norm.default})
_FREE_TARGETS = frozenset(
    {
        *(_aten.view.default, _aten.reshape.default, _aten.permute.default, _aten.t.default),
        *(_aten.unsqueeze.default, _aten.expand.default, _aten.detach.default),
        *(_aten.transpose.int, _aten.squeeze.dim, _aten.slice.Tensor, _aten.select.int),
    }
)


@dataclass(frozen=True)
class Kernel:
    """A leaf ready to be launched.

    ``function`` takes the flat operands as one list, which it may empty (``convention="boxed"``),
    or as positional arguments (``convention="plain"``); it returns the flat results. ``launches``
    is its kernel list, if recorded already; for a GPU that is not here, only that exists.
    ``written`` is Inductor's wrapper to record launches from, if the kernels are text and
    ``function`` is not that wrapper. ``why_eager`` says why the backend has no kernels for the
    leaf, which then runs on PyTorch's own.
    """

    function: Callable[..., Sequence[Any]]
    convention: Literal["boxed", "plain"]
    source: BackendName  # which backend made it
    sizes: tuple[int, ...] = ()  # come before the operands
    symbols: tuple[Any, ...] = ()  # that it was compiled with; ``sizes`` are their values
    launches: KernelList | None = None
    written: Callable[..., Any] | None = None
    why_eager: str = ""


KeptCode: TypeAlias = Callable[
    [Sequence[TritonKernel], Callable[[Iterable[TritonKernel]], dict[str, bytes]]], dict[str, bytes]
]
"""A cache of machine code, by contents of kernels; the function compiles those it does not have."""


class EagerBackend:
    """PyTorch's own kernels, operator by operator."""

    name: BackendName = "eager"

    def recipe(self, leaf: Leaf) -> Recipe:
        """Saves what autograd would save; decomposes nothing further than autograd does."""
        return Recipe()

    def lower(self, leaves: Sequence[Leaf], on_done: Callable[[], None]) -> list[Kernel]:
        """Returns each graph's generated Python function."""
        kernels = []
        for leaf in leaves:
            kernels.append(_eager_kernel(leaf))
            on_done()
        return kernels


class InductorBackend:
    """TorchInductor kernels: compiled for a CPU, or generated as text for a GPU that may be absent.

    A program for a GPU target launches the same kernels as one for a model on a GPU: every leaf has
    Inductor's kernels, attention and dropout are those of a GPU, and kernels are kept as text,
    which is compiled and loaded where the program runs. ``built`` is machine code for the target.
    """

    name: BackendName = "inductor"

    def __init__(self, target: Target | None = None) -> None:
        self.target = target
        self.built: dict[str, bytes] = {}

    @cached_property
    def _recipes(self) -> list[Recipe]:
        """The recipes for a CPU and for a GPU."""
        table, rewrite_joint = torch_decompositions.decompositions(), torch_inductor.rewrite_joint
        rewrites = with_plain_attention, as_on_a_gpu
        return [Recipe(table, "min_cut", rewrite_joint, rewrite=one) for one in rewrites]

    def _is_on_gpu(self, leaf: Leaf) -> bool:
        """Whether a leaf runs on a GPU, even if it copies from or to the host."""
        types = flat_types((*leaf.input_types, *leaf.output_types))
        return self.target is not None or any(t.device.type == "cuda" for t in types)

    def recipe(self, leaf: Leaf) -> Recipe:
        """Uses Inductor's decompositions, passes and min-cut split; tiny CPU leaves stay eager."""
        if self._is_on_gpu(leaf):
            return self._recipes[1] if _has_compiler(leaf) else Recipe(kernels="eager")
        is_left = (leaf.kernels != "compiled" and is_tiny(leaf)) or not _has_compiler(leaf)
        return Recipe(kernels="eager") if is_left else self._recipes[0]

    def lower(self, leaves: Sequence[Leaf], on_done: Callable[[], None]) -> list[Kernel]:
        """Compiles the leaves for which that pays (for a GPU: generates their code)."""
        written = [leaf for leaf in leaves if self._is_on_gpu(leaf)]
        kernels = dict(zip(written, self._written(written, on_done), strict=True))
        rest = [leaf for leaf in leaves if leaf not in kernels]
        compiled = [leaf for leaf in rest if _wants_compiler(leaf)]
        symbols = [torch_symbols.symbol_sizes(leaf.module) for leaf in compiled]
        functions = torch_inductor.compile_leaves([leaf.module for leaf in compiled], on_done)
        for leaf, made, sizes in zip(compiled, functions, symbols, strict=True):
            if isinstance(made, torch_inductor.NotCompiled):
                kernels[leaf] = replace(_eager_kernel(leaf), why_eager=made.reason)
            else:
                kernels[leaf] = Kernel(made, "boxed", self.name, symbols=sizes)
        for leaf in rest:
            if leaf not in kernels:
                kernels[leaf] = _eager_kernel(leaf)
                on_done()
        return [kernels[leaf] for leaf in leaves]

    def _written(self, leaves: Sequence[Leaf], on_done: Callable[[], None]) -> list[Kernel]:
        """Generates the kernels of each leaf as text, and records their launches."""
        if not leaves:
            return []
        target = self.target
        moved = [moved_leaf(leaf, target.device) if target else leaf for leaf in leaves]
        wanted = [leaf for leaf in moved if _wants_compiler(leaf) and not is_update(leaf)]
        with gpu_described(target) if target else nullcontext():
            modules = [leaf.module for leaf in wanted]
            symbols = dict(zip(wanted, map(torch_symbols.symbol_sizes, modules), strict=True))
            made = torch_inductor.write_gpu_leaves(modules, on_done)
            wrappers = dict(zip(wanted, made, strict=True))
            found = [self._written_kernel(leaf, wrappers.get(leaf)) for leaf in moved]
            pairs = zip(moved, found, strict=True)
            return [replace(kernel, symbols=symbols.get(leaf, ())) for leaf, kernel in pairs]

    def _written_kernel(
        self, leaf: Leaf, made: Callable[..., Any] | torch_inductor.NotCompiled | None
    ) -> Kernel:
        is_here = self.target is None
        if made is None:
            plain = _eager_kernel(leaf) if is_here else Kernel(_not_here, "plain", self.name)
            return plain if has_sizes(leaf) else replace(plain, launches=record_graph(leaf))
        if not isinstance(made, torch_inductor.NotCompiled) and can_record_wrapper(made):
            function = _when_called(leaf) if is_here else _not_here
            launches = None if has_sizes(leaf) else record_wrapper(leaf, made)
            return Kernel(function, "boxed", self.name, launches=launches, written=made)
        unlike = "its kernels are not a plain list of launches"
        why = made.reason if isinstance(made, torch_inductor.NotCompiled) else unlike
        if self.target is not None:
            raise PlanError(f"There are no kernels of @{leaf.name} for {self.target.name}: {why}.")
        return replace(_eager_kernel(leaf), why_eager=why)

    def build(self, lists: Iterable[KernelList | None], kept: KeptCode) -> None:
        """Compiles the target's Triton kernels, unless they are built or ``kept`` has them."""
        kernels = [k for k in triton_kernels(lists) if k.content not in self.built]
        if self.target is not None and kernels and not is_interpreting():
            with gpu_described(self.target):
                self.built.update(kept(kernels, machine_code))


Backend: TypeAlias = EagerBackend | InductorBackend
"""Makes kernels, and says how leaves are differentiated for them."""


def _when_called(leaf: Leaf) -> Callable[..., Sequence[Any]]:
    """Returns a function that compiles a leaf at its first call, which only unplanned runs make."""

    @cache
    def made() -> Callable[..., Sequence[Any]]:
        (function,) = torch_inductor.compile_leaves([leaf.module], lambda: None)
        if not isinstance(function, torch_inductor.NotCompiled):
            return function
        eager = _eager_kernel(leaf).function
        return lambda operands: eager(*operands)

    return lambda operands: made()(operands)


def triton_kernels(lists: Iterable[KernelList | None]) -> list[TritonKernel]:
    """Returns each different Triton kernel that is launched."""
    launched = (x.function for kernels in lists if kernels for x in kernels.launches)
    return list(dict.fromkeys(f for f in launched if isinstance(f, TritonKernel)))


def _not_here(*args: Any) -> Sequence[Any]:
    raise PlanError("This was compiled for a GPU that is not here.")


def backend_named(name: BackendName, target: str | None = None) -> Backend:
    """Returns a backend by name, for a target if one is named; PlanError if there is none such."""
    if target is not None:
        if name != "inductor":
            raise PlanError(f"target={target!r} needs backend='inductor', not {name!r}.")
        return InductorBackend(target_named(target))
    if name == "inductor":
        return InductorBackend()
    if name == "eager":
        return EagerBackend()
    raise PlanError(f"backend={name!r} is unknown; there are 'inductor' and 'eager'.")


def is_tiny(leaf: Leaf) -> bool:
    """Whether a leaf has at most two operators that compute (views cost nothing)."""
    # A layer norm is not tiny: PyTorch's kernel returns three tensors to Python in each run, which
    # takes several times its work on one row. Nor is an operator with a user's rule.
    if rules_in(leaf.nodes):
        return False
    targets = [node.target for node in leaf.nodes if node.target not in _FREE_TARGETS]
    return len(targets) <= _TINY_NODES and _LAYER_NORMS.isdisjoint(targets)


def _wants_compiler(leaf: Leaf) -> bool:
    """Whether a leaf is compiled; for one that only returns operands Inductor has no wrapper."""
    wants = leaf.kernels != "eager" and leaf.num_nodes > 0 and _has_compiler(leaf)
    return wants and not torch_decompositions.scatters_into_complex(leaf.module)


def _has_compiler(leaf: Leaf) -> bool:
    """Whether Inductor supports a leaf's devices: only one, and no custom one (PrivateUse1)."""
    devices = {t.device for t in flat_types((*leaf.input_types, *leaf.output_types))}
    return len(devices) <= 1 and all(d.type != own_device_type() for d in devices)


def decompose_leaf(leaf: Leaf, backend: Backend) -> Leaf:
    """Returns the leaf at the ATen level, without a derivative."""
    if leaf.level == "aten":
        return leaf
    recipe = backend.recipe(leaf)
    module = trace_forward(
        recipe.rewrite(leaf.module), flat_types(leaf.input_types), recipe.decompositions
    )
    return replace(leaf, module=module, level="aten", kernels=recipe.kernels)


@without_autocast()
def lower_leaves(
    leaves: Iterable[Leaf],
    backend: Backend,
    on_done: Callable[[], None],
    unaligned: Mapping[Leaf, Collection[int]] | None = None,
) -> dict[Leaf, Kernel]:
    """Makes a kernel for each different leaf.

    ``unaligned`` has, by leaf, its inputs that may be unaligned; on a GPU, kernels assume that all
    others are aligned.
    """
    different = list(dict.fromkeys(leaves))
    begun = []
    for leaf in different:
        begins = (unaligned or {}).get(leaf)
        module = torch_inductor.with_unaligned_inputs(leaf.module, begins) if begins else None
        begun.append(replace(leaf, module=module) if module is not None else leaf)
    return dict(zip(different, backend.lower(begun, on_done), strict=True))


def can_record(kernel: Kernel) -> bool:
    """Whether a kernel's launches can be recorded, so that their memory can be planned."""
    if kernel.launches is not None or kernel.convention == "plain":
        return True
    return can_record_wrapper(kernel.written or kernel.function)


def kernel_list(leaf: Leaf, kernel: Kernel) -> KernelList:
    """Returns the launches of a lowered leaf."""
    if kernel.launches is not None:
        return kernel.launches
    if kernel.convention == "plain":
        return record_graph(leaf)
    return record_wrapper(leaf, kernel.written or kernel.function, kernel.sizes)


def closure_list(leaf: Leaf, kernel: Kernel | None = None) -> KernelList:
    """Returns a leaf as one launch that allocates its results; without a kernel it cannot run."""
    inputs, outputs = flat_types(leaf.input_types), flat_types(leaf.output_types)
    types, number = (*inputs, *outputs), len(inputs)
    views = tuple(View(i, t.dtype, t.shape, t.stride, 0) for i, t in enumerate(types))
    buffers = tuple(
        BufferInfo("input" if i < number else "foreign", t.num_bytes, 0, 0)
        for i, t in enumerate(types)
    )
    args: tuple[Any, ...] = (*(kernel.sizes if kernel else ()), *views[:number])
    args = ([*args],) if kernel and kernel.convention == "boxed" else args
    function = kernel.function if kernel else _not_here
    launch = Launch(leaf.name, function, args, (), views[number:], "tuple")
    return KernelList(leaf.name, number, buffers, (launch,), views[number:], tuple(outputs))


def has_sizes(leaf: Leaf) -> bool:
    """Whether a leaf has symbolic sizes, or only a gradient whose size a trace settled since."""
    types_ = flat_types((*leaf.input_types, *leaf.output_types))
    return torch_symbols.has_sizes(leaf.module) or any(t.is_symbolic for t in types_)


def kernel_at(leaf: Leaf, kernel: Kernel, values: torch_symbols.Values) -> tuple[Leaf, Kernel]:
    """Returns a leaf and its kernel at given values of its symbolic sizes.

    PlanError if its graph was traced with other sizes or strides of an input than the leaf says.
    """
    if not has_sizes(leaf):
        return leaf, kernel
    made = _leaf_at(leaf, values)
    for node, type_ in zip(input_nodes(leaf.module), flat_types(made.input_types), strict=True):
        traced = torch_symbols.tensor_type_at(TensorType.of(node.meta["val"]), values)
        layouts = [(t.shape, strides_that_matter(t.shape, t.stride)) for t in (traced, type_)]
        if layouts[0] != layouts[1]:  # the kernel would read other elements
            raise PlanError(f"@{leaf.name} takes sizes and strides {layouts[0]}, not {layouts[1]}")
    if kernel.convention == "boxed":
        return made, replace(kernel, sizes=tuple(map(int, _sizes_at(kernel, values))))
    made = replace(made, module=torch_symbols.module_at(_of_any_layout(leaf.module), values))
    return made, _eager_kernel(made)


def _sizes_at(kernel: Kernel, values: torch_symbols.Values) -> list[Any]:
    """Returns the values of the symbols that a kernel takes, some of them numbers by now."""
    return [torch_symbols.value_of(torch_symbols.expression_of(s), values) for s in kernel.symbols]


def _leaf_at(leaf: Leaf, values: torch_symbols.Values) -> Leaf:
    types_ = (leaf.input_types, leaf.output_types)
    inputs, outputs = (tuple(torch_symbols.type_at(t, values) for t in one) for one in types_)
    return leaf.retyped(inputs, outputs)


def symbolic_launches(leaf: Leaf, kernel: Kernel, trace: torch_symbols.SymbolTrace) -> SymbolicList:
    """Returns the launches of a leaf with expressions of its symbols for numbers."""
    traced = Traced(_leaf_at(leaf, trace.values), trace)
    if kernel.convention == "boxed":
        sizes, wrapper = _sizes_at(kernel, trace.values), kernel.written or kernel.function
        found = record_wrapper(leaf, wrapper, sizes, traced)
    else:
        found = record_graph(leaf, traced)
    return SymbolicList(*(getattr(found, field.name) for field in fields(found)))


def numbered(
    leaf: Leaf, kernels: SymbolicList, values: torch_symbols.Values
) -> tuple[Leaf, KernelList]:
    """Returns a leaf and its launches at given values of its symbolic sizes."""
    return _leaf_at(leaf, values), kernels.at(lambda size: torch_symbols.value_of(size, values))


def _eager_kernel(leaf: Leaf) -> Kernel:
    return Kernel(_eager_function(leaf.module), "plain", "eager")


def _eager_function(module: torch.fx.GraphModule) -> Callable[..., Any]:
    """Returns a function that runs a leaf's operators, correct for any layout of their results."""
    # Not a lazy module, which would check in each call whether its code was generated.
    made = torch.fx.GraphModule(module, _of_any_layout(module).graph)
    forward: Callable[..., Any] = made.forward
    return forward


def _of_any_layout(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns a leaf's body, correct for any layout of its operators' results."""
    # A trace has the strides of fake tensors, and a few kernels return others, such as
    # ``softplus_backward`` of operands with different strides. Values do not depend on that, but
    # then a view may be impossible, and ``as_strided`` would read other elements.
    if not any(node.target in (*RESHAPES, *_STRIDED) for node in module.graph.nodes):
        return module
    copied = torch.fx.Graph()
    copied.output(copied.graph_copy(module.graph, {}))
    for node in copied.nodes:
        if node.target in RESHAPES:
            node.target = torch.ops.aten.reshape.default
        elif node.target in _STRIDED:
            base = node.args[0]
            if isinstance(base, torch.fx.Node) and isinstance(base.meta.get("val"), torch.Tensor):
                stride = tuple(map(torch_symbols.as_literal, base.meta["val"].stride()))
                with copied.inserting_before(node):
                    placed = copied.call_function(_in_layout, (base, stride))
                node.args = (placed, *node.args[1:])
    return module_of(copied, module)


def _in_layout(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor with these strides: the same one if it has them, else a copy."""
    if tensor.stride() == stride:
        return tensor
    shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(tensor)
