"""The programs of one module: finds the one that fits a call, or compiles it.

``compile`` and ``compile_step`` both stand on it. A module may run eagerly instead; a step splits
its batch and owns its arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic

from torch import nn

from ...reuse import torch_pytree
from ..capture.surroundings import one_at_a_time
from ..checks.refusals import written_out
from ..compiler import Compiler
from ..guards.kept_programs import AnyEntry, Inputs, KeptPrograms
from ..options import Options
from ..passes.state import Compilation, Goal, Pass
from ..report import CompileReport
from ..sizes.shapes import CompileResult, ShapeCache
from ..tracing.capture_errors import own_model


class Dispatcher(Generic[AnyEntry]):
    """Finds the program of a call, or compiles it and keeps it.

    Args:
        model: what is compiled; of a step, the model with its loss.
        options: how it is compiled.
        dynamic: which sizes are symbols, see :class:`ShapeCache`; so do ``names``.
        names: of dimensions that are known to vary.
        compiler: shared with other modules, for what is equal in them.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        dynamic: bool | None = None,
        names: tuple[tuple[str, ...], ...] = (),
        compiler: Compiler | None = None,
    ) -> None:
        self._subject = model
        self._compiler = compiler or Compiler(options)
        self._made_with = (options, dynamic, names)
        self._forget()
        self._report: CompileReport | None = None

    def _forget(self) -> None:
        """Drops all programs; what was made per closure is kept."""
        self._entries: KeptPrograms[AnyEntry] = KeptPrograms()
        self._shapes = ShapeCache(self._subject, *self._made_with)

    @property
    def last_report(self) -> CompileReport | None:
        """Returns what the newest compile did; None before the first call."""
        return self._report

    def _fitting(
        self, leaves: list[Any], tree: torch_pytree.TreeSpec
    ) -> tuple[AnyEntry | None, list[Any]]:
        """Returns the program that fits a call, and the flat inputs that it reads.

        They are those given, or copies where one is conjugated or negated only in name: kernels
        read memory, which such a tensor shares with another.
        """
        entry = self._entries.fitting(leaves, tree)
        if entry is not None:
            return entry, leaves
        plain = written_out(leaves)
        if plain is None:
            return None, leaves
        return self._entries.fitting(plain, tree), plain

    @one_at_a_time()
    def _compile_for(self, inputs: Inputs, goal: Goal) -> AnyEntry:
        """Compiles for a call, or links for its sizes what was compiled with symbols."""
        # Another thread may have compiled for the same call while this one waited.
        made_meanwhile = self._entries.fitting(inputs.given, inputs.tree)
        if made_meanwhile is not None:
            return made_meanwhile
        made = self._shapes.symbolic(inputs, goal)
        if made is None:
            compiled, report = self._compiler.compile(
                self._subject, inputs.args, inputs.kwargs, goal, watch=self._watch
            )
            whole = Inputs.of(inputs.given, inputs.tree)
            self._entries.warn_if_many(own_model(self._subject), whole)
            made = self._shapes.note(compiled, report, inputs)
        entry = self._entry(made, inputs.leaves)
        if self._entries.add(entry):  # most of what the compiler keeps has no user any more
            self._compiler = Compiler(self._compiler.options)
        self._report = made.report
        return entry

    def _entry(self, made: CompileResult, leaves: Sequence[Any]) -> AnyEntry:
        """Makes what runs a program; the first call for it has these flat inputs."""
        raise NotImplementedError

    def _watch(self, one: Pass, before: Compilation, after: Compilation) -> None:
        """Looks at each pass of a compile, and may raise to end it."""
