"""Set-up that all tests share: the environment of torch, golden texts, markers."""

import difflib
import gc
import importlib.util
import logging
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import hypothesis
import link_tree  # tests/link_tree.py: pytest puts tests/ on sys.path
import outcomes
import pytest

if TYPE_CHECKING:
    from lazyinline.frontend.report import CompileReport

ROOT = link_tree.ROOT
GOLDEN = ROOT / "tests" / "golden"

# Read when torch is imported, so set before; what the caller has set wins. Waiting threads must
# sleep and not spin: the tests share their cores with others.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / "build" / "inductor_cache"))
os.environ["LAZYINLINE_CACHE"] = "1"  # each test has a directory of its own, below
os.environ.setdefault("LAZYINLINE_VERIFY", "1")  # every program, after each pass
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2" if WORKERS == 1 else "1")
os.environ.setdefault("OMP_NUM_THREADS", "2" if WORKERS == 1 else "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The package and the tests are compiled once, not again in each process that a test starts.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# In a bare checkout (no `pip install`) the package is imported through links. A real directory on
# the path, in the environment too, serves the processes that tests start as well.
if importlib.util.find_spec("lazyinline") is None:
    tree = str(link_tree.make_link_tree())
    sys.path.insert(0, tree)
    paths = [tree, os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

# Tests ask the benchmarks for decoders, large models and what counts memory.
BENCHMARKS = str(ROOT / "benchmarks")
sys.path.append(BENCHMARKS)
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [os.environ.get("PYTHONPATH", ""), BENCHMARKS])
)

# pytest adds a handler to each logger that does not propagate. To this one, which takes all at any
# level, PyTorch would then write out each graph and each step of a compile.
mock.patch.object(logging.getLogger("torch.__trace"), "addHandler").start()

MANY_OBJECTS = 300_000  # a capture of a few layers makes a third
gc.set_threshold(0)  # modules live on, so that imports make next to no garbage

# How long an example takes says nothing here: the first one compiles.
hypothesis.settings.register_profile("lazyinline", deadline=None, print_blob=True)
hypothesis.settings.load_profile("lazyinline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden texts in tests/golden instead of comparing with them",
    )
    parser.addoption(
        "--sweep",
        action="store_true",
        help="run the tests marked `sweep` too: many more models, backends and layouts",
    )

    parser.addoption(
        "--outcomes",
        type=pathlib.Path,
        help="write what becomes of each model that a test compiles; see tests/outcomes.py",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--outcomes"):
        config.pluginmanager.register(outcomes.Recorder(config.getoption("--outcomes")))


def pytest_report_header(config: pytest.Config) -> str:
    spec = importlib.util.find_spec("lazyinline")
    assert spec is not None and spec.origin is not None
    return f"lazyinline under test: {pathlib.Path(spec.origin).resolve().parent}"


def is_swept(item: pytest.Item) -> bool:
    """Says whether a test is left to `--sweep`; what the command line names by itself is not.

    `mark.sweep` leaves all of a function, `mark.sweep(keep="eager")` all but the cases that have
    this in their brackets. keep may be a list.
    """
    marker = item.get_closest_marker("sweep")
    if marker is None or any("::" in name for name in item.config.args):
        return False
    keep = marker.kwargs.get("keep", ())
    case = "".join(item.name.partition("[")[1:])  # "[eager-2]"
    return not any(text in case for text in ([keep] if isinstance(keep, str) else keep))


@pytest.hookimpl(tryfirst=True)  # before -k takes cases out: each `keep` must keep one
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_without_gpu(items)
    if config.getoption("--sweep"):
        return
    swept = [item for item in items if is_swept(item)]
    items[:] = [item for item in items if not is_swept(item)]
    config.hook.pytest_deselected(items=swept)
    kept = {item.nodeid.split("[")[0] for item in items}
    for item in swept:
        function = item.nodeid.split("[")[0]
        if item.get_closest_marker("sweep").kwargs and function not in kept:
            raise pytest.UsageError(f"{function}: its mark `sweep` keeps no case")


def pytest_collection_finish() -> None:
    """Collects garbage between tests only: they make much that lives on, and Python walks it."""
    gc.collect()
    gc.freeze()
    # Each capture asks for it, and Python counts by walking all of them.
    num_frozen = gc.get_freeze_count()
    mock.patch.object(gc, "get_freeze_count", lambda: num_frozen).start()


@pytest.hookimpl(trylast=True)  # after fixtures have let go of what they held
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collects what is much by now; what lives on after a file is not walked again."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    elif gc.get_count()[0] > MANY_OBJECTS:
        gc.collect(0)  # what the tests before left is not walked again, either


def selected(request: pytest.FixtureRequest, argument: str) -> list[str]:
    """Returns the values of an argument in the tests of a module that will run.

    For a fixture that does the work of all of them at once, to leave out what nobody looks at.
    """
    cases = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and hasattr(item, "callspec")
    ]
    return list(dict.fromkeys(case[argument] for case in cases if argument in case))


def skip_without_gpu(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def cache_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Each test, and the processes it starts, begins with an empty cache."""
    directory = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LAZYINLINE_CACHE", "1")  # whatever a test before it has imported
    monkeypatch.setenv("LAZYINLINE_CACHE_DIR", str(directory))
    yield
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(params=["eager", "inductor"])
def backend(request: pytest.FixtureRequest) -> str:
    """Whose kernels run."""
    return str(request.param)


@pytest.fixture
def eager_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lazyinline.func compiles by itself runs eager's kernels: none are generated."""
    from lazyinline.frontend.func import transforms

    monkeypatch.setattr(transforms, "compile", partial(transforms.compile, backend="eager"))


@pytest.fixture(scope="module")
def two_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each of two processes, started once, says to every ``task``, a function of the module.

    It is given its rank, and a folder where ``planned`` has the values of that argument.
    """
    from ranks import run_ranks

    folder = tmp_path_factory.mktemp("ranks")
    (folder / "planned").write_text(" ".join(selected(request, "planned")))
    module, names = request.module.__name__, selected(request, "task")
    return run_ranks(folder, "".join(f"{module}.{name}," for name in names))


@pytest.fixture
def compiles() -> Iterator[list["CompileReport"]]:
    """The report of each compile that a test makes, in order."""
    with outcomes.compiles_noted() as reports:
        yield reports


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with tests/golden/<name>.txt: ``golden("two_blocks", str(program))``."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(
                f"{path.relative_to(ROOT)} does not exist; run with --update-golden and read it",
                pytrace=False,
            )
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            diff = difflib.unified_diff(
                expected.splitlines(),
                text.splitlines(),
                str(path.relative_to(ROOT)),
                "this run",
                lineterm="",
            )
            pytest.fail(
                "the text differs from the golden one (if it should, run with --update-golden):\n"
                + "\n".join(diff),
                pytrace=False,
            )

    return check
