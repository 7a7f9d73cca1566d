"""A leaf for another device than the one it was traced on.

PyTorch differentiates on a device only where it is there, so a program for a GPU that is not is
traced and differentiated for the CPU. Below autograd an operator is the same on any device, and
Inductor asks each for its layout there. Composite operators that depend on the device were decided
before (attention, dropout).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from ...autodiff.traces.joint_cut import copy_graph
from ...autodiff.traces.torch_make_fx import fake_tensor, new_fake_mode
from ...reuse.ir.leaf import flat_types
from ...reuse.ir.program import Leaf
from ...reuse.ir.types import StructType, TensorType, Type


def moved_leaf(leaf: Leaf, device: torch.device) -> Leaf:
    """Returns the leaf at the ATen level, on a device (the same leaf, if it is there)."""
    types = flat_types((*leaf.input_types, *leaf.output_types))
    if all(type_.device.type == device.type for type_ in types):
        return leaf
    module = copy_graph(leaf.module)
    mode = new_fake_mode(module)

    def moved(value: Any) -> Any:
        """A value on the device: a name of a device, or what stands for a tensor there."""
        if isinstance(value, torch.device):
            return device
        if isinstance(value, torch.Tensor):
            return fake_tensor(mode, _on(TensorType.of(value), device))
        return value

    for node in module.graph.nodes:
        node.args = torch.fx.node.map_aggregate(node.args, moved)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, moved)
        if "val" in node.meta:
            node.meta["val"] = torch.fx.node.map_aggregate(node.meta["val"], moved)
    module.recompile()
    return replace(
        leaf,
        module=module,
        input_types=_all_on(leaf.input_types, device),
        output_types=_all_on(leaf.output_types, device),
    )


def _all_on(types: Sequence[Type], device: torch.device) -> tuple[Type, ...]:
    return tuple(_on(type_, device) for type_ in types)


def _on(type_: Any, device: torch.device) -> Any:
    if isinstance(type_, StructType):
        return StructType(_all_on(type_.fields, device))
    return TensorType(type_.dtype, type_.shape, type_.stride, device)
