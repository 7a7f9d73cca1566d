"""Versions that this was not made for are named when lazyinline is imported."""

import subprocess
import sys
import sysconfig
import warnings

import pytest
import torch
from run_versions import PAIRS, MissingError, Pair, find_python

from lazyinline import LazyInlineError
from lazyinline.reuse import process
from lazyinline.reuse.process import check_supported

pytestmark = pytest.mark.smoke


def test_this_interpreter_and_this_torch_are_supported() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_supported()


@pytest.mark.parametrize("version", ["2.10.1", "2.9.0+cpu", "1.13.1"])
def test_a_torch_that_is_too_old_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(LazyInlineError) as refused:
        check_supported()
    assert "needs PyTorch 2.11 to 2.15" in str(refused.value)
    assert f"this is {version}" in str(refused.value)
    assert "pip install 'torch>=2.11,<2.16'" in str(refused.value)


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0a0+git1234567", "3.0.0.dev20270101"])
def test_a_torch_that_is_too_new_gets_a_warning(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.warns(UserWarning, match="tested with PyTorch 2.11 to 2.15, and this is"):
        check_supported()


def test_a_python_that_is_too_new_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "NEWEST_PYTHON", (3, 9))
    with pytest.warns(UserWarning, match=r"up to Python 3\.9, this is 3\."):
        check_supported()


def test_a_free_threaded_build_is_refused_also_with_its_lock_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: int(name == "Py_GIL_DISABLED"))
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    with pytest.raises(LazyInlineError, match="does not run on free-threaded Python"):
        check_supported()


def test_free_threaded_python_is_refused_by_the_import() -> None:
    """With a stand-in for such an interpreter, in a process that has imported nothing."""
    lines = "import sys; sys._is_gil_enabled = lambda: False; import lazyinline"
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
    assert done.returncode == 1
    assert "LazyInlineError: lazyinline does not run on free-threaded Python" in done.stderr


def test_the_pairs_that_are_tried_reach_from_the_oldest_to_the_newest() -> None:
    pairs = [Pair.of(text) for text in PAIRS]
    assert all(str(pair) == f"PyTorch {pair.torch}, Python {pair.python}" for pair in pairs)
    torches = {tuple(map(int, pair.torch.split("."))) for pair in pairs}
    pythons = {tuple(map(int, pair.python.split("."))) for pair in pairs}
    assert (min(torches), max(torches)) == (process.OLDEST_TORCH, process.NEWEST_TORCH)
    assert (min(pythons), max(pythons)) == ((3, 10), process.NEWEST_PYTHON)


def test_an_interpreter_is_found_where_it_is_said_to_be_and_a_missing_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONS", sys.executable)
    assert find_python(".".join(map(str, sys.version_info[:2]))) == sys.executable
    with pytest.raises(MissingError, match=r"there is no python3\.99 in \$PYTHONS, on the PATH"):
        find_python("3.99")
