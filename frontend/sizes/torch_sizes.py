"""Adapter: symbols in place of some sizes of a call's inputs, while that call is captured.

The trace computes a size where it is first used, maybe inside a block, and then uses that node
everywhere. Closures take only tensors, so sizes are made local: each region computes its sizes from
the shapes of its own inputs. If none of them has the size, a user input is added for its shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from ...reuse.ir.program import Source, UserInput
from ...reuse.ir.torch_symbols import (
    computing_node,
    expression_of,
    is_size,
    put_literal,
    replace_operand,
)
from ...reuse.ir.types import TensorType
from ..capture.regions import Region, regions_inside
from ..tracing.torch_tracing import TracingFakeMode

Place = tuple[torch.fx.Node, int]  # a tensor, and one of its dimensions


def make_sizes_local(root: Region, sources: Mapping[torch.fx.Node, Source]) -> None:
    """Rewrites a recorded run in-place so that each region computes the sizes that it uses."""
    users = [n for n, s in sources.items() if isinstance(s, UserInput)]
    localizer = _Localizer(_places(users))
    localizer.region(root, is_root=True)
    present = set(localizer.dropped[0].graph.nodes) if localizer.dropped else set()
    for node in reversed(localizer.dropped):
        if node in present:  # the tracer may have dropped unused nodes
            node.graph.erase_node(node)


def make_sizes_literal(root: Region) -> None:
    """Rewrites a recorded run in-place so that sizes are literals in operator arguments."""
    dropped = list(dict.fromkeys(n for n in root.nodes() if is_size(n)))
    for region in (root, *regions_inside(root)):
        region.items[:] = [i for i in region.items if isinstance(i, Region) or not is_size(i)]
    present = set(dropped[0].graph.nodes) if dropped else set()
    for node in reversed(dropped):
        for user in list(node.users):
            put_literal(user, node)
        if node in present:
            node.graph.erase_node(node)


def _places(nodes: Iterable[torch.fx.Node]) -> dict[Any, Place]:
    """Returns for each symbol a tensor dimension that has its size."""
    found: dict[Any, Place] = {}
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(TensorType.of(value).shape):
                if not isinstance(size, int) and size.is_Symbol:
                    found.setdefault(size, (node, dim))
    return found


class _Localizer:
    """Makes sizes local, region by region, inner ones and earlier ones first."""

    def __init__(self, outer: Mapping[Any, Place]) -> None:
        self._outer = outer
        self._extra: dict[Region, list[torch.fx.Node]] = {}
        self.dropped: list[torch.fx.Node] = []

    def region(self, region: Region, *, is_root: bool = False) -> None:
        own = {} if is_root else _places(region.inputs)
        places = {**self._outer, **own}
        needed: dict[torch.fx.Node, None] = {}
        items: list[torch.fx.Node | Region] = []
        for item in region.items:
            if isinstance(item, Region):
                self.region(item)
                needed.update(dict.fromkeys(self._extra[item]))
            elif "call" in item.meta:
                extra = self._extra[item.meta["call"].region]
                item.args = (*item.args, *extra)
                needed.update(dict.fromkeys(extra))
            elif is_size(item):
                self.dropped.append(item)
                continue
            else:
                made = self._rewrite(item, places)
                needed.update((n, None) for node in made for n in node.all_input_nodes)
                items.extend(made)
            items.append(item)
        region.items[:] = items
        outer = {node for node, _ in self._outer.values()}
        extra = [n for n in needed if n in outer and n not in region.inputs]
        self._extra[region] = extra
        if not is_root:
            region.inputs.extend(extra)
            region.input_names.extend(n.name for n in extra)

    def _rewrite(self, node: torch.fx.Node, places: Mapping[Any, Place]) -> list[torch.fx.Node]:
        """Replaces the sizes among a node's operands; returns the nodes that compute them."""
        sizes = [n for n in node.all_input_nodes if is_size(n)]
        if not sizes:
            return []
        before = node.prev
        graph = node.graph
        with graph.inserting_before(node):
            for size in sizes:
                expression = expression_of(size.meta["val"])
                symbols = {
                    s: graph.call_function(torch.ops.aten.sym_size.int, places[s])
                    for s in sorted(expression.free_symbols, key=str)
                }
                replace_operand(node, size, computing_node(expression, symbols, graph))
        made = []
        while node.prev is not before:
            before = before.next
            before.meta["stamp"] = node.meta.get("stamp")
            made.append(before)
        return made


class TracedSizes:
    """The symbolic sizes of one capture: learned from calls, or declared by the user.

    No hint may be one of the numbers ``taken``, so that a comparison in the trace does not unify a
    symbol with a number that it equals only in this call. ``moved`` says whether a symbol's hint
    differs from the size in this call.
    """

    def __init__(self, environment: ShapeEnv, taken: Iterable[int] = ()) -> None:
        self.mode = TracingFakeMode(
            allow_non_fake_inputs=True, shape_env=environment, static_shapes=True
        )
        # The mode's result cache rarely hits with symbolic sizes, and filling it takes longer than
        # running the operators.
        self.mode.cache_enabled = False
        self.moved = False
        self._env = environment
        self._taken = set(taken)
        self._sizes: dict[int, list[Any]] = {}  # of inputs that have symbols

    def _new_symbol(self, name: str, size: int, hint: int) -> Any:
        """Makes a symbol, with a hint, for a size of this call."""
        self._taken.add(hint)
        self.moved = self.moved or hint != size
        return self._env.create_symbol(hint, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC)

    def _free(self, wanted: int, low: int = 2, high: float = float("inf")) -> int:
        """Returns a hint in the range that is not taken yet: the wanted number or one near it."""
        below, above = range(wanted, low - 1, -1), range(wanted + 1, wanted + len(self._taken) + 2)
        free = (n for n in (*below, *above) if n not in self._taken and n <= high)
        return next(free, wanted)

    def given(self, index: int, leaf: Any) -> Any:
        """Returns a symbol, or the value itself, for a flat input that is not a tensor."""
        return leaf

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a fake of an input; dimensions without a symbol keep their size."""
        sizes = self._sizes.get(id(tensor), [])
        if all(isinstance(n, int) for n in sizes):
            return self.mode.from_tensor(tensor.detach())
        with self.mode:
            return torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)
