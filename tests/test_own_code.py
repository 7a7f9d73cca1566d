"""What counts as the code of lazyinline: for the key of the cache, and for frames."""

import pathlib
import sys
from types import SimpleNamespace

import pytest
from link_tree import PUBLIC_FACE, ROOT, package_folders

from lazyinline.frontend.tracing import frames
from lazyinline.reuse import process


def test_every_folder_of_the_package_is_known() -> None:
    assert sorted(process.FOLDERS) == [folder.name for folder in package_folders()]
    assert process.package_root().resolve() == ROOT


def test_the_digest_reads_every_file_of_the_package() -> None:
    found = {pathlib.Path(path).resolve() for path in process.own_files()}
    expected = {path for folder in package_folders() for path in folder.rglob("*")}
    assert PUBLIC_FACE / "__init__.py" in found
    assert found == {p for p in expected if p.is_file() and "__pycache__" not in p.parts}


@pytest.mark.parametrize("installed", [False, True])
def test_the_digest_changes_with_any_file_at_any_depth(
    installed: bool, tmp_path: pathlib.Path
) -> None:
    files = ["reuse/x.py", "recompute/x.py", "backend/a/native.cpp", "frontend/a/b/c/x.py"]
    files += ["__init__.py"] if installed else []
    for name in [*files, "backend/a/__pycache__/native.pyc"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("old")
    seen = [process.code_digest(tmp_path)]
    for name in files:
        (tmp_path / name).write_text("new")
        seen.append(process.code_digest(tmp_path))
    (tmp_path / "backend/a/native.cpp").rename(tmp_path / "backend/native.cpp")
    seen.append(process.code_digest(tmp_path))
    assert len(set(seen)) == len(files) + 2
    (tmp_path / "backend/a/__pycache__/native.pyc").write_text("new")
    assert process.code_digest(tmp_path) == seen[-1]
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/x.py").write_text("")
    assert (process.code_digest(tmp_path) == seen[-1]) is not installed


def frame_of(path: pathlib.Path) -> SimpleNamespace:
    """Returns what says of a frame that it runs a function of this file."""
    return SimpleNamespace(
        f_code=SimpleNamespace(co_filename=str(path)), f_globals={"__name__": "x"}, f_back=None
    )


def test_no_frame_of_ours_is_a_frame_of_the_user() -> None:
    ours = [p for p in map(pathlib.Path, process.own_files()) if p.suffix == ".py"]
    assert len(ours) > 100
    for path in ours:
        frame = frame_of(path)
        assert frames.is_library_frame(frame), path
        assert frames.user_frame(frame) is None, path


def test_what_stands_beside_our_folders_is_the_users() -> None:
    root = process.package_root()
    beside = [
        path for name in ("tests", "examples", "benchmarks") for path in root.glob(f"{name}/*.py")
    ]
    beside += [root / "model.py", root / "frontend_of_mine" / "model.py", root / "reuse.py"]
    for path in beside:
        frame = frame_of(path)
        assert frames.is_user_frame(frame), path
        assert frames.user_frame(frame) is frame, path
    assert frames.user_frame(sys._getframe()) is sys._getframe()
