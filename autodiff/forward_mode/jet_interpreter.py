"""An operator graph, run on values that carry their series."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor

from ...reuse.errors import PlanError
from ...reuse.ir.operators import is_draw, mutated_args
from ...reuse.ir.torch_symbols import SizedInterpreter
from ...reuse.torch_names import OPERATOR_TYPES
from ..traces.origins import origin_of
from .jets import Lanes
from .nested_forward import by_nesting
from .operands import Operands
from .torch_rules import rule_of


@dataclass(frozen=True, slots=True)
class Fallback:
    """An operator that had no rule: differentiated by forward mode inside forward mode.

    Attributes:
        operator: its name.
        source: the user's line; empty if unknown.
    """

    operator: str
    source: str

    def __str__(self) -> str:
        return f"{self.operator} at {self.source}" if self.source else self.operator


class JetInterpreter(SizedInterpreter):
    """Runs a graph of plain operators; those whose operands carry a series by their rules.

    Args:
        module: has no in-place operators; each ``detach`` in it stops a derivative.
        lanes: how series are computed.
        stop: detaches, and says in the trace that this one is to stay.
    """

    def __init__(
        self, module: torch.fx.GraphModule, lanes: Lanes, stop: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(module)
        self.extra_traceback = False  # our messages say which operator it is
        self._lanes = lanes
        self._stop = stop
        self._node: torch.fx.Node | None = None
        self.fallbacks: list[Fallback] = []

    def run_flat(self, args: list[Any]) -> tuple[Any, ...]:
        """Runs on flat inputs; returns the flat outputs."""
        return tuple(super().run(*args))

    def run_node(self, n: torch.fx.Node) -> Any:
        """Runs a node; keeps it for messages."""
        self._node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operator, or its rule."""
        operands = Operands.of(args, kwargs)
        if target is torch.ops.aten.detach.default:
            return self._stop(operands.call(lambda tensor: tensor))
        if not operands.jets:
            return super().call_function(target, args, kwargs)
        if not isinstance(target, OPERATOR_TYPES):
            return super().call_function(target, args, kwargs)
        rule = rule_of(target)
        found = NotImplemented if rule is None else rule(self._lanes, target, operands)
        return self._nested(target, operands) if found is NotImplemented else found

    def _nested(self, target: Any, operands: Operands) -> Any:
        assert self._node is not None
        origin = origin_of(self._node)
        fallback = Fallback(str(target), "" if origin is None else origin.source)
        if is_draw(self._node) or mutated_args(self._node):
            raise PlanError(
                f"There is no forward derivative of {fallback}: it draws random numbers or changes "
                "what it is given. Take the derivative of a model in eval mode, or in reverse."
            )
        try:
            found = by_nesting(self._lanes, target, operands)
        except (PlanError, RuntimeError) as error:  # PyTorch's, where it has no formula
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise PlanError(
                f"There is no forward derivative of order {self._lanes.order} of {fallback}: "
                f"{reason} Take it in reverse."
            ) from error
        self.fallbacks.append(fallback)
        return found
