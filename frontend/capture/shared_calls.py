"""Templates: what a traced block instance leaves behind, and how another instance calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch import nn

from ...reuse import torch_pytree
from ...reuse.evidence.evidence import Evidence
from ...reuse.evidence.module_state import TensorPath, follow_tensor_path
from ...reuse.evidence.slots import SlotEvidence
from ...reuse.freeze import IMMUTABLE
from ...reuse.ir.leaf import memory_of
from ...reuse.ir.program import ModelTensor
from ...reuse.ir.types import TensorType
from ...reuse.torch_names import memory_id
from ..marks import recompute_mark
from ..tracing.torch_tracing import WRITES, Tracer, with_history, written_by
from .outside_tensors import OutsideTensors
from .regions import CallSite, OutputLeaf, Region, Template, shared_call


class TemplateMaker:
    """Makes a template of a traced region, and call nodes from templates.

    Its methods run while the model's reads are not watched.
    """

    def __init__(self, tracer: Tracer, tensors: OutsideTensors) -> None:
        self._tracer = tracer
        self._tensors = tensors
        with tracer.untraced():
            self._own = torch.empty((), device="cpu", requires_grad=True)

    def make(
        self,
        region: Region,
        evidence: Evidence,
        names: Sequence[str],
        leaves: Sequence[Any],
        arg_nodes: Mapping[torch.fx.Node, int],
        flat_result: tuple[list[Any], torch_pytree.TreeSpec],
        result_nodes: Sequence[torch.fx.Node | None],
        slots: SlotEvidence | None,
    ) -> tuple[Template | None, str]:
        """Settles a region's inputs and outputs; returns its template, or why it has none."""
        inside = set(region.nodes())
        results, spec = flat_result
        used = [self._tensors.resolve(n) for node in region.nodes() for n in node.all_input_nodes]
        used += [n for n in result_nodes if n is not None]
        # Sizes become literals in the graph: no closure takes one.
        used = [n for n in used if not isinstance(n.meta.get("val"), torch.SymInt)]
        region.inputs = list(dict.fromkeys(n for n in used if n not in inside))
        region.outputs = list(
            dict.fromkeys(n for n in result_nodes if n in inside and n is not None)
        )
        bindings, reason = [], ""
        for node in region.inputs:
            kind, where = self._binding(node, arg_nodes, evidence)
            region.input_names.append(_input_name(kind, where, names, node))
            reason = reason or ("" if kind != "unknown" else where)
            bindings.append((kind, where))
        output_leaves = [
            self._output_leaf(region, r, n) for r, n in zip(results, result_nodes, strict=True)
        ]
        memory = {memory_of(n) for node in region.nodes() for n in written_by(node)}
        written = tuple(i for i, n in enumerate(region.inputs) if memory_of(n) in memory)
        changed = [
            leaves[arg_nodes[n]] if n in arg_nodes else self._own_fake(n)
            for n in (region.inputs[i] for i in written)
        ]
        pairs = zip(written, changed, strict=True)
        grown = tuple(i for i, x in pairs if x is not None and x.requires_grad)
        if any(not _is_plain(leaf.constant) for leaf in output_leaves):
            reason = reason or "it returns an object that is neither a tensor nor plain data"
        changes = (written, grown)
        template = Template(
            region, evidence, tuple(bindings), tuple(output_leaves), spec, *changes, slots
        )
        return (None if reason else template), reason

    def _binding(
        self, node: torch.fx.Node, arg_nodes: Mapping[torch.fx.Node, int], evidence: Evidence
    ) -> tuple[str, Any]:
        if node in arg_nodes:
            return "argument", arg_nodes[node]
        source = self._tensors.sources.get(node)
        if not isinstance(source, ModelTensor):
            return "unknown", "it uses a tensor that is neither an argument nor one of its own"
        path = evidence.tensor_path(source.tensor)
        if path is not None:
            return "own", path
        if evidence.is_fixed(source.tensor) or node in self._tensors.literals:
            return "fixed", node
        return "unknown", "it uses a tensor that was reached in a way lazyinline cannot follow"

    def _own_fake(self, node: torch.fx.Node) -> torch.Tensor | None:
        """Returns the fake of one of the model's tensors, if something has asked for it."""
        source = self._tensors.sources.get(node)
        return (
            self._tensors.fakes.get(id(source.tensor)) if isinstance(source, ModelTensor) else None
        )

    def _output_leaf(self, region: Region, value: Any, node: torch.fx.Node | None) -> OutputLeaf:
        if node is None:
            return OutputLeaf("constant", constant=value)
        if node in region.inputs:
            return OutputLeaf("input", region.inputs.index(node))
        storages = [memory_id(n.meta["val"]) for n in region.inputs]
        with self._tracer.untraced():
            prototype = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            ).requires_grad_(value.requires_grad)
        storage = memory_id(node.meta["val"])
        return OutputLeaf(
            "new",
            region.outputs.index(node),
            type=TensorType.of(value),
            requires_grad=value.requires_grad,
            alias_of=storages.index(storage) if storage in storages else -1,
            storage_offset=value.storage_offset(),
            prototype=prototype,
        )

    def call(
        self, template: Template, module: nn.Module, leaves: Sequence[Any], path: str
    ) -> tuple[Any, list[Any]]:
        """Adds one call node for an instance that agrees with a template.

        Returns:
            Its result, and what it leaves at the places that it writes.
        """
        operands = [self._operand(b, module, leaves) for b in template.bindings]
        template.region.num_calls += 1
        node = self._tracer.call(shared_call, operands)
        node.meta["call"] = CallSite(template.region, path, recompute_mark(module))
        node.meta[WRITES] = [operands[i] for i in template.written]
        history = self._history(operands, leaves)
        for i in template.grown:
            grown = self._operand_tensor(template.bindings[i], module, leaves)
            self._tracer.write(grown, history)
        made: dict[int, torch.Tensor] = {}
        results = []
        for leaf in template.output_leaves:
            if leaf.kind == "constant":
                results.append(leaf.constant)
            elif leaf.kind == "input":
                results.append(self._operand_tensor(template.bindings[leaf.index], module, leaves))
            else:
                if leaf.index not in made:
                    item = self._tracer.item(node, leaf.index)
                    made[leaf.index] = self._new_result(
                        template, leaf, item, module, leaves, history
                    )
                results.append(made[leaf.index])
        num_written = 0 if template.slots is None else len(template.slots.written)
        count = len(results) - num_written
        return torch_pytree.unflatten(results[:count], template.output_spec), results[count:]

    def _history(
        self, operands: Sequence[torch.fx.Node], leaves: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Returns the tensors that results may be functions of, as far as autograd knows."""
        # ``_own`` is for the block's own tensors, which have no fakes unless something else asked.
        known = (*leaves, *map(self._own_fake, operands))
        return [self._own, *(x for x in known if isinstance(x, torch.Tensor) and x.requires_grad)]

    def _operand_tensor(
        self, binding: tuple[str, Any], module: nn.Module, leaves: Sequence[Any]
    ) -> torch.Tensor:
        kind, where = binding
        if kind == "argument":
            tensor = leaves[where]
        elif kind == "own":
            tensor = self._tensors.fake_of(follow_tensor_path(module, where))
        else:
            source = self._tensors.sources[where]
            assert isinstance(source, ModelTensor)
            tensor = self._tensors.fake_of(source.tensor)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def _operand(
        self, binding: tuple[str, Any], module: nn.Module, leaves: Sequence[Any]
    ) -> torch.fx.Node:
        kind, where = binding
        if kind == "argument":
            return self._tensors.node_of(leaves[where])
        if kind == "own":
            return self._tensors.outside_node(follow_tensor_path(module, where))
        assert isinstance(where, torch.fx.Node)
        return where

    def _new_result(
        self,
        template: Template,
        leaf: OutputLeaf,
        node: torch.fx.Node,
        module: nn.Module,
        leaves: Sequence[Any],
        history: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Makes the fake result of a shared call; never an autograd leaf, so it may be changed."""
        assert leaf.type is not None
        assert leaf.prototype is not None
        history = history if leaf.requires_grad else ()
        # A view has to be made by an operator, to share its base's memory; anything else is made
        # without one, in a tenth of the time.
        if leaf.alias_of < 0 and not leaf.type.is_symbolic:
            return self._tracer.track_new(leaf.type, history, node)  # type: ignore[no-any-return]
        shape, stride = leaf.prototype.shape, leaf.prototype.stride()
        with self._tracer.untraced(), torch.set_grad_enabled(leaf.requires_grad):
            if leaf.alias_of >= 0:
                base = self._operand_tensor(template.bindings[leaf.alias_of], module, leaves)
                result = base.as_strided(shape, stride, leaf.storage_offset)
            else:
                result = with_history(leaf.prototype.detach().clone(), history)
        self._tracer.track(result, node)
        return result


def _is_plain(value: Any) -> bool:
    return type(value) in (*IMMUTABLE, torch.SymInt)


def _input_name(kind: str, where: Any, names: Sequence[str], node: torch.fx.Node) -> str:
    if kind == "argument":
        return names[where]
    if kind == "own":
        path: TensorPath = where
        return ".".join(str(p[1] if isinstance(p, tuple) else p) for p in path if p != "")
    return node.name
