"""Programs as text: each closure once with its call count, the same bytes for the same program.

::

    closure @Block(%x: f32[2,64], %w_qkv: f32[768,64]) -> (f32[2,64])  // 69 nodes, 32 calls {
      ...
    }
    program @main(%ids: i64[2,64]) -> (f32[]) {
      %h1 = call @Block(%h0, %layers.0.w_qkv)  // layers.0
      return %h1
    }
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import torch
import torch.fx

from ..torch_names import OPERATOR_TYPES
from .leaf import stamp_of
from .program import Call, Closure, Composite, Leaf, Pack, Program, Unpack, Value, count_calls
from .types import Type, dtype_name

WIDTH = 100
"""Columns of all that is printed; a word that is longer by itself stays whole."""

_FURTHER_IN = 4


def folded(text: str, *, width: int = WIDTH, indent: int | None = None) -> str:
    """Returns a text whose lines fit: one that is too long goes on below.

    Args:
        text: of any number of lines.
        width: columns that there are.
        indent: where a line goes on; None: further in than it begins.
    """
    return "\n".join(
        piece for line in text.split("\n") for piece in _folded_line(line, width, indent)
    )


def _folded_line(line: str, width: int, indent: int | None) -> list[str]:
    if len(line) <= width:
        return [line]
    if indent is None:
        indent = len(line) - len(line.lstrip()) + _FURTHER_IN
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


Shown: TypeAlias = Literal["show", "hide"]

_INDENT = " " * 6  # of what continues a line
_NOTE = "  // "  # before what a line says beside what is run


class UniqueNames:
    """Hands out each name once; a taken name gets a number."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, hint: str) -> str:
        """Returns the hint itself, or with a number if that is taken."""
        name, number = hint, 1
        while name in self._taken:
            name, number = f"{hint}_{number}", number + 1
        self._taken.add(name)
        return name


def closure_names(program: Program) -> dict[Closure, str]:
    """Returns a unique printed name for each closure, callees first."""
    names = UniqueNames()
    return {c: names.take(c.name) for c in program.closures if not _is_structural(c)}


def format_program(
    program: Program, *, source: Shown = "hide", bodies: Shown = "show", width: int = WIDTH
) -> str:
    """Returns the text of a program, for people: it fits a screen.

    Args:
        program: the program.
        source: ``"show"`` adds the user's line to each operator.
        bodies: ``"hide"`` leaves out the operators of leaf closures.
        width: columns that it may take; what cannot be broken may be longer.
    """
    text = _text(program, source, bodies)
    return "\n".join(piece for line in text.split("\n") for piece in _pieces(line, width))


def text_to_compare(program: Program) -> str:
    """Returns the text of a program, a line for each call: a name's length breaks none."""
    return _text(program, "hide", "show")


def _text(program: Program, source: Shown, bodies: Shown) -> str:
    names = closure_names(program)
    counts = count_calls(program)
    parts = []
    for closure, name in names.items():
        note = f"{_count(closure.num_nodes, 'node')}, {_count(counts[closure], 'call')}"
        if isinstance(closure, Leaf):
            parts.append(_format_leaf(closure, name, note, source, bodies))
        elif isinstance(closure, Composite):
            parts.append(_format_body("closure", closure.program, name, note, names))
    note = f"{program.num_nodes()} nodes held, {program.num_nodes_if_inlined()} if inlined"
    parts.append(_format_body("program", program, "main", note, names))
    return "\n".join(parts)


def closure_to_compare(closure: Closure) -> str:
    """Returns the text of one closure, and of those it calls; call counts are left out."""
    if isinstance(closure, Leaf):
        return _format_leaf(closure, closure.name, "", "hide", "show")
    if isinstance(closure, Composite):
        return text_to_compare(closure.program)
    return f"{closure.name}({closure.type})"


def diff_texts(before: str, after: str) -> str:
    """Returns a unified diff of two texts; empty where they are equal."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), "before", "after", lineterm=""
    )
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _is_structural(closure: Closure) -> bool:
    return isinstance(closure, (Pack, Unpack))


def _types(types: Iterable[Type]) -> str:
    return "(" + ", ".join(map(str, types)) + ")"


def _format_body(
    kind: str, program: Program, name: str, note: str, closures: dict[Closure, str]
) -> str:
    names, values = UniqueNames(), {}
    for index, value in enumerate(program.inputs):
        values[value] = "%" + names.take(value.hint or f"a{index}")
    header = ", ".join(f"{values[v]}: {v.type}" for v in program.inputs)
    results = _types(v.type for v in program.outputs)
    lines = [_header(f"{kind} @{name}({header}) -> {results}", note)]
    for call in program.calls:
        for value in call.results:
            values[value] = "%" + names.take(value.hint or "v")
        lines.append(_format_call(call, values, closures))
    outputs = ", ".join(values.get(v, "%undefined") for v in program.outputs)
    lines.append(f"  return {outputs}")
    for output, target in program.writes:
        lines.append(f"  write {values[program.inputs[target]]} <- output {output}")
    lines.append("}\n")
    return "\n".join(lines)


def _format_call(call: Call, values: dict[Value, str], closures: dict[Closure, str]) -> str:
    args = ", ".join(values.get(v, "%undefined") for v in call.args)
    results = ", ".join(values[v] for v in call.results)
    if _is_structural(call.closure):
        return f"  {results} = {call.closure.name}({args})"
    mark = f"recompute {call.recompute}" if call.recompute else ""
    note = ", ".join(part for part in (call.path, mark) if part)
    head = f"{results} = " if results else ""
    return _with_note(f"  {head}call @{closures[call.closure]}({args})", note)


def _format_leaf(leaf: Leaf, name: str, note: str, source: Shown, bodies: Shown) -> str:
    values: dict[torch.fx.Node, str] = {}
    names = UniqueNames()
    placeholders = leaf.entries
    hints = leaf.input_names if len(leaf.input_names) == len(placeholders) else ()
    for index, node in enumerate(placeholders):
        values[node] = "%" + names.take(hints[index] if hints else f"a{index}")
    header = ", ".join(f"{values[n]}: {node_type(n)}" for n in placeholders)
    shared = _shared_modes(leaf)
    note = ", ".join(part for part in (note, shared) if part)
    lines = [_header(f"closure @{name}({header}) -> {_types(leaf.output_types)}", note)]
    for node in leaf.nodes:
        values[node] = "%" + names.take(str(len(values)))
        if bodies == "show":
            lines.append(_format_node(node, values, source, "" if shared else _modes(node)))
    outputs = leaf.module.graph.output_node().args[0]
    returned = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    lines.append("  return " + ", ".join(operand_text(o, values) for o in returned))
    lines.append("}\n")
    return "\n".join(lines)


def _format_node(
    node: torch.fx.Node, values: dict[torch.fx.Node, str], source: Shown, modes: str
) -> str:
    args = [operand_text(a, values) for a in node.args]
    args += [f"{k}={operand_text(v, values)}" for k, v in sorted(node.kwargs.items())]
    line = stamp_of(node).source if source == "show" else ""
    note = ", ".join(part for part in (modes, line) if part)
    text = f"  {values[node]}: {node_type(node)} = {operator_name(node)}({', '.join(args)})"
    return _with_note(text, note)


def _modes(node: torch.fx.Node) -> str:
    """What a node ran under, where that is not what is usual."""
    stamp = stamp_of(node)
    notes = [] if stamp.grad_enabled else ["no_grad"]
    notes += [f"autocast {device} {dtype_name(dtype)}" for device, _, dtype in stamp.autocast]
    return ", ".join(notes)


def _shared_modes(leaf: Leaf) -> str:
    """The modes of all nodes, which the header then says once; "" if they differ."""
    found = {_modes(node) for node in leaf.nodes}
    return found.pop() if len(found) == 1 else ""


def _header(text: str, note: str) -> str:
    """Returns the line that opens a body."""
    return _with_note(text, f"{note} {{" if note else "{")


def _with_note(text: str, note: str) -> str:
    return f"{text}{_NOTE}{note}" if note else text


def _pieces(line: str, width: int) -> Iterator[str]:
    """Yields a line in pieces that fit; the note stands behind the last, or on a line of its own.

    It is broken between operands only: no type and no path has a blank.
    """
    if len(line) <= width:
        yield line
        return
    text, mark, note = line.partition(_NOTE)
    behind = mark + note
    piece, *rest = re.split(r"(?<=,) ", text)
    for operand in rest:
        if len(piece) + 1 + len(operand) > width:
            yield piece
            piece = _INDENT + operand
        else:
            piece = f"{piece} {operand}"
    if len(piece) + len(behind) > width:
        yield piece
        piece, behind = _INDENT, behind.lstrip()
    yield piece + behind


def operator_name(node: torch.fx.Node) -> str:
    """Returns what a node does, as printed programs have it."""
    if isinstance(node.target, OPERATOR_TYPES):
        return str(node.target).removeprefix("aten.").removesuffix(".default")
    return getattr(node.target, "__name__", str(node.target))


def node_type(node: torch.fx.Node) -> str:
    """Returns the type of a node's value, as printed programs have it."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}[{','.join(map(str, value.shape))}]"
    return "tuple" if isinstance(value, (tuple, list)) else "?"


def operand_text(value: Any, values: Mapping[torch.fx.Node, str]) -> str:
    """Returns an operand as printed programs have it; ``values`` are the names of nodes."""
    if isinstance(value, torch.fx.Node):
        return values[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(operand_text(v, values) for v in value) + "]"
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return repr(value)
