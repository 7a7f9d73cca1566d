"""Numbers that a forward asks of its inputs, such as ``int(batch.max())``: asked at each call.

A program has no values, but what Python computes from whole numbers among the inputs alone can be
computed before it runs. The number stands in the program; the guard asks again and compares.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.fx

from ...reuse.ir.leaf import memory_of
from ...reuse.ir.operators import is_mutable, may_draw
from ...reuse.ir.program import Source, UserInput
from ...reuse.torch_names import memory_id, module_of
from ..tracing.torch_tracing import made_of, untraced_numbers, written_by


@dataclass(frozen=True, eq=False)
class Question:
    """Holds a question that the forward asks of the inputs of a call.

    Attributes:
        source: the user's line.
        text: what is computed; equal for questions that are the same.
        answer: what it was when the forward was captured.
    """

    source: str
    text: str
    answer: int | bool
    _module: torch.fx.GraphModule
    _places: tuple[int, ...]

    @classmethod
    def of(
        cls,
        node: torch.fx.Node,
        sources: Mapping[torch.fx.Node, Source],
        tensors: Sequence[torch.Tensor],
        source: str,
    ) -> Question | None:
        """Returns the question for the value of a node; None if more than inputs decides it.

        Args:
            node: it.
            sources: where the nodes from outside come from.
            tensors: those among the inputs of the call that is captured.
            source: the user's line.
        """
        found = made_of(node)
        if not all(_is_asked(n, sources, found) for n in found):
            return None
        if _writes_inputs(node, sources, tensors):
            return None
        # Only what leads to the number: the rest of the trace needs the model, and takes longer.
        graph = torch.fx.Graph()
        places, copies = [], dict[torch.fx.Node, torch.fx.Node]()
        for n in (n for n in node.graph.nodes if n in found):
            given = sources.get(n)
            if isinstance(given, UserInput):
                copies[n] = graph.placeholder(f"input_{given.index}")
                places.append(given.index)
            else:
                copies[n] = graph.node_copy(n, copies.__getitem__)
        graph.output(copies[node])
        asked = tensors[places[0]]
        if any(tensors[i].is_meta or tensors[i].device != asked.device for i in places):
            return None
        question = cls(source, str(graph), 0, module_of(graph), tuple(places))
        with untraced_numbers():
            answer = question.ask(tensors)
        return cls(source, question.text, answer, question._module, question._places)

    def ask(self, tensors: Sequence[torch.Tensor]) -> int | bool:
        """Returns the answer for the tensors among the inputs of a call."""
        with torch.no_grad():
            answer: int | bool = self._module(*[tensors[i] for i in self._places]).item()
        return answer


def _is_asked(
    node: torch.fx.Node, sources: Mapping[torch.fx.Node, Source], found: Collection[torch.fx.Node]
) -> bool:
    """Whether a node is whole numbers of the inputs, or computed from such by PyTorch alone."""
    value = node.meta.get("val")
    is_whole = isinstance(value, torch.Tensor) and not (
        value.dtype.is_floating_point or value.dtype.is_complex
    )
    if not is_whole or node in sources:
        return is_whole and isinstance(sources[node], UserInput)
    is_own = getattr(node.target, "namespace", "") == "aten"
    is_plain = is_own and not is_mutable(node.target) and not may_draw(node.target)
    return is_plain and bool(node.all_input_nodes) and all(n in found for n in node.all_input_nodes)


def _writes_inputs(
    node: torch.fx.Node, sources: Mapping[torch.fx.Node, Source], tensors: Sequence[torch.Tensor]
) -> bool:
    """Whether the forward has changed one of its inputs so far, or a buffer that is one."""
    held = set(map(memory_id, tensors))
    inputs = {
        memory_of(n)
        for n, source in sources.items()
        if isinstance(source, UserInput) or memory_id(source.tensor) in held
    }
    written = (n for other in node.graph.nodes for n in written_by(other))
    return any(memory_of(n) in inputs for n in written)
