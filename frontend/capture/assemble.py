"""From the outer graph to a program: regions and glue become closures, instances become calls.

Glue is what runs between blocks. Consecutive glue becomes one leaf closure; equal glue (and equal
blocks that had to be traced apart) share one closure, by exact comparison of their graphs.

A closure that changes one of its inputs in place works on a copy and returns the new state, which
takes the input's place from there on; a program input that ends up changed is written back.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
from torch import nn

from ...autodiff.inner_gradients import DerivativeMark
from ...reuse import torch_pytree
from ...reuse.evidence.module_state import module_state
from ...reuse.evidence.root_evidence import RootEvidence
from ...reuse.ir import program as ir
from ...reuse.ir.constants import Shared, share_constants
from ...reuse.ir.control import control_leaf
from ...reuse.ir.costs import tensors_of
from ...reuse.ir.leaf import FullKey, cut_leaf, leaf_key, node_type, stamp_of
from ...reuse.ir.operators import mutated_args
from ...reuse.torch_names import memory_id
from ..effects.effects import find_fake
from ..effects.kept import NOTHING_KEPT, Arguments, Kept
from ..tracing.torch_tracing import is_mode_switch
from .blocks import NoBlocks, dissolve
from .recording import Recording
from .regions import (
    DIFFERENTIATED,
    CallSite,
    CapturedModel,
    CrossingError,
    Region,
    SharingDecision,
    regions_inside,
)

ResultTree = tuple[torch_pytree.TreeSpec, bool, Kept]
"""The ``spec``, ``updates`` and ``kept`` of an :class:`OutputTree`."""


@dataclass(frozen=True)
class OutputTree:
    """How the model's result is rebuilt: each leaf is a program output or a constant.

    Attributes:
        leaves: ``("output", index)`` or ``("constant", value)``.
        spec: their structure.
        updates: whether that is ``(result, containers, contents)``: objects among the arguments
            that the forward may have changed, as it left them, and what is left in places.
        kept: these places.
    """

    leaves: tuple[tuple[str, Any], ...]
    spec: torch_pytree.TreeSpec
    updates: bool = False
    kept: Kept = NOTHING_KEPT

    @property
    def names(self) -> list[str]:
        """Names of the leaves: keys of a ``ModelOutput``, else ``output_0``..."""
        names = [name for name, _ in self.named(list(range(len(self.leaves))))]
        if names == [""]:
            return ["output"]
        return [f"output_{name}" if name[:1].isdigit() else name for name in names]

    def named(self, leaves: list[Any]) -> list[tuple[str, Any]]:
        """Returns the leaves with their names."""
        built = torch_pytree.unflatten(leaves, self.spec)
        if not self.updates:
            return torch_pytree.flatten_with_names(built)
        pairs = torch_pytree.flatten_with_names({"0": built[0], "updated": built[1]})
        return [(name.removeprefix("0").removeprefix("."), leaf) for name, leaf in pairs]

    def built(
        self, leaves: list[Any], given: Sequence[Any] = (), call: Arguments = ((), {})
    ) -> Any:
        """Rebuilds the result; brings up to date the containers that the call was given."""
        built = torch_pytree.unflatten(leaves, self.spec, given)
        if not self.updates:
            return built
        for place, content in zip(self.kept.places, built[2], strict=True):
            place.put(call, content)
        returned = self.kept.returned
        return built[0] if returned is None else returned.find(call)


@dataclass(frozen=True)
class _Body:
    """A closure made of a region, and the outer nodes at its boundary."""

    closure: ir.Closure
    inputs: tuple[torch.fx.Node, ...]
    outputs: tuple[torch.fx.Node, ...]
    changed: tuple[int, ...]  # inputs whose new state is returned after the outputs


@dataclass
class _Unit:
    """Holds the outer nodes that become one call: of a region, of a call site, or glue."""

    nodes: list[torch.fx.Node]
    region: Region | None = None
    site: CallSite | None = None

    @property
    def place(self) -> tuple[str, ir.RecomputeMark]:
        """The module path, and how the user wants it recomputed."""
        instance = self.site or self.region
        return (instance.path, instance.recompute) if instance is not None else ("", "")

    def uses(self, assembler: Assembler) -> Iterable[torch.fx.Node]:
        if self.site is not None:
            return self.nodes[0].all_input_nodes
        if self.region is not None:
            return assembler.body(self.region).inputs
        return (n for node in self.nodes for n in node.all_input_nodes)


def captured_model(recording: Recording, results: list[Any], tree: ResultTree) -> CapturedModel:
    """Returns the program of a finished run, and what was decided on the way."""
    recording.caches_asked()
    recording.tensors.resolve_all(recording.root.nodes())
    if recording.sizes is not None:
        recording.sizes.settle(recording.root, recording.tensors.sources)
    _dissolve_idle(recording, results, tree)
    made = assemble(recording.root, results, tree, recording.tensors.sources)
    program, shared = _sharing(recording, *made)
    pairs = [
        (d, region)
        for d, region in zip(recording.decisions, recording.decided, strict=True)
        if d.shared or d.reason or region in shared
    ]
    decisions = [
        d if region not in shared else _with_constants(d, shared[region]) for d, region in pairs
    ]
    met = [m for m in recording.inside.met.values() if _can_be_watched(m)]
    evidence = _root_evidence(recording, program, met)
    return CapturedModel(
        program,
        decisions,
        evidence,
        met,
        recording.readings,
        recording.sizes,
        tuple(recording.modes),
        tuple(recording.questions.values()),
        recording.left_out,
    )


def _can_be_watched(module: nn.Module) -> bool:
    """Whether a module outside the tree has its state in Python, and no trace made it."""
    state = module_state(module)
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    return not is_scripted and "training" in state and find_fake([state]) is None


def _root_evidence(recording: Recording, program: ir.Program, met: list[nn.Module]) -> RootEvidence:
    """Returns the reads of the run, without those that the guard compares itself in each module."""
    attributes = recording.tensors.attributes_read(recording.reads.names())
    for held in (*attributes, *recording.given):
        recording.reads.contents.look_into(held)
    placed = {id(s.tensor) for s in program.sources if isinstance(s, ir.ModelTensor)}
    evidence = RootEvidence(recording.reads, {*recording.paths, *map(id, met)}, placed)
    recording.refuse_unreadable()
    return evidence


def _sharing(
    recording: Recording, program: ir.Program, closures: Mapping[Region, ir.Closure]
) -> tuple[ir.Program, Mapping[Region | None, Shared]]:
    """Shares what differs in constants alone; returns what each region's closure became, too."""
    if isinstance(recording.blocks, NoBlocks):
        return program, {}
    if recording.sizes is not None:
        return program, {region: Shared(closure) for region, closure in closures.items()}
    program, found = share_constants(program)
    return program, {region: found[closure] for region, closure in closures.items()}


def _dissolve_idle(recording: Recording, results: list[Any], tree: ResultTree) -> None:
    """Dissolves the blocks that nobody marked and whose closure nothing else calls."""
    root, blocks = recording.root, recording.blocks
    idle = {r for r in regions_inside(root) if r.num_calls == 1 and not blocks.keeps(r)}
    names = Counter(region.name for region in regions_inside(root))
    # A region that nothing else calls may still share its closure by constants: then it stays.
    if any(names[r.name] > 1 for r in idle):
        made = assemble(recording.root, results, tree, recording.tensors.sources)
        _, shared = _sharing(recording, *made)
        uses = Counter(s.closure for s in shared.values())
        idle -= {r for r in idle if uses[shared[r].closure] > 1}
    dissolve(root, idle)


def _with_constants(decision: SharingDecision, shared: Shared) -> SharingDecision:
    """Adds to a decision that the closure is shared with others, by constants that it takes."""
    if shared.num_members < 2 or not shared.numbers:
        return decision
    numbers = ", ".join(repr(n.value) for n in shared.numbers)
    noun = "constant" if len(shared.numbers) == 1 else "constants"
    be = "an input" if len(shared.numbers) == 1 else "inputs"
    text = f"shares @{shared.closure.name} with {noun} {numbers} as {be}"
    return replace(decision, shares=text)


def assemble(
    root: Region,
    results: Sequence[Any],
    tree: ResultTree,
    sources: Mapping[torch.fx.Node, ir.Source],
) -> tuple[ir.Program, Mapping[Region, ir.Closure]]:
    """Builds the program of a captured model; returns the closure of each traced region too.

    Args:
        root: the root region.
        results: the model's flat results: nodes for tensors, anything else as it is.
        tree: the structure of the results, and whether containers follow them.
        sources: where each input node's tensor comes from.

    Raises:
        CrossingError: if a tensor is changed in place in a way that crosses blocks.
    """
    outputs = list(dict.fromkeys(r for r in results if isinstance(r, torch.fx.Node)))
    assembler = Assembler({root: outputs, **{r: r.outputs for r in regions_inside(root)}})
    used = {n for node in root.nodes() for n in node.all_input_nodes} | set(outputs)
    inputs = [n for n in sources if n in used or n.op == "placeholder"]
    env = {n: ir.Value(node_type(n), sources[n].name) for n in inputs}
    start = dict(env)
    calls = assembler.build(root.items, env, outputs, root.path)
    # A new value in the place of an input: it is written back into the tensor after a run.
    changed = [n for n in inputs if env[n] is not start[n]]
    values = [env[n] for n in (*outputs, *changed)]
    leaves = tuple(
        ("output", outputs.index(r)) if isinstance(r, torch.fx.Node) else ("constant", r)
        for r in results
    )
    program = ir.Program(
        tuple(start[n] for n in inputs),
        tuple(calls),
        tuple(values),
        tuple(sources[n] for n in inputs),
        tuple((len(outputs) + i, inputs.index(n)) for i, n in enumerate(changed)),
        OutputTree(leaves, *tree),
    )
    return program, assembler.closures()


class Assembler:
    """Builds bodies of regions, each region once, and shares equal leaves."""

    def __init__(self, returned: Mapping[Region, Sequence[torch.fx.Node]]) -> None:
        self._returned = returned
        self._bodies: dict[Region, _Body] = {}
        self._leaves: dict[Any, ir.Leaf] = {}

    def closures(self) -> dict[Region, ir.Closure]:
        """Returns the closure of each region that has been built."""
        return {region: body.closure for region, body in self._bodies.items()}

    def body(self, region: Region) -> _Body:
        """Returns the closure of a region, and its boundary."""
        if region not in self._bodies:
            self._bodies[region] = self._make_body(region)
        return self._bodies[region]

    def _make_body(self, region: Region) -> _Body:
        nodes = region.nodes()
        within = {region, *regions_inside(region)}
        # What the model or another block returns leaves this one, although its forward does not.
        further = {n for r, found in self._returned.items() if r not in within for n in found}
        outputs = tuple(region.outputs) + _leaked(region, nodes, further)
        inputs, names = _region_inputs(region, nodes)
        operators = [n for n in nodes if not is_mode_switch(n)]
        if not any(map(_stands_apart, region.items)) and len(_devices(operators)) <= 1:
            changed = _changed_inputs(operators, inputs, region.name)
            leaf = cut_leaf(region.name, operators, inputs, outputs, frozenset(changed))
            leaf = ir.Leaf(leaf.name, leaf.module, leaf.input_types, leaf.output_types, names)
            return _Body(self._shared(leaf), tuple(inputs), outputs, changed)
        env = {n: ir.Value(node_type(n), name) for n, name in zip(inputs, names, strict=True)}
        start = dict(env)
        calls = self.build(region.items, env, outputs, region.path)
        changed = tuple(i for i, n in enumerate(inputs) if env[n] is not start[n])
        results = [env[n] for n in outputs] + [env[inputs[i]] for i in changed]
        program = ir.Program(tuple(start[n] for n in inputs), tuple(calls), tuple(results))
        return _Body(ir.Composite(region.name, program, names), tuple(inputs), outputs, changed)

    def _shared(self, leaf: ir.Leaf) -> ir.Leaf:
        return self._leaves.setdefault(FullKey(leaf_key(leaf)), leaf)

    def build(
        self,
        items: Sequence[torch.fx.Node | Region],
        env: dict[torch.fx.Node, ir.Value],
        outputs: Sequence[torch.fx.Node],
        path: str,
    ) -> list[ir.Call]:
        """Turns the items of one region into calls; ``env`` gains a value per result node."""
        units = _units(items)
        last_use: dict[torch.fx.Node, int] = {}
        for index, unit in enumerate(units):
            last_use.update(dict.fromkeys(unit.uses(self), index))
        last_use.update(dict.fromkeys(outputs, len(units)))
        last_use.update(dict.fromkeys(env, len(units)))  # an input's last state may be written back
        calls = []
        for index, unit in enumerate(units):
            body, results = self._unit_body(unit, index, last_use)
            if body is None:
                continue
            place, mark = unit.place
            operands: Sequence[Any] = unit.nodes[0].args if unit.site is not None else body.inputs
            types = body.closure.output_types
            values = [
                ir.Value(type_, node.name)
                for type_, node in zip(
                    types, (*results, *(operands[i] for i in body.changed)), strict=True
                )
            ]
            relative = place.removeprefix(path + ".") if path else place
            arguments = tuple(env[n] for n in operands)
            calls.append(ir.Call(body.closure, arguments, tuple(values), relative, mark))
            env.update(zip(results, values, strict=False))
            for position, value in zip(body.changed, values[len(results) :], strict=True):
                _check_aliases(operands[position], last_use, index, body.closure.name)
                env[operands[position]] = value
        return calls

    def _unit_body(
        self, unit: _Unit, index: int, last_use: Mapping[torch.fx.Node, int]
    ) -> tuple[_Body | None, Sequence[torch.fx.Node]]:
        if unit.site is not None:
            body = self.body(unit.site.region)
            return body, _site_results(unit, body)
        if unit.region is not None:
            body = self.body(unit.region)
            return body, body.outputs
        if isinstance(unit.nodes[0].target, ir.Control):
            return _control_body(unit.nodes)
        inside = set(unit.nodes)
        results = [n for n in unit.nodes if last_use.get(n, -1) > index]
        inputs = list(
            dict.fromkeys(n for node in unit.nodes for n in node.all_input_nodes if n not in inside)
        )
        changed = _changed_inputs(unit.nodes, inputs, "the model")
        if not results and not changed:
            return None, ()
        leaf = cut_leaf("glue", unit.nodes, inputs, results, frozenset(changed))
        return _Body(self._shared(leaf), tuple(inputs), tuple(results), changed), results


def _control_body(nodes: Sequence[torch.fx.Node]) -> tuple[_Body, Sequence[torch.fx.Node]]:
    """Returns the leaf of an operator, and its results; ``nodes`` are it and their picks."""
    node, picked = nodes[0], nodes[1:]
    inputs: Any = node.args  # each an operand of its own, though two may be one node
    control = node.target
    assert isinstance(control, ir.Control)
    types = [list(map(node_type, some)) for some in (inputs, picked)]
    leaf = control_leaf(control.word, control, *types, [n.name for n in inputs], stamp_of(node))
    return _Body(leaf, tuple(inputs), tuple(picked), ()), picked


def _stands_apart(item: torch.fx.Node | Region) -> bool:
    """Whether an item is a call of its own, or will be."""
    return isinstance(item, Region) or "call" in item.meta or isinstance(item.target, _ALONE)


_ALONE = (DerivativeMark, ir.Control)


def _units(items: Sequence[torch.fx.Node | Region]) -> list[_Unit]:
    """Groups items: a region or a call alone (with the picks of its results), glue together."""
    units: list[_Unit] = []
    calls: dict[torch.fx.Node, _Unit] = {}
    alone: dict[torch.fx.Node, _Unit] = {}
    is_open = False  # whether the last unit is glue that goes on
    devices: set[torch.device] = set()  # that it is on
    for item in items:
        if isinstance(item, Region):
            units.append(_Unit([], region=item))
        elif "call" in item.meta:
            calls[item] = _Unit([item], site=item.meta["call"])
            units.append(calls[item])
        elif item.target is operator.getitem and item.args[0] in calls:
            calls[item.args[0]].nodes.append(item)  # type: ignore[index]
        elif item.target is operator.getitem and item.args[0] in alone:
            alone[item.args[0]].nodes.append(item)  # type: ignore[index]
        elif isinstance(item.target, _ALONE):
            # Glue ends where a gradient is taken: the program is cut there. So it does at control
            # flow, which is a call.
            alone[item] = _Unit([item])
            units.append(alone[item])
            is_open = False
        elif not is_mode_switch(item):
            # Kernels are of one device, so glue is, and a copy from one to another is a call.
            own = _devices([item])
            is_open = is_open and len(own) <= 1 and (not own or own == devices)
            devices = own or devices
            if not is_open or units[-1].region is not None or units[-1].site is not None:
                units.append(_Unit([]))
            units[-1].nodes.append(item)
            is_open = not item.meta.get(DIFFERENTIATED, False)
    return units


def _devices(nodes: Iterable[torch.fx.Node]) -> set[torch.device]:
    """Returns the devices of tensors that operators take and make."""
    both = {n: None for node in nodes for n in (node, *node.all_input_nodes)}
    return {tensor.device for node in both for tensor in tensors_of(node)}


def _site_results(unit: _Unit, body: _Body) -> list[torch.fx.Node]:
    """Returns the node that represents each result of a call, in the closure's order."""
    picked = {int(n.args[1]): n for n in unit.nodes[1:]}  # type: ignore[arg-type]
    # The nodes of the traced region take the place of results that this instance does not use.
    return [picked.get(i, node) for i, node in enumerate(body.outputs)]


def _region_inputs(
    region: Region, nodes: Sequence[torch.fx.Node]
) -> tuple[list[torch.fx.Node], tuple[str, ...]]:
    inside = set(nodes)
    used = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    named = dict(zip(region.inputs, region.input_names, strict=True))
    # All instances pass the same operands, whether the traced one had a use for each or not.
    order = [n for n in region.inputs if n in used or region.num_calls > 1]
    order += [n for n in used if n not in named]
    return order, tuple(named.get(n, n.name) for n in order)


def _leaked(
    region: Region, nodes: Sequence[torch.fx.Node], returned: set[torch.fx.Node]
) -> tuple[torch.fx.Node, ...]:
    """Returns results that code outside the block uses or returns, though the block did not."""
    inside, known = set(nodes), set(region.outputs)
    leaked = [
        n
        for n in nodes
        if n not in known and (n in returned or any(u not in inside for u in n.users))
    ]
    if leaked and region.num_calls > 1:
        raise CrossingError(
            f"{region.name} hands a tensor to code outside it other than by returning it "
            f"({stamp_of(leaked[0]).source}). Return it from forward."
        )
    return tuple(leaked)


def _storage(node: torch.fx.Node) -> int | None:
    value = node.meta.get("val")
    return memory_id(value) if isinstance(value, torch.Tensor) else None


def _changed_inputs(
    nodes: Sequence[torch.fx.Node], inputs: Sequence[torch.fx.Node], name: str
) -> tuple[int, ...]:
    """Returns the positions of the inputs whose memory one of the nodes changes."""
    # By memory, not by node: a change through a view changes the input as well.
    changed_memory: dict[int | None, torch.fx.Node] = {}
    for node in nodes:
        for operand in mutated_args(node):
            changed_memory[_storage(operand)] = node
    if not changed_memory:
        return ()
    changed = tuple(i for i, n in enumerate(inputs) if _storage(n) in changed_memory)
    # Written back by copy, so each changed element must have one place and one name.
    repeated = any(_repeats_itself(inputs[i].meta["val"]) for i in changed)
    if repeated or len({_storage(inputs[i]) for i in changed}) < len(changed):
        node = changed_memory[_storage(inputs[changed[0]])]
        raise CrossingError(_alias_text(name, stamp_of(node).source))
    return changed


def _repeats_itself(tensor: torch.Tensor) -> bool:
    """Whether elements share memory (``expand``), so that to write one is to write others."""
    return any(n != 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _check_aliases(
    changed: torch.fx.Node, last_use: Mapping[torch.fx.Node, int], index: int, name: str
) -> None:
    memory = _storage(changed)
    for node, use in last_use.items():
        if use > index and node is not changed and _storage(node) == memory:
            raise CrossingError(_alias_text(name, stamp_of(node).source))


def _alias_text(name: str, source: str) -> str:
    at = f" at {source}" if source else ""
    return (
        f"{name} changes a tensor in place{at} that is also seen through a view elsewhere in the "
        "model. Use the out-of-place operator there, or clone the tensor first."
    )
