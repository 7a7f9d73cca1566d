"""Estimates the memory that a program will need, before its kernels are made.

A leaf that is not compiled yet gets an estimated kernel list from its ATen graph: operators that
Inductor fuses into their readers need no buffer, every other one writes its result. Such lists are
laid out like real ones, so the buffers between calls are exact; only scratch inside calls is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NoReturn

import torch
import torch.fx

from ...reuse.ir.leaf import node_type
from ...reuse.ir.operators import changed_operand, is_elementwise, is_view
from ...reuse.ir.program import Leaf
from ...reuse.ir.torch_updates import is_update
from ...reuse.ir.types import TensorType
from ...reuse.torch_names import operator_schema
from ..kernels.torch_recorder import record_graph
from ..launches.kernel_list import BufferInfo, KernelList, Launch, View
from .link import FlatProgram, link
from .placement import TOOLS
from .program_writer import record_control

_REDUCTIONS = ("sum", "mean", "amax", "amin", "var", "var_mean", "prod", "any", "all")


class Estimates:
    """Kernel lists of leaves that are not compiled yet, each made once.

    Where the backend ``fuses``, elementwise values are computed where they are read.
    """

    def __init__(self, *, fuses: bool) -> None:
        self._fuses = fuses
        self._known: dict[Leaf, KernelList] = {}

    def lists(
        self, flats: Iterable[FlatProgram], recorded: Mapping[Leaf, KernelList]
    ) -> dict[Leaf, KernelList]:
        """Returns the kernel list of each leaf: the recorded one, or an estimate."""
        leaves = {launch.leaf: None for flat in flats for launch in flat.launches}
        for leaf in leaves.keys() - recorded.keys() - self._known.keys():
            self._known[leaf] = self._made(leaf, recorded)
        return {leaf: recorded.get(leaf) or self._known[leaf] for leaf in leaves}

    def _made(self, leaf: Leaf, recorded: Mapping[Leaf, KernelList]) -> KernelList:
        if leaf.bodies:
            bodies = [link(body.program) for body in leaf.bodies]
            lists = self.lists(bodies, recorded)
            return record_control(leaf, _cannot_run, bodies, lists, TOOLS)
        if is_update(leaf):  # one operator, recorded as it is launched
            return record_graph(leaf)
        fuses = self._fuses and leaf.kernels != "eager"
        return _Estimate(leaf, fuses).kernel_list()


class _Estimate:
    """The likely buffers of one leaf, from a walk over its graph; its launches cannot run."""

    def __init__(self, leaf: Leaf, fuses: bool) -> None:
        self._leaf = leaf
        self._fuses = fuses
        graph = leaf.module.graph
        results = graph.output_node().args[0]
        assert isinstance(results, (tuple, list))
        self._results = [n for n in results if isinstance(n, torch.fx.Node)]
        self._buffer_of: dict[torch.fx.Node, int] = {}
        self._types: list[TensorType] = []
        self._first: list[int] = []
        self._last: list[int] = []
        self._launches: list[Launch] = []
        self._kernels: dict[int, tuple[int, set[int]]] = {}  # elements, and buffers that are read
        self._pending: dict[torch.fx.Node, set[int]] = {}  # buffers that a fused value reads
        for node in leaf.entries:
            self._buffer_of[node] = self._new_buffer(node_type(node), -1)
        for node in graph.nodes:
            if node.op == "call_function":
                self._visit(node)

    def kernel_list(self) -> KernelList:
        num_inputs = len(self._leaf.entries)
        buffers = tuple(
            BufferInfo(
                "input" if i < num_inputs else "private",
                t.num_bytes,
                self._first[i],
                max(self._last[i], self._first[i]),
                t.device,
            )
            for i, t in enumerate(self._types)
        )
        types = tuple(node_type(n) for n in self._results)
        outputs = tuple(
            View(self._buffer_of[n], t.dtype, t.shape, t.stride, 0)
            for n, t in zip(self._results, types, strict=True)
        )
        launches = tuple(self._launches)
        return KernelList(self._leaf.name, num_inputs, buffers, launches, outputs, types)

    def _new_buffer(self, type_: TensorType, first: int) -> int:
        self._types.append(type_)
        self._first.append(first)
        self._last.append(first)
        return len(self._types) - 1

    def _visit(self, node: torch.fx.Node) -> None:
        if node in self._buffer_of:  # one of several results of an operator
            return
        written = changed_operand(node)
        source = written if written is not None else _viewed(node)
        if source is not None and source in self._buffer_of:
            self._buffer_of[node] = self._buffer_of[source]
            if written is not None:
                self._launch(node)
        elif source is not None or self._is_fused(node):
            self._pending[node] = self._reads(node)
        else:
            value, place = node.meta.get("val"), len(self._launches)
            if isinstance(value, torch.Tensor):
                first = self._beside(node, TensorType.of(value), place)
                self._launch(node)
                self._buffer_of[node] = self._new_buffer(TensorType.of(value), first)
            else:  # several results, each picked by a node of its own
                self._launch(node)
                self._pending[node] = set()
                for user in node.users:
                    picked = user.meta.get("val")
                    if isinstance(picked, torch.Tensor):
                        self._buffer_of[user] = self._new_buffer(TensorType.of(picked), place)

    def _beside(self, node: torch.fx.Node, type_: TensorType, place: int) -> int:
        """Returns the launch that makes a value, maybe an earlier one over the same operand."""
        if not self._fuses or not _is_pointwise(node):
            return place
        reads = self._reads(node)
        ready = max((self._first[b] for b in reads), default=-1)
        size = math.prod(type_.shape)
        # Inductor puts elementwise operators that read one buffer into one kernel.
        for earlier, (elements, others) in self._kernels.items():
            if earlier > ready and elements == size and reads & others:
                return earlier
        self._kernels[place] = (size, reads)
        return place

    def _launch(self, node: torch.fx.Node) -> None:
        for buffer in self._reads(node):
            self._last[buffer] = len(self._launches)
        self._launches.append(Launch(str(node.target), _cannot_run, (), ()))

    def _reads(self, node: torch.fx.Node) -> set[int]:
        """Returns the buffers that a node reads, directly or through what is fused into it."""
        found: set[int] = set()
        for operand in node.all_input_nodes:
            if operand in self._buffer_of:
                found.add(self._buffer_of[operand])
            else:
                found |= self._pending.get(operand, set())
        return found

    def _is_fused(self, node: torch.fx.Node) -> bool:
        """Whether Inductor computes a value where it is read: all readers are its own kernels."""
        if not self._fuses or not _is_pointwise(node):
            return False
        readers, todo = [], [node]
        while todo:
            for user in todo.pop().users:
                readers.append(user)
                if _viewed(user) is not None:
                    todo.append(user)
        return all(r.op == "call_function" and _has_own_kernel(r) for r in readers)


def _viewed(node: torch.fx.Node) -> torch.fx.Node | None:
    """Returns the operand that a node is a view of; None if it is no view."""
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    source = node.all_input_nodes[0]
    picks = operator_schema(node) is None and is_view(source)
    return source if picks or is_view(node) else None


def _is_pointwise(node: torch.fx.Node) -> bool:
    """Whether Inductor computes each element where it is read."""
    return is_elementwise(node) or str(node.target).startswith(("aten.cat", "aten.full"))


def _has_own_kernel(node: torch.fx.Node) -> bool:
    """Whether Inductor makes an operator's kernel: a view, an elementwise one, a reduction."""
    is_reduction = str(node.target).removeprefix("aten.").split(".")[0] in _REDUCTIONS
    return is_reduction or _viewed(node) is not None or _is_pointwise(node)


def _cannot_run(*args: object) -> NoReturn:
    raise AssertionError("an estimated launch was run")
