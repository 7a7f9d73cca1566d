"""Reads what ``printer.py`` prints: a program from its text.

Apart from a few signs a text has Python's syntax, so Python's parser reads it. No text is executed:
operators are looked up among those registered with PyTorch, and run on fake tensors only, which
checks their operands and gives the layouts.

A tensor of the model is read as a meta tensor, since a text holds its type, not its data.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial, reduce
from typing import Any, Literal, NoReturn, get_args

import sympy
import torch
import torch.fx

from ..errors import ParseError
from ..torch_names import OPERATOR_TYPES, module_of, operator_as_printed
from . import program as ir
from . import read_leaves as reading
from .control import OPERATORS, checked, control_leaf
from .leaf import Stamp, flat_types
from .printer import node_type
from .torch_symbols import SIZE_FUNCTIONS, ReadSizes, degree
from .types import DTYPES, StructType, TensorType, Type, contiguous_stride

_MAX_SIZE = 2**40  # of a dimension: more than any memory holds
_MAX_NUMBER = 2**64  # in the computation of a size
_MAX_DEGREE = 64  # of nested powers
_FORBIDDEN = ("aten.from_file.default", "aten.from_file.out")  # they open a file of any name

# Signs that no name in Python may have become letters that no printed name has.
_LETTERS = {"%": "\u01c2", "@": "\u01c3", "$": "\u01c1", ".": "\u01c0"}
_SIGNS_TEXT = r"""
    (?P<text>'(?:[^'\\\n]|\\.)*')
    | (?P<comment>(?<!\S)//.*)
    | ^(?P<head>[\w ]*\b(?:closure|program)[ ]) (?=@)
    | (?P<name>(?<![\w\]])[%@$][\w.]+(?:,[ ][%@$][\w.]+)*)
    | (?P<type>TYPE)
    | (?P<skipped>\bcall[ ](?=@) | (?<=\w)\[\] | \})
    | (?P<broken>,\n(?=[ ]{6}))
    | (?P<opened>\{$ | \{(?=[ ]+//))
    | (?P<foreign>[;\#\\"{\u0294\u0295\u01bb\u01be\u01c0-\u01c3]|:$|\bdef\b)"""
_SIGNS = re.compile(_SIGNS_TEXT.replace("TYPE", reading.TYPE), re.VERBOSE | re.MULTILINE)
# A leaf with result types in its header, and at least two lines after the first.
_LEAF = re.compile(
    r"^(?![^@\n]*\bcomposite\b)[\w ]*\bclosure @(?P<name>[\w.]+)"
    r"\([^\n]*\) -> [^\n]*\{(?:  //[^\n]*)?\n"
    r"  (?! )[^\n]*[^,\n]\n(?P<rest>(?:  [^\n]*\n){2,})\}$",
    re.MULTILINE,
)
_LINE = re.compile(r"^  (?! )", re.MULTILINE)
_CONSTANTS: dict[str, Any] = {
    "inf": float("inf"),
    "nan": float("nan"),
    **{
        str(x): x
        for x in vars(torch).values()
        if isinstance(x, (torch.layout, torch.memory_format))
    },
    **DTYPES,
}
_ARITHMETIC: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: SIZE_FUNCTIONS["FloorDiv"],
    ast.Mod: SIZE_FUNCTIONS["Mod"],
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
_SIGNS_BEFORE: dict[type, Any] = {ast.USub: operator.neg, ast.Invert: operator.invert}


def parse_program(
    text: str, bodies: Literal["now", "later"] = "now", sizes: ReadSizes | None = None
) -> ir.Program:
    """Returns the program of a text, not verified; raises ParseError, which shows the place.

    ``bodies="later"`` reads the operators of a leaf when something asks for them. ``sizes`` are
    symbols shared with other texts.
    """
    reader = _Reader(text, bodies, sizes or ReadSizes())
    try:
        return reader.program()
    except RecursionError:
        reader.fail_at(1, 0, "too many brackets or signs within one another")


def parse_size(text: str, sizes: ReadSizes) -> Any:
    """Returns a size of a text, or a condition such as ``Eq(Mod(s0,8),0)``; raises ParseError."""
    reader = _Reader(text, "now", sizes)
    try:
        return reader.computed(reading.parsed(text, "eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reader.fail_at(1, 0, f"this cannot be read: {error}")


class _Reader:
    """Reads one text, a statement on each line."""

    def __init__(self, text: str, bodies: Literal["now", "later"], sizes: ReadSizes) -> None:
        self._text = text
        self._bodies = bodies
        self._leaf = self._leaf_now if bodies == "now" else self._leaf_later
        self._heads: list[list[str]] = []
        self._structs: dict[str, StructType] = {}
        self._types: dict[str, TensorType] = {}
        self._closures: dict[str, ir.Closure] = {}
        self._sizes = sizes
        self._left_out: dict[str, tuple[int, int]] = {}

    def program(self) -> ir.Program:
        """Returns the program."""
        is_later = self._bodies == "later"
        text = _LEAF.sub(self._shortened, self._text) if is_later else self._text
        statements = self._statements(text)
        for tree in statements:
            if isinstance(tree, ast.Assign):
                self._structs[ast.unparse(tree.targets[0])] = self._struct(tree.value)
                continue
            if not isinstance(tree, ast.FunctionDef):
                self._fail(tree, "expected a closure or a program")
            words, name = self._heads.pop(0), self._name(tree.name)
            if "program" in words:
                if tree is not statements[-1]:
                    self._fail(statements[-1], "expected nothing after the program")
                return self._body(tree)
            if name in self._closures:
                self._fail(tree, f"@{name} is defined twice")
            if "composite" in words:
                body = self._body(tree)
                self._closures[name] = ir.Composite(name, body, tuple(v.hint for v in body.inputs))
            else:
                self._closures[name] = self._control(tree, words) or self._leaf(tree, words)
        self.fail_at(self._text.count("\n") + 1, 0, "expected a program at the end")

    def _shortened(self, found: re.Match[str]) -> str:
        """Returns a leaf with its first line only: to parse lines takes most of the time."""
        self._left_out[found["name"]] = found.span()
        end = found.start("rest") - found.start()
        return found[0][:end] + "\n" * found["rest"].count("\n") + "}"

    def _statements(self, text: str) -> list[Any]:
        try:
            return reading.parsed(_SIGNS.sub(self._as_python, text)).body
        except SyntaxError as error:
            self.fail_at(error.lineno or 1, (error.offset or 1) - 1, error.msg)
        except (MemoryError, ValueError) as error:
            self.fail_at(1, 0, f"this cannot be read: {error}")

    def _as_python(self, found: re.Match[str]) -> str:
        """Returns Python's text for a sign that Python does not have; columns stay as they are."""
        sign, text = str(found.lastgroup), found[0]
        if sign == "name":
            return reduce(lambda found, pair: found.replace(*pair), _LETTERS.items(), text)
        if sign == "type":
            return text.translate(reading.AS_NAMES)
        if sign == "foreign":
            line = self._text.count("\n", 0, found.start())
            start = self._text.rfind("\n", 0, found.start()) + 1
            self.fail_at(line + 1, found.start() - start, f"unexpected {text!r}")
        if sign == "head":
            self._heads.append(text.split())
            return "def".ljust(len(text))
        same = {"text": text, "comment": "#" + text[1:], "opened": ":", "broken": ",\\\n"}
        return same.get(sign, " " * len(text))

    # ---- errors and names --------------------------------------------------------------------

    def _fail(self, tree: Any, message: str) -> NoReturn:
        line = _SIGNS.sub(self._as_python, self._text).split("\n")[tree.lineno - 1]
        self.fail_at(tree.lineno, len(line.encode()[: tree.col_offset].decode()), message)

    def fail_at(self, line: int, column: int, message: str) -> NoReturn:
        text = self._text.split("\n")[line - 1]
        raise ParseError(f"line {line}: {message}\n{text}\n{' ' * column}^") from None

    def _name(self, identifier: str) -> str:
        return identifier[1:].replace(_LETTERS["."], ".")

    def _defined(self, tree: Any, names: Mapping[str, Any], taken: Any = ()) -> str:
        """Returns the name that a target or an input defines."""
        identifier: str = getattr(tree, "arg", "") or getattr(tree, "id", "")
        if not identifier.startswith(_LETTERS["%"]):
            self._fail(tree, "expected a name %...")
        name = self._name(identifier)
        if name in names or name in taken:
            self._fail(tree, f"%{name} is defined twice")
        return name

    def _used(self, tree: Any, names: Mapping[str, Any], mark: str = "%") -> Any:
        """Returns what a name stands for."""
        name = self._name(getattr(tree, "id", ""))
        if name not in names or tree.id[0] != _LETTERS[mark]:
            self._fail(tree, f"{mark}{name} is not defined")
        return names[name]

    def _constant(self, tree: Any, *kinds: type) -> Any:
        if not isinstance(tree, ast.Constant) or type(tree.value) not in kinds:
            self._fail(tree, f"expected {' or '.join(kind.__name__ for kind in kinds)}")
        return tree.value

    # ---- types -------------------------------------------------------------------------------

    def _type(self, tree: Any) -> Type:
        if isinstance(tree, ast.Name):
            if tree.id in self._structs:
                return self._structs[tree.id]
            if tree.id not in self._types:
                self._types[tree.id] = self._tensor_type(tree)
            return self._types[tree.id]
        return self._struct(tree) if isinstance(tree, ast.Call) else self._tensor_type(tree)

    def _struct(self, tree: Any) -> StructType:
        if not isinstance(tree, ast.Call) or ast.unparse(tree.func) != "struct":
            self._fail(tree, "expected struct(...)")
        return StructType(tuple(map(self._type, tree.args)))

    def _tensor_type(self, tree: Any) -> TensorType:
        whole, device, sizes = tree, torch.device("cpu"), []
        if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.MatMult):
            tree, device = tree.left, self._device(tree.right)
        tree = reading.with_sizes(tree)
        if isinstance(tree, ast.Subscript):
            sizes = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
            tree = tree.value
        dtype = DTYPES.get(getattr(tree, "id", ""))
        strided = [size for size in sizes if isinstance(size, ast.Slice)]
        if dtype is None or len(strided) not in (0, len(sizes)):
            self._fail(whole, "expected a type, such as f32[2,3] or, with strides, f32[2:1,3:2]")
        # Strides are written where they are not those of contiguous memory.
        if not strided:
            shape = tuple(map(self._size, sizes))
            return TensorType(dtype, shape, contiguous_stride(shape), device)
        shape = tuple(self._size(size.lower) for size in strided)
        stride = tuple(self._size(size.upper) for size in strided)
        return TensorType(dtype, shape, stride, device)

    def _device(self, tree: Any) -> torch.device:
        given = reading.with_sizes(tree)
        name = given.value if isinstance(given, ast.Constant) else ast.unparse(given)
        try:
            return torch.device(re.sub(r"\[(\d+)\]$", r":\1", str(name)))
        except RuntimeError:
            self._fail(tree, f"there is no device {name!r}")

    def _size(self, tree: Any) -> Any:
        """Returns a number, a symbol, or an expression of symbols."""
        number = getattr(tree, "value", None)
        size = number if type(number) is int else self.computed(tree)
        if isinstance(size, bool) or getattr(size, "is_Boolean", False):
            self._fail(tree, "expected a size")
        if isinstance(size, float) or (isinstance(size, int) and not 0 <= size <= _MAX_SIZE):
            self._fail(tree, f"a size is from 0 to {_MAX_SIZE}")
        return size

    def computed(self, tree: Any) -> Any:
        """Evaluates an expression of sizes, or a comparison of them."""
        try:
            return self._computed(tree)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
            self._fail(tree, "expected a size")

    def _computed(self, tree: Any) -> Any:
        if isinstance(tree, ast.Constant):
            return self._constant(tree, int, float)
        if isinstance(tree, ast.Name):
            if not re.fullmatch(r"s(0|[1-9]\d{0,5})", tree.id):
                raise KeyError(tree.id)
            return self._sizes.symbol(tree.id)
        if isinstance(tree, ast.UnaryOp):
            return _SIGNS_BEFORE[type(tree.op)](self._computed(tree.operand))
        if isinstance(tree, ast.Compare):
            (comparison,), (right,) = tree.ops, tree.comparators
            return _ARITHMETIC[type(comparison)](*map(self._computed, (tree.left, right)))
        if isinstance(tree, ast.Call):
            return SIZE_FUNCTIONS[ast.unparse(tree.func)](*map(self._computed, tree.args))
        if isinstance(tree.op, ast.Pow):
            found = self._computed(tree.left) ** range(8)[tree.right.value]
            if degree(found) > _MAX_DEGREE:
                raise ValueError("too large")
        else:
            found = _ARITHMETIC[type(tree.op)](*map(self._computed, (tree.left, tree.right)))
        if isinstance(found, (int, sympy.Integer)) and abs(found) > _MAX_NUMBER:
            raise ValueError("too large")
        return found

    # ---- programs ----------------------------------------------------------------------------

    def _inputs(self, tree: ast.FunctionDef) -> list[tuple[str, Type, Any]]:
        """Returns the name, the type and the default of each input."""
        given = tree.args
        others = (*given.posonlyargs, *given.kwonlyargs, given.vararg, given.kwarg)
        if any(others) or len(given.defaults) not in (0, len(given.args)):
            self._fail(tree, "expected inputs %name: type")
        names: dict[str, None] = {}
        found = []
        for index, arg in enumerate(given.args):
            default = given.defaults[index] if given.defaults else None
            names[self._defined(arg, names)] = None
            found.append((list(names)[-1], self._type(arg.annotation), default))
        return found

    def _outputs(self, tree: ast.FunctionDef) -> list[Type] | None:
        """Returns the result types in a header, if there are any."""
        return None if tree.returns is None else list(map(self._type, reading.parts(tree.returns)))

    def _body(self, tree: ast.FunctionDef) -> ir.Program:
        inputs = self._inputs(tree)
        sources = tuple(self._source(*row) for row in inputs if row[2] is not None)
        values = {name: ir.Value(type_, name) for name, type_, _ in inputs}
        entries, calls, outputs = list(values.values()), [], None
        writes: list[tuple[int, int]] = []
        for line in tree.body:
            if isinstance(line, ast.Return):
                outputs = [self._used(part, values) for part in reading.parts(line.value)]
            elif outputs is None:
                calls.append(self._call(line, values))
            else:
                writes.append(self._write(line, values, entries))
        if outputs is None:
            self._fail(tree, "it returns nothing")
        # Result types in a header are for readers, and must agree with the body.
        if self._outputs(tree) not in (None, [v.type for v in outputs]):
            self._fail(tree, "the header has other result types")
        return ir.Program(tuple(entries), tuple(calls), tuple(outputs), sources, tuple(writes))

    def _source(self, name: str, type_: Type, tree: Any) -> ir.Source:
        """Reads what an input is bound to, such as ``parameter(grad)``."""
        kind: Any = ast.unparse(tree.func) if isinstance(tree, ast.Call) else ""
        parts = list(tree.args) if kind in ("input", *get_args(ir.TensorKind)) else []
        index = self._constant(parts.pop(0), int) if kind == "input" and parts else None
        if parts and isinstance(parts[0], ast.Constant):
            name = self._constant(parts.pop(0), str)
        words = list(map(ast.unparse, parts))
        if index is not None and set(words) <= {"grad", "switched", "back"}:
            return ir.UserInput(index, name, *(w in words for w in ("grad", "switched", "back")))
        is_right = kind in get_args(ir.TensorKind) and words in ([], ["grad"])
        if not is_right or not isinstance(type_, TensorType) or type_.is_symbolic:
            self._fail(tree, "expected what a tensor is bound to, such as parameter(grad)")
        return ir.ModelTensor(name, type_.empty("meta").requires_grad_(bool(words)), kind)

    def _call(self, line: Any, values: dict[str, ir.Value]) -> ir.Call:
        call = getattr(line, "value", None)
        is_line = reading.is_assignment(line) or isinstance(line, ast.Expr)
        if not is_line or not isinstance(call, ast.Call):
            self._fail(line, "expected %name, ... = call @name(...)")
        names: dict[str, None] = {}
        for target in reading.parts(line.targets[0]) if isinstance(line, ast.Assign) else []:
            names[self._defined(target, values, names)] = None
        args = tuple(self._used(arg, values) for arg in call.args)
        closure = self._called(call.func, args)
        types = closure.output_types
        if len(types) != len(names):
            self._fail(line, f"{len(names)} names for {len(types)} results")
        options = {word.arg: self._constant(word.value, str) for word in call.keywords}
        mark = options.get("recompute", "")
        if not options.keys() <= {"at", "recompute"} or mark not in get_args(ir.RecomputeMark):
            self._fail(call, "expected at='path' or recompute='full', 'selective' or 'save'")
        results = {n: ir.Value(t, n) for t, n in zip(types, names, strict=True)}
        values.update(results)
        return ir.Call(closure, args, tuple(results.values()), options.get("at", ""), mark)

    def _called(self, tree: Any, args: tuple[ir.Value, ...]) -> ir.Closure:
        name = ast.unparse(tree)
        if name == "pack":
            return ir.Pack(StructType(tuple(v.type for v in args)))
        if name != "unpack":
            closure: ir.Closure = self._used(tree, self._closures, "@")
            return closure
        struct = args[0].type if len(args) == 1 else None
        if not isinstance(struct, StructType):
            self._fail(tree, "unpack takes one struct")
        return ir.Unpack(struct)

    def _write(
        self, line: Any, values: Mapping[str, ir.Value], inputs: list[ir.Value]
    ) -> tuple[int, int]:
        match line:
            case ast.Expr(ast.Call(ast.Name("write"), [target], [ast.keyword("output", index)])):
                value = self._used(target, values)
                if value in inputs:
                    return self._constant(index, int), inputs.index(value)
        self._fail(line, "expected write(%input, output=number)")

    # ---- leaves ------------------------------------------------------------------------------

    def _control(self, tree: ast.FunctionDef, words: list[str]) -> ir.Leaf | None:
        """Reads a leaf that runs other closures; None if its body has operators."""
        match tree.body:
            case [ast.Return(ast.Call(ast.Name(word), args, keywords) as call)] if (
                word in OPERATORS
            ):
                pass
            case _:
                return None
        bodies = [self._used(arg, self._closures, "@") for arg in args]
        inputs, outputs = self._inputs(tree), self._outputs(tree) or []
        numbers = {str(one.arg): self._constant(one.value, int) for one in keywords}
        names, types = [row[0] for row in inputs], ([row[1] for row in inputs], outputs)
        try:
            control = OPERATORS[word](tuple(bodies), **numbers)
            flat = checked(control, *types)
            leaf = control_leaf(self._name(tree.name), control, *flat, names)
        except (TypeError, ValueError) as error:
            self._fail(call, f"{word} cannot be given this: {error}")
        return replace(leaf, level="aten") if "aten" in words else leaf

    def _leaf_later(self, tree: ast.FunctionDef, words: list[str]) -> ir.Leaf:
        inputs, outputs = self._inputs(tree), self._outputs(tree)
        if outputs is None:
            return self._leaf_now(tree, words)
        name = self._name(tree.name)
        num_nodes, read = len(tree.body) - 1, partial(self._leaf_now, tree, words)
        if name in self._left_out:
            num_nodes = len(_LINE.findall(self._text, *self._left_out[name])) - 1
            read = partial(self._leaf_at, *self._left_out[name], words)
        leaf = reading.LeafLater.__new__(reading.LeafLater)
        vars(leaf).update(
            name=name,
            input_types=tuple(type_ for _, type_, _ in inputs),
            output_types=tuple(outputs),
            input_names=tuple(
                own for name, type_, _ in inputs for own in reading.flat_names(name, type_)
            ),
            **self._settings(words),
            num_nodes=num_nodes,
            first_target=self._first_target(tree.body[0]),
            is_sum=self._is_sum(tree),
            read=read,
        )
        return leaf

    def _leaf_at(self, start: int, end: int, words: list[str]) -> ir.Leaf:
        """Reads a leaf that was shortened, where it is in the text."""
        num_lines = self._text.count("\n", 0, start)
        before = " " * (start - num_lines) + "\n" * num_lines  # so that errors say where it is
        (tree,) = self._statements(before + self._text[start:end])
        return self._leaf_now(tree, words)

    def _first_target(self, line: Any) -> Any:
        """Returns the operator of a line; None if it has none."""
        _, call = reading.without_modes(getattr(line, "value", None))
        return self._operator(call.func) if isinstance(call, ast.Call) else None

    def _is_sum(self, tree: ast.FunctionDef) -> bool:
        """Whether a leaf adds its two inputs, by its lines."""
        match tree.body:
            case [ast.Assign() | ast.AnnAssign() as line, ast.Return()]:
                names = [ast.unparse(x) for x in getattr(line.value, "args", ())]
                is_add = self._first_target(line) is torch.ops.aten.add.Tensor
                is_plain = not getattr(line.value, "keywords", ())
                return is_add and is_plain and names == [x.arg for x in tree.args.args]
        return False

    def _settings(self, words: list[str]) -> dict[str, Any]:
        kernels = next((kind for kind in get_args(ir.Kernels) if kind in words), "backend")
        return {"level": "aten" if "aten" in words else "composite", "kernels": kernels}

    def _leaf_now(self, tree: ast.FunctionDef, words: list[str]) -> ir.Leaf:
        graph = torch.fx.Graph()
        nodes: dict[str, torch.fx.Node] = {}
        types = []
        for name, type_, _ in self._inputs(tree):
            for own in reading.flat_names(name, type_):
                nodes[own] = graph.placeholder(f"a{len(nodes)}")
            types.append(type_)
        names = tuple(nodes)
        shared = [w for w in words if w == "no_grad" or w.startswith("autocast_")]
        lines: dict[Any, Any] = {}
        body: list[Any] = tree.body
        for line in body[:-1]:
            is_plain = reading.is_assignment(line)
            (target,) = line.targets if is_plain else [getattr(line, "target", line)]
            if not is_plain and (type(line) is not ast.AnnAssign or line.value is None):
                self._fail(line, "expected %name: type = operator(...)")
            name = self._defined(target, nodes)
            nodes[name] = self._node(graph, nodes, line.value, shared)
            lines[nodes[name]] = line
        last = body[-1]
        if not isinstance(last, ast.Return):
            self._fail(last, "expected return")
        graph.output(tuple(self._operand(part, nodes) for part in reading.parts(last.value)))
        module = module_of(graph)
        self._run(module, flat_types(types), lines, last)
        given = [getattr(one, "meta", {}).get("val") for one in ir.outputs_of(module)]
        found = [TensorType.of(one) for one in given if isinstance(one, torch.Tensor)]
        if len(found) < len(given):
            self._fail(last, "expected tensors")
        outputs = self._outputs(tree) or found
        # A kernel writes as much as the operators give.
        if not reading.are_equal(flat_types(outputs), found, self._sizes):
            self._fail(tree, "the header has other results than the operators give")
        name = self._name(tree.name)
        return ir.Leaf(name, module, tuple(types), tuple(outputs), names, **self._settings(words))

    def _node(
        self, graph: torch.fx.Graph, nodes: Mapping[str, torch.fx.Node], tree: Any, modes: list[str]
    ) -> torch.fx.Node:
        own, tree = reading.without_modes(tree)
        if not isinstance(tree, ast.Call):
            self._fail(tree, "expected an operator")
        args = tuple(self._operand(arg, nodes) for arg in tree.args)
        kwargs = {str(word.arg): self._operand(word.value, nodes) for word in tree.keywords}
        node = graph.call_function(self._operator(tree.func), args, kwargs)
        node.meta["stamp"] = self._stamp(own or modes, tree)
        return node

    def _stamp(self, modes: list[str], tree: Any) -> Stamp:
        autocast = []
        for mode in modes:
            if mode != "no_grad":
                _, kind, dtype = mode.split("_", 2)
                if dtype not in DTYPES:
                    self._fail(tree, f"{mode} names no dtype")
                autocast.append((kind, True, DTYPES[dtype]))
        return Stamp("no_grad" not in modes, tuple(autocast))

    def _operator(self, tree: Any) -> Any:
        name = ast.unparse(tree)
        # The printer leaves ``aten.`` and ``.default`` out.
        for full in (f"aten.{name}", f"aten.{name}.default", name):
            found = operator_as_printed(full)
            if isinstance(found, OPERATOR_TYPES[0]) and full not in _FORBIDDEN:
                return found
        if name != "getitem":
            self._fail(tree, f"there is no operator {name!r}")
        return operator.getitem

    def _operand(self, tree: Any, nodes: Mapping[str, torch.fx.Node]) -> Any:
        if isinstance(tree, ast.Name) and tree.id.startswith(_LETTERS["%"]):
            return self._used(tree, nodes)
        if isinstance(tree, (ast.List, ast.Tuple)):
            parts = [self._operand(part, nodes) for part in tree.elts]
            return parts if isinstance(tree, ast.List) else tuple(parts)
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
            number = self._operand(tree.operand, nodes)
            if type(number) in (int, float):
                return -number
        if isinstance(tree, (ast.Name, ast.Attribute)) and ast.unparse(tree) in _CONSTANTS:
            return _CONSTANTS[ast.unparse(tree)]
        match tree:
            case ast.Call(ast.Name("size"), [size]):
                return self._sizes.literal(self._size(size))
            case ast.Call(ast.Name("device"), [ast.Constant() as name]):
                return self._device(name)
            case ast.Call(ast.Name("slice"), [start, stop, step]):
                return slice(*(self._operand(end, nodes) for end in (start, stop, step)))
            case ast.Call(ast.Name("complex"), [real, imaginary]):
                return complex(self._operand(real, nodes), self._operand(imaginary, nodes))
        return self._constant(tree, int, float, str, bool, type(None))

    def _run(
        self,
        module: torch.fx.GraphModule,
        types: list[TensorType],
        lines: Mapping[Any, Any],
        last: Any,
    ) -> None:
        """Gives each node its operator's result on fake tensors, whose type must be the text's."""
        values = reading.ReadValues(module, self._bodies, lines)
        try:
            with self._sizes.running():
                values.run_flat([self._sizes.fake(type_) for type_ in types])
        # Whatever a fake kernel raises for these operands, it is the text that is wrong.
        except Exception as error:
            reason = str(error).partition("\n")[0]
            line = lines.get(values.node, last)
            self._fail(line.value, f"{values.node.target} cannot be given this: {reason}")
        for node, line in lines.items():
            if not reading.has_stated_type(node, line):
                self._fail(line.annotation, f"the operator gives {node_type(node)}")
