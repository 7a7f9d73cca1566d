"""Where a class sets and reads an attribute, found in its source."""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
from collections.abc import Iterator
from types import FunctionType

from torch import nn


def class_place(cls: type) -> str:
    """Returns ``file.py:31`` of a class statement, or an empty text."""
    try:
        _, line = inspect.getsourcelines(cls)
        return f"{os.path.basename(inspect.getsourcefile(cls) or '')}:{line}"
    except (OSError, TypeError):
        return ""


def read_at(cls: type, name: str) -> str:
    """Returns the first line that reads an attribute of this name, ``__init__`` left out."""
    for function, tree in _methods(cls):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
                continue
            if node.attr == name and function.__name__ != "__init__":
                return f"{_line(function, node)} {function.__qualname__}"
    return ""


def set_at(cls: type, name: str) -> str:
    """Returns the line that sets an attribute of this name, with the expression it gets."""
    for function, tree in _methods(cls):
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Attribute) and t.attr == name for t in targets):
                return f"{ast.unparse(node.value)}   {_line(function, node)}"
    return ""


def _methods(cls: type) -> Iterator[tuple[FunctionType, ast.AST]]:
    for base in cls.__mro__:
        if base is nn.Module:
            return
        for value in vars(base).values():
            function = inspect.unwrap(value) if inspect.isfunction(value) else None
            if not isinstance(function, FunctionType):
                continue
            try:
                yield function, ast.parse(textwrap.dedent(inspect.getsource(function)))
            except (OSError, SyntaxError, TypeError):
                continue


def _line(function: FunctionType, node: ast.expr | ast.stmt) -> str:
    code = function.__code__
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno + node.lineno - 1}"
