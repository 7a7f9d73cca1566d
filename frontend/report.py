"""The report of a compile, as text and as a page; and its progress bar on a terminal."""

from __future__ import annotations

import itertools
import os
import pathlib
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from ..reuse.ir.printer import closure_names, folded
from ..reuse.ir.program import count_calls
from .capture.regions import CapturedModel
from .compile_record import (
    ClosureRecord,
    CompileRecord,
    not_shared_lines,
    part_lines,
    reuse_table,
)
from .page.page import compile_page, write_page


@dataclass
class CompileReport(CompileRecord):
    """The newest compile of a module; see :class:`CompileRecord` for its numbers."""

    def __str__(self) -> str:
        kind = "training" if self.train else "inference"
        if self.ran_eagerly:
            shown = [part for part in self.parts if not part.is_small]
            compiled = any(part.num_programs for part in shown)
            how = "only parts are compiled" if compiled else "not compiled"
            head = [f"{kind}: {how}, {self.ran_eagerly}"]
            return folded("\n".join([*head, *(f"  {line}" for line in part_lines(shown))]))
        # Equal graphs share a closure, even if capture shared no block.
        saves = self.num_nodes < self.num_nodes_if_inlined
        why = self.nothing_shared and not saves
        inlined = f", {self.num_nodes_if_inlined} if inlined" if saves else ""
        lines = [
            self.nothing_shared if why else self.headline(),
            f"  {kind}, backend {self.backend}, reuse {self.reuse}: "
            f"{self.num_nodes} nodes held{inlined}",
            f"  {self.num_closures} closures, {self.num_block_calls} block calls; "
            f"{self.num_kernels} compiled with {self.num_operators} operators, "
            f"{self.num_launches} launches",
        ]
        return "\n".join([folded("\n".join(lines)), self.details()])

    def details(self) -> str:
        """Returns the text below the first lines: passes, cache, notes, sharing."""
        lines = [f"  {'pass':<12}{'CPU s':>8}{'wall s':>8}{'nodes':>8}"]
        lines += [
            f"  {p.name:<12}{p.cpu_s:>8.2f}{p.wall_s:>8.2f}{p.num_nodes:>8}" for p in self.passes
        ]
        lines.append(f"  {'total':<12}{self.cpu_s:>8.2f}{self.wall_s:>8.2f}")
        lines += [f"  {line}" for line in self.gpu.lines()] if self.gpu else []
        if self.cache.directory:
            lines.append("  " + str(self.cache).replace("\n", "\n  "))
        lines += [f"  {note}" for note in self.notes()]
        lines += [f"  {line}" for line in reuse_table(self.decisions)]
        lines += [f"  {line}" for line in not_shared_lines(self.not_shared())]
        lines += [
            f"  {d.path or d.class_name}: {d.shares} (traced because {d.reason})"
            for d in self.shared_with_constants()
        ]
        return folded("\n".join(lines))

    def describe(self, captured: CapturedModel) -> None:
        """Notes the sizes and sharing decisions of a captured model."""
        self.left_out = captured.left_out
        program = captured.program
        self.num_nodes = program.num_nodes()
        self.num_nodes_if_inlined = program.num_nodes_if_inlined()
        self.num_closures = len(program.closures)
        self.num_block_calls = len(captured.decisions)
        counts = count_calls(program)
        self.closures = [
            ClosureRecord(name, closure.num_nodes, counts[closure])
            for closure, name in closure_names(program).items()
        ]
        self.decisions = captured.decisions

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a self-contained page: the program, which blocks share, passes, the arena.

        Args:
            path: the file to write.

        Example:
            >>> compiled.last_report.save_html("report.html")
        """
        pathlib.Path(path).write_text(write_page(compile_page(self)), encoding="utf-8")


def cpu_seconds() -> float:
    """Returns CPU-seconds used so far by this process and its finished children."""
    # The compiler g++ and TorchInductor's workers are children, with most of a cold compile's time.
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total


class Progress:
    """The progress bar of one compiler on a terminal; ``TQDM_DISABLE=1`` turns it off."""

    def __init__(self) -> None:
        self._bar: Any = None

    @contextmanager
    def passes(self, names: Sequence[str]) -> Iterator[Callable[[str], Any]]:
        """Shows the bar for a list of passes; yields a function that makes a context per pass."""
        if self._bar is not None:  # a pass runs other passes: only the outer one counts
            yield nullcontext
            return
        form = "{desc} |{bar}| {n_fmt}/{total_fmt} passes, {elapsed}{postfix}"
        # Hidden unless on a terminal: a log file would contain every state of the bar.
        hidden: dict[str, Any] = {} if sys.stderr.isatty() else {"disable": True}
        with tqdm(total=len(names), bar_format=form, leave=False, **hidden) as self._bar:
            try:
                yield self._step
            finally:
                self._bar = None

    def parts(self, total: int, unit: str) -> Callable[[], None]:
        """Returns a function that shows that one more part of the running pass is done."""
        numbers, bar = itertools.count(1), self._bar
        return lambda: bar and bar.set_postfix_str(f"{next(numbers)}/{total} {unit}")

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        bar = self._bar
        bar.set_description_str(f"lazyinline: {name}")
        yield
        bar.set_postfix_str("")
        bar.update(1)
