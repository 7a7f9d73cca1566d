"""Programs as text: as captured, after any pass, what a pass changed, and those of a file.

The command line names a model as ``package.module:function``.
"""

from __future__ import annotations

import importlib
import operator
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from torch import nn

from ..backend.files.container import Parts, open_parts
from ..reuse.errors import LazyInlineError, door
from ..reuse.ir.printer import WIDTH, Shown, diff_texts, folded, format_program
from ..reuse.ir.program import Program
from ..reuse.ir.verify import not_primitive, operators_of, verify
from .capture.blocks import Reuse
from .compiler import GOALS, PASSES, Compiler, note_recompute, passes_for
from .options import Batching, LossModel, Options
from .passes.programs import PARTS
from .passes.programs import capture as capture_pass
from .passes.state import Compilation, Goal, Subject, between, check, run, step_goal
from .refusals import check_example
from .saved.load import Opened, load
from .saved.parts import read_texts
from .saved.ranks import read_table
from .saved.save import MODEL

if TYPE_CHECKING:
    from torch.export import ExportedProgram

FORM = "package.module:function, a function without arguments that returns (model, args)"


class Target(NamedTuple):
    """A model with example inputs."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def load_target(text: str, *arguments: int) -> Target:
    """Calls the function that a command line names; LazyInlineError if it returns no model.

    Its module is also looked for in the working directory. A target may also be a ``.pt2`` file of
    ``torch.export.save``, with its example inputs.
    """
    if text.endswith(".pt2"):
        from .dynamo.torch_dynamo_backend import target_in  # it imports Dynamo

        return Target(*target_in(text))
    module_name, _, function_name = text.partition(":")
    if not (module_name and function_name):
        raise LazyInlineError(f"{text!r} is not a target. A target is {FORM}.")
    if module_name.endswith(".py"):
        name = ".".join(module_name.removesuffix(".py").split("/"))
        raise LazyInlineError(f"{text!r} names a file. Write {name}:{function_name}.")
    # A console script does not look in the working directory by itself, unlike `python -m`.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        result = operator.attrgetter(function_name)(importlib.import_module(module_name))(
            *arguments
        )
    except LazyInlineError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        # The line in the user's function, not the import or the call here.
        inside = [f for f in frames if f.filename != __file__ and "importlib" not in f.filename]
        where = f" at {inside[-1].filename}:{inside[-1].lineno}" if inside else ""
        raise LazyInlineError(
            f"{text} failed{where}: {type(error).__name__}: {error}. A target is {FORM}."
        ) from error
    return _checked(text, result)


def _checked(text: str, result: Any) -> Target:
    model, args, kwargs = (*result, {}, {}, {})[:3] if isinstance(result, tuple) else (None,) * 3
    wrong = ""
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        wrong = f"a {type(result).__name__}"
    elif not isinstance(model, nn.Module):
        wrong = f"a {type(model).__name__} where an nn.Module belongs"
    elif not isinstance(args, (tuple, list)):
        wrong = f"a {type(args).__name__} as args: write (x,) for one input"
    elif not isinstance(kwargs, Mapping):
        wrong = f"a {type(kwargs).__name__} as kwargs"
    if wrong:
        raise LazyInlineError(
            f"{text} has to return (model, args) or (model, args, kwargs); it returned {wrong}."
        )
    return Target(model, tuple(args), kwargs)


Way = Literal["compile", "step"]  # the functions that need only a model with example inputs


@door
def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    reuse: Reuse = "auto",
    train: bool = False,
) -> Program:
    """Captures a model as a program of closures and calls; nothing is compiled or run.

    Args:
        model: any ``nn.Module``. Its parameters may be on the meta device.
        args: example positional inputs; only layouts matter.
        kwargs: example keyword inputs.
        reuse: ``"auto"`` (share instances of marked classes, and modules that repeat), ``"marked"``
            (marked ones only) or ``"off"`` (inline early).
        train: capture with grad mode on.

    Returns:
        The program; ``print(program)`` shows each closure once with its call count.

    Raises:
        CaptureError: if the model's Python cannot be traced.
        PlanError: if ``model`` or ``args`` are something else.

    Example:
        >>> print(lazyinline.capture(model, (ids,)))
    """
    check_example("capture", model, args)
    compiler = Compiler(Options(reuse=reuse, backend="eager"))
    subject = Subject(model, args, dict(kwargs or {}), effects="undo")
    state = run((capture_pass,), compiler.started(subject, Goal(train=train)))
    return verify(state.captured.program)


@door
def from_exported(exported: ExportedProgram, *, train: bool = False) -> Program:
    """Returns the program of a ``torch.export`` result; each repeated region is one closure.

    A result of :meth:`Program.to_exported` gives the same program again. Dynamic sizes are symbols.

    Args:
        exported: from ``torch.export.export`` or ``torch.export.load``.
        train: capture with grad mode on.

    Raises:
        CaptureError: if a program cannot express it, or it has no example inputs.

    Example:
        >>> program = lazyinline.from_exported(torch.export.load("model.pt2"))
        >>> compiled = lazyinline.compile(program)
    """
    from .dynamo.torch_dynamo_backend import program_of_exported  # it imports Dynamo

    return program_of_exported(exported, train=train)


def pass_lists() -> str:
    """Returns each kind of goal with its passes: name, level after it, and description."""
    lines = []
    for kind, what in GOALS.items():
        lines.append(f"{kind}: {what}")
        lines += [f"  {one.name:<14}{one.level:<8}{one.summary}" for one in passes_for(kind)]
        lines.append("")
    lines += [
        "A further shape, where sizes vary, begins at link; a backward for fewer outputs at "
        "decompose.",
        "",
    ]
    return folded("\n".join(lines), indent=24)


def show_captured(target: Target, options: Options, *, train: bool, source: Shown = "hide") -> str:
    """Returns a captured program as text; in training, also what is saved and recomputed."""
    compiler = Compiler(options)
    subject = Subject(target.model, target.args, target.kwargs)
    state = run((capture_pass,), compiler.started(subject, Goal(train=train)))
    text = format_program(state.programs[PARTS[0]], source=source)
    if not train:
        return text
    state = run(between(PASSES, "derive", "recompute"), state)
    note_recompute(state)
    lines = ["saved for the backward, and computed again in it, per closure:"]
    return "\n".join([text, folded("\n".join([*lines, *map(str, state.report.recompute)])), ""])


def reduced(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    options: Options | None = None,
    *,
    train: bool = False,
) -> Mapping[str, Program]:
    """Reduces a model's forward, and in training its backward, to primitives.

    Operators without a rule stay; :func:`not_primitive` lists them. The result is for inspection
    only: compiled programs are made from the original operators.
    """
    compiler = Compiler(options or Options(reuse="auto", backend="eager"))
    subject, goal = Subject(model, args, dict(kwargs or {})), Goal("primitives", train=train)
    return run(PASSES, compiler.started(subject, goal)).programs


def show_primitives(
    target: Target, options: Options, *, train: bool, source: Shown = "hide"
) -> str:
    """Returns a model's programs reduced to primitives, and the operators that are none."""
    programs = reduced(target.model, target.args, target.kwargs, options, train=train)
    texts = [
        f"// {part}, as primitives\n{format_program(program, source=source)}"
        for part, program in programs.items()
    ]
    return "\n".join([*texts, folded(_reduction(programs))])


def _reduction(programs: Mapping[str, Program]) -> str:
    """Returns the number of different primitives, and the operators that are none."""
    operators = {name for program in programs.values() for name in operators_of(program)}
    whole = dict.fromkeys(one for p in programs.values() for one in not_primitive(p))
    said = f"{len(operators - {one.operator for one in whole})} different primitives"
    if not whole:
        return f"{said}, and nothing else.\n"
    return "\n".join([f"{said}; no rule takes these apart:", *(f"  {one}" for one in whole), ""])


def show_after(
    name: str,
    target: Target,
    options: Options,
    *,
    way: Way = "compile",
    train: bool = False,
    micro_batches: int = 1,
    diff: bool = False,
) -> str:
    """Returns the programs after a pass, verified; with ``diff``, what it changed."""
    is_step = way == "step"
    model = LossModel(target.model, None) if is_step else target.model
    goal = step_goal(Batching(micro_batches)) if is_step else Goal(train=train)
    state = Compiler(options).started(Subject(model, target.args, target.kwargs), goal)
    passes = passes_for(goal.kind)
    names = [one.name for one in passes]
    if name not in names:
        raise LazyInlineError(f"There is no pass {name!r} here; there are {', '.join(names)}.")
    # Unique, because passes of one name are for different goals.
    number = names.index(name)
    # Kept for the diff, which costs nothing as states are immutable.
    before = run(passes[:number], state)
    one = passes[number]
    if not one.wanted(before):
        return f"{name} does not run here: nothing asks for it.\n"
    after = run((one,), before)
    check(after, one.level)
    width = WIDTH - 1 if diff else WIDTH  # a diff puts a sign before each line
    texts = _texts(after, width)
    if not diff:
        return "\n".join(f"// {part}, after {name}\n{text}" for part, text in texts.items())
    old = _texts(before, width)
    parts = {part: None for part in (*old, *texts)}
    changes = {p: diff_texts(old.get(p, ""), texts.get(p, "")) for p in parts}
    return "\n".join(f"// {p}, by {name}\n{d or '(unchanged)'}\n" for p, d in changes.items())


def _texts(state: Compilation, width: int) -> dict[str, str]:
    """Returns each program as text: as calls, or as launches once it is linked."""
    programs = {part: format_program(one, width=width) for part, one in state.programs.items()}
    return programs | {part: folded(f"{flat}\n", width=width) for part, flat in state.flats.items()}


# ---- files ---------------------------------------------------------------------------------------

_OF_RANKS = re.compile(
    r"(?P<place>ranks/(?P<rank>[0-9]{1,7})/programs/0/(stages/(?P<stage>[0-9]{1,7})/)?)"
    r"(?P<kind>step|forward|backward)\.txt"
)


def programs_of_file(path: str, *, bound: bool = False) -> list[tuple[str, Program]]:
    """Returns the programs of a file, described: the captured one, and those of ranks.

    With ``bound`` they have the file's tensors; then those of several ranks are left out.
    """
    with open_parts(path, None) as parts:
        opened, (_, alike) = Opened(parts, None), _alike(parts)
        if bound:
            return [] if alike else opened.captured(opened.module(path, None))
        found = opened.captured()
        for ranks, texts in alike:
            # Imported late: DTensor takes as long to import as all of lazyinline.
            from ..pipeline_parallel.mesh.torch_collectives import OWN

            for what, (place, kind) in texts.items():
                (program,) = read_texts(parts, place, [kind], own=OWN, trusted=False).values()
                found.append((f"the {what}, {_listed(ranks)}", program))
        return found


def opened_as_ranks(path: str) -> Iterator[tuple[str, Any]]:
    """Opens a file as each of its ranks in turn, with collectives that do nothing.

    Yields the names of ranks that run the same, and the opened file; "" for a single process.
    """
    with open_parts(path, None) as parts:
        axes, alike = _alike(parts)
    if not alike:
        yield "", load(path)
    for ranks, _ in alike:
        from ..pipeline_parallel.mesh.torch_collectives import absent_ranks  # late, as above

        with absent_ranks(axes, ranks[0]):
            yield _listed(ranks), load(path)


_Texts: TypeAlias = dict[str, tuple[str, str]]
"""The programs of a rank, by description: folder and name of each in a file."""


def _alike(parts: Parts) -> tuple[dict[str, int], list[tuple[list[int], _Texts]]]:
    """Returns the mesh of a file's ranks, and groups of ranks that run the same programs."""
    told, axes, by_place = parts.json(MODEL), dict[str, int](), list[Sequence[int]]()
    if "mesh" in told:
        from .saved.mesh import SavedMesh  # late, as above

        mesh = SavedMesh.read(told["mesh"], None, has_stages="ranks" in told)
        axes, by_place = dict(mesh.axes), [[rank] for rank in mesh.row]
    elif "ranks" in told:
        read_table(told["ranks"])  # which checks the sizes
        _, ranks, _, replicas = told["ranks"][1]
        axes = {"data": replicas, "pipeline": ranks}
        by_place = [range(rank, ranks * replicas, ranks) for rank in range(ranks)]
    texts: dict[int, _Texts] = {}
    for found in filter(None, map(_OF_RANKS.fullmatch, parts.names if by_place else ())):
        stage = found["stage"]
        what = found["kind"] if stage is None else f"{found['kind']} of stage {stage}"
        for rank in by_place[int(found["rank"])]:
            texts.setdefault(rank, {})[what] = found["place"], found["kind"]
    # Each text is read once, and only its digest is kept.
    digest = cache(lambda one: sha256(parts.read(f"{''.join(one)}.txt")).digest())
    same: dict[Any, list[int]] = {}
    for rank, own in texts.items():
        same.setdefault(tuple((what, digest(x)) for what, x in own.items()), []).append(rank)
    return axes, [(ranks, texts[ranks[0]]) for ranks in same.values()]


def _listed(ranks: Sequence[int]) -> str:
    own = sorted(ranks)
    if len(own) > 3 and own[-1] - own[0] == len(own) - 1:
        return f"ranks {own[0]} to {own[-1]}"
    return f"rank{'s' * (len(own) > 1)} {', '.join(map(str, own))}"
