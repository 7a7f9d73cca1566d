"""The shape of the code: which folder may import which, and who may touch private torch names.

Both are read from the source, functions and `if TYPE_CHECKING` included, so an import that no test
runs counts as well.
"""

import ast
import functools
import itertools
import pathlib
import re
from collections.abc import Iterable, Iterator

import pytest
from link_tree import COMMAND, PUBLIC_FACE, ROOT, package_folders

# Who may import whom: folder -> folders of ours that it may import, besides itself.
ALLOWED: dict[str, set[str]] = {
    "reuse": set(),
    "autodiff": {"reuse"},
    "recompute": {"reuse", "autodiff"},
    "pipeline_parallel": {"reuse", "autodiff"},
    "backend": {"reuse", "autodiff"},
    "frontend": {"reuse", "autodiff", "recompute", "pipeline_parallel", "backend"},
}

# Only modules of this name may touch private torch names: one per concern, so that a new torch
# release is met in few places, and each has a contract test.
ADAPTER = "torch_*.py"

# Public by name, but torch promises nothing about them.
UNSTABLE = ("torch.fx.experimental",)

# Private by name, but part of every saved and subclassed module since the first release, and of
# every named tuple.
STABLE = {"_buffers", "_modules", "_parameters", "_fields"}

DYNAMIC_IMPORTS = {"import_module", "__import__", "find_spec"}
ATTRIBUTE_CALLS = {"getattr", "hasattr", "setattr", "delattr", "object"}  # of mock.patch

PRIVATE_PART = re.compile(r"_[a-zA-Z]\w*")  # _x, but not __doc__


def module_name(path: pathlib.Path, root: pathlib.Path = ROOT) -> str:
    """Returns the dotted name under which a file of the tree is imported."""
    relative = path.relative_to(root).with_suffix("")
    if relative.parts[:2] in {face.relative_to(ROOT).parts for face in (PUBLIC_FACE, COMMAND)}:
        parts = relative.parts[1:]
    else:
        parts = ("lazyinline", *relative.parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(path: pathlib.Path, root: pathlib.Path = ROOT) -> str:
    """Returns the package that relative imports in this file start from."""
    name = module_name(path, root)
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


def sources() -> list[pathlib.Path]:
    """Returns every Python file of the package."""
    return sorted(path for folder in package_folders() for path in folder.rglob("*.py"))


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
    """Returns a file's syntax tree: read by many tests, parsed once."""
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """Returns all nodes of a tree, which is walked once."""
    return list(ast.walk(tree))


def is_adapter(path: pathlib.Path) -> bool:
    """Says whether a file may touch private names of torch."""
    return path.match(ADAPTER)


def imported_names(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Yields line and absolute dotted name of all that is imported, `from a import b` as a.b."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(node, package)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and called_name(node) in DYNAMIC_IMPORTS:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                dots = len(name.value) - len(name.value.lstrip("."))
                up = package.split(".")[: len(package.split(".")) + 1 - dots] if dots else []
                yield node.lineno, ".".join([*up, name.value.lstrip(".")])


def called_name(call: ast.Call) -> str:
    """Returns the last part of the name of what is called."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def absolute_base(node: ast.ImportFrom, package: str) -> str:
    """Returns the absolute name of X in `from X import ...`."""
    if node.level == 0:
        return node.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) + 1 - node.level]
    return ".".join([*parts, node.module] if node.module else parts)


def against_direction(tree: ast.AST, path: pathlib.Path, root: pathlib.Path) -> Iterator[str]:
    """Yields each import of this file that goes against ALLOWED."""
    folder = path.relative_to(root).parts[0]
    may = ALLOWED[folder] | {folder}
    for line, name in imported_names(tree, package_of(path, root)):
        parts = name.split(".")
        if parts[0] != "lazyinline" or (len(parts) > 1 and parts[1] in may):
            continue
        if len(parts) > 1 and parts[1] in ALLOWED:
            yield f"{path.relative_to(root)}:{line} imports {parts[1]}/"
        elif folder != "frontend":
            # The public face is made of frontend/, so it counts as frontend/.
            yield f"{path.relative_to(root)}:{line} imports the public face ({name})"


def is_private(dotted: str) -> bool:
    """Says whether a dotted name is a private name of torch."""
    parts = dotted.split(".")
    if parts[0] != "torch":
        return False
    if any(dotted == name or dotted.startswith(f"{name}.") for name in UNSTABLE):
        return True
    return any(PRIVATE_PART.fullmatch(part) for part in parts[1:])


class PrivateTorchNames(ast.NodeVisitor):
    """Collects line and dotted name of each private torch name that a file touches.

    Seen are imports, attribute chains that start at a name bound by an import of torch (under any
    alias), `getattr(torch.x, "_y")`, and strings that are such a name, like a key of sys.modules.
    Attributes of objects are left to foreign_private_attributes: only running the code would tell
    whether they are of torch.
    """

    def __init__(self, tree: ast.AST) -> None:
        self.found: list[tuple[int, str]] = []
        self.torch_names: dict[str, str] = {}
        self.docstrings = set()
        for node in nodes_of(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    self.torch_names[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                for alias in node.names:
                    self.torch_names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                self.docstrings.add(node.value)
        self.visit(tree)

    def note(self, node: ast.expr | ast.stmt, dotted: str | None) -> None:
        if dotted is not None and is_private(dotted):
            self.found.append((node.lineno, dotted))

    def dotted(self, node: ast.expr) -> str | None:
        """Returns the full name of an attribute chain that starts at an imported torch name."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.torch_names:
            return None
        return ".".join([self.torch_names[node.id], *reversed(parts)])

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.note(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0:
            for alias in node.names:
                self.note(node, f"{node.module}.{alias.name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = self.dotted(node)
        self.note(node, dotted)
        if dotted is None:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if called_name(node) in ATTRIBUTE_CALLS and len(node.args) > 1:
            name = node.args[1]
            base = self.dotted(node.args[0])
            if base and isinstance(name, ast.Constant) and isinstance(name.value, str):
                self.note(node, f"{base}.{name.value}")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        text = node.value
        if isinstance(text, str) and node not in self.docstrings and re.fullmatch(r"[\w.]+", text):
            self.note(node, text)


def private_torch_names(path: pathlib.Path) -> list[tuple[int, str]]:
    """Returns line and name of each private torch name in a file, in order, once per line."""
    return sorted(set(PrivateTorchNames(tree_of(path)).found))


def own_names(trees: Iterable[ast.AST]) -> set[str]:
    """Returns every name that our code defines: functions, classes, variables, attributes."""
    own: set[str] = set()
    for node in itertools.chain.from_iterable(map(nodes_of, trees)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
    return own


def foreign_private_attributes(tree: ast.AST, own: set[str]) -> list[tuple[int, str]]:
    """Returns line and text of each `x._y`, or `getattr(x, "_y")`, where `_y` is not of ours.

    `x` is an object here: private names of modules are found by name.
    """
    modules = {
        alias.asname or alias.name.partition(".")[0]
        for node in nodes_of(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    found, known = [], own | STABLE
    for node in nodes_of(tree):
        name: object = None
        if isinstance(node, ast.Attribute):
            name, base = node.attr, node.value
        elif isinstance(node, ast.Call) and called_name(node) in ATTRIBUTE_CALLS and node.args:
            base, literal = node.args[0], node.args[1]
            name = literal.value if isinstance(literal, ast.Constant) else None
        if not isinstance(name, str) or not PRIVATE_PART.fullmatch(name):
            continue
        if name in known or ast.unparse(base).partition(".")[0] in modules:
            continue
        found.append((node.lineno, ast.unparse(node)))
    return found


def test_folders_are_known() -> None:
    assert {folder.name for folder in package_folders()} == set(ALLOWED)
    face = [PUBLIC_FACE / name for name in ("__init__.py", "__main__.py", "func.py")]
    assert sorted(PUBLIC_FACE.glob("*.py")) == face


def test_import_direction() -> None:
    found = [row for path in sources() for row in against_direction(tree_of(path), path, ROOT)]
    assert not found, "imports against the direction:\n" + "\n".join(found)


def test_private_torch_names_stay_in_adapters() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sources()
        if not is_adapter(path)
        for line, name in private_torch_names(path)
    ]
    assert not found, "private torch names outside the adapter modules:\n" + "\n".join(found)


def test_foreign_private_attributes_stay_in_adapters() -> None:
    trees = {path: tree_of(path) for path in sources()}
    own = own_names(trees.values())
    found = [
        f"{path.relative_to(ROOT)}:{line} {text}"
        for path, tree in trees.items()
        if not is_adapter(path)
        for line, text in foreign_private_attributes(tree, own)
    ]
    assert not found, "private attributes of others outside the adapters:\n" + "\n".join(found)


def test_adapters_and_they_alone_are_named_so() -> None:
    for path in sources():
        docstring = ast.get_docstring(tree_of(path)) or ""
        assert docstring.startswith("Adapter: ") == is_adapter(path), path


# The checks themselves -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "code", "target"),
    [
        ("reuse", "from ..backend.lower import lower", "backend/"),
        ("reuse", "from .. import autodiff", "autodiff/"),
        ("reuse", "import lazyinline.frontend", "frontend/"),
        ("reuse", "def f():\n    from lazyinline.frontend import capture", "frontend/"),
        ("recompute", "from ..backend import lower", "backend/"),
        ("backend", "import lazyinline", "public face"),
        ("backend", "from lazyinline import Program", "public face"),
        ("backend", "importlib.import_module('lazyinline.recompute.knapsack')", "recompute/"),
        ("backend", "importlib.import_module('..recompute', __package__)", "recompute/"),
        ("backend", "from ..reuse.program import Program; from . import link", ""),
        ("backend", "import torch; from lazyinline.autodiff import derivative", ""),
        ("frontend", "import lazyinline; from ..backend import lower", ""),
    ],
)
def test_the_check_of_directions(folder: str, code: str, target: str) -> None:
    rows = list(against_direction(ast.parse(code), ROOT / folder / "x.py", ROOT))
    assert len(rows) == bool(target) and all(target in row for row in rows)


PRIVATE_CODE = """
import torch._inductor
import torch._inductor.config as config
from torch import _C
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx import experimental
import torch; torch._C._get_tracing_state()
import torch; torch.fx.experimental.symbolic_shapes.ShapeEnv()
import torch as t; t.ops._dir
from torch import nn; nn.modules.module._global_forward_hooks
import torch; getattr(torch, '_C')
import sys; sys.modules.get('torch._dynamo')
import importlib; importlib.import_module('torch._dynamo')
"""
PUBLIC_CODE = """
'torch._inductor is not used.'; import torch; torch.nn.Linear.__init__
import torch; self._cache = torch.ops.aten.add
from .torch_tracing import _private_of_ours
"""


def test_the_check_of_private_names() -> None:
    for code in PRIVATE_CODE.strip().splitlines():
        assert PrivateTorchNames(ast.parse(code)).found, code
    for code in PUBLIC_CODE.strip().splitlines():
        assert not PrivateTorchNames(ast.parse(code)).found, code


def test_the_check_of_foreign_attributes() -> None:
    for code in ("t.untyped_storage()._cdata", "getattr(op, '_schema', None)"):
        assert foreign_private_attributes(ast.parse(code), own=set()), code
    for code in ("self._mine", "m._parameters", "import sys; sys._getframe(1)"):
        assert not foreign_private_attributes(ast.parse(code), own={"_mine"}), code
