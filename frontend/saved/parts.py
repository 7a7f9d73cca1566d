"""One compiled program as the parts of a file, and back.

The captured program and the programs that run are text, which the parser checks operator by
operator. Kernels and memory plans, which are for one machine, are parts of their own. They are used
only if this machine's cache has signed the file, or the user trusts it; otherwise they are made
again from the text.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from ...autodiff.derivative import Derivative
from ...autodiff.training_program import StepProgram, Updates
from ...backend.arena import ArenaPlan
from ...backend.cache import CompileCache, NotCacheableError, plan_data, plan_of
from ...backend.files.container import Content, Parts, to_json
from ...backend.launches.kernel_list import KernelList
from ...backend.launches.torch_facts import function_name
from ...reuse.errors import FileError, ParseError, VerifyError
from ...reuse.ir import program as ir
from ...reuse.ir.parser import parse_program, parse_size
from ...reuse.ir.printer import closure_names, text_to_compare
from ...reuse.ir.torch_symbols import ReadSizes
from ...reuse.ir.torch_updates import IN_PLACE, STATE
from ...reuse.ir.types import StructType, TensorType
from ...reuse.ir.verify import name_of, verify
from ..capture.assemble import OutputTree
from ..compiled import Compiled, CompiledStep, Facts
from ..guard import Guard
from ..passes.programs import PARTS, programs_of
from ..passes.state import Compilation, State
from .saved_model import tree_data, tree_of

_STATE = {name for names in STATE.values() for name in names}
_INDICES = ("kept_inputs", "kept_outputs", "cotangent_outputs", "gradient_inputs")
CAPTURED, STEP, BOUNDARY = "captured", "step", "boundary.json"
RANKS = "stages"  # in place of boundary data, for ranks, whose programs are parts of their own
_MAX_EXAMPLE = 2**31
_OURS = "lazyinline."


# ---- to a file -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeptProgram:
    """A program of a compiled model, to be saved."""

    guard: Guard  # the guard of the call that it was compiled for
    lowered: Compilation  # the state of its compile before link
    plans: Sequence[ArenaPlan] = ()  # its memory plans, if it is linked
    # Facts and watched inputs of a module; None for a step.
    facts: tuple[Facts, tuple[int, ...]] | None = None
    own: Container[Any] = ()  # operators of lazyinline that it may contain

    @classmethod
    def of(cls, guard: Guard, compiled: Compiled) -> KeptProgram:
        """Returns a program of fixed sizes."""
        if isinstance(compiled, CompiledStep):
            return cls(guard, compiled.lowered, compiled.runner.plans)
        compiled = compiled.whole()
        facts = compiled.facts, compiled.watched_inputs
        return cls(guard, compiled.lowered, compiled.runtime.program.plans, facts)

    @classmethod
    def symbolic(cls, guard: Guard, linker: Any) -> KeptProgram:
        """Returns a program of symbolic sizes."""
        is_step = linker.lowered.goal.kind == "step"
        facts = None if is_step else (linker.facts, linker.watched_inputs)
        linker.finish_backward()
        return cls(guard, linker.whole, (), facts)

    @property
    def backwards(self) -> list[Compilation]:
        """The states before link of backwards for losses that leave outputs unused."""
        found: dict[tuple[int, ...], Compilation] = {}
        for one in self.facts[0].backwards.values() if self.facts is not None else ():
            found.setdefault(one.derivative.cotangent_outputs, one)
        full = self.lowered.derivative
        return [one for key, one in found.items() if full and key != full.cotangent_outputs]


def program_parts(
    kept: KeptProgram,
    texts: Mapping[str, ir.Program],
    launches: Mapping[Any, KernelList] | None,
    sizes: Any,
) -> Iterator[tuple[str, Content]]:
    """Yields the parts of a compiled program: texts, then kernels and memory plans.

    ``texts`` are the captured program, with tensor names as in the file, and the programs that run;
    ``launches`` are None if unknown. Raises FileError if a part is not plain data.
    """
    # A symbolic program was compiled without the cache, which is needed here to pack kernels.
    options = kept.lowered.context.options
    cache = CompileCache.of_user(options.backend, options.target or "")
    runs = {name: _plainly_named(one) for name, one in texts.items() if name != CAPTURED}
    for name, one in {**texts, **runs}.items():
        yield f"{name}.txt", [_text(one, sizes, kept.own)]
    if not runs or not cache.facts or launches is None:
        return  # then load makes kernels and plans again
    made, objects = {}, dict[str, bytes]()
    try:
        for part, one in runs.items():
            named = {leaf: name for leaf, name in closure_names(one).items() if leaf in launches}
            packed = {name: cache.packed(launches[leaf]) for leaf, name in named.items()}
            made[part] = {name: data for name, (data, _) in packed.items()}
            objects |= {d: content for _, found in packed.values() for d, content in found.items()}
    except (NotCacheableError, OSError):
        return
    known: Any = None
    if kept.facts is not None:
        facts, watched = kept.facts
        # Facts that load would have to compute from operators. Equal roots get equal numbers, and
        # inputs get negative ones.
        roots = facts.view_roots
        numbers = [~r if isinstance(r, int) else roots.index(r) for r in roots]
        known = [numbers, facts.draws, list(watched), facts.output_order]
        if kept.backwards:  # the caches of ``Facts`` for these
            apart = [[sorted(a), sorted(b), are] for (a, b), are in facts.apart.items()]
            known += [apart, list(facts.absent.items())]
    plans, *more = [
        list(map(plan_data, found)) for found in (kept.plans, *(x.plans for x in kept.backwards))
    ]
    yield "made.json", [to_json([cache.facts, made, plans, known, *more])]
    yield from ((f"objects/{digest}", [content]) for digest, content in objects.items())


def _text(program: ir.Program, told: Any, own: Container[Any]) -> bytes:
    """Returns the text of a program, checked to parse to the same program.

    Raises FileError if it does not, or an operator is a custom one.
    """
    refuse_foreign(program, own)
    text = text_to_compare(program)
    for _ in range(2):  # the first text may lack types of operators that never ran, such as updates
        try:
            sizes = None if told is None else read_sizes(told)
            again = text_to_compare(parse_program(text, sizes=sizes))
        except ParseError as error:
            raise FileError(f"This program has no text that can be read again: {error}") from error
        if again == text:
            return text.encode()
        text = again
    raise FileError("This program has no text that says all of it.")


def refuse_foreign(program: ir.Program, own: Container[Any]) -> None:
    """Raises FileError for an operator that is not PyTorch's own, because it is user code."""
    for closure in ir.walk_closures(program):
        for node in closure.nodes if isinstance(closure, ir.Leaf) else ():
            is_ours = isinstance(node.target, ir.Control) or node.target in IN_PLACE
            name = function_name(node.target) or _OURS
            if name.startswith(_OURS) and not is_ours and node.target not in own:
                raise FileError(
                    f"@{closure.name} calls {name_of(node)}, no operator of PyTorch's own, and a "
                    "file holds no code: a program with it is neither saved nor loaded."
                )


def _plainly_named(program: ir.Program) -> ir.Program:
    """Returns the program with short names; readable names are in the captured program."""
    named = {v: ir.Value(v.type) for v in program.inputs}
    calls = []
    for call in program.calls:
        results = tuple(ir.Value(v.type) for v in call.results)
        args = tuple(named[v] for v in call.args)
        named.update(zip(call.results, results, strict=True))
        calls.append(ir.Call(call.closure, args, results, call.path, call.recompute))
    outputs = tuple(named[v] for v in program.outputs)
    return ir.Program(tuple(named[v] for v in program.inputs), tuple(calls), outputs)


def boundary_data(state: Compilation) -> Any:
    """Returns what crosses from a forward to its backward, or into a step, as JSON data."""
    if state.goal.kind == "rank" or state.goal.on_mesh is not None:
        return RANKS
    if state.composed is not None:
        return step_data(state.composed)
    return derivative_data(state.derivative)


def step_data(step: StepProgram) -> Any:
    """Returns the meaning of a step's inputs and outputs, as JSON data."""
    updates = step.updates
    of_updates = [updates.state, updates.parameters, updates.num_results]
    return [step.batch, step.gradients, step.writes, of_updates]


def derivative_data(derivative: Derivative | None) -> Any:
    """Returns the positions of what crosses from a forward to its backward, as JSON data."""
    if derivative is None:
        return None
    if derivative.offloaded:
        raise FileError("A program whose saved tensors wait on the host cannot be saved.")
    return [list(getattr(derivative, name)) for name in _INDICES]


def backward_texts(backwards: Iterable[ir.Program]) -> dict[str, ir.Program]:
    """Returns backwards for losses that leave outputs unused, by their names in a file."""
    return {f"{PARTS[1]}.{number}": one for number, one in enumerate(backwards, 1)}


def output_data(tree: OutputTree) -> Any:
    """Returns a result's structure, as JSON data; FileError if calls change the user's objects."""
    if tree.updates or tree.kept:
        raise FileError(
            "A call of this program changes dictionaries, caches or attributes besides returning "
            "its result, which a file cannot say: return what is needed (use_cache=False)."
        )
    try:
        return tree_data(tree.leaves, tree.spec)
    except NotCacheableError as reason:
        raise FileError(f"The result holds {reason}, which a file cannot say.") from reason


# ---- from a file ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadProgram:
    """The texts of a program, read and checked against each other.

    ``backwards`` are for losses that leave outputs unused.
    """

    captured: ir.Program
    runs: Mapping[str, ir.Program]
    sizes: ReadSizes | None = None
    derivative: Derivative | None = None
    step: StepProgram | None = None
    backwards: Sequence[Derivative] = ()


def read_program(
    parts: Parts,
    place: str,
    told: Mapping[str, Any],
    settings: Sequence[TensorType] | None,
    *,
    trusted: bool,
) -> ReadProgram:
    """Reads a program; FileError if it is not valid, or its texts do not fit together.

    ``told`` is the file's JSON data of it, ``settings`` are the types of the numbers of a step's
    optimizer. If ``trusted``, operators are read on demand, unchecked: this machine wrote them.
    """
    boundary = told["boundary"]
    sizes = None if told["sizes"] is None else read_sizes(told["sizes"])
    size_of = None if sizes is None else partial(parse_size, sizes=sizes)
    (program,) = read_texts(parts, place, [CAPTURED], sizes, trusted=trusted).values()
    leaves, spec = tree_of(told["output"], size_of)
    captured = replace(program, output_tree=OutputTree(tuple(map(tuple, leaves)), spec))
    _check_leaves(captured)
    if boundary == RANKS:
        return ReadProgram(captured, {})
    if settings is not None:
        programs = read_texts(parts, place, [STEP], sizes, trusted=trusted)
        step = step_of(captured, programs[STEP], settings, boundary)
        return ReadProgram(captured, programs, sizes, _halves(step.program), step)
    read = read_runs(parts, place, captured, boundary, sizes, trusted=trusted)
    told_backwards = told.get("backwards", ())
    programs = read_texts(parts, place, backward_texts(told_backwards), sizes, trusted=trusted)
    pairs = zip(told_backwards, programs.values(), strict=True)
    return replace(read, backwards=[_backward_of(read, told, one) for told, one in pairs])


def _backward_of(read: ReadProgram, told: Any, program: ir.Program) -> Derivative:
    """Returns the derivative for a backward without some cotangents, checked by the full one."""
    full, backward = read.derivative, ir.Composite(f"main.{PARTS[1]}", program)
    taken, given = told
    rows = _positions(taken), _positions(given)
    if full is None or rows[0] == full.cotangent_outputs:
        raise FileError("a backward is for a loss of some results, and there is none of all")
    for row, every in zip(rows, (full.cotangent_outputs, full.gradient_inputs), strict=True):
        if not row or row != tuple(i for i in every if i in row):
            raise FileError("a backward takes or gives what the one for all results does not")
    found = Derivative(full.forward, backward, full.kept_inputs, full.kept_outputs, *rows)
    _check_derivative(read.captured, found)
    return found


def read_runs(
    parts: Parts,
    place: str,
    captured: ir.Program,
    boundary: Any,
    sizes: ReadSizes | None = None,
    local: Callable[[Mapping[str, ir.Program]], ir.Program] | None = None,
    own: Container[Any] = (),
    *,
    trusted: bool,
) -> ReadProgram:
    """Reads the programs that run for a captured one: a forward, and its backward if there is one.

    Over a mesh, ``local`` returns the captured program in local types, to check them against.
    """
    names = PARTS[: 1 if boundary is None else 2]
    programs = read_texts(parts, place, names, sizes, own, trusted=trusted)
    captured = captured if local is None else local(programs)
    if boundary is None:
        _check_types("the forward", _types(programs[PARTS[0]]), _types(captured))
        return ReadProgram(captured, programs, sizes)
    forward, backward = (ir.Composite(f"main.{n}", p) for n, p in programs.items())
    found = Derivative(forward, backward, *map(_positions, boundary))
    _check_derivative(captured, found)
    return ReadProgram(captured, programs, sizes, found)


def read_texts(
    parts: Parts,
    place: str,
    names: Iterable[str],
    sizes: ReadSizes | None = None,
    own: Container[Any] = (),
    *,
    trusted: bool,
) -> dict[str, ir.Program]:
    """Reads programs by name, and verifies them unless this machine wrote them.

    They may contain PyTorch's operators and those in ``own``.
    """
    bodies: Literal["now", "later"] = "later" if trusted else "now"
    found = {}
    for name in names:
        part = f"{place}{name}.txt"
        try:
            found[name] = program = parse_program(parts.read(part).decode(), bodies, sizes)
            if not trusted:
                refuse_foreign(program, own)  # else it could run any operator of the process
                verify(program, "shared" if name == CAPTURED else "aten")
        except (ParseError, VerifyError, UnicodeError) as error:
            first, *rest = str(error).splitlines()
            is_in_line = rest and isinstance(error, ParseError)
            where = f", in {rest[0].strip()[:80]!r}" if is_in_line else ""
            raise FileError(f"{part}: {first[:200]}{where}") from error
    return found


def read_sizes(told: Any) -> ReadSizes:
    """Reads the symbols of a program, and their conditions, which their examples must keep."""
    _, examples, conditions = told
    for name, number in examples.items():
        if type(number) is not int or not 2 <= number <= _MAX_EXAMPLE:
            raise FileError(f"{name[:20]} cannot be {str(number)[:20]}")
    sizes = ReadSizes(examples)
    for condition in conditions:
        sizes.require(parse_size(condition, sizes))
    return sizes


def _index(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise FileError(f"{str(number)[:20]!r} is no position of an input or output")
    return number


def _check_leaves(captured: ir.Program) -> None:
    tree = captured.output_tree
    for kind, value in tree.leaves:
        if kind not in ("output", "constant"):
            raise FileError(f"a leaf of the result is of the kind {str(kind)[:20]!r}")
        if kind == "output" and not _index(value) < len(captured.outputs):
            raise FileError(f"the result holds output {value}, which there is not")
    if len(captured.sources) != len(captured.inputs):
        raise FileError("the captured program has inputs without a source")


def _types(program: ir.Program) -> tuple[list[Any], list[Any]]:
    return [v.type for v in program.inputs], [v.type for v in program.outputs]


def _check_types(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise FileError(f"{what} takes or gives other types than the program as captured")


def _positions(row: Any) -> tuple[int, ...]:
    return tuple(map(_index, row))


def _check_derivative(captured: ir.Program, found: Derivative) -> None:
    """Checks that the types of forward and backward fit together and fit the captured program."""
    inputs, outputs = _types(captured)
    saved = found.forward.output_types[-1:]
    if not saved or not isinstance(saved[0], StructType):
        raise FileError("a forward saves nothing for its backward")
    _check_types(
        "the forward",
        (list(found.forward.input_types), list(found.forward.output_types)),
        (inputs, [*outputs, *saved]),
    )
    kept = [*(inputs[i] for i in found.kept_inputs), *(outputs[i] for i in found.kept_outputs)]
    taken = list(found.backward.input_types)
    number = len(taken) - len(found.cotangent_outputs)
    _check_types("the backward", taken[:number], [*saved, *kept])
    pairs: list[Any] = [
        *zip(taken[number:], (outputs[i] for i in found.cotangent_outputs), strict=True),
        *zip(found.backward.output_types, (inputs[i] for i in found.gradient_inputs), strict=True),
    ]
    for gradient, value in pairs:
        both = isinstance(gradient, TensorType) and isinstance(value, TensorType)
        # A gradient may have other strides than its tensor.
        if not both or gradient != replace(value, stride=gradient.stride):
            raise FileError("a gradient is of another type than what it belongs to")


def _halves(step: ir.Program) -> Derivative:
    """Returns the forward that a step calls first, as a derivative without positions."""
    one = step.calls[0].closure
    if not isinstance(one, ir.Composite) or not isinstance(one.output_types[-1], StructType):
        raise FileError("the first call of a step is not its forward")
    return Derivative(one, one, (), (), (), ())


def step_of(
    captured: ir.Program, program: ir.Program, settings: Sequence[TensorType], boundary: Any
) -> StepProgram:
    """Returns a step, after checking the types of its inputs and outputs."""
    batch, gradients, writes, (state, parameters, num_results) = boundary
    model = tuple(s for s in captured.sources if isinstance(s, ir.ModelTensor))
    updates = Updates(
        tuple((_index(i), str(name)) for i, name in state),
        _positions(parameters),
        _index(num_results),
    )
    found = StepProgram(
        program,
        tuple(map(_positions, batch)),
        model,
        _positions(gradients),
        _positions(writes),
        updates,
    )
    inputs, outputs = _types(program)
    own = [type_ for _, _, type_ in model_inputs(captured)]
    given = {
        s.index: v.type
        for s, v in zip(captured.sources, captured.inputs, strict=True)
        if isinstance(s, ir.UserInput)
    }
    expected = [*(given[i] for row in batch for i in row), *own]
    count = TensorType(torch.float32, (), (), torch.device("cpu"))
    states = [count if name == "step" else own[index] for index, name in state]
    _check_types("a step", inputs, [*expected, *states, *settings, outputs[0]])
    results = len(batch) + len(gradients) + len(writes) + num_results
    if len(outputs) != results or not {name for _, name in state} <= _STATE:
        raise FileError("a step returns another number of results than model.json says")
    for output, index in zip(outputs[len(batch) :], (*gradients, *writes), strict=False):
        if (output.shape, output.dtype) != (own[index].shape, own[index].dtype):
            raise FileError("a gradient is of another type than what it belongs to")
    return found


def take_made(state: State, parts: Parts, place: str, program: ReadProgram) -> State:
    """Adds the kernels and memory plans of a file to the state: trusted code.

    The state stays as it is if the file is from another PyTorch or machine.
    """
    name, context = f"{place}made.json", state.context
    if name not in parts.names:
        return state
    facts, lists, plans, known, *more = parts.json(name)
    if facts != context.cache.facts:
        return state
    size_of = partial(parse_size, sizes=program.sizes or ReadSizes())
    backwards = [programs_of(one)[PARTS[1]] for one in program.backwards]
    for part, one in {**program.runs, **backward_texts(backwards)}.items():
        for leaf, leaf_name in closure_names(one).items():
            if isinstance(leaf, ir.Leaf) and leaf_name in lists[part]:
                data = lists[part][leaf_name]
                context.recorded[leaf] = context.cache.unpacked(data, leaf.name, size_of)
    first, *others = [tuple(map(plan_of, found)) for found in (plans, *more)]
    pairs = zip(program.backwards, others, strict=True)
    state = replace(state, plans=first, backwards=tuple(pairs))
    if known is None:
        return state
    roots, draws, watched, order, *asked = known
    views = [~root if root < 0 else ("root", root) for root in roots]
    told = {"view_roots": views, "draws": draws, "output_order": order}
    told["watched_inputs"] = tuple(watched)
    if asked:
        apart, absent = asked
        told["apart"] = {(frozenset(one), frozenset(other)): are for one, other, are in apart}
        told["absent"] = {tuple(unused): tuple(places) for unused, places in absent}
    return replace(state, known=told)


def used_parameters(programs: Iterable[ir.Program]) -> list[str]:
    """Returns the names of the parameters that programs use, in order."""
    found = (source for program in programs for _, source, _ in model_inputs(program))
    return list(dict.fromkeys(source.name for source in found if source.kind == "parameter"))


def model_inputs(program: ir.Program) -> list[tuple[int, ir.ModelTensor, TensorType]]:
    """Returns the inputs that are tensors of the model, with their positions and types."""
    pairs = enumerate(zip(program.sources, program.inputs, strict=True))
    return [(i, s, ir.tensor_type(v)) for i, (s, v) in pairs if isinstance(s, ir.ModelTensor)]
