"""One instance of a block traced as a region, and whether others can be calls on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...reuse import torch_pytree
from ...reuse.evidence.evidence import Evidence
from ...reuse.evidence.module_state import Places, has_hooks, walk_modules
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
        leaves: the same, flat.
        places: the block's tree of modules.
        init_key: what proposes which closures it may share.
    """

    module: nn.Module
    args: Any
    kwargs: Any
    arguments: dict[str, Any]
    leaves: Sequence[Any]
    places: Places
    key: CallKey
    init_key: InitKey


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
    tensors = recording.tensors
    with recording.bookkeeping():
        before = freeze_arguments(call.arguments)
        arg_tensors = [(i, x) for i, x in enumerate(call.leaves) if isinstance(x, torch.Tensor)]
        arg_nodes = {tensors.node_of(x): i for i, x in reversed(arg_tensors)}
        # An operator that returns its operand takes over its name: for who comes after the block,
        # the tensor is what it was before.
        given = [x for _, x in arg_tensors]
        known = [(x, tensors.node_of(x)) for x in (*given, *tensors.fakes.values())]
    with recording.inside_block(region):
        result = proceed(call.module, *call.args, **call.kwargs)
    with recording.bookkeeping():
        evidence = Evidence(call.module, region.reads)
        results = torch_pytree.flatten(result)
        nodes = [tensors.node_of(r) if isinstance(r, torch.Tensor) else None for r in results[0]]
        template, reason = templating.make(
            region, evidence, call.arguments, arg_nodes, results, nodes
        )
        tensors.restore(known)
        hindrance = _hindrance(recording, call, evidence, before, results)
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
) -> str:
    """Says why a call on a closure could not do what this block's forward did."""
    flat, tree = results
    if recording.tensors.have_attributes((*call.leaves, *flat)):
        return "a tensor that it is given or returns has attributes"
    if isinstance(tree, torch_pytree.Nested):
        return "it returns an object that holds tensors"
    if evidence.side_effect or before != freeze_arguments(call.arguments):
        return evidence.side_effect or "its forward changes an argument"
    if any(has_hooks(inner, "forward") for _, inner in walk_modules(call.module)):
        return "it has forward hooks, which may keep what they see"
    return ""
