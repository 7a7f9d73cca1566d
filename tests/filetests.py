"""A test that is a text file: a program, passes by name, and what comes of it.

``docs/design/file-tests.md`` says how one is written.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from programs import inline_calls, random_value
from torch import nn

from lazyinline.autodiff.missing_cotangents import MissingCotangents
from lazyinline.backend.kernels.torch_recorder import record_graph
from lazyinline.backend.link.link import link
from lazyinline.backend.run.planned import PlannedProgram, Runtime
from lazyinline.frontend.capture.regions import CapturedModel
from lazyinline.frontend.compiler import GOALS, Compiler, passes_for, run
from lazyinline.frontend.options import Batching, Options
from lazyinline.frontend.passes.programs import PARTS, returned_of, with_derivative
from lazyinline.frontend.passes.state import Compilation, Goal, GoalKind, Subject
from lazyinline.pipeline_parallel.cut import cut_program, split_composites
from lazyinline.reuse.ir.constants import share_constants
from lazyinline.reuse.ir.leaf import flat_types, flatten_value, interpret
from lazyinline.reuse.ir.parser import parse_program
from lazyinline.reuse.ir.program import Leaf, ModelTensor, Program, walk_closures
from lazyinline.reuse.ir.verify import verify

FOLDER = Path(__file__).parent / "filetests"
_COMMAND = re.compile(r"// (RUN|EXECUTE|ERROR): ?(.*)")
_CHECK = re.compile(r"^// CHECK( calls)?\n", re.MULTILINE)
_LEAF = re.compile(r"(?:aten |eager |no_grad |autocast_\w+ )*closure ")
_BETWEEN = "// ----\n"

Step = Callable[[Compilation], Compilation]


@dataclass(frozen=True)
class FileTest:
    """One test; a file holds one or more.

    Attributes:
        program: the text before CHECK, which the parser reads.
        passes: of RUN, each with its option.
        executes: whether what comes of each pass is run and compared.
        error: what must be said, instead of a text.
        check: the line of CHECK; "" if no text is expected.
        expected: the text of all programs after the last pass.
    """

    program: str
    passes: Sequence[tuple[str, str]]
    executes: bool
    error: str
    check: str
    expected: str

    @classmethod
    def read(cls, path: Path) -> list[FileTest]:
        """Returns the tests in a file."""
        return list(map(cls._of, path.read_text(encoding="utf-8").split(_BETWEEN)))

    @classmethod
    def _of(cls, text: str) -> FileTest:
        check = _CHECK.search(text)
        program, expected = (text[: check.start()], text[check.end() :]) if check else (text, "")
        said = dict(found.groups() for found in map(_COMMAND.match, program.split("\n")) if found)
        names = [part.strip().partition("=") for part in said.get("RUN", "").split("|")]
        passes = [(name, option) for name, _, option in names if name]
        executes, error = "EXECUTE" in said, said.get("ERROR", "")
        return cls(program, passes, executes, error, check[0] if check else "", expected)

    @property
    def title(self) -> str:
        """What it shows, by its first line."""
        return self.program.partition("\n")[0].removeprefix("// ")

    def write(self, path: Path, index: int, found: str) -> None:
        """Writes the test anew, with what was found."""
        tests = path.read_text(encoding="utf-8").split(_BETWEEN)
        tests[index] = self.program + self.check + found
        path.write_text(_BETWEEN.join(tests), encoding="utf-8")

    def text(self) -> str:
        """Runs the passes, and each program if that is asked for; returns the last programs."""
        program = verify(parse_program(self.program))
        kind = next((kind for kind in GOALS if [kind] == [p[0] for p in self.passes[:1]]), "module")
        options = dict(self.passes)
        state = started(program, kind, options)
        for name, option in self.passes:
            if name != kind:
                state = step_named(name, option, kind)(state)
                if self.executes:
                    compare(program, state, name)
        texts = [str(program) for program in state.programs.values()]
        if "calls" in self.check:
            texts = ["\n\n".join(p for p in t.split("\n\n") if not _LEAF.match(p)) for t in texts]
        return "\n".join(texts)


def started(program: Program, kind: GoalKind, options: Mapping[str, str]) -> Compilation:
    """Returns what is known of a program as if a model had just been captured."""
    recompute: Any = options.get("recompute") or None
    boundaries: Any = "fused" if "rotate" in options else "kept"
    compiler = Compiler(
        Options(backend="eager", recompute=recompute, cache="off", boundaries=boundaries)
    )
    batching = Batching(int(options.get("repeat") or 1))
    goal = Goal(kind, train="autodiff" in options, batching=batching)
    state = compiler.started(Subject(nn.Identity(), (), {}), goal)
    nothing: Any = None
    seen = CapturedModel(program, [], nothing, [], {})
    return replace(state, seen=seen, programs={PARTS[0]: program})


def step_named(name: str, option: str, kind: GoalKind) -> Step:
    """Returns a pass of the compiler, or another rewrite."""
    for one in passes_for(kind):
        if one.name == name:
            return lambda state: run([one], state)
    return lambda state: _OTHERS[name](state, option)


def _each(rewrite: Callable[[Program], Program]) -> Any:
    def apply(state: Compilation, option: str) -> Compilation:
        programs = {name: rewrite(program) for name, program in state.programs.items()}
        return replace(state, programs=programs)

    return apply


def _verified(state: Compilation, level: Any) -> Compilation:
    for program in state.programs.values():
        verify(program, level or "shared")
    return state


def _without_cotangents(state: Compilation, outputs: str) -> Compilation:
    assert state.request is not None and state.derivative is not None
    fewer = MissingCotangents(state.derivative).without(map(int, outputs.split(",")))
    assert fewer is not None
    return with_derivative(state, state.request, fewer)


def _cut(state: Compilation, stages: str) -> Compilation:
    """Composites that span stages in parts; ``stages`` has the stage of each call."""
    (program,) = state.programs.values()
    colors = ast.literal_eval(f"({stages},)")
    cut_program(program, colors, num_stages=len(set(re.findall(r"\d+", stages))))
    return replace(state, programs={PARTS[0]: split_composites(program, colors)[0]})


def _constants(program: Program) -> Program:
    return share_constants(program)[0]


_OTHERS: Mapping[str, Callable[[Compilation, str], Compilation]] = {
    "inline": _each(inline_calls),
    "constants": _each(_constants),
    "cut": _cut,
    "verify": _verified,
    "unused": _without_cotangents,
}

# ---- running ---------------------------------------------------------------------------------


def compare(program: Program, state: Compilation, what: str) -> None:
    """Asserts that the programs of a state, and what runs them, give what PyTorch gives."""
    generator = torch.Generator().manual_seed(0)
    args = [random_value(v.type, generator) for v in program.inputs]
    constants = state.programs[PARTS[0]].sources[len(args) :]  # numbers that became inputs
    numbers = [s.tensor for s in constants if isinstance(s, ModelTensor)]
    derivative = state.derivative
    wanted = derivative.gradient_inputs if derivative else ()
    outputs = derivative.cotangent_outputs if derivative else ()
    tracked = [a.requires_grad_() if i in wanted else a for i, a in enumerate(map(_copied, args))]
    torch.manual_seed(0)
    expected = list(interpret(program, tracked))
    seeds = [torch.randn_like(expected[i]) for i in outputs]
    if derivative:
        expected += torch.autograd.grad(
            [expected[i] for i in outputs], [tracked[i] for i in wanted], seeds
        )
    for name, engine in _engines(state).items():
        torch.manual_seed(0)
        found = engine([*map(_copied, args), *numbers], seeds)
        flat, plain = flatten_value(tuple(found)), flatten_value(tuple(expected))
        assert len(flat) == len(plain), f"after {what}, {name}"
        for ours, theirs in zip(flat, plain, strict=True):
            torch.testing.assert_close(ours, theirs.detach(), msg=partial(_said, what, name))


def _said(what: str, engine: str, message: str) -> str:
    return f"after {what}, run by the {engine}: {message}"


def _copied(value: Any) -> Any:
    return tuple(map(_copied, value)) if isinstance(value, tuple) else value.clone()


def _engines(state: Compilation) -> dict[str, Callable[[list[Any], list[Any]], list[Any]]]:
    """Returns what can run a state: the interpreter, an arena, the closures of a linked program."""
    derivative = state.derivative
    programs = list(state.programs.values())
    num_results = len(state.captured.program.outputs)

    def handed(args: list[Any], results: list[Any], seeds: list[Any]) -> list[Any]:
        assert derivative is not None
        kept = [args[i] for i in derivative.kept_inputs]
        return [*kept, *(results[i] for i in derivative.kept_outputs), *seeds]

    def interpreted(args: list[Any], seeds: list[Any]) -> list[Any]:
        results = list(interpret(programs[0], args))
        if derivative is None:
            return results
        *results, saved = results
        return [*results, *interpret(programs[1], [saved, *handed(args, results, seeds)])]

    def by(runtime: Any) -> Callable[[list[Any], list[Any]], list[Any]]:
        def ran(args: list[Any], seeds: list[Any]) -> list[Any]:
            results, flight = runtime.forward(flatten_value(tuple(args)))
            if derivative is None:
                return list(results)
            return [*results, *runtime.backward(flight, handed(args, results, seeds), "free")]

        return ran

    engines = {"interpreter": interpreted}
    if state.runs is None:
        returned, sources = returned_of(state.captured.program, derivative)
        returned[0] = len(flat_types(v.type for v in programs[0].outputs[:num_results]))
        leaves = {c for p in programs for c in walk_closures(p) if isinstance(c, Leaf)}
        lists = {leaf: record_graph(leaf) for leaf in leaves}
        planned = PlannedProgram(list(map(link, programs)), lists, [], returned, sources)
        num_saved = len(flat_types([derivative.saved_type])) if derivative else 0
        engines["arena"] = by(Runtime(planned, returned[0], num_saved))
    else:
        engines["closures"] = by(state.runs)
    return engines
