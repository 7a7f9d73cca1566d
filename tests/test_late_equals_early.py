"""The central property: inlining late gives the same launches, numbers and gradients as early.

And a step has the same bits in every order that its dependencies allow: its operands are written,
and whoever else reads memory that an update takes over has run. Random draws take numbers off one
generator, so those stay in order. Random programs in random orders are in ``test_planned.py``.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from models import MarkedBlock
from programs import (
    MATRIX,
    VECTOR,
    LeafBuilder,
    binary_leaf,
    inline_calls,
    merge_leaves,
    random_arguments,
    random_program,
    random_value,
    remove_unused_packs,
    unary_leaf,
)
from torch import Tensor, nn

import lazyinline
from lazyinline.autodiff.derivative import Derivative, Differentiator, Recipe
from lazyinline.backend.kernels.lower import (
    EagerBackend,
    InductorBackend,
    closure_list,
    lower_leaves,
)
from lazyinline.backend.link.link import FlatProgram, link
from lazyinline.backend.run.planned import closures_run
from lazyinline.reuse.ir.leaf import (
    ModalInterpreter,
    Stamp,
    flat_types,
    flatten_value,
    interpret,
    is_active,
)
from lazyinline.reuse.ir.operators import may_draw
from lazyinline.reuse.ir.program import Call, Composite, Leaf, Program, Value
from lazyinline.reuse.ir.torch_updates import results_in_place
from lazyinline.reuse.ir.types import StructType, TensorType
from lazyinline.reuse.ir.verify import verify

aten = torch.ops.aten
SEEDS, GRADIENT_SEEDS = range(200), range(100)
BATCH = 25  # programs of one test: a test each would cost more than the programs


def assert_same_bits(actual: Sequence[Any], expected: Sequence[Any], what: str) -> None:
    """Equal values to the last bit, zero tolerance: both sides run the same operators."""
    ours, theirs = flatten_value(tuple(actual)), flatten_value(tuple(expected))
    assert len(ours) == len(theirs), what
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), f"{what}: output {index} differs"
        assert TensorType.of(a) == TensorType.of(b), f"{what}: output {index} has another layout"


def has_structs(program: Program) -> bool:
    return any(isinstance(v.type, StructType) for v in (*program.inputs, *program.outputs)) or any(
        isinstance(v.type, StructType)
        for call in program.calls
        for v in (*call.args, *call.results)
    )


@pytest.mark.parametrize("start", SEEDS[::BATCH])
@pytest.mark.sweep(keep=["[0]", "[150]"])
def test_random_programs_run_the_same_late_and_early(start: int) -> None:
    for seed in range(start, start + BATCH):
        check_late_and_early(seed)


def check_late_and_early(seed: int) -> None:
    program = verify(random_program(seed))
    early = verify(inline_calls(program))
    assert not any(isinstance(call.closure, Composite) for call in early.calls)

    # The whole flat list: the very same leaf objects, slot numbers, frees, types and paths.
    flat = link(program)
    assert flat == link(early)

    arguments = random_arguments(program, seed)
    expected = interpret(program, arguments)
    declared = flat_types(v.type for v in program.outputs)
    assert [TensorType.of(t) for t in flatten_value(expected)] == declared
    assert_same_bits(interpret(early, arguments), expected, f"seed {seed}, inlined early")

    kernels = lower_leaves([launch.leaf for launch in flat.launches], EagerBackend(), lambda: None)
    flat_arguments = flatten_value(tuple(arguments))
    lists = {leaf: closure_list(leaf, kernel) for leaf, kernel in kernels.items()}
    results = closures_run(flat, lists)(list(flat_arguments))
    assert_same_bits(results, expected, f"seed {seed}, closures")

    lean = remove_unused_packs(early)
    if not has_structs(lean):
        verify(lean, "flat")
        whole = merge_leaves(lean)
        assert whole.num_nodes == program.num_nodes_if_inlined()
        call = Call(whole, lean.inputs, tuple(Value(v.type) for v in lean.outputs))
        merged = verify(Program(lean.inputs, (call,), call.results), "flat")
        assert_same_bits(interpret(merged, arguments), expected, f"seed {seed}, merged")


def test_leaf_that_only_hands_its_operands_on_is_not_compiled() -> None:
    """Inductor gives no wrapper for it, so nothing could be recorded."""
    builder = LeafBuilder([MATRIX, VECTOR])
    leaf = dataclasses.replace(builder.leaf(builder.nodes[::-1]), kernels="backend")
    (kernel,) = lower_leaves([leaf], InductorBackend(), lambda: None).values()
    assert kernel.source == "eager"
    arguments = random_arguments(one_call(leaf), 0)
    assert list(map(id, kernel.function(*arguments))) == list(map(id, arguments[::-1]))


def gradients_by_closures(
    program: Program, derivative: Derivative, arguments: list[torch.Tensor], seeds: dict[int, Any]
) -> tuple[tuple[Any, ...], dict[int, torch.Tensor]]:
    """Runs the forward and the backward closure on the interpreter."""
    assert isinstance(derivative.forward, Composite)
    assert isinstance(derivative.backward, Composite)
    *outputs, saved = interpret(verify(derivative.forward.program), arguments)
    operands = [
        saved,
        *(arguments[i] for i in derivative.kept_inputs),
        *(outputs[i] for i in derivative.kept_outputs),
        *(seeds[i] for i in derivative.cotangent_outputs),
    ]
    results = interpret(verify(derivative.backward.program), operands)
    return tuple(outputs), dict(zip(derivative.gradient_inputs, results, strict=True))


def gradients_by_autograd(
    program: Program, arguments: list[torch.Tensor], wanted: list[int], seeds: dict[int, Any]
) -> dict[int, torch.Tensor | None]:
    """Runs the program on the interpreter under autograd."""
    leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(arguments)]
    outputs = interpret(program, leaves)
    roots = [(outputs[i], seed) for i, seed in seeds.items() if outputs[i].requires_grad]
    if not roots:
        return dict.fromkeys(wanted)
    gradients = torch.autograd.grad(
        [root for root, _ in roots],
        [leaves[i] for i in wanted],
        [seed for _, seed in roots],
        allow_unused=True,
    )
    return dict(zip(wanted, gradients, strict=True))


# One differentiator for all seeds: what it remembers of a closure must not depend on the caller.
SHARED = Differentiator(lambda leaf: Recipe())


@pytest.mark.parametrize("start", GRADIENT_SEEDS[::BATCH])
@pytest.mark.sweep(keep="[75]")
def test_gradients_of_random_programs_equal_autograd(start: int) -> None:
    for seed in range(start, start + BATCH):
        check_gradients(seed)


def check_gradients(seed: int) -> None:
    program = random_program(seed, structs=False)
    generator = torch.Generator().manual_seed(seed)
    arguments = random_arguments(program, seed)
    # Every third input frozen, every third output unused, at another place for each seed.
    wanted = [i for i in range(len(program.inputs)) if (i + seed) % 3]
    used = [i for i in range(len(program.outputs)) if (i + seed) % 3 != 1]
    seeds = {
        i: random_value(v.type.cotangent(), generator)
        for i, v in enumerate(program.outputs)
        if i in used and isinstance(v.type, TensorType)
    }
    expected = gradients_by_autograd(program, arguments, wanted, seeds)
    derivative = SHARED.vjp(Composite("main", program), wanted, used)
    if derivative is None:
        assert all(g is None for g in expected.values())
        return
    outputs, found = gradients_by_closures(program, derivative, arguments, seeds)
    assert_same_bits(outputs, interpret(program, arguments), f"seed {seed}, forward")
    assert set(found) <= set(wanted)
    for index, gradient in expected.items():
        if index not in found:
            assert gradient is None, f"input {index} has no gradient closure"
        elif gradient is None:
            assert not found[index].any(), f"input {index} has a gradient that autograd has not"
        else:
            # Sums of cotangents may be taken in another order: a few units in the last place.
            torch.testing.assert_close(found[index], gradient, rtol=1e-12, atol=1e-12)
            assert TensorType.of(found[index]) == program.inputs[index].type.cotangent()


def one_call(leaf: Leaf) -> Program:
    inputs = tuple(Value(t) for t in leaf.input_types)
    call = Call(leaf, inputs, tuple(Value(t) for t in leaf.output_types))
    return Program(inputs, (call,), call.results)


def test_no_gradient_flows_gives_no_derivative() -> None:
    program = Composite("main", one_call(binary_leaf(aten.mul.Tensor)))
    assert SHARED.vjp(program, [], [0]) is None
    assert SHARED.vjp(program, [0, 1], []) is None
    cut = one_call(unary_leaf(aten.detach.default))
    assert SHARED.vjp(Composite("main", cut), [0], [0]) is None


def test_value_is_active_whatever_in_place_operators_did_to_it() -> None:
    """A wrong "no" here would lose a gradient without a word."""
    builder = LeafBuilder([VECTOR])
    (x,) = builder.nodes
    zeros = builder.add(aten.zeros.default, [3, 4], dtype=torch.float64)
    row = builder.add(aten.select.int, zeros, 0, 1)
    builder.add(aten.copy_.default, row, x)
    copy = builder.add(aten.clone.default, x)
    doubled = builder.add(aten.mul_.Tensor, copy, 2)
    doubled.meta["stamp"] = Stamp(grad_enabled=False)
    constant = builder.add(aten.add.Tensor, zeros, 1)
    constant.meta["stamp"] = Stamp(grad_enabled=False)
    detached = builder.add(aten.detach.default, x)
    like = builder.add(aten.zeros_like.default, x)
    filled = builder.add(aten.index_add_.default, builder.add(aten.ones_like.default, x), 0, row, x)
    leaf = builder.leaf([x, zeros, row, copy, doubled, constant, detached, like, filled])
    assert is_active(leaf, [True]) == (*[True] * 5, False, False, False, True)
    assert not any(is_active(leaf, [False]))


PICKS: list[Callable[[Sequence[int]], int]] = [
    lambda ready: ready[0],
    lambda ready: ready[-1],
    random.Random(0).choice,
    random.Random(1).choice,
]
"""Each takes the launches that are ready, by number, and returns the one to run next."""


def dependencies(flat: FlatProgram) -> list[set[int]]:
    """Returns, for each launch, the launches that end before it begins."""
    writer = {slot: n for n, one in enumerate(flat.launches) for slot in one.results}
    readers: dict[int, set[int]] = {}
    for number, one in enumerate(flat.launches):
        for slot in one.operands:
            readers.setdefault(slot, set()).add(number)
    found = []
    last_draw = None
    for number, one in enumerate(flat.launches):
        needed = {writer[slot] for slot in one.operands if slot in writer}
        for operand in results_in_place(one.leaf):
            needed |= readers[one.operands[operand]] - {number}
        if any(may_draw(node.target) for node in one.leaf.nodes):
            needed |= set() if last_draw is None else {last_draw}
            last_draw = number
        found.append(needed)
    return found


def run(
    flat: FlatProgram, needed: list[set[int]], inputs: Sequence[Tensor], pick: Any
) -> tuple[list[Tensor], tuple[int, ...]]:
    """Runs launches one after the other, as they are picked; returns results and the order."""
    slots = dict(zip(flat.inputs, inputs, strict=True))
    waiting, order = dict(enumerate(needed)), list[int]()
    torch.manual_seed(0)
    while waiting:
        order.append(pick([n for n, before in waiting.items() if before <= {*order}]))
        del waiting[order[-1]]
        launch = flat.launches[order[-1]]
        operands = [slots[slot] for slot in launch.operands]
        results = ModalInterpreter(launch.leaf.module).run_flat(operands)
        slots.update(zip(launch.results, results, strict=True))
    return [slots[slot] for slot in flat.outputs], tuple(order)


def step_of() -> tuple[Program, list[Tensor]]:
    """A step with dropout and an optimizer, and what it is run on."""
    model = nn.Sequential(*(MarkedBlock(norm=True, dropout=0.1) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"optimizer": optimizer, "micro_batches": 2}
    step = lazyinline.compile_step(model, loss_fn=torch.mean, backend="eager", **options)
    found: list[Program] = []
    step._watch = lambda one, before, after: found.extend(  # type: ignore[method-assign]
        after.programs.values() if one.name == "decompose" else ()
    )
    step(torch.randn(4, 4))
    entry = step.entries.first
    assert entry is not None
    return found[0], [tensor.clone() for tensor in entry._lease.tensors]


def test_a_step_with_dropout_and_updates_gives_the_same_bits_in_every_order() -> None:
    program, tensors = step_of()
    flat = link(program)
    assert any(one.leaf.name == "adam" for one in flat.launches)
    runs = [run(flat, dependencies(flat), tensors, pick) for pick in PICKS]
    for found, _ in runs[1:]:
        assert all(map(torch.equal, found, runs[0][0]))
    assert len({order for _, order in runs}) > 3
    with pytest.raises(KeyError):  # the check can fail: a slot is read that nobody has written yet
        run(flat, [set() for _ in flat.launches], tensors, PICKS[1])
