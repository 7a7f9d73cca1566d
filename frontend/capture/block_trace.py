"""One instance of a block traced as a region, and whether others can be calls on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...reuse import torch_pytree
from ...reuse.evidence.evidence import Evidence
from ...reuse.evidence.module_state import Places, has_hooks, module_paths, walk_modules
from ...reuse.evidence.slots import SlotEvidence, name_of
from .init_key import InitKey
from .recording import Recording
from .regions import Region, Template
from .shared_calls import TemplateMaker
from .signatures import CallKey, freeze_arguments


@dataclass(frozen=True, eq=False)
class BlockCall:
    """One call of a block: by which module, with what, and what a closure must fit.

    Attributes:
        args: as they were passed, with fakes in place of tensors.
        arguments: the same by name, defaults applied.
        leaves: the same, flat, but for objects whose parts are watched.
        spec: their structure.
        places: the block's tree of modules.
        init_key: what proposes which closures it may share.
    """

    module: nn.Module
    args: Any
    kwargs: Any
    arguments: dict[str, Any]
    leaves: Sequence[Any]
    spec: torch_pytree.TreeSpec
    places: Places
    key: CallKey
    init_key: InitKey

    @property
    def names(self) -> list[str]:
        """Names of the flat arguments."""
        arguments = torch_pytree.outer_names(self.arguments)
        is_whole = len(arguments) == len(self.leaves)
        pairs = torch_pytree.flatten_with_names(self.arguments)
        return arguments if is_whole else [name for name, _ in pairs]


def trace_block(
    recording: Recording,
    templating: TemplateMaker,
    region: Region,
    call: BlockCall,
    proceed: Callable[..., Any],
) -> tuple[Template | None, str, Any]:
    """Runs a block's forward as a region.

    Returns:
        What other instances can call, or None and why they cannot; and the block's result.
    """
    tensors, slots = recording.tensors, region.reads.slots
    with recording.bookkeeping():
        before = freeze_arguments(call.leaves, call.spec)
        arg_tensors = [(i, x) for i, x in enumerate(call.leaves) if isinstance(x, torch.Tensor)]
        arg_nodes = {tensors.node_of(x): i for i, x in reversed(arg_tensors)}
        # An operator that returns its operand takes over its name: for who comes after the block,
        # the tensor is what it was before.
        given = [x for _, x in arg_tensors]
        inside = [] if slots is None else slots.tensors_in_holders()
        known = [(x, tensors.node_of(x)) for x in (*given, *inside, *tensors.fakes.values())]
    with recording.inside_block(region):
        result = proceed(call.module, *call.args, **call.kwargs)
    with recording.bookkeeping():
        evidence = Evidence(call.module, region.reads)
        results, spec = torch_pytree.flatten(result)
        found, names, leaves = None, call.names, list(call.leaves)
        if slots is not None:
            results += slots.results()
            found = SlotEvidence(slots, module_paths(call.places), call.leaves, tensors.is_own)
            for way, (tensor, _) in slots.tensors.items():
                arg_nodes.setdefault(tensors.node_of(tensor), len(names))
                names.append(name_of(way, names))
                leaves.append(tensor)
        nodes = [tensors.node_of(r) if isinstance(r, torch.Tensor) else None for r in results]
        template, reason = templating.make(
            region, evidence, names, leaves, arg_nodes, (results, spec), nodes, found
        )
        tensors.restore(known)
        hindrance = _hindrance(recording, call, evidence, before, (results, spec), found)
    if hindrance:
        template, reason = None, hindrance
    if template is not None:
        recording.note_nested(call.module, evidence)
    return template, reason, result


def _hindrance(
    recording: Recording,
    call: BlockCall,
    evidence: Evidence,
    before: Any,
    results: tuple[list[Any], torch_pytree.TreeSpec],
    slots: SlotEvidence | None,
) -> str:
    """Says why a call on a closure could not do what this block's forward did."""
    flat, tree = results
    inside = () if slots is None else slots.tensors
    if recording.tensors.have_attributes((*call.leaves, *inside, *flat)):
        return "a tensor that it is given or returns has attributes"
    if isinstance(tree, torch_pytree.Nested):
        return "it returns an object that holds tensors"
    after = freeze_arguments(*recording.objects.flatten(call.arguments))
    if evidence.side_effect or before != after:
        return evidence.side_effect or "its forward changes an argument"
    if slots is not None and slots.unseen:
        return slots.unseen
    if any(has_hooks(inner, "forward") for _, inner in walk_modules(call.module)):
        return "it has forward hooks, which may keep what they see"
    return ""
