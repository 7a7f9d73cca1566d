"""Replaces the call of a block by a call node if its module agrees with an earlier one's evidence.

The first instance of a block is traced as a region. If other instances can call its closure, a
template is kept, from which their call nodes are made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import nn

from ...reuse import torch_pytree
from ...reuse.evidence.evidence import Evidence
from ...reuse.evidence.module_state import (
    Places,
    TensorPath,
    follow_tensor_path,
    has_hooks,
    module_paths,
    module_state,
    walk_modules,
)
from ...reuse.evidence.slots import FoundSlots, SlotEvidence, name_of, reveal
from ...reuse.freeze import IMMUTABLE
from ...reuse.ir.leaf import memory_of
from ...reuse.ir.program import ModelTensor
from ...reuse.ir.torch_symbols import is_size
from ...reuse.ir.types import TensorType
from ...reuse.torch_names import memory_id
from ..marks import only_copies, recompute_mark
from ..refusals import refuse_nested, refuse_recurrent
from ..tracing.torch_state import modes_now
from ..tracing.torch_tracing import WRITES, Tracer, is_fake, written_by
from . import regions
from .blocks import dissolve
from .outside_tensors import OutsideTensors
from .recording import Recording

_PLAIN = frozenset({*IMMUTABLE, torch.SymInt})


class TemplateMaker:
    """Makes templates from traced regions, and call nodes from templates.

    Its methods run inside ``Recording.bookkeeping``, where reads are not recorded as the model's.
    """

    def __init__(self, tracer: Tracer, tensors: OutsideTensors) -> None:
        self._tracer = tracer
        self._tensors = tensors
        with tracer.untraced():
            self._own = torch.empty((), device="cpu", requires_grad=True)

    def make(
        self,
        region: regions.Region,
        evidence: Evidence,
        names: Sequence[str],
        leaves: Sequence[Any],
        arg_nodes: Mapping[torch.fx.Node, int],
        flat_result: tuple[list[Any], torch_pytree.TreeSpec],
        result_nodes: Sequence[torch.fx.Node | None],
        slots: SlotEvidence | None,
    ) -> tuple[regions.Template | None, str]:
        """Sets a region's inputs and outputs; returns its template, or why it has none."""
        inside = set(region.nodes())
        results, spec = flat_result
        # A tensor that only size nodes use is no input: sizes are computed from symbols.
        used = [
            found
            for node in region.nodes()
            for found in map(self._tensors.resolve, node.all_input_nodes)
            if found in arg_nodes or not is_size(node)
        ]
        used += [n for n in result_nodes if n is not None]
        # Symbolic sizes become literals in the graph, so they are no inputs of closures either.
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
        if any(type(leaf.constant) not in _PLAIN for leaf in output_leaves):
            reason = reason or "it returns an object that is neither a tensor nor plain data"
        given = {memory_id(n.meta["val"]) for n in region.inputs}
        if not given.isdisjoint(memory_id(n.meta["val"]) for n in region.outputs):
            reason = reason or "it returns a view of what it is given, or of a tensor of its own"
        changes = (written, grown)
        template = regions.Template(
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
        path = evidence.tensor_paths.get(id(source.tensor))
        if path is not None:
            return "own", path
        if evidence.is_fixed(source.tensor) or node in self._tensors.literals:
            return "fixed", node
        return "unknown", "it uses a tensor that was reached in a way lazyinline cannot follow"

    def _own_fake(self, node: torch.fx.Node) -> torch.Tensor | None:
        """Returns the fake of a model tensor's node, if one was made."""
        source = self._tensors.sources.get(node)
        return (
            self._tensors.fakes.get(id(source.tensor)) if isinstance(source, ModelTensor) else None
        )

    def _output_leaf(
        self, region: regions.Region, value: Any, node: torch.fx.Node | None
    ) -> regions.OutputLeaf:
        if node is None:
            return regions.OutputLeaf("constant", constant=value)
        if node in region.inputs:
            return regions.OutputLeaf("input", region.inputs.index(node))
        type_, place = TensorType.of(value), region.outputs.index(node)
        return regions.OutputLeaf("new", place, type=type_, requires_grad=value.requires_grad)

    def call(
        self, template: regions.Template, module: nn.Module, leaves: Sequence[Any], path: str
    ) -> tuple[Any, list[Any]]:
        """Adds a call node for an instance; returns its result, and values for slots it writes."""
        operands = [self._operand(b, module, leaves) for b in template.bindings]
        template.region.num_calls += 1
        node = self._tracer.call(regions.shared_call, operands)
        node.meta["call"] = regions.CallSite(template.region, path, recompute_mark(module))
        node.meta[WRITES] = [operands[i] for i in template.written]
        # ``_own`` represents the block's own tensors, most of which have no fakes.
        known = (*leaves, *map(self._own_fake, operands))
        moving = (x for x in known if isinstance(x, torch.Tensor) and x.requires_grad)
        history = [self._own, *moving]  # what requires grad and results may depend on
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
                    item, flows = self._tracer.item(node, leaf.index), leaf.requires_grad
                    assert leaf.type is not None
                    # Not an autograd leaf: it may be changed in-place.
                    made[leaf.index] = self._tracer.track_new(
                        leaf.type, history if flows else (), item
                    )
                results.append(made[leaf.index])
        num_written = 0 if template.slots is None else len(template.slots.written)
        count = len(results) - num_written
        return torch_pytree.unflatten(results[:count], template.output_spec), results[count:]

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


def _input_name(kind: str, where: Any, names: Sequence[str], node: torch.fx.Node) -> str:
    if kind == "argument":
        return names[where]
    if kind == "own":
        path: TensorPath = where
        return ".".join(str(p[1] if isinstance(p, tuple) else p) for p in path if p != "")
    return node.name


@dataclass(frozen=True, eq=False)
class BlockCall:
    """One call of a block, with fakes in place of tensors.

    ``arguments`` has all by name, defaults applied, and ``leaves`` the same flat: objects whose
    parts are watched are leaves. Calls with equal keys may share, if the evidence agrees;
    ``init_key`` orders the candidates (see :class:`.regions.InitKey`).
    """

    module: nn.Module
    args: Any
    kwargs: Any
    arguments: dict[str, Any]
    leaves: Sequence[Any]
    spec: torch_pytree.TreeSpec
    places: Places
    key: regions.CallKey
    init_key: regions.InitKey

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
    region: regions.Region,
    call: BlockCall,
    proceed: Callable[..., Any],
) -> tuple[regions.Template | None, str, Any]:
    """Runs a block's forward as a region; returns its template, or why it has none, and result."""
    tensors, slots = recording.tensors, region.reads.slots
    with recording.bookkeeping():
        before = regions.freeze_arguments(call.leaves, call.spec)
        arg_tensors = [(i, x) for i, x in enumerate(call.leaves) if isinstance(x, torch.Tensor)]
        arg_nodes = {tensors.node_of(x): i for i, x in reversed(arg_tensors)}
        # An operator that returns its operand makes the tensor's node a node of the block. Code
        # after the block must see the old node: these are put back below.
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
        hindrance = _why_unshared(recording, call, evidence, before, (results, spec), found)
        parts = set(map(id, torch_pytree.changeable_parts(call.arguments)))
        if any(id(part) in parts for part in torch_pytree.changeable_parts(result)):
            region.alone = region.alone or "it returns a list or dictionary that it is given"
    hindrance = hindrance or region.alone
    if hindrance:
        template, reason = None, hindrance
    if template is not None:
        recording.note_nested(call.module, evidence)
    return template, reason, result


def _why_unshared(
    recording: Recording,
    call: BlockCall,
    evidence: Evidence,
    before: Any,
    results: tuple[list[Any], torch_pytree.TreeSpec],
    slots: SlotEvidence | None,
) -> str:
    """Returns why a call of the closure could not replace this forward; empty if it can."""
    flat, tree = results
    found = () if slots is None else slots.tensors
    if recording.tensors.have_attributes((*call.leaves, *found, *flat)):
        return "a tensor that it is given or returns has attributes"
    if isinstance(tree, torch_pytree.Nested):
        return "it returns an object that holds tensors"
    after = regions.freeze_arguments(*recording.objects.flatten(call.arguments))
    if evidence.side_effect or before != after:
        return evidence.side_effect or "its forward changes an argument"
    if slots is not None and slots.unseen:
        return slots.unseen
    inside = [inner for _, inner in walk_modules(call.module)]
    if any(has_hooks(inner, "forward") and not only_copies(inner) for inner in inside):
        return "it has forward hooks, which may keep what they see"
    return ""


_MAX_CLOSURES_PER_BLOCK = 64
_OTHER_CALL = "it is called in another way than earlier instances"


class BlockCalls:
    """Runs the module calls of one recording, or replaces them by call nodes."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._blocks = recording.blocks
        self._init_keys = regions.InitKeys()
        self._templating = TemplateMaker(recording.tracer, recording.tensors)
        self._templates: dict[regions.CallKey, list[regions.Template]] = {}
        self._signatures: dict[type, inspect.Signature | None] = {}
        self._traced: dict[type, tuple[regions.CallKey, str]] = {}

    def call(self, module: nn.Module, args: Any, kwargs: Any, proceed: Callable[..., Any]) -> Any:
        """Runs a module's forward, or replaces it by a call node if evidence allows it."""
        recording = self._recording
        if recording.quiet:
            return proceed(module, *args, **kwargs)
        if recording.effects.policy == "refuse":
            refuse_recurrent(module)
            with recording.bookkeeping():
                refuse_nested(module, args, kwargs)
        if module is recording.model:
            return proceed(module, *args, **kwargs)
        # A body of control flow is one closure, without blocks inside.
        if recording.num_apart or not self._blocks.wants(module, recording.current):
            return self._run_inline(module, args, kwargs, proceed)
        # Arguments are compared by value, so a proxy of an index is replaced by its number.
        args, kwargs = tuple(map(reveal, args)), {name: reveal(x) for name, x in kwargs.items()}
        with recording.bookkeeping():
            call = self._described(module, args, kwargs)
            # A closure takes tensors without the Python attributes that they may have.
            plain = not recording.tensors.have_attributes(call.leaves)
            known = self._templates.setdefault(call.key, []) if plain else []
            template, reason, compared, found = self._agreeing(call, known)
            if template is not None:
                result, written = self._call_shared(template, call, found)
                recording.decide(module, call.init_key, None, compared=compared)
            elif reason:
                self._blocks.differs(module)
        if template is not None:
            if template.slots is not None and found is not None:
                recording.note_slots(template.slots, found, written)
            return result
        region = self._new_region(call)
        made, why, result = trace_block(recording, self._templating, region, call, proceed)
        if not self._blocks.pays(region):  # too small for a closure: its nodes join those around
            dissolve(recording.current, {region})
            return result
        if made is not None and len(known) < _MAX_CLOSURES_PER_BLOCK:
            known.append(made)
        self._traced[type(module)] = (call.key, region.path)
        recording.decide(module, call.init_key, region, reason=why or reason, compared=compared)
        return result

    def _run_inline(
        self, module: nn.Module, args: Any, kwargs: Any, proceed: Callable[..., Any]
    ) -> Any:
        """Runs a module that is not a block; one marked for recompute becomes a region."""
        recording = self._recording
        before, mark = recording.num_nodes, recompute_mark(module)
        part = recording.inside_part(type(module).__name__, recording.path(module), mark)
        with part if mark else nullcontext():
            result = proceed(module, *args, **kwargs)
        self._blocks.ran(module, recording.num_nodes - before)
        return result

    # ---- how calls are compared ----------------------------------------------------------

    def _described(self, module: nn.Module, args: Any, kwargs: Any) -> BlockCall:
        arguments = self._bind(module, args, kwargs)
        flatten = self._recording.objects.flatten
        leaves, spec = flatten(arguments)
        if any(isinstance(x, torch.Tensor) and not is_fake(x) for x in leaves):
            given, outer = torch_pytree.flatten_outer((args, kwargs))  # a cache object stays itself
            fake_of = self._recording.fake_of
            given = [fake_of(x) if isinstance(x, torch.Tensor) else x for x in given]
            args, kwargs = torch_pytree.unflatten(given, outer)
            arguments = self._bind(module, args, kwargs)
            leaves, spec = flatten(arguments)
        places = walk_modules(module)
        signature = regions.CallSignature(module, leaves, self._recording.tensors)
        marks = ((path, recompute_mark(inner)) for path, inner in places[1:])
        marked = tuple((path, mark) for path, mark in marks if mark)
        key = (type(module), spec, signature, modes_now(), marked)
        init_key = self._init_keys.key(module)
        return BlockCall(module, args, kwargs, arguments, leaves, spec, places, key, init_key)

    def _bind(self, module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
        if "forward" in module_state(module):
            return regions.bind_arguments(regions.forward_signature(module), args, kwargs)
        if type(module) not in self._signatures:
            self._signatures[type(module)] = regions.forward_signature(module)
        return regions.bind_arguments(self._signatures[type(module)], args, kwargs)

    # ---- shared, or traced ---------------------------------------------------------------

    def _agreeing(
        self, call: BlockCall, known: Sequence[regions.Template]
    ) -> tuple[regions.Template | None, str, str, FoundSlots | None]:
        """Finds a template that a call can share, or why there is none.

        Also returns the path of the instance that the call was compared with, and the objects in
        its arguments that the template reads or writes.
        """
        reason, compared = "", ""
        # Without a template of this key, the reason is how the key differs from the newest one.
        earlier = self._traced.get(type(call.module))
        if not known and earlier is not None:
            compared, reason = earlier[1], _other_call(call.key, earlier[0], call.names)
        # Those built with equal arguments first; the sort is stable, so among these the newest.
        differing = call.init_key.differing
        likely = sorted(reversed(known), key=lambda one: bool(differing(one.region.init_key)))
        for template in likely:
            compared = template.region.path
            reason = template.evidence.mismatch(call.places)
            found: FoundSlots | str | None = None
            if not reason and template.slots is not None:
                found = template.slots.found_by(call.leaves, dict(call.places))
            if isinstance(found, str):
                reason = found
            elif not reason:
                return template, "", compared, found
        return None, reason, compared, None

    def _call_shared(
        self, template: regions.Template, call: BlockCall, found: FoundSlots | None
    ) -> tuple[Any, list[Any]]:
        """Makes the call node of an instance that agrees with a template."""
        recording, module = self._recording, call.module
        leaves = call.leaves if found is None else [*call.leaves, *found.tensors]
        result = self._templating.call(template, module, leaves, recording.path(module))
        recording.note_nested(module, template.evidence)
        recording.reads.like(template.evidence.plain_reads, dict(call.places))
        return result

    def _new_region(self, call: BlockCall) -> regions.Region:
        recording, module = self._recording, call.module
        # The region's own reads are its evidence; the region around absorbs them at its end.
        reads = recording.reads.of_block()
        with recording.bookkeeping():
            reads.slots = recording.objects.reads_of(call.leaves)
        return regions.Region(
            module,
            recording.path(module),
            type(module).__name__,
            recording.current,
            reads=reads,
            recompute=recompute_mark(module),
            init_key=call.init_key,
        )


def _other_call(key: regions.CallKey, earlier: regions.CallKey, names: Sequence[str]) -> str:
    """Says how a call differs from an earlier one of the class."""
    detail = key[2].difference(earlier[2], names)
    if key[1] != earlier[1]:
        detail = "its arguments are nested in another way"
    elif not detail and key[3] != earlier[3]:
        detail = "a mode such as grad mode or autocast is another"
    elif not detail and key[4] != earlier[4]:
        detail = "its sub-modules are marked for recompute in another way"
    return f"{_OTHER_CALL}: {detail}" if detail else _OTHER_CALL
