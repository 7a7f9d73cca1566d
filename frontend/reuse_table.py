"""Describes sharing: a table of traced blocks, and why blocks were traced again."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from ..reuse.ir.printer import WIDTH
from .capture.blocks import Reuse, first_repeated
from .capture.regions import SharingDecision, text_of_keys

Item = TypeVar("Item")
_HEAD = "block"
_CALLS = 7
_INDENT = "  "
_WIDTH = WIDTH - len(_INDENT)  # the width of the table, which a report indents


def alike(items: Iterable[Item], kind: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Groups items by kind, in the order of the first of each kind."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(kind(item), []).append(item)
    return list(groups.values())


@dataclass(frozen=True)
class ReuseRow:
    """One traced block and the instances that call its closure."""

    key: str  # class and constructor arguments; an argument that differs shows its range
    num_calls: int  # the number of calls that inlining would expand
    note: str  # how evidence and key disagree, or an empty text


def reuse_rows(decisions: Sequence[SharingDecision]) -> list[ReuseRow]:
    """Returns a row for each traced block, in the order they were traced."""
    groups = alike(decisions, _traced_at)
    members = {_traced_at(group[0]): group for group in groups}
    return [
        ReuseRow(
            text_of_keys([d.key for d in group]),
            sum(_num_runs(d.path, members) for d in group),
            _note(group, members),
        )
        for group in groups
    ]


def shared_classes(decisions: Sequence[SharingDecision]) -> list[str]:
    """Says of each class with fewer graphs than calls: ``12 Layer share one graph``, most first."""
    groups = alike(decisions, _traced_at)
    members = {_traced_at(group[0]): group for group in groups}
    found = []
    for group in alike(decisions, lambda decision: decision.class_name):
        num_calls = sum(_num_runs(d.path, members) for d in group)
        num_graphs = sum(not (d.shared or d.shares) for d in group)
        # num_graphs is 0 if every instance shares with another class.
        if num_calls > max(num_graphs, 1):
            graphs = "one graph" if num_graphs <= 1 else f"{num_graphs} graphs"
            found.append((num_calls, f"{num_calls} {group[0].class_name} share {graphs}"))
    return [text for _, text in sorted(found, key=lambda each: -each[0])]


def _traced_at(decision: SharingDecision) -> str:
    """Returns the path of the instance whose closure this one calls."""
    return decision.compared_with if decision.shared else decision.path


def reuse_table(decisions: Sequence[SharingDecision]) -> list[str]:
    """Returns the rows as lines of text, or none if there is no block."""
    rows = reuse_rows(decisions)
    if not rows:
        return []
    room = _WIDTH - _CALLS
    keys = [textwrap.wrap(row.key, room, subsequent_indent=_INDENT) or [""] for row in rows]
    width = max(len(_HEAD), *(len(line) for key in keys for line in key))
    lines = [f"{_HEAD:<{width}}{'calls':>{_CALLS}}"]
    for key, row in zip(keys, rows, strict=True):
        first = f"{key[0]:<{width}}{row.num_calls:>{_CALLS}}"
        fits = len(first) + len(_INDENT) + len(row.note) <= _WIDTH and len(key) == 1
        lines += [f"{first}{_INDENT}{row.note}".rstrip() if fits else first, *key[1:]]
        if not fits:
            indent = 2 * _INDENT
            lines += textwrap.wrap(
                row.note, _WIDTH, initial_indent=indent, subsequent_indent=indent
            )
    return lines


def not_shared_lines(decisions: Sequence[SharingDecision]) -> list[str]:
    """Returns the reasons why blocks were traced again: ``layers.0..3: not shared, ...``.

    Blocks with the same reason whose paths differ in one number share a line.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[list[str]]] = {}
    for decision in decisions:
        parts = re.split(r"(\d+)", decision.path or decision.class_name)
        groups.setdefault((decision.reason, tuple(parts[::2])), []).append(parts[1::2])
    lines = []
    for (reason, texts), found in groups.items():
        columns = list(zip(*found, strict=True))
        # With two varying numbers, ranges would include blocks that are not in the group.
        varying = [column for column in columns if len(set(column)) > 1]
        rows = [list(map(_range_text, columns))] if len(varying) <= 1 else found
        for numbers in rows:
            path = "".join(t + n for t, n in zip(texts, (*numbers, ""), strict=True))
            lines.append(f"{path}: not shared, {reason}")
    return lines


def _range_text(column: Sequence[str]) -> str:
    """Formats the numbers of a column: ``0``, ``0..3``, or ``0,2,5``."""
    numbers = sorted(set(map(int, column)))
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}..{numbers[-1]}"
    return ",".join(map(str, numbers))


def nothing_shared(model: nn.Module, decisions: Sequence[SharingDecision], reuse: Reuse) -> str:
    """Says why a model shares nothing although modules repeat, and what to do; "" if it shares."""
    if reuse == "off" or any(d.shared or d.shares for d in decisions):
        return ""
    apart = next((d for d in decisions if d.reason), None)
    if apart is not None:
        return (
            f"nothing is shared: {apart.path} ({apart.class_name}) is not like "
            f"{apart.compared_with or 'others'}: {apart.reason}. "
            "lazyinline.advise(model, args) says what to change."
        )
    repeated = first_repeated(model)
    if repeated is None or (reuse == "auto" and decisions):
        return ""
    name, count = repeated
    if reuse == "auto":
        return (
            f"nothing is shared: {name} occurs {count} times, and has too few operators to pay as "
            "a block."
        )
    return (
        f"nothing is shared: {name} occurs {count} times and is not marked. Use reuse='auto', or "
        f"lazy_inline({name})."
    )


def _num_runs(path: str, members: dict[str, list[SharingDecision]]) -> int:
    """Returns how often an instance runs: once per call of the blocks around it."""
    # Blocks inside a shared block were traced in its first instance, and run in every one.
    outer = path.rpartition(".")[0]
    while outer and outer not in members:
        outer = outer.rpartition(".")[0]
    return sum(_num_runs(d.path, members) for d in members[outer]) if outer else 1


def _note(group: Sequence[SharingDecision], members: dict[str, list[SharingDecision]]) -> str:
    first = group[0]
    names = dict.fromkeys(n for d in group for n in first.key.differing(d.key))
    if names:
        verb = "differ" if len(names) > 1 else "differs"
        return f"one closure although {', '.join(names)} {verb}"
    other = [] if first.shares else members.get(first.compared_with, [])
    if first.reason and other and not first.key.differing(other[0].key):
        return f"kept apart from {other[0].path} although the key is equal"
    return ""
