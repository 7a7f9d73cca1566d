"""The sizes that recompute is weighed at where they are symbols: those of one call.

A choice names values, so it is right at any size. What it saves and what it costs are numbers, and
those are of the sizes at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from ..autodiff.traces.torch_make_fx import fake_tensor, new_fake_mode
from ..reuse.ir.program import Leaf
from ..reuse.ir.torch_symbols import (
    SIZE_TYPES,
    Values,
    expression_of,
    module_at,
    symbols_of,
    tensor_type_at,
    type_at,
    value_of,
)
from ..reuse.ir.types import HOST, TensorType, Type, flatten_type


@dataclass(frozen=True)
class SizesAt:
    """A number for each symbol; without any, all sizes are numbers already."""

    values: Values = field(default_factory=Values)

    def num_bytes(self, type_: Type) -> int:
        """Returns the bytes of a value of a type."""
        return self.type(type_).num_bytes

    def host_bytes(self, type_: Type) -> int:
        """Returns those of them that wait on the host."""
        types = flatten_type(self.type(type_))
        return sum(one.num_bytes for one in types if one.device == HOST)

    def type(self, type_: Type) -> Type:
        """Returns a type with numbers for sizes."""
        return type_at(type_, self.values)

    def leaf(self, leaf: Leaf) -> Leaf:
        """Returns a leaf with numbers for sizes, in its types and its graph."""
        module = self.module(leaf.module)
        if module is leaf.module:
            return leaf
        return replace(
            leaf,
            module=module,
            input_types=tuple(map(self.type, leaf.input_types)),
            output_types=tuple(map(self.type, leaf.output_types)),
        )

    def module(self, module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """Returns a graph of the same nodes with numbers for sizes, also in the nodes' values.

        A graph that has no symbol is returned as it is.
        """
        if not symbols_of(module):  # the same object, so that what is known of it stays known
            return module
        made, mode = module_at(module, self.values), new_fake_mode()

        def number(value: Any) -> Any:
            if isinstance(value, SIZE_TYPES):
                return value_of(expression_of(value), self.values)
            if not isinstance(value, torch.Tensor):
                return value
            type_ = TensorType.of(value)
            return fake_tensor(mode, tensor_type_at(type_, self.values))

        for node in made.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = map_aggregate(node.meta["val"], number)
        return made
