"""From the outer graph to a program: regions and glue become closures, instances become calls.

Glue is the code between blocks. Consecutive glue becomes one leaf closure. Leaves with equal graphs
(glue, or blocks that were traced separately) share one closure.

In-place changes are functionalized: a closure works on a copy of an input that it changes and
returns the new value, which later calls use. A changed program input is written back at the end.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.fx import Node

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
from ..effects.effects import NOTHING_KEPT, Arguments, Kept, find_fake
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
    """How to rebuild the model's result: each leaf is a program output or a constant."""

    leaves: tuple[tuple[str, Any], ...]  # ``("output", index)`` or ``("constant", value)``
    spec: torch_pytree.TreeSpec  # their tree structure
    # Whether that structure is ``(result, containers, contents)``, where containers are the
    # arguments that the forward may have changed, as it left them, and contents are the values that
    # it left in the places of ``kept``.
    updates: bool = False
    kept: Kept = NOTHING_KEPT  # places in arguments and attributes that a call must write to

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
        """Rebuilds the result, and updates the containers that the call was given."""
        built = torch_pytree.unflatten(leaves, self.spec, given)
        if not self.updates:
            return built
        for place, content in zip(self.kept.places, built[2], strict=True):
            place.put(call, content)
        returned = self.kept.returned
        return built[0] if returned is None else returned.find(call)


@dataclass(frozen=True)
class _Body:
    """The closure of a region, and the outer nodes at its boundary."""

    closure: ir.Closure
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    changed: tuple[int, ...]  # inputs whose new value is returned after the outputs


@dataclass
class _Unit:
    """The outer nodes that become one call: a region, a call site, or glue."""

    nodes: list[Node]
    region: Region | None = None
    site: CallSite | None = None

    @property
    def place(self) -> tuple[str, ir.RecomputeMark]:
        """The module path, and the user's recompute mark."""
        instance = self.site or self.region
        return (instance.path, instance.recompute) if instance is not None else ("", "")

    def uses(self, assembler: Assembler) -> Iterable[Node]:
        if self.site is not None:
            return self.nodes[0].all_input_nodes
        if self.region is not None:
            return assembler.body(self.region).inputs
        return (n for node in self.nodes for n in node.all_input_nodes)


def captured_model(recording: Recording, results: list[Any], tree: ResultTree) -> CapturedModel:
    """Returns the captured model of a finished run."""
    recording.caches_asked()
    recording.tensors.resolve_all(recording.root.nodes())
    if recording.sizes is not None:
        recording.sizes.localize(recording.root, recording.tensors.sources)
    _dissolve_uncalled(recording, results, tree)
    made = assemble(recording.root, results, tree, recording.tensors.sources)
    program, shared = _sharing(recording, *made)
    decisions = [
        _with_constants(d, shared[region]) if region in shared else d
        for d, region in zip(recording.decisions, recording.decided, strict=True)
        if d.shared or d.reason or region in shared
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
    """Whether a guard can compare a module outside the tree: not scripted, not made in the run."""
    state = module_state(module)
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    return not is_scripted and "training" in state and find_fake([state]) is None


def _root_evidence(recording: Recording, program: ir.Program, met: list[nn.Module]) -> RootEvidence:
    """Returns the reads of the run, except those that the guard compares module by module."""
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
    """Shares closures that differ only in constants; also returns the closure of each region."""
    if isinstance(recording.blocks, NoBlocks):
        return program, {}
    if recording.sizes is not None:
        return program, {region: Shared(closure) for region, closure in closures.items()}
    program, found = share_constants(program)
    return program, {region: found[closure] for region, closure in closures.items()}


def _dissolve_uncalled(recording: Recording, results: list[Any], tree: ResultTree) -> None:
    """Dissolves unmarked blocks whose closure has only one call."""
    root, blocks = recording.root, recording.blocks
    idle = {r for r in regions_inside(root) if r.num_calls == 1 and not blocks.keeps(r)}
    names = Counter(region.name for region in regions_inside(root))
    # A region that is called once may still share its closure up to constants: then it stays.
    if any(names[r.name] > 1 for r in idle):
        made = assemble(recording.root, results, tree, recording.tensors.sources)
        _, shared = _sharing(recording, *made)
        uses = Counter(s.closure for s in shared.values())
        idle -= {r for r in idle if uses[shared[r].closure] > 1}
    dissolve(root, idle)


def _with_constants(decision: SharingDecision, shared: Shared) -> SharingDecision:
    """Adds to a decision that the closure is shared, with constants as inputs."""
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
    sources: Mapping[Node, ir.Source],
) -> tuple[ir.Program, Mapping[Region, ir.Closure]]:
    """Builds the program of a captured model; also returns the closure of each traced region.

    The model's flat results are nodes for tensors, and other values unchanged. It raises
    CrossingError if a tensor is changed in place in a way that crosses blocks.
    """
    outputs = list(dict.fromkeys(r for r in results if isinstance(r, Node)))
    assembler = Assembler({root: outputs, **{r: r.outputs for r in regions_inside(root)}})
    used = {n for node in root.nodes() for n in node.all_input_nodes} | set(outputs)
    inputs = [n for n in sources if n in used or n.op == "placeholder"]
    env = {n: ir.Value(node_type(n), sources[n].name) for n in inputs}
    start = dict(env)
    calls = assembler.build(root.items, env, outputs, root.path)
    # Inputs with a new value: it is written back into the tensor after a run.
    changed = [n for n in inputs if env[n] is not start[n]]
    values = [env[n] for n in (*outputs, *changed)]
    leaves = tuple(
        ("output", outputs.index(r)) if isinstance(r, Node) else ("constant", r) for r in results
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
    """Builds the closure of each region once, and shares equal leaves."""

    def __init__(self, returned: Mapping[Region, Sequence[Node]]) -> None:
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
        # Nodes that the model or another block returns are outputs, even if this forward does not
        # return them.
        further = {n for r, found in self._returned.items() if r not in within for n in found}
        outputs = tuple(region.outputs) + _leaked(region, nodes, further)
        inputs, names = _region_inputs(region, nodes)
        operators = [n for n in nodes if not is_mode_switch(n)]
        has_calls = any(
            isinstance(one, Region) or "call" in one.meta or isinstance(one.target, _OWN_CALLS)
            for one in region.items
        )
        if not has_calls and len(_devices(operators)) <= 1:
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
        items: Sequence[Node | Region],
        env: dict[Node, ir.Value],
        outputs: Sequence[Node],
        path: str,
    ) -> list[ir.Call]:
        """Turns the items of one region into calls; adds a value per result node to ``env``."""
        units = _units(items)
        last_use: dict[Node, int] = {}
        for index, unit in enumerate(units):
            last_use.update(dict.fromkeys(unit.uses(self), index))
        last_use.update(dict.fromkeys(outputs, len(units)))
        last_use.update(dict.fromkeys(env, len(units)))  # an input may be written back at the end
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
        self, unit: _Unit, index: int, last_use: Mapping[Node, int]
    ) -> tuple[_Body | None, Sequence[Node]]:
        if unit.site is not None:
            body = self.body(unit.site.region)
            picked = {int(n.args[1]): n for n in unit.nodes[1:]}  # type: ignore[arg-type]
            # For a result that this instance does not use, the node of the traced region is used.
            return body, [picked.get(i, node) for i, node in enumerate(body.outputs)]
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


def _control_body(nodes: Sequence[Node]) -> tuple[_Body, Sequence[Node]]:
    """Returns the leaf of a control-flow operator, the first of ``nodes``, and its results."""
    node, picked = nodes[0], nodes[1:]
    inputs: Any = node.args  # every argument is an operand, even if two are the same node
    control = node.target
    assert isinstance(control, ir.Control)
    types = [list(map(node_type, some)) for some in (inputs, picked)]
    leaf = control_leaf(control.word, control, *types, [n.name for n in inputs], stamp_of(node))
    return _Body(leaf, tuple(inputs), tuple(picked), ()), picked


_OWN_CALLS = (DerivativeMark, ir.Control)


def _units(items: Sequence[Node | Region]) -> list[_Unit]:
    """Groups items: each region or call (with its ``getitem`` nodes) alone, glue together."""
    units: list[_Unit] = []
    calls: dict[Node, _Unit] = {}
    alone: dict[Node, _Unit] = {}
    is_open = False  # whether the last unit is glue that the next item may join
    devices: set[torch.device] = set()  # of that glue
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
        elif isinstance(item.target, _OWN_CALLS):
            # Glue ends at control flow, which is a call, and where a gradient is taken, because a
            # later pass splits the program there.
            alone[item] = _Unit([item])
            units.append(alone[item])
            is_open = False
        elif not is_mode_switch(item):
            # A kernel runs on one device, so glue has one device, and a copy between two is a call.
            own = _devices([item])
            is_open = is_open and len(own) <= 1 and (not own or own == devices)
            devices = own or devices
            if not is_open or units[-1].region is not None or units[-1].site is not None:
                units.append(_Unit([]))
            units[-1].nodes.append(item)
            is_open = not item.meta.get(DIFFERENTIATED, False)
    return units


def _devices(nodes: Iterable[Node]) -> set[torch.device]:
    both = {n: None for node in nodes for n in (node, *node.all_input_nodes)}
    return {tensor.device for node in both for tensor in tensors_of(node)}


def _region_inputs(region: Region, nodes: Sequence[Node]) -> tuple[list[Node], tuple[str, ...]]:
    inside = set(nodes)
    used = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    named = dict(zip(region.inputs, region.input_names, strict=True))
    # If shared, all inputs are kept, even one that the traced instance has no use for.
    order = [n for n in region.inputs if n in used or region.num_calls > 1]
    order += [n for n in used if n not in named]
    return order, tuple(named.get(n, n.name) for n in order)


def _leaked(region: Region, nodes: Sequence[Node], returned: set[Node]) -> tuple[Node, ...]:
    """Returns nodes that code outside the block uses or returns, though the block did not."""
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


def _storage(node: Node) -> int | None:
    value = node.meta.get("val")
    return memory_id(value) if isinstance(value, Tensor) else None


def _changed_inputs(nodes: Sequence[Node], inputs: Sequence[Node], name: str) -> tuple[int, ...]:
    """Returns the positions of the inputs whose memory one of the nodes changes."""
    # By storage, not by node: a change through a view changes the input as well.
    changed_memory: dict[int | None, Node] = {}
    for node in nodes:
        for operand in mutated_args(node):
            changed_memory[_storage(operand)] = node
    if not changed_memory:
        return ()
    changed = tuple(i for i, n in enumerate(inputs) if _storage(n) in changed_memory)
    # The new value is copied back, so a changed storage must have one input, whose elements do not
    # overlap (``expand``).
    values = (inputs[i].meta["val"] for i in changed)
    steps = (pair for x in values for pair in zip(x.shape, x.stride(), strict=True))
    if any(size != 1 and step == 0 for size, step in steps) or len(
        {_storage(inputs[i]) for i in changed}
    ) < len(changed):
        node = changed_memory[_storage(inputs[changed[0]])]
        raise CrossingError(_alias_text(name, stamp_of(node).source))
    return changed


def _check_aliases(changed: Node, last_use: Mapping[Node, int], index: int, name: str) -> None:
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
