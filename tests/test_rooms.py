"""The rooms of the house: what each `__init__.py` and `docs/rooms.md` say is there, and no more.

A folder's docstring has a line for each file and each folder in it. Folders stand in the order of
imports: each may import those above it. `pytest --update-golden` writes `docs/rooms.md` anew.
"""

import ast
import functools
import pathlib
import re
from collections.abc import Iterator

import networkx as nx
import pytest
from link_tree import PUBLIC_FACE, ROOT, all_packages, package_folders
from test_architecture import imported_names, module_name, package_of, sources, tree_of

PAGE = ROOT / "docs" / "rooms.md"
HEAD = """# The rooms

After this page you know which folder to open. There is one line for each folder of the package; the
`__init__.py` of each has one for each file in it. Beside each other they stand in the order of
imports: each may import those above it, and a test holds that. Top folders: `frontend/` sees all of
them; `recompute/`, `pipeline_parallel/` and `backend/` import `autodiff/` and `reuse/`, `autodiff/`
imports `reuse/`, `reuse/` none. New here? [Read these five files first](read-first.md).

"""

# A value that shows itself: its method imports, when called, what knows how to write it.
SHOWS_ITSELF = {("reuse.ir.program", f"reuse.ir.{name}") for name in ("printer", "fx_form")}

ROOMS = [folder for folder in all_packages().values() if folder != PUBLIC_FACE]


def lines_of(folder: pathlib.Path) -> dict[str, str]:
    """Returns what the docstring of a folder says of each name in it, in order."""
    text = ast.get_docstring(tree_of(folder / "__init__.py")) or ""
    return dict(re.findall(r"^(\w+)  +(.+)$", text, re.MULTILINE))


def title_of(folder: pathlib.Path) -> str:
    """Returns the first line of a folder's docstring."""
    text = ast.get_docstring(tree_of(folder / "__init__.py")) or ""
    return text.partition("\n")[0]


def rooms_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the rooms in a folder in the order of its docstring."""
    return [folder / name for name in lines_of(folder) if (folder / name) in ROOMS]


def tree(folder: pathlib.Path, depth: int = 0) -> Iterator[str]:
    """Yields a line for a folder and for each room in it."""
    yield f"{'  ' * depth}- `{folder.name}/` {title_of(folder).replace('``', '`')}"
    for room in rooms_in(folder):
        yield from tree(room, depth + 1)


@functools.cache
def arrows() -> set[tuple[str, str]]:
    """Returns (importing, imported) modules, without the leading `lazyinline.`."""
    modules = {module_name(path): path for path in sources() if path.name != "__init__.py"}
    found = set()
    for module, path in modules.items():
        for _, name in imported_names(tree_of(path), package_of(path)):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != module:
                found.add((module.partition(".")[2], target.partition(".")[2]))
    return found


def place_of(module: str) -> str:
    """Returns the room of a module; what stands in no room is one by itself."""
    folder = module.rpartition(".")[0]
    return folder if "." in folder else module


def circles(edges: set[tuple[str, str]]) -> list[list[str]]:
    """Returns the names in each circle."""
    found = nx.strongly_connected_components(nx.DiGraph(edges))
    return [sorted(names) for names in found if len(names) > 1]


@pytest.mark.parametrize("folder", ROOMS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_folder_says_what_is_in_it(folder: pathlib.Path) -> None:
    inside = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    inside |= {init.parent.name for init in folder.glob("*/__init__.py")}
    assert set(lines_of(folder)) == inside, "a line for each in __init__.py"


def test_the_page_of_rooms_is_what_the_folders_say(request: pytest.FixtureRequest) -> None:
    order = ("frontend", "pipeline_parallel", "recompute", "backend", "autodiff", "reuse")
    assert sorted(order) == [folder.name for folder in package_folders()]
    text = HEAD + "".join(f"{line}\n" for name in order for line in tree(ROOT / name))
    if request.config.getoption("--update-golden"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "run with --update-golden, and read it"


def test_no_imports_go_in_a_circle() -> None:
    shown = {(a, b) for a, b in arrows() if (a, b) not in SHOWS_ITSELF}
    assert not circles(shown)
    assert arrows() >= SHOWS_ITSELF, "take out what is no import any more"


def test_rooms_do_not_import_in_a_circle() -> None:
    places = {(place_of(a), place_of(b)) for a, b in arrows()}
    assert not circles({(a, b) for a, b in places if a != b})


def test_rooms_import_those_that_are_listed_above_them() -> None:
    against = []
    for top in package_folders():
        rank = {
            ".".join(room.relative_to(ROOT).parts): number
            for number, room in enumerate(rooms_in(top))
        }
        for a, b in sorted(arrows()):
            source, target = a.rpartition(".")[0], b.rpartition(".")[0]
            if rank.get(source, -1) < rank.get(target, -1) and source in rank:
                against.append(f"{a} imports {b}")
    assert not against


REFERENCE = re.compile(r":(?:mod|class|func|meth|attr|data):`~?(\.+)([\w.]+)`")


def is_there(path: pathlib.Path, dots: str, name: str) -> bool:
    """Says whether what a docstring of a file refers to exists, as far as its text tells."""
    folder, (place, *parts) = path.parents[len(dots) - 1], name.split(".")
    while parts and (folder / place).is_dir():
        folder, place, *parts = (folder / place, *parts)
    file = folder / f"{place}.py"
    if not parts or not file.is_file():
        return not parts and (file.is_file() or (folder / place).is_dir())
    return re.search(rf"\b{parts[0]}\b", file.read_text()) is not None


def test_what_docstrings_refer_to_is_there() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {dots}{name}"
        for path in sources()
        for dots, name in REFERENCE.findall(path.read_text())
        if not is_there(path, dots, name)
    ]
    assert not missing
