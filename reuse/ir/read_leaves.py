"""Leaves that are read from text; their operators run on fake tensors.

An operator that does not accept its operands raises, and the type of its result is compared with
the text. A text may come from anywhere, so a view may not reach beyond its storage, and no operator
may have more results than a machine has memory for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal

import torch
import torch.fx
from torch.fx.node import map_aggregate

from ..process import ProcessLock
from ..torch_names import memory_id, schema_of
from .leaf import ModalInterpreter
from .masks import ATTENTION
from .printer import node_type
from .program import Leaf
from .torch_symbols import ReadSizes
from .types import DTYPES, StructType, TensorType, Type, flatten_type, reach, strides_that_matter

_STRIDE_OF_ONE = re.compile(r"\b1:[^,\]]+")
# CPython has one counter of recursion depth for all threads that parse: if a finalizer lets another
# thread parse in between, both fail with a SystemError (python/cpython#106905).
_ONE_AT_A_TIME = ProcessLock()
_SIZE = "(?:0|[1-9][0-9]{,18})"
# A type is read as one name: most of a text is types, and few of them differ.
TYPE = rf"\b(?:{'|'.join(DTYPES)})\[{_SIZE}(?:[,:]{_SIZE})*\]"
AS_NAMES = str.maketrans("[],:", "\u0294\u0295\u01bb\u01be")
_AS_TYPES = {letter: sign for sign, letter in AS_NAMES.items()}
_MAX_RESULTS = 2**16  # of one operator: each is an object of its own


def without_modes(tree: Any) -> tuple[list[str], Any]:
    """Returns the modes that the printer writes as calls around an operator, and what is inside."""
    modes: list[str] = []
    while isinstance(tree, ast.Call) and (mode := ast.unparse(tree.func)):
        if mode != "no_grad" and not mode.startswith("autocast_"):
            break
        modes.insert(0, mode)
        tree = tree.args[0]
    return modes, tree


def flat_names(name: str, type_: Type) -> list[str]:
    """Returns the names of the tensors of one input."""
    is_struct = isinstance(type_, StructType)
    return [f"{name}.{i}" for i, _ in enumerate(flatten_type(type_))] if is_struct else [name]


def is_assignment(line: Any) -> bool:
    """Whether a line is an assignment with one equals sign."""
    return isinstance(line, ast.Assign) and len(line.targets) == 1


def parts(tree: Any) -> list[Any]:
    """Returns the elements between commas."""
    if tree is None:
        return []
    return tree.elts if isinstance(tree, ast.Tuple) else [tree]


def parsed(text: str, mode: str = "exec") -> Any:
    """Parses a text into Python's syntax tree, without running any of it."""
    with _ONE_AT_A_TIME:
        return ast.parse(text, mode=mode)


def with_sizes(tree: Any) -> Any:
    """Returns the expression of a type that was read as one name."""
    name = getattr(tree, "id", "")
    text = name.translate(_AS_TYPES)
    if text == name:
        return tree
    found = parsed(text, "eval").body
    for one in ast.walk(found):  # where a mistake is shown, in bytes
        if isinstance(one, ast.expr):
            start = tree.col_offset + len(name[: one.col_offset].encode())
            one.lineno, one.col_offset = tree.lineno, start
    return found


class LeafLater(Leaf):
    """A leaf whose operators are read when something asks for them."""

    read: Callable[[], Leaf]

    def retyped(self, inputs: tuple[Type, ...], outputs: tuple[Type, ...]) -> Leaf:
        """Returns the same leaf for other types, still not read."""
        made = type(self).__new__(type(self))
        vars(made).update(vars(self), input_types=inputs, output_types=outputs)
        return made

    @cached_property
    def module(self) -> torch.fx.GraphModule:  # type: ignore[override]
        """The body."""
        return self.read().module


def has_stated_type(node: torch.fx.Node, line: Any) -> bool:
    """Whether a node's type is the one in its line."""
    stated = getattr(line, "annotation", None)
    texts = [node_type(node).replace("[]", "")]
    if stated is not None:
        texts.append(ast.unparse(stated).translate(_AS_TYPES))
    # The stride of a dimension of size one is arbitrary, and operators differ in it.
    plain = [_STRIDE_OF_ONE.sub("1:1", ast.unparse(parsed(text))) for text in texts]
    return plain[-1] in (plain[0], "...")


def are_equal(stated: list[TensorType], found: list[TensorType], sizes: ReadSizes) -> bool:
    """Whether types are equal; if two expressions of sizes are, that becomes a guard."""
    if stated == found or list(map(_kind, stated)) != list(map(_kind, found)):
        return stated == found
    rows = (map(_numbers, both) for both in zip(stated, found, strict=True))
    pairs = [pair for one, other in rows for pair in zip(one, other, strict=False)]
    return all(a == b or sizes.are_equal(a, b) for a, b in pairs)


def _kind(type_: TensorType) -> Any:
    return type_.dtype, type_.device, len(type_.shape), type_.is_symbolic


def _numbers(type_: TensorType) -> tuple[Any, ...]:
    return *type_.shape, *strides_that_matter(type_.shape, type_.stride)


def _wanting_gradients(operand: Any) -> Any:
    is_tensor = isinstance(operand, torch.Tensor) and operand.is_floating_point()
    return operand.detach().requires_grad_() if is_tensor else operand


class ReadValues(ModalInterpreter):
    """Runs a graph that was read on fake tensors, and gives each node its value.

    ``bodies`` is ``"later"`` for a text that is trusted; ``node`` is the one that runs, or ran
    last.
    """

    node: Any = None

    def __init__(
        self,
        module: torch.fx.GraphModule,
        bodies: Literal["now", "later"],
        lines: Mapping[torch.fx.Node, Any],
    ) -> None:
        super().__init__(module)
        self._bodies, self._lines = bodies, lines
        self._bytes: dict[int, int] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        """Runs a node, and keeps an alias of its value, whose layout may be changed in place."""
        self.node = n
        many = any(
            str(r.type) == "List[Tensor]" for r in getattr(schema_of(n.target), "returns", ())
        )
        sizes = [size for i in n.all_input_nodes for size in getattr(i.meta["val"], "shape", ())]
        if many and any(type(size) is int and size > _MAX_RESULTS for size in sizes):
            raise ValueError(f"it may have more than {_MAX_RESULTS} results")
        value = super().run_node(n)
        self._note(n, value)
        if n.target is ATTENTION and not has_stated_type(n, self._lines.get(n)):
            # If operands require gradients, another kernel runs, whose result has other strides.
            operands = map_aggregate(self.fetch_args_kwargs_from_env(n), _wanting_gradients)
            with torch.enable_grad():
                value = self.call_function(n.target, *operands).detach()
            self._note(n, value)
        self._check_memory(value)
        return value

    def _note(self, n: torch.fx.Node, value: Any) -> None:
        if n.op != "output":
            n.meta["val"] = map_aggregate(
                value, lambda x: x.detach() if isinstance(x, torch.Tensor) else x
            )

    def _check_memory(self, value: Any) -> None:
        """Raises ValueError for a view beyond its storage: fake tensors let the storage grow."""
        for one in value if isinstance(value, (tuple, list)) else [value]:
            if not isinstance(one, torch.Tensor):
                continue
            # With symbolic sizes this check adds a guard. A text that is read late is trusted, and
            # gets no more guards than when it was captured.
            if self._bodies == "later" and TensorType.of(one).is_symbolic:
                continue
            there = self._bytes.setdefault(memory_id(one), one.untyped_storage().nbytes())
            end = one.storage_offset() + reach(one.shape, one.stride())
            if 0 not in TensorType.of(one).shape and end * one.dtype.itemsize > there:
                raise ValueError("it reaches beyond the memory that it is a view of")
