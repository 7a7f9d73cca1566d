"""Forks, many writers, folders of others, and objects that are damaged: nothing ends or is run."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from apart import run_apart
from comparing import assert_close
from models import Made
from torch import Tensor, nn

import lazyinline
from lazyinline import CacheError
from lazyinline.backend.files import torch_store
from lazyinline.backend.files.torch_store import (
    DamagedObjectError,
    DiskCache,
    is_whole_object,
    own_folder,
    sound_object,
)
from lazyinline.backend.kernels import torch_inductor
from lazyinline.backend.launches import torch_native
from lazyinline.reuse.errors import CacheWarning
from lazyinline.reuse.process import ProcessLock

# ---- forks -----------------------------------------------------------------------------------


def slow(self: Any, x: Tensor) -> Tensor:
    """Takes a while to capture."""
    started.set()
    time.sleep(self.wait_s)
    return self.linear(x).tanh()


started = threading.Event()


def compile_and_check(wait_s: float) -> None:
    model, x = Made(slow, linear=nn.Linear(4, 4), wait_s=wait_s), torch.rand(2, 4)
    with torch.no_grad():
        assert_close(lazyinline.compile(model, backend="eager")(x), model(x))


def in_child(function: Callable[[], None]) -> None:
    """Forks; the child runs a function."""
    child = os.fork()
    if not child:
        signal.alarm(200)  # where it hangs
        torch.set_num_threads(1)  # the parent's other threads are not here
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status}"


def forks() -> None:
    compiling = threading.Thread(target=compile_and_check, args=(0.5,), daemon=True)
    compiling.start()
    started.wait()
    in_child(lambda: compile_and_check(0))
    compiling.join()

    lock, taken, done = ProcessLock(threading.Lock), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            done.wait()

    holding = threading.Thread(target=hold, daemon=True)
    holding.start()
    taken.wait()
    assert not lock.acquire(blocking=False)

    def take() -> None:
        with lock:
            assert not lock.acquire(blocking=False)

    in_child(take)
    done.set()
    holding.join()


@pytest.mark.sweep
def test_a_child_forked_while_another_thread_compiles_can_compile() -> None:
    run_apart(forks)


# ---- whose a folder is -----------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inductor's folder, which others know of."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "known"))
    monkeypatch.setenv("LAZYINLINE_CACHE_DIR", str(tmp_path / "cache"))
    torch_store._private_folder.cache_clear()
    (tmp_path / "known").mkdir(mode=0o700)
    return tmp_path / "known"


def open_to_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o777)


def open_above(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.parent.chmod(0o777)


def of_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = torch_store.not_private
    theirs = folder.stat().st_ino

    def not_private(status: os.stat_result) -> str:
        return "it belongs to user 12345" if status.st_ino == theirs else kept(status)

    monkeypatch.setattr(torch_store, "not_private", not_private)


@pytest.mark.parametrize("spoil", [open_to_all, of_another])
def test_a_folder_that_others_can_write_to_is_left(
    spoil: Callable[[Path, pytest.MonkeyPatch], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert own_folder() == folder
    spoil(folder, monkeypatch)
    with pytest.warns(CacheWarning, match=r"cannot be trusted.*TORCHINDUCTOR_CACHE_DIR"):
        private = own_folder()
    assert private == folder.parent / "cache" / "inductor"
    assert private.stat().st_mode & 0o077 == 0
    assert own_folder() == private  # and no further warning
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(private)


def test_a_folder_below_one_that_everybody_may_write_to_is_no_place_for_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_above(folder, monkeypatch)
    with pytest.warns(CacheWarning, match="everybody may rename what is in"):
        assert folder.parent not in own_folder().parents
    with pytest.raises(CacheError, match="everybody may rename"):
        DiskCache(folder.parent / "cache")
    folder.parent.chmod(0o1777)  # as /tmp is
    assert not torch_store.why_not_trusted(folder)


def test_inductors_own_default_is_made_for_its_user_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new" / "folder"))
    assert own_folder().stat().st_mode & 0o077 == 0


# ---- damaged objects -------------------------------------------------------------------------


def test_an_object_that_is_cut_off_or_open_to_others_is_removed_and_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch_native.native_file()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert whole is not None and is_whole_object(whole)
    size = whole.stat().st_size
    for kept_bytes in (0, 3, 40, 64, 4096, size // 2, size - 1):
        cut = tmp_path / "cut.so"
        cut.write_bytes(whole.read_bytes()[:kept_bytes])
        with pytest.raises(DamagedObjectError):
            torch_inductor._loads_here(None, str(cut))
        assert not cut.exists()
    opened = tmp_path / "opened.so"
    shutil.copy(whole, opened)
    assert sound_object(opened) == opened
    assert torch_inductor._loads_here(None, str(opened))
    opened.chmod(0o666)
    with pytest.raises(DamagedObjectError):
        sound_object(opened)


def test_a_damaged_probe_is_built_again() -> None:
    asked = []

    def check_build(isa: object, code: str) -> bool:
        asked.append(code)
        if len(asked) == 1:
            raise DamagedObjectError("cut off")
        return True

    assert torch_inductor._built_as_kernels(check_build)(None, "code")
    assert asked == ["code", "code"]


# ---- many processes ----------------------------------------------------------------------------

WRITER = """
import os, sys, pathlib
from lazyinline.backend.files.torch_store import DiskCache
found = DiskCache(pathlib.Path(sys.argv[1]))
if sys.argv[2] == "die":
    os.replace = lambda *paths: os.kill(os.getpid(), 9)
for i in range(90):
    found.write(f"key{i % 3}", [i % 3] * 5000)
    value = found.read(f"key{(i + 1) % 3}")
    assert value is None or value == [(i + 1) % 3] * 5000, "torn"
    if i % 40 == 20:
        found.clear()
    found.trim()
"""


def writer(directory: Path, how: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", WRITER, str(directory), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.sweep
def test_processes_may_write_read_and_clear_at_once(tmp_path: Path) -> None:
    for process in [writer(tmp_path, "live") for _ in range(2)]:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


def test_a_clear_amid_a_write_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, replace = DiskCache(tmp_path), os.replace

    def cleared_before(*paths: Any) -> None:
        DiskCache(tmp_path).clear()
        replace(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", cleared_before)
        cache.write("key", 1)
    assert cache.read("key") is None
    cache.write("key", 2)
    assert cache.read("key") == 2


@pytest.mark.sweep
def test_a_killed_writer_leaves_no_entry_and_its_leftover_goes(tmp_path: Path) -> None:
    process = writer(tmp_path, "die")
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    (leftover,) = (tmp_path / "entries").iterdir()
    found = DiskCache(tmp_path)
    assert found.info().num_entries == 0
    assert found.read("key0") is None
    found.trim()
    assert leftover.exists()  # its writer may still be at work
    os.utime(leftover, (0, 0))
    found.trim()
    assert not leftover.exists()
