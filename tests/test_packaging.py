"""What is installed: each folder, nothing else, from a wheel and a checkout; for which versions.

And what counts as the code of lazyinline.
"""

import importlib.metadata
import json
import os
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from link_tree import COMMAND, PUBLIC_FACE, ROOT, all_packages, package_folders
from pytest import MonkeyPatch
from run_versions import PAIRS, Pair
from test_architecture import imported_names, package_of, sources, tree_of

import lazyinline
from lazyinline import LazyInlineError
from lazyinline.frontend.tracing import frames
from lazyinline.reuse import process
from lazyinline.reuse.process import check_supported

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# What is beside the source in a checkout and no part of it.
NOT_SOURCE = shutil.ignore_patterns(
    *(".git", ".venv", "build", "dist", "shared"),
    *("*.egg-info", "__pycache__", ".*_cache", ".hypothesis"),
)


def run_python(*args: object, cwd: Path, **env: str) -> str:
    """Runs this interpreter outside the checkout; returns what it prints."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | env
    command = [sys.executable, *map(str, args)]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def release(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version or a requirement: `torch>=2.11` is (2, 11)."""
    match = re.search(r"\d+(\.\d+)*", version)
    assert match, version
    return tuple(map(int, match.group().split(".")))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (needed,) = (r for r in PYPROJECT["build-system"]["requires"] if r.startswith("setuptools>="))
    found = importlib.metadata.version("setuptools")
    if release(found) < release(needed):
        pytest.skip(f"a wheel is built with {needed}; here is {found} (`make test` installs it)")
    # From a copy: setuptools works inside the source tree and takes up what an older build left.
    source = tmp_path_factory.mktemp("source") / "checkout"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCE, symlinks=True)
    out = tmp_path_factory.mktemp("wheel")
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    run_python("-c", code, cwd=source)
    (built,) = out.glob("*.whl")
    return built


def test_every_package_folder_is_listed() -> None:
    setup = PYPROJECT["tool"]["setuptools"]
    folders = {face.name: face.relative_to(ROOT).as_posix() for face in (PUBLIC_FACE, COMMAND)}
    folders |= {f"lazyinline.{folder.name}": folder.name for folder in package_folders()}
    assert setup["package-dir"] == folders
    missing = sorted(all_packages().keys() - set(setup["packages"]))
    assert not missing, f"add to `packages` in pyproject.toml: {missing}"
    gone = sorted(set(setup["packages"]) - all_packages().keys())
    assert not gone, f"take out of `packages` in pyproject.toml: {gone}"


def test_every_folder_with_code_is_a_package() -> None:
    inside = {path.parent for folder in package_folders() for path in folder.rglob("*.py")}
    assert inside == set(all_packages().values()), "each needs an __init__.py"


def test_wheel_has_every_file_and_no_other(wheel: Path) -> None:
    expected = {f"lazyinline/{path.name}" for path in PUBLIC_FACE.iterdir() if path.is_file()}
    for folder in package_folders():
        inside = (path for path in folder.rglob("*") if path.is_file())
        expected |= {
            f"lazyinline/{path.relative_to(ROOT).as_posix()}"
            for path in inside
            if not {PUBLIC_FACE, COMMAND} & {*path.parents} and "__pycache__" not in path.parts
        }
    expected |= {f"{COMMAND.name}/{path.name}" for path in COMMAND.glob("*.py")}
    names = zipfile.ZipFile(wheel).namelist()
    info = f"lazyinline-{lazyinline.__version__}.dist-info"
    assert {name for name in names if not name.startswith(f"{info}/")} == expected
    told = {name.removeprefix(f"{info}/") for name in names if name.startswith(f"{info}/")}
    assert told == {
        *("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    }
    assert wheel.name == f"lazyinline-{lazyinline.__version__}-py3-none-any.whl"


# Prints, for each module of those named that `import lazyinline` loads and `import torch` does not,
# the lines of ours that led to it and the first line of others.
WATCH_IMPORTS = """
import json, sys, traceback
import torch
before, stacks = set(sys.modules), {}
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in sys.argv[1:] and name not in stacks:
            frames = [f for f in traceback.extract_stack() if "importlib" not in f.filename][1:-1]
            ours = [f for f in frames if "site-packages" not in f.filename]
            shown = frames[: len(ours) + 1]
            stacks[name] = [f"{f.filename}:{f.lineno} {f.line}" for f in shown]
sys.meta_path.insert(0, Watch())
import lazyinline
loaded = set(sys.modules) - before
print(json.dumps({name: stack for name, stack in stacks.items() if name in loaded}))
"""
HEAVY = ["torch._dynamo", "torch._inductor", "onnx", "onnxscript", "networkx", "scipy"]
HEAVY += ["transformers", "triton"]


@pytest.fixture(scope="module")
def imported_alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Where a wheel was unpacked, and what one process says that imports it and finds the rest."""
    target = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(target)  # all that an installer does with a plain one
    code = WATCH_IMPORTS + (
        "import importlib.util, pkgutil\n"
        "from lazyinline.reuse.process import own_places\n"
        "import lazyinline_command.main\n"
        "for found in pkgutil.walk_packages(lazyinline.__path__, 'lazyinline.'):\n"
        "    file = importlib.util.find_spec(found.name).origin\n"
        "    print(found.name, file, file.startswith(own_places()))\n"
    )
    printed = run_python("-c", code, *HEAVY, cwd=target.parent, PYTHONPATH=str(target))
    return target, printed.splitlines()


def test_wheel_imports_by_itself(imported_alone: tuple[Path, list[str]]) -> None:
    target, (_, *printed) = imported_alone
    imported = {line.split()[0]: line.split()[1:] for line in printed}
    packages = {name: path for name, path in all_packages().items() if path != COMMAND}
    expected = {*packages, "lazyinline.__main__"} - {"lazyinline"}
    for package, folder in packages.items():
        modules = pkgutil.iter_modules([str(folder)])
        expected |= {f"{package}.{m.name}" for m in modules if not m.ispkg}
    assert set(imported) == expected
    elsewhere = {name for name, (file, _) in imported.items() if not file.startswith(str(target))}
    assert not elsewhere, f"not imported from the wheel: {elsewhere}"
    foreign = {name for name, (_, own) in imported.items() if own != "True"}
    assert not foreign, f"taken for code of the user: {foreign}"


def test_only_declared_libraries_are_imported() -> None:
    project = PYPROJECT["project"]
    extras = [r for name in ("completion", "onnx") for r in project["optional-dependencies"][name]]
    declared = {
        re.match(r"[\w.-]+", requirement).group().replace("-", "_")  # type: ignore[union-attr]
        for requirement in project["dependencies"] + extras
    }
    known = declared | sys.stdlib_module_names | {"lazyinline", "lazyinline_command", "__future__"}
    found = {
        f"{path.relative_to(ROOT)}:{line}": name
        for path in sources()
        for line, name in imported_names(tree_of(path), package_of(path))
        if name.partition(".")[0] not in known
    }
    assert not found, f"imported, but not among the dependencies: {found}"


def test_command_is_installed_with_its_module() -> None:
    target = PYPROJECT["project"]["scripts"]["lazyinline"]
    entry = importlib.metadata.EntryPoint("lazyinline", target, "console_scripts")
    assert callable(entry.load())
    # None in a bare checkout; an old one stays until the next installation.
    installed = importlib.metadata.entry_points(group="console_scripts", name="lazyinline")
    assert {script.value for script in installed} <= {target}, "install again: pip install -e ."


def test_torch_is_in_the_declared_range() -> None:
    (torch,) = (r for r in PYPROJECT["project"]["dependencies"] if r.startswith("torch"))
    match = re.fullmatch(r"torch(>=[\d.]+),(<[\d.]+)", torch)
    assert match, f"the Makefile cannot read the range from {torch!r}"
    low, high = map(release, match.groups())
    assert low <= release(importlib.metadata.version("torch"))[:2] < high
    newest = (*process.NEWEST_TORCH[:1], process.NEWEST_TORCH[1] + 1)
    assert (low, high) == (process.OLDEST_TORCH, newest), "what the import asks for"


def test_the_newest_python_is_the_one_that_is_declared() -> None:
    named = [c.rpartition(" ")[2] for c in PYPROJECT["project"]["classifiers"] if ":: 3." in c]
    assert max(map(release, named)) == process.NEWEST_PYTHON


# Changing this list changes what users may rely on: say so in CHANGELOG.md.
NAMES = """
    Advice Budget CacheError CaptureError CompileReport CompiledModule DecompositionError
    ExportError ExportReport FileError Fit LazyInlineError MeasureReport NoProgramError
    ParallelStep Pipeline PipelineError PlanError
    Primitive Program ReuseError StepStats TrainingStep VerifyError advise capture compile
    compile_step decomposition export_onnx fit for_checkpoint from_exported func
    last_report lazy_inline load measure
    measure_links parallelize pipeline place primitives recompute restore save shard
    stage
"""
PUBLIC = set(NAMES.split())


def test_public_names_are_defined_and_documented() -> None:
    assert set(lazyinline.__all__) == PUBLIC
    assert lazyinline.__all__ == sorted(lazyinline.__all__), "keep __all__ sorted"
    missing = [name for name in lazyinline.__all__ if not hasattr(lazyinline, name)]
    assert not missing, f"in __all__ but not defined: {missing}"
    texts = {name: (getattr(lazyinline, name).__doc__ or "").strip() for name in PUBLIC}
    assert not [name for name, text in texts.items() if not text], "has no docstring"
    assert not [name for name, text in texts.items() if text.startswith(f"{name}(")]


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+([a-z]+\d+)?", lazyinline.__version__)


def test_import_is_light(imported_alone: tuple[Path, list[str]]) -> None:
    seen = json.loads(imported_alone[1][0])
    report = [f"{name}:\n  " + "\n  ".join(stack) for name, stack in sorted(seen.items())]
    if report:
        pytest.fail("importing lazyinline also loads\n" + "\n".join(report), pytrace=False)


@pytest.mark.smoke
def test_this_interpreter_and_this_torch_are_supported() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_supported()


@pytest.mark.smoke
@pytest.mark.parametrize("version", ["2.10.1", "2.9.0+cpu", "1.13.1"])
def test_a_torch_that_is_too_old_is_refused(version: str, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(LazyInlineError) as refused:
        check_supported()
    assert "needs PyTorch 2.11 to 2.15" in str(refused.value)
    assert f"this is {version}" in str(refused.value)
    assert "pip install 'torch>=2.11,<2.16'" in str(refused.value)


@pytest.mark.smoke
@pytest.mark.parametrize("version", ["2.16.0", "2.16.0a0+git1234567", "3.0.0.dev20270101"])
def test_a_torch_that_is_too_new_gets_a_warning(version: str, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.warns(UserWarning, match="tested with PyTorch 2.11 to 2.15, and this is"):
        check_supported()


@pytest.mark.smoke
def test_a_python_that_is_too_new_gets_a_warning(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(process, "NEWEST_PYTHON", (3, 9))
    with pytest.warns(UserWarning, match=r"up to Python 3\.9, this is 3\."):
        check_supported()


@pytest.mark.smoke
def test_a_free_threaded_build_is_refused_also_with_its_lock_on(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: int(name == "Py_GIL_DISABLED"))
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    with pytest.raises(LazyInlineError, match="does not run on free-threaded Python"):
        check_supported()


@pytest.mark.smoke
def test_free_threaded_python_is_refused_by_the_import(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(LazyInlineError, match="does not run on free-threaded Python"):
        runpy.run_path(str(PUBLIC_FACE / "__init__.py"))


@pytest.mark.smoke
def test_the_pairs_that_are_tried_reach_from_the_oldest_to_the_newest() -> None:
    pairs = [Pair.of(text) for text in PAIRS]
    assert all(str(pair) == f"PyTorch {pair.torch}, Python {pair.python}" for pair in pairs)
    torches = {tuple(map(int, pair.torch.split("."))) for pair in pairs}
    pythons = {tuple(map(int, pair.python.split("."))) for pair in pairs}
    assert (min(torches), max(torches)) == (process.OLDEST_TORCH, process.NEWEST_TORCH)
    assert (min(pythons), max(pythons)) == ((3, 10), process.NEWEST_PYTHON)


# ---- what counts as the code of lazyinline: for the key of the cache, and for frames


def test_every_folder_of_the_package_is_known() -> None:
    assert sorted(process.FOLDERS) == [folder.name for folder in package_folders()]
    assert process.package_root().resolve() == ROOT


def test_the_digest_reads_every_file_of_the_package() -> None:
    found = {Path(path).resolve() for path in process.own_files()}
    expected = {path for folder in package_folders() for path in folder.rglob("*")}
    assert PUBLIC_FACE / "__init__.py" in found
    assert found == {p for p in expected if p.is_file() and "__pycache__" not in p.parts}


@pytest.mark.parametrize("installed", [False, True])
def test_the_digest_changes_with_any_file_at_any_depth(installed: bool, tmp_path: Path) -> None:
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


def frame_of(path: Path) -> SimpleNamespace:
    """Returns what says of a frame that it runs a function of this file."""
    return SimpleNamespace(
        f_code=SimpleNamespace(co_filename=str(path)), f_globals={"__name__": "x"}, f_back=None
    )


def test_no_frame_of_ours_is_a_frame_of_the_user() -> None:
    ours = [p for p in map(Path, process.own_files()) if p.suffix == ".py"]
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
