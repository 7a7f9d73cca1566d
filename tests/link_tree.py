"""Makes build/lint: a tree of links to the folders that together are the two packages.

mypy reads it (``make lint``), and the tests import from it where lazyinline is not installed. The
links point at whole folders, so new files appear by themselves.
"""

import os
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
PUBLIC_FACE = ROOT / "frontend" / "lazyinline"
COMMAND = ROOT / "frontend" / "lazyinline_command"


def package_folders(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    """Returns the folders at the root that are packages of lazyinline."""
    return sorted(init.parent for init in root.glob("*/__init__.py"))


def all_packages(root: pathlib.Path = ROOT) -> dict[str, pathlib.Path]:
    """Returns the folder of each package of lazyinline, at any depth, by its dotted name."""
    found = {face.name: root / face.relative_to(ROOT) for face in (PUBLIC_FACE, COMMAND)}
    faces = set(found.values())
    for top in package_folders(root):
        for init in top.rglob("__init__.py"):
            if init.parent not in faces:
                name = ".".join(init.parent.relative_to(root).parts)
                found[f"lazyinline.{name}"] = init.parent
    return found


def make_link_tree(root: pathlib.Path = ROOT) -> pathlib.Path:
    """Makes the links that are missing or point elsewhere; returns the folder to search."""
    tree = root / "build" / "lint"
    package = tree / "lazyinline"
    package.mkdir(parents=True, exist_ok=True)
    names = ("__init__.py", "__main__.py", "func.py", "py.typed")
    face = [root / "frontend" / "lazyinline" / name for name in names]
    wanted = {path.name: path for path in (*package_folders(root), *face)}
    for link in package.iterdir():
        # Python keeps its bytecode there, too: a folder.
        if link.is_symlink() and link.name not in wanted and not link.name.startswith("."):
            link.unlink(missing_ok=True)
    for name, path in wanted.items():
        make_link(package / name, path)
    make_link(tree / COMMAND.name, root / COMMAND.relative_to(ROOT))
    return tree


def make_link(link: pathlib.Path, path: pathlib.Path) -> None:
    """Links to a path, by a way that no other process sees half done."""
    target = os.path.relpath(path, link.parent)
    if link.is_symlink() and os.readlink(link) == target:
        return
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.symlink_to(target)
    fresh.replace(link)


if __name__ == "__main__":
    make_link_tree()
