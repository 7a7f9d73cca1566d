"""Programs as text: each closure once with its call count, the same bytes for the same program.

::

    closure @Block(%x: f32[2,64], %w_qkv: f32[768,64]) -> (f32[2,64]) {  // 69 nodes, 32 calls
      %2: f32[2,768] = linear(%x, %w_qkv)
      ...
    }
    program @main(%ids: i64[2,64] = input(0)) -> (f32[]) {
      %h1 = call @Block(%h0, %layers.0.w_qkv, at='layers.0')
      return %h1
    }

``parser.py`` reads the text back, without comments (``//``). A text does not hold the values of the
model's tensors, the Python containers of the output, or source lines.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, TypeAlias

import torch
import torch.fx

from ..torch_names import OPERATOR_TYPES
from . import program as ir
from .leaf import stamp_of
from .torch_symbols import SizeLiteral
from .types import StructType, TensorType, Type, contiguous_stride, dtype_name, flatten_type

WIDTH = 100  # columns of printed text; a longer word is not broken

_FURTHER_IN = 4


def folded(text: str, *, width: int = WIDTH, indent: int | None = None) -> str:
    """Wraps the lines of a text that are too long, with more indent than theirs by default."""
    return "\n".join(
        piece for line in text.split("\n") for piece in _folded_line(line, width, indent)
    )


def _folded_line(line: str, width: int, indent: int | None) -> list[str]:
    if len(line) <= width:
        return [line]
    if indent is None:
        indent = len(line) - len(line.lstrip()) + _FURTHER_IN
    return textwrap.wrap(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def bytes_text(num_bytes: float) -> str:
    """Returns bytes in a unit that suits them: ``31.1 MiB``."""
    return _in_units(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def flops_text(flops: float) -> str:
    """Returns an amount of work in a unit that suits it: ``1.2 GFLOP``."""
    return _in_units(flops, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def seconds_text(seconds: float) -> str:
    """Returns seconds in a unit that suits them: ``12.1 ms``."""
    return f"{seconds:.3g} s" if seconds >= 1 else _in_units(seconds * 1e6, 1000, ("\u00b5s", "ms"))


def _in_units(amount: float, step: int, units: Sequence[str]) -> str:
    """Returns an amount with the largest of some units in which it is not below one."""
    place = 0
    while abs(amount) >= step and place + 1 < len(units):
        amount, place = amount / step, place + 1
    digits = f"{amount:.0f}" if abs(amount) >= 1000 else f"{amount:.3g}"
    return f"{digits} {units[place]}"


Shown: TypeAlias = Literal["show", "hide"]

_INDENT = " " * 6  # of what continues a line
_COMMENT = "  // "
_ODD = re.compile(r"[^\w.]", re.ASCII)  # characters that a printed name must not have


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


def closure_names(program: ir.Program) -> dict[ir.Closure, str]:
    """Returns a unique printed name for each closure, callees first."""
    names = UniqueNames()
    return {
        c: names.take(_plain(c.name))
        for c in program.closures
        if not isinstance(c, (ir.Pack, ir.Unpack))
    }


def format_program(program: ir.Program, *, source: Shown = "hide", width: int = WIDTH) -> str:
    """Returns a program's text, wrapped for a screen; ``source="show"`` adds the user's lines."""
    text = _text(program, source)
    return "\n".join(piece for line in text.split("\n") for piece in _pieces(line, width))


def text_to_compare(program: ir.Program) -> str:
    """Returns the text of a program, not wrapped: a longer name moves no line break."""
    return _text(program, "hide")


def _text(program: ir.Program, source: Shown) -> str:
    names = closure_names(program)
    counts = ir.count_calls(program)
    structs = _Structs()
    parts = []
    for closure, name in names.items():
        note = f"{counted(closure.num_nodes, 'node')}, {counted(counts[closure], 'call')}"
        if isinstance(closure, ir.Leaf):
            parts.append(_format_leaf(closure, name, note, structs, source, names))
        elif isinstance(closure, ir.Composite):
            head = f"composite closure @{name}"
            parts.append(
                _format_body(head, closure.program, note, names, structs, closure.input_names)
            )
    note = f"{program.num_nodes()} nodes held, {program.num_nodes_if_inlined()} if inlined"
    parts.append(_format_body("program @main", program, note, names, structs))
    return "\n".join([*structs.definitions(), *parts])


def closure_to_compare(closure: ir.Closure) -> str:
    """Returns the text of one closure, and of those it calls; call counts are left out."""
    if isinstance(closure, ir.Leaf):
        structs = _Structs()
        names: dict[ir.Closure, str] = {body: body.name for body in closure.bodies}
        text = _format_leaf(closure, closure.name, "", structs, "hide", names)
        bodies = map(closure_to_compare, closure.bodies)
        return "\n".join([*structs.definitions(), *bodies, text])
    if isinstance(closure, ir.Composite):
        return text_to_compare(closure.program)
    return f"{closure.name}({closure.type})"


def diff_texts(before: str, after: str) -> str:
    """Returns a unified diff of two texts; empty where they are equal."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), "before", "after", lineterm=""
    )
    return "\n".join(lines)


def counted(number: int, noun: str) -> str:
    """Writes a number of things: ``1 call``, ``2 calls``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


class _Structs:
    """Names struct types: one may have hundreds of tensors and be in many headers."""

    def __init__(self) -> None:
        self._names: dict[StructType, str] = {}

    def text(self, type_: Type) -> str:
        """Returns a type as printed in a header."""
        if isinstance(type_, TensorType):
            return tensor_type_text(type_)
        if type_ not in self._names:
            for field in type_.fields:
                self.text(field)  # names those inside first, so that definitions are in order
            self._names[type_] = f"$struct{len(self._names)}"
        return self._names[type_]

    def row(self, types: Iterable[Type]) -> str:
        """Returns several types in parentheses."""
        return "(" + ", ".join(map(self.text, types)) + ")"

    def definitions(self) -> list[str]:
        """Returns a line for each struct type that was named."""
        lines = [f"{n} = struct{self.row(t.fields)}" for t, n in self._names.items()]
        return ["\n".join(lines) + "\n"] if lines else []


def tensor_type_text(type_: TensorType, *, device: Shown = "show") -> str:
    """Returns the text of a tensor type, without blanks: no line is broken inside it.

    A dimension is its size, with its stride (``3:1``) where the tensor is not contiguous. The CPU
    is not named.
    """
    sizes = [_size_text(size) for size in type_.shape]
    if type_.stride != contiguous_stride(type_.shape):
        sizes = [f"{n}:{_size_text(st)}" for n, st in zip(sizes, type_.stride, strict=True)]
    place = ""
    if device == "show" and type_.device.type != "cpu":
        index = type_.device.index
        place = f"@{type_.device.type}" + ("" if index is None else f"[{index}]")
    return f"{dtype_name(type_.dtype)}[{','.join(sizes)}]{place}"


def _size_text(size: Any) -> str:
    return str(size).replace(" ", "")


def _plain(name: str) -> str:
    return _ODD.sub("_", name)


def _in_quotes(text: str) -> str:
    """Returns a text in quotes, with its blanks escaped where a line could be broken."""
    return repr(text).replace(", ", ",\\x20")


def _format_body(
    head: str,
    program: ir.Program,
    note: str,
    closures: Mapping[ir.Closure, str],
    structs: _Structs,
    input_names: Sequence[str] = (),
) -> str:
    names, values = UniqueNames(), {}
    hints = input_names if len(input_names) == len(program.inputs) else ()
    for index, value in enumerate(program.inputs):
        hint = hints[index] if hints else value.hint
        values[value] = "%" + names.take(_plain(hint or f"a{index}"))
    header = ", ".join(
        f"{values[v]}: {structs.text(v.type)}{_source_text(source, values[v])}"
        for v, source in zip_longest(program.inputs, program.sources[: len(program.inputs)])
    )
    results = structs.row(v.type for v in program.outputs)
    lines = [_with_comment(f"{head}({header}) -> {results} {{", note)]
    for call in program.calls:
        for value in call.results:
            values[value] = "%" + names.take(_plain(value.hint or "v"))
        lines.append(_format_call(call, values, closures))
    lines.append(_format_return(values.get(v, "%undefined") for v in program.outputs))
    for output, target in program.writes:
        lines.append(f"  write({values[program.inputs[target]]}, output={output})")
    lines.append("}\n")
    return "\n".join(lines)


def _source_text(source: ir.Source | None, printed: str) -> str:
    """Returns what an entry input is bound to, with its name if printed under another."""
    if source is None:
        return ""
    if isinstance(source, ir.UserInput):
        kind, words, grad = "input", [str(source.index)], source.requires_grad
    else:
        kind, words, grad = source.kind, [], source.tensor.requires_grad
    if "%" + source.name != printed:
        words.append(_in_quotes(source.name))
    words += ["grad"] * grad
    words += ["switched"] * (isinstance(source, ir.UserInput) and source.is_switched)
    words += ["back"] * (isinstance(source, ir.UserInput) and source.is_switched_back)
    return f" = {kind}({', '.join(words)})"


def _format_call(
    call: ir.Call, values: Mapping[ir.Value, str], closures: Mapping[ir.Closure, str]
) -> str:
    args = [values.get(v, "%undefined") for v in call.args]
    results = ", ".join(values[v] for v in call.results)
    head = f"  {results} = " if results else "  "
    if isinstance(call.closure, (ir.Pack, ir.Unpack)):
        return f"{head}{call.closure.name}({', '.join(args)})"
    args += [f"at={_in_quotes(call.path)}"] if call.path else []
    args += [f"recompute={call.recompute!r}"] if call.recompute else []
    return f"{head}call @{closures[call.closure]}({', '.join(args)})"


def _format_return(returned: Iterable[str]) -> str:
    return f"  return {', '.join(returned)}".rstrip()


def _format_leaf(
    leaf: ir.Leaf,
    name: str,
    note: str,
    structs: _Structs,
    source: Shown,
    closures: Mapping[ir.Closure, str],
) -> str:
    values: dict[torch.fx.Node, str] = {}
    header = list(_input_texts(leaf, values, structs))
    values.update(dict.fromkeys(leaf.entries[len(values) :], "%undefined"))  # in a malformed leaf
    names = UniqueNames()
    for taken in values.values():
        names.take(taken[1:])
    modes = {tuple(_modes(node)) for node in leaf.nodes}
    shared = list(modes.pop()) if len(modes) == 1 else []  # in the header, if nodes agree
    is_plain = leaf.kernels == "backend" or leaf.control is not None
    words = [leaf.level] * (leaf.level != "composite") + [leaf.kernels] * (not is_plain)
    results = structs.row(leaf.output_types)
    signature = f"closure @{name}({', '.join(header)}) -> {results}"
    lines = [_with_comment(" ".join([*words, *shared, signature, "{"]), note)]
    if leaf.control is not None:
        operands = [f"@{closures[body]}" for body in leaf.bodies]
        operands += [f"{name}={number}" for name, number in leaf.control.numbers.items()]
        return "\n".join([*lines, f"  return {leaf.control.word}({', '.join(operands)})", "}\n"])
    for node in leaf.nodes:
        values[node] = "%" + names.take(str(len(values)))
        lines.append(_format_node(node, values, source, [] if shared else _modes(node)))
    outputs = leaf.module.graph.output_node().args[0]
    returned = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    lines.append(_format_return(operand_text(o, values) for o in returned))
    lines.append("}\n")
    return "\n".join(lines)


def _input_texts(
    leaf: ir.Leaf, values: dict[torch.fx.Node, str], structs: _Structs
) -> Iterator[str]:
    """Yields the inputs of a leaf, and names their tensors; those in struct 0 are %s0.0, %s0.1."""
    entries = leaf.entries
    hints = leaf.input_names if len(leaf.input_names) == len(entries) else ()
    names = UniqueNames()
    for index, type_ in enumerate(leaf.input_types):
        first = len(values)
        if isinstance(type_, TensorType):
            name = names.take(_plain(hints[first] if hints else f"a{first}"))
            fields = [name]
        else:
            name = names.take(f"s{index}")
            fields = [f"{name}.{i}" for i, _ in enumerate(flatten_type(type_))]
        values.update(zip(entries[first:], ["%" + field for field in fields], strict=False))
        yield f"%{name}: {structs.text(type_)}"


def _format_node(
    node: torch.fx.Node, values: Mapping[torch.fx.Node, str], source: Shown, modes: Sequence[str]
) -> str:
    args = [operand_text(a, values) for a in node.args]
    args += [f"{k}={operand_text(v, values)}" for k, v in node.kwargs.items()]
    text = f"{operator_name(node)}({', '.join(args)})"
    for mode in modes:
        text = f"{mode}({text})"
    text = f"  {values[node]}: {node_type(node)} = {text}"
    return _with_comment(text, stamp_of(node).source if source == "show" else "")


def _modes(node: torch.fx.Node) -> list[str]:
    """Returns the modes that a node ran under and that are not the default."""
    stamp = stamp_of(node)
    notes = [] if stamp.grad_enabled else ["no_grad"]
    return notes + [f"autocast_{kind}_{dtype_name(dtype)}" for kind, _, dtype in stamp.autocast]


def _with_comment(text: str, comment: str) -> str:
    return f"{text}{_COMMENT}{comment}" if comment else text


def _pieces(line: str, width: int) -> Iterator[str]:
    """Yields a line in pieces that fit, broken between operands only.

    A comment follows the last piece, or has a line of its own.
    """
    if len(line) <= width:
        yield line
        return
    text, mark, comment = line.partition(_COMMENT)
    behind = mark + comment
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
    """Returns the operator of a node as printed: without ``aten.`` and ``.default``."""
    if not isinstance(node.target, OPERATOR_TYPES):
        return getattr(node.target, "__name__", str(node.target))
    name = str(node.target)
    is_aten = name.startswith("aten.")
    return name.removeprefix("aten.").removesuffix(".default") if is_aten else name


def node_type(node: torch.fx.Node) -> str:
    """Returns the type of a node's value as printed; ``...`` if it is not a tensor."""
    return _value_type(node.meta.get("val"))


def _value_type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        # A trace may keep values on the meta device: the leaf's inputs say where it runs.
        device: Shown = "hide" if value.device.type == "meta" else "show"
        return tensor_type_text(TensorType.of(value), device=device)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_value_type, value)) + "]"
    return "..."


def operand_text(value: Any, values: Mapping[torch.fx.Node, str]) -> str:
    """Returns an operand as printed; ``values`` are the names of nodes."""
    if isinstance(value, torch.fx.Node):
        return values[value]
    if isinstance(value, list):
        return "[" + ", ".join(operand_text(v, values) for v in value) + "]"
    if isinstance(value, tuple):
        parts = [operand_text(v, values) for v in value]
        return "(" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")"
    if isinstance(value, slice):
        ends = (value.start, value.stop, value.step)
        return "slice(" + ", ".join(operand_text(end, values) for end in ends) + ")"
    if isinstance(value, str):
        return _in_quotes(value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, torch.device):
        return f"device({str(value)!r})"
    if isinstance(value, complex):
        return f"complex({value.real!r}, {value.imag!r})"
    if isinstance(value, SizeLiteral):
        return f"size({_size_text(value.size)})"
    return repr(value)
