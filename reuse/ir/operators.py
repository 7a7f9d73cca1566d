"""What an operator is, by PyTorch's schema and tags: a view, in place, random, elementwise.

Each fact is asked here and nowhere else. An operator whose schema and tags are right needs no row
of ours; what they hide has one.
"""

from __future__ import annotations

import torch
import torch.fx
from torch.fx.node import map_arg

from ..torch_names import memory_id, operator_schema, schema_of
from .types import TensorType

# In training these change running_mean and running_var (operands 3 and 4); their schemas hide it.
_NORMS = (
    "batch_norm",
    "instance_norm",
    "native_batch_norm",
    "cudnn_batch_norm",
    "miopen_batch_norm",
)
WRITES_STATISTICS = frozenset(getattr(torch.ops.aten, name).default for name in _NORMS)


def is_mutable(operator: object) -> bool:
    """Whether an operator changes an operand in place; running statistics do not count."""
    schema = schema_of(operator)
    return schema is not None and bool(schema.is_mutable)


def returns_operand(operator: object) -> bool:
    """Whether a result of an operator lies in the memory of an operand."""
    schema = schema_of(operator)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def mutated_args(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Returns the operands that an operator changes in place."""
    schema = operator_schema(node)
    if schema is None:
        return []
    if node.target in WRITES_STATISTICS and len(node.args) > 5 and node.args[5]:
        return [n for n in node.args[3:5] if isinstance(n, torch.fx.Node)]
    if not schema.is_mutable:
        return []
    found: list[torch.fx.Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position : position + 1]
            map_arg((*given, node.kwargs.get(argument.name)), found.append)
    return found


def is_view(node: torch.fx.Node) -> bool:
    """Whether an operator returns its operand's memory, unchanged, under another shape."""
    return returns_operand(node.target) and not is_mutable(node.target)


def changed_operand(node: torch.fx.Node) -> torch.fx.Node | None:
    """Returns the operand that an operator changes in place and returns, as it is."""
    operands = mutated_args(node)
    if len(operands) != 1 or len(operator_schema(node).returns) != 1:
        return None
    result, operand = node.meta.get("val"), operands[0].meta.get("val")
    if not isinstance(result, torch.Tensor) or not isinstance(operand, torch.Tensor):
        return None
    place, own = ((memory_id(t), t.storage_offset(), TensorType.of(t)) for t in (result, operand))
    return operands[0] if place == own else None


def may_draw(operator: object) -> bool:
    """Whether an operator draws random numbers, for some arguments at least."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def is_draw(node: torch.fx.Node) -> bool:
    """Whether an operator draws random numbers (attention without dropout does not)."""
    if not may_draw(node.target):
        return False
    schema = operator_schema(node)
    for index, argument in enumerate(schema.arguments if schema is not None else ()):
        given = node.args[index] if index < len(node.args) else argument.default_value
        given = node.kwargs.get(argument.name, given)
        if argument.name == "dropout_p":
            return bool(given != 0.0)
        if argument.name in ("train", "training") and given is False:
            return False
    return True


def is_elementwise(node: torch.fx.Node) -> bool:
    """Whether each element of the result depends on one element of each operand."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or str(node.target).startswith("aten.where")
