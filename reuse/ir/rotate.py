"""Moves the boundaries between equal blocks to matrix products, across which kernels do not fuse.

Kernels fuse within a closure only, so the last sum of a block and the norm of the next one are two
kernels that write and read the same values. This pass cuts a block's closure into a head (before
its first product), a body, and a tail (after its last product). The tail of a block and the head of
the next become one closure, a seam, the same between any two of the blocks::

    Block, Block, Block    becomes    head, (body, seam), (body, seam), body, tail

The first head and the last tail are fused with the calls around the blocks, if possible. The pass
runs on a captured program, before autodiff, so that a backward has these boundaries, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx

from ..torch_names import module_of
from .costs import is_free, is_heavy
from .leaf import cut_leaf, memory_of, node_type
from .operators import is_draw, is_view, mutated_args
from .program import Call, Closure, Composite, Leaf, Program, Value, count_calls, outputs_of

LEAST_CALLS = 3
"""The fewest blocks in a row for which it pays: they have two seams, which share one closure."""

_PERIOD = ".period"

Node = torch.fx.Node
Env = dict[Node, Value]  # the values that the nodes of a block's graph have in one of its calls


def rotate(program: Program) -> Program:
    """Returns a program with seams between equal blocks in a row; the same if it has none."""
    counts = count_calls(program)
    chains = list(_chains(program.calls))
    blocks = _blocks(chains, counts)
    if not blocks:
        return program
    calls: list[Call] = []
    ends: set[Call] = set()
    for chain in chains:
        block = blocks.get(chain[0].closure)
        rotated = chain if block is None else block.rotated(chain)
        ends.update(() if block is None else (rotated[0], rotated[-1]))
        calls += rotated
    # Fuse only with closures that are called once and are not blocks themselves.
    glue = {call for call in calls if _is_glue(call) and counts[call.closure] == 1}
    uses = Counter(program.outputs)
    uses.update(value for call in calls for value in call.args)
    return replace(program, calls=tuple(_with_ends_fused(calls, ends, glue, uses)))


def seams_of(program: Program) -> Counter[str]:
    """Counts the seams of a rotated program, by the name of the block."""
    names = (call.closure.name for call in program.calls if isinstance(call.closure, Composite))
    return Counter(n.removesuffix(_PERIOD) for n in names if n.endswith(_PERIOD))


def _with_ends_fused(
    calls: Sequence[Call], ends: set[Call], glue: set[Call], uses: Counter[Value]
) -> list[Call]:
    """Fuses the first heads and the last tails with the calls that surround the blocks."""
    fused = list(calls[:1])
    for call in calls[1:]:
        last = fused[-1]
        if (last in ends and call in glue) or (last in glue and call in ends):
            named = last if last in glue else call
            fused[-1] = _fused(named.closure.name, [last, call], uses)
            glue.add(fused[-1])  # of blocks that follow, too
        else:
            fused.append(call)
    return fused


# ---- which calls -------------------------------------------------------------------------------


def _chains(calls: Sequence[Call]) -> Iterator[list[Call]]:
    """Yields runs of equal blocks that each pass one value to the next; other calls one by one."""
    chain: list[Call] = []
    for call in calls:
        if chain and not _continues(chain, call):
            yield chain
            chain = []
        chain.append(call)
    if chain:
        yield chain


def _continues(chain: Sequence[Call], call: Call) -> bool:
    last = chain[-1]
    if call.closure is not last.closure or call.recompute or last.recompute:
        return False
    handed_on = _handed_on(last, call)
    return handed_on is not None and (len(chain) < 2 or handed_on == _handed_on(chain[-2], last))


def _handed_on(call: Call, after: Call) -> tuple[int, int] | None:
    """Returns which result of a call is which operand of the next; None unless exactly one is."""
    found = [
        (call.results.index(value), position)
        for position, value in enumerate(after.args)
        if value in call.results
    ]
    return found[0] if len(found) == 1 else None


def _blocks(chains: Iterable[Sequence[Call]], counts: Counter[Closure]) -> dict[Closure, _Block]:
    """Cuts each closure whose calls are all in long chains, with equal links."""
    links: dict[Closure, set[tuple[int, int] | None]] = {}
    for chain in chains:
        link = _handed_on(chain[0], chain[1]) if len(chain) >= LEAST_CALLS else None
        links.setdefault(chain[0].closure, set()).add(link)
    found: dict[Closure, _Block] = {}
    for closure, (link, *others) in links.items():
        # A closure that is also called elsewhere would be compiled twice: whole, and in pieces.
        in_chains = sum(len(chain) for chain in chains if chain[0].closure is closure)
        if link is None or others or in_chains != counts[closure]:
            continue
        block = _cut_block(closure, *link) if isinstance(closure, Leaf) else None
        if block is not None:
            found[closure] = block
    return found


def _is_glue(call: Call) -> bool:
    """Whether a call is glue between blocks: a leaf without module path and recompute mark."""
    leaf = call.closure
    if not isinstance(leaf, Leaf) or leaf.kernels != "backend" or call.path or call.recompute:
        return False
    return not any(map(mutated_args, leaf.nodes))


# ---- a block in pieces -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Piece:
    """A part of a block as a closure, with the block's nodes that it takes and returns."""

    leaf: Leaf
    inputs: Sequence[Node]
    outputs: Sequence[Node]

    def values(self) -> Env:
        """Returns new values for the results."""
        return {n: Value(node_type(n), n.name) for n in self.outputs}

    def call(self, env: Env, path: str = "") -> Call:
        """Returns a call on the values of its inputs; adds values for results that have none."""
        env.update({n: value for n, value in self.values().items() if n not in env})
        args = tuple(env[node] for node in self.inputs)
        return Call(self.leaf, args, tuple(env[node] for node in self.outputs), path)


@dataclass(frozen=True, eq=False)
class _Block:
    """A block's closure in pieces."""

    entries: Sequence[Node]  # its inputs
    outputs: Sequence[Node]  # what it returns
    head: _Piece  # what comes before its first product
    body: _Piece  # from its first product to its last
    tail: _Piece  # what comes after
    # A body and the seam after it; ``own`` and ``following`` are the nodes whose values it takes,
    # of its own block and of the next one.
    period: Composite
    own: Sequence[Node]
    following: Sequence[Node]

    def rotated(self, chain: Sequence[Call]) -> list[Call]:
        """Returns the calls in place of a chain: a head, periods, a body and a tail."""
        envs: list[Env] = [dict(zip(self.entries, call.args, strict=True)) for call in chain]
        for env, call in zip(envs, chain, strict=True):
            env.update(zip(self.outputs, call.results, strict=True))
        calls = [self.head.call(envs[0])]
        for call, env, after in zip(chain, envs, envs[1:], strict=False):
            after.update(self.head.values())
            args = (*(env[n] for n in self.own), *(after[n] for n in self.following))
            results = (*call.results, *(after[n] for n in self.head.outputs))
            calls.append(Call(self.period, args, results, call.path))
        last = envs[-1]
        return [*calls, self.body.call(last, chain[-1].path), self.tail.call(last)]


def _cut_block(leaf: Leaf, handed_on: int, received: int) -> _Block | None:
    """Cuts a block in three; None where there is nothing to fuse, or a cut could change a number.

    ``handed_on`` is the result that is the next block's operand ``received``.
    """
    entries, outputs = leaf.entries, outputs_of(leaf.module)
    first = entries[received]
    parts = _parts(leaf, first, outputs[handed_on])
    if any(all(map(is_free, part)) for part in parts) or len(set(outputs)) < len(outputs):
        return None
    _, body, tail = parts
    if not {*body, *tail}.issuperset(outputs) or outputs[handed_on] not in tail:
        return None
    # Random numbers have to be drawn in the same order when the parts run one by one.
    if [n for part in parts for n in part if is_draw(n)] != list(filter(is_draw, leaf.nodes)):
        return None
    pieces = [_piece(leaf, *named) for named in zip(("head", "body", "tail"), parts, strict=True)]
    crossing = [node for piece in pieces for node in piece.outputs]
    if not _can_be_cut(leaf, [*entries, *crossing]):
        return None
    return _block(leaf, pieces, outputs[handed_on], first)


def _parts(leaf: Leaf, first: Node, last: Node) -> tuple[list[Node], list[Node], list[Node]]:
    """Returns the operators of head, body and tail, in the order in which they run."""
    heavy = set(filter(is_heavy, leaf.nodes))
    after_product, of_first, before_product, for_last = set(heavy), {first}, set(heavy), {last}
    for node in leaf.nodes:
        operands = node.all_input_nodes
        if not after_product.isdisjoint(operands):
            after_product.add(node)
        if not of_first.isdisjoint(operands):
            of_first.add(node)
    for node in reversed(leaf.nodes):
        if not before_product.isdisjoint(node.users):
            before_product.add(node)
        if not for_last.isdisjoint(node.users):
            for_last.add(node)
    head = {n for n in of_first - after_product if n is not first}
    for node in reversed(leaf.nodes):
        # What only the body reads of a value under another shape is a view of the body's own; and
        # what the head computes with is the head's, though it may not depend on the block before.
        if node in head and is_view(node) and head.isdisjoint(node.users):
            head.remove(node)
        elif node not in head and not head.isdisjoint(node.users):
            head.add(node)
    tail: set[Node] = set()
    for node in leaf.nodes:
        # What leads to another result, or changes something that is the body's, is the body's too.
        wanted = node in for_last or not tail.isdisjoint(node.all_input_nodes)
        if wanted and node not in before_product and node not in head:
            tail.add(node)
    body = [n for n in leaf.nodes if n not in head and n not in tail]
    return [n for n in leaf.nodes if n in head], body, [n for n in leaf.nodes if n in tail]


def _can_be_cut(leaf: Leaf, crossing: Sequence[Node]) -> bool:
    """Whether values between closures are tensors of their own that nothing changes in place."""
    if not all(isinstance(node.meta.get("val"), torch.Tensor) for node in crossing):
        return False
    memory = Counter(map(memory_of, crossing))
    changed = {memory_of(node) for one in leaf.nodes for node in mutated_args(one)}
    return max(memory.values()) == 1 and changed.isdisjoint(memory)


def _piece(leaf: Leaf, name: str, nodes: Sequence[Node]) -> _Piece:
    own = set(nodes)
    inputs = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in own))
    returned = [n for n in nodes if not own.issuperset(n.users)]
    hints = dict(zip(leaf.entries, leaf.input_names, strict=False))
    piece = cut_leaf(f"{leaf.name}.{name}", nodes, inputs, returned)
    named = replace(piece, input_names=tuple(hints.get(n, n.name) for n in inputs))
    return _Piece(named, inputs, returned)


def _block(leaf: Leaf, pieces: Sequence[_Piece], handed_on: Node, received: Node) -> _Block:
    """Puts the pieces together: a body and the seam after it are called as one closure."""
    head, body, tail = pieces
    entries, outputs = leaf.entries, outputs_of(leaf.module)
    made_before = {*entries, *head.outputs}
    own = [n for n in dict.fromkeys((*body.inputs, *tail.inputs)) if n in made_before]
    following = [n for n in head.inputs if n is not received]
    hints = {n: hint for p in pieces for n, hint in zip(p.inputs, p.leaf.input_names, strict=True)}
    env: Env = {n: Value(node_type(n), hints[n]) for n in own}
    after: Env = {n: Value(node_type(n), hints[n]) for n in following}
    inputs = (*env.values(), *after.values())
    first, last = body.call(env), tail.call(env)
    after[received] = env[handed_on]
    head_call = head.call(after)
    made = [*(env[n] for n in outputs), *head_call.results]
    uses = Counter((*made, *last.args, *head_call.args))
    seam = _fused(f"{leaf.name}.seam", [last, head_call], uses)
    period = Composite(f"{leaf.name}{_PERIOD}", Program(inputs, (first, seam), tuple(made)))
    return _Block(entries, outputs, head, body, tail, period, own, following)


def _fused(name: str, calls: Sequence[Call], uses: Counter[Value]) -> Call:
    """Returns one call in place of calls on leaves; what only they use (``uses``) is no result."""
    graph = torch.fx.Graph()
    nodes: dict[Value, Node] = {}
    made = {value for call in calls for value in call.results}
    args = tuple(dict.fromkeys(v for call in calls for v in call.args if v not in made))
    leaves = [call.closure for call in calls if isinstance(call.closure, Leaf)]
    for call, leaf in zip(calls, leaves, strict=True):
        for value, entry in zip(call.args, leaf.entries, strict=True):
            if value not in nodes and value not in made:
                nodes[value] = graph.placeholder(f"a{len(nodes)}")
                nodes[value].meta["val"] = entry.meta.get("val")
    for call, leaf in zip(calls, leaves, strict=True):
        copies = dict(zip(leaf.entries, (nodes[v] for v in call.args), strict=True))
        for node in leaf.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        nodes.update(zip(call.results, (copies[n] for n in outputs_of(leaf.module)), strict=True))
    inside = Counter(v for call in calls for v in call.args)
    results = tuple(v for call in calls for v in call.results if uses[v] > inside[v])
    graph.output(tuple(nodes[v] for v in results))
    types = (tuple(v.type for v in args), tuple(v.type for v in results))
    leaf = Leaf(name, module_of(graph), *types, tuple(v.hint for v in args))
    return Call(leaf, args, results)
