"""The on-disk cache: what a warm start skips, and every way in which its files can be wrong.

Whatever is done to the directory, a compile gives the numbers it gave before, says with a warning
what it did not trust, and leaves the cache healed.
"""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import damage
import models
import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

import lazyinline
from lazyinline.backend import cache as compile_cache
from lazyinline.backend.cache import encode_value, leaf_content
from lazyinline.backend.files.torch_store import DiskCache, default_directory, open_cache
from lazyinline.backend.launches import torch_facts
from lazyinline.frontend.report import CompileReport
from lazyinline.reuse.errors import CacheError, CacheWarning
from lazyinline.reuse.ir.program import Leaf, walk_closures
from lazyinline_command.main import main

Fault = Callable[[Path], Any]


@lazyinline.lazy_inline
class Block(nn.Module):
    def __init__(self, width: int = 8, scale: float = 0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * torch.tanh(self.weight * x).sin()


def stack(depth: int = 2, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(**options) for _ in range(depth)]
    return models.Around(lambda layers, x: layers[0](x).square().mean(), models.Stack(*blocks))


def inputs(rows: int = 4, width: int = 8) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * width).reshape(rows, width)


def train(model: nn.Module) -> list[torch.Tensor]:
    """Loss and all gradients of one step."""
    loss = model(inputs())
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def compiled_anew(model: nn.Module | None = None) -> tuple[list[torch.Tensor], CompileReport]:
    """Compiles as a new process would, as far as the cache is concerned, and trains one step."""
    compiled = lazyinline.compile(model or stack())
    return train(compiled), compiled.last_report


def inferred_anew() -> tuple[list[torch.Tensor], CompileReport]:
    """The same, for inference."""
    compiled = lazyinline.compile(stack())
    with torch.no_grad():
        return [compiled(inputs())], compiled.last_report


def assert_right(numbers: list[torch.Tensor], model: nn.Module | None = None) -> None:
    expected = train(model or stack())
    for found, wanted in zip(numbers, expected[: len(numbers)], strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory that one compile has filled."""
    directory = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAZYINLINE_CACHE_DIR", str(directory))
        _, report = compiled_anew()
        assert report.cache.num_made >= 5, report
        assert not report.cache.not_kept
        inferred_anew()
    return directory


@pytest.fixture
def directory(filled: Path) -> Path:
    """A copy of it, in use."""
    own = default_directory()
    shutil.copytree(filled, own, dirs_exist_ok=True)
    return own


def entries(directory: Path) -> list[Path]:
    return sorted((directory / "entries").iterdir())


def objects(directory: Path) -> list[Path]:
    return sorted((directory / "objects").iterdir())


@pytest.mark.usefixtures("directory")
def test_a_warm_start_traces_lowers_and_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a warm start does not come here")

    for where in (
        "lazyinline.autodiff.derivative.JointTrace",
        "lazyinline.backend.kernels.lower.trace_forward",
        "lazyinline.backend.kernels.torch_inductor._compile",
        "lazyinline.backend.link.placement.plan",
        "lazyinline.backend.launches.torch_native.native_library",
    ):
        monkeypatch.setattr(where, unexpected)
    for anew in (compiled_anew, inferred_anew):
        numbers, report = anew()
        assert report.cache.num_made == 0
        assert report.cache.num_loaded >= 5
        assert f"{report.cache.num_loaded} of {report.cache.num_loaded} results from" in str(report)
        assert_right(numbers)


@pytest.mark.smoke
def test_a_new_process_starts_warm(directory: Path) -> None:
    code = (
        "import sys, warnings; warnings.simplefilter('error'); sys.path.insert(0, sys.argv[1])\n"
        "import test_cache as t\n"
        "numbers, report = t.compiled_anew(); t.assert_right(numbers)\n"
        "print(report.cache.num_loaded, report.cache.num_made)\n"
        "print('torch._inductor.compile_fx' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded, made, uses_inductor = done.stdout.split()[-3:]
    assert int(loaded) >= 5 and (made, uses_inductor) == ("0", "False")


@pytest.mark.usefixtures("directory")
def test_a_rebuilt_derivative_can_be_lowered_again(directory: Path) -> None:
    for path in entries(directory):
        if b'"KernelList"' in path.read_bytes():
            path.unlink()
    numbers, report = compiled_anew()
    assert report.cache.num_loaded > 0 and report.cache.num_made > 0
    assert_right(numbers)


@pytest.mark.usefixtures("directory")
def test_a_training_step_uses_the_same_blocks() -> None:
    model = stack()
    step = lazyinline.compile_step(model, micro_batches=2)
    loss = step(inputs(8))
    assert step.last_report.cache.num_loaded >= 3
    torch.testing.assert_close(
        loss, torch.stack([model(part) for part in inputs(8).chunk(2)]).mean().detach()
    )


def content(model: nn.Module, x: torch.Tensor) -> str:
    """What the key of a model's block is made of."""
    program = lazyinline.capture(model, (x,), train=True)
    (block,) = (c for c in walk_closures(program) if isinstance(c, Leaf) and "Block" in c.name)
    return json.dumps(leaf_content(block))


def test_another_content_is_another_key() -> None:
    others = {
        "a constant": (stack(scale=0.25), inputs()),
        "a parameter's shape": (stack(width=16), inputs(4, 16)),
        "a shape": (stack(), inputs(6)),
        "a dtype": (stack().double(), inputs().double()),
    }
    usual = content(stack(), inputs())
    for what, other in others.items():
        assert content(*other) != usual, what
    assert content(stack(3), inputs()) == usual


def test_int_and_float_and_bool_constants_are_told_apart() -> None:
    written = [json.dumps(encode_value((value,))) for value in (1, 1.0, True, -0.0, 0.0, "1")]
    assert len(set(written)) == len(written)


@pytest.mark.usefixtures("directory")
def test_names_and_source_lines_are_not_in_the_key() -> None:
    @lazyinline.lazy_inline
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.randn(8))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            bent = torch.tanh(self.gain * hidden)
            return hidden + 0.5 * bent.sin()

    def whole(layers: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        hidden = layers[1](layers[0](hidden))
        return hidden.square().mean()

    _, report = compiled_anew(models.Around(whole, Renamed(), Renamed()))
    assert report.cache.num_made == 0
    model = stack(5)  # nor is the depth
    numbers, report = compiled_anew(model)
    assert report.cache.num_made <= 2  # the memory plan, and the program's own ends
    assert_right(numbers, model)


FACTS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "torch": lambda patch: patch.setattr(torch, "__version__", "2.99"),
    "threads": lambda patch: patch.setattr(torch, "get_num_threads", lambda: 77),
    "package": lambda patch: patch.setattr(compile_cache, "package_digest", lambda: "other"),
    "cpu": lambda patch: patch.setattr(torch_facts, "cpu_kind", lambda: "other"),
    "vectors": lambda patch: patch.setenv("ATEN_CPU_CAPABILITY", "any other"),
    "precision": lambda patch: patch.setattr(
        torch_facts, "matmul_precision", lambda: ("none", "bf16")
    ),
}


@pytest.mark.parametrize("fact", FACTS)
def test_every_fact_is_in_the_key(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = facts()
    assert first == facts()
    FACTS[fact](monkeypatch)
    assert facts() != first


def facts() -> str | None:
    made = compile_cache.CompileCache.of_user("inductor")
    made.begin()
    return made._facts


def test_the_settings_of_inductor_are_in_the_key() -> None:
    first = facts()
    with inductor_config.patch({"cpp.simdlen": 1}):
        assert facts() != first
    with inductor_config.patch({"compile_threads": 7}):
        assert facts() == first


def test_a_pass_of_the_users_own_turns_the_cache_off() -> None:
    with inductor_config.patch(post_grad_custom_pre_pass=lambda graph: None):
        made = compile_cache.CompileCache.of_user("inductor")
        made.begin()
        assert made._facts is None
    assert "a setting of Inductor holds code" in str(made.finish())


def test_an_operator_of_the_users_own_is_not_kept() -> None:
    @torch.library.custom_op("lazyinline_cache_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    doubling = models.Around(lambda _, x: twice(x).tanh())
    program = lazyinline.capture(doubling, (inputs(),))
    made = compile_cache.CompileCache.of_user("inductor")
    made.begin()
    for leaf in program.closures:
        assert made.kernels(leaf) is None
    (reason,) = made.finish().not_kept
    assert "the operator lazyinline_cache_test.twice" in reason


def each_entry(change: Callable[[Path], Any]) -> Fault:
    return lambda directory: [change(path) for path in entries(directory)]


@pytest.mark.parametrize("accident", [*damage.WAYS, "swapped"])
def test_what_is_read_is_what_was_written_or_nothing(accident: str, tmp_path: Path) -> None:
    source = tmp_path / "object"
    for seed in range(12):
        random, cache = Random(seed), DiskCache(tmp_path / str(seed))
        values = {f"key{i}": ["x" * random.randrange(40), i] for i in range(3)}
        digests = []
        for key, value in values.items():
            cache.write(key, value)
            source.write_bytes(random.randbytes(20))
            digests.append(cache.write_object(source))
        assert all(map(cache.object_path, digests))
        kept = DiskCache(cache.directory)  # as another process: it has seen no object yet
        files = [cache.directory / "entries" / "key1", kept.object_path(digests[1])]
        if accident == "swapped":
            damage.swap(entries(cache.directory)), damage.swap(objects(cache.directory))
        else:
            for file in files:
                damage.WAYS[accident](file, random)
        later = DiskCache(cache.directory)
        with pytest.warns(CacheWarning) as told:
            assert later.read("key1") is None
            assert later.object_path(digests[1]) is None
        assert len(told) == 2
        if accident != "swapped":
            assert later.read("key0") == values["key0"] and later.object_path(digests[0])
        later.write("key1", values["key1"])  # it heals
        assert later.read("key1") == values["key1"]


def with_unknown_operators(path: Path) -> None:
    """Changes the value of an entry, and gives it the right digest."""
    text = json.dumps(json.loads(path.read_bytes().partition(b"\n")[2])["value"])
    value = json.loads(text.replace('"aten.', '"os.').replace('"torch.', '"os.'))
    body = json.dumps({"key": path.name, "value": value}).encode()
    path.write_bytes(f"lazyinline cache 1 {hashlib.sha256(body).hexdigest()}\n".encode() + body)


def accidents(directory: Path) -> None:
    """One to each file."""
    random = Random(0)
    for path in (*entries(directory), *objects(directory)):
        random.choice([*damage.WAYS.values()])(path, random)


FAULTS: dict[str, Fault] = {
    "accidents": accidents,
    "objects swapped": lambda directory: damage.swap(objects(directory)),
    "unknown operators": each_entry(with_unknown_operators),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_damaged_is_made_anew(fault: str, directory: Path) -> None:
    FAULTS[fault](directory)
    with pytest.warns(CacheWarning):
        numbers, report = compiled_anew()
    assert_right(numbers)
    assert report.cache.num_made > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        numbers, report = compiled_anew()
    assert_right(numbers)
    assert report.cache.num_made == 0 and report.cache.num_loaded >= 4


def test_an_entry_that_is_a_folder_stops_writing_and_nothing_else(directory: Path) -> None:
    each_entry(lambda p: damage.instead(p, Path.mkdir))(directory)
    with pytest.warns(CacheWarning, match="cannot be written to"):
        numbers, _ = inferred_anew()
    assert_right(numbers)


@pytest.mark.parametrize("folder", [".", "entries", "objects"])
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_directory_open_to_others_is_refused(directory: Path, folder: str, mode: int) -> None:
    (directory / folder).chmod(mode)
    with pytest.warns(CacheWarning, match="others may write to it"):
        found = open_cache()
    assert found is None
    with pytest.raises(CacheError, match="chmod 700"):
        DiskCache(directory)


def test_what_others_own_is_not_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, own = DiskCache(directory), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(CacheError, match=f"it belongs to user {own}"):
        DiskCache(directory)
    with pytest.warns(CacheWarning, match="it belongs to user"):
        assert found.read(entries(directory)[0].name) is None


def test_what_the_cache_makes_is_the_users_own(tmp_path: Path) -> None:
    made = DiskCache(tmp_path / "deep" / "down")
    made.write("key", [1])
    for path in (made.directory, *made.directory.rglob("*")):
        assert not path.stat().st_mode & 0o077, path


@pytest.mark.parametrize("call", ["os.replace", "os.fdopen", "tempfile.mkstemp"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_disk_costs_the_cache_and_nothing_else(
    call: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = DiskCache(tmp_path)
    monkeypatch.setattr(call, mock.Mock(side_effect=OSError(code, os.strerror(code))))
    with pytest.warns(CacheWarning, match="cannot be written to") as told:
        found.write("a", 1)
        found.write("b", 2)
    assert len(told) == 1
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("LAZYINLINE_CACHE_DIR", f"{__file__}/below", "The cache is not used"),
        ("LAZYINLINE_CACHE_MAX_BYTES", "2 GB", "LAZYINLINE_CACHE_MAX_BYTES='2 GB'"),
    ],
)
def test_a_wrong_setting_is_told_and_turns_the_cache_off(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.warns(CacheWarning, match=said):
        assert open_cache() is None


def test_the_cache_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYINLINE_CACHE", "0")
    directory = default_directory()
    shutil.rmtree(directory)
    _, report = inferred_anew()
    assert not directory.exists()
    assert str(report.cache) == "cache: off"


def test_the_directory_is_in_the_users_cache_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAZYINLINE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_directory() == Path("/somewhere/lazyinline")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_directory() == Path("/home/me/.cache/lazyinline")


def test_the_least_recently_used_go_first_and_the_limit_holds(tmp_path: Path) -> None:
    found = DiskCache(tmp_path, 11_000)
    for i in range(10):
        found.write(f"key{i}", "x" * 900)
        os.utime(tmp_path / "entries" / f"key{i}", (1000 + i, 1000 + i))
    found.trim()
    assert found.info().num_entries == 10
    assert found.read("key0") == "x" * 900  # now the newest
    found.write("key10", "x" * 900)
    found.trim()
    info = found.info()
    assert info.num_bytes <= 11_000
    kept = {path.name for path in entries(tmp_path)}
    assert {"key0", "key10", "key9"} <= kept
    assert not kept & {"key1", "key2"}


def test_an_entry_that_goes_away_meanwhile_is_a_miss(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DiskCache.object_path

    def and_gone(self: DiskCache, digest: str) -> Path | None:
        path = real(self, digest)
        if path is not None:
            path.unlink(missing_ok=True)
        return path

    monkeypatch.setattr(DiskCache, "object_path", and_gone)
    numbers, report = inferred_anew()
    assert report.cache.num_made > 0
    assert_right(numbers)


def test_the_command_tells_and_clears_and_refuses_what_a_compile_refuses(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = DiskCache(directory).info()
    assert main(["cache", "info"]) == 0
    told = capsys.readouterr().out
    assert str(directory) in told
    assert f"{held.num_entries} entries, {held.num_objects} compiled objects" in told
    assert main(["cache", "clear"]) == 0
    assert f"deleted {held.num_entries} entries" in capsys.readouterr().out
    assert not entries(directory) and not objects(directory)
    directory.chmod(0o777)
    assert main(["cache", "info"]) == 2
    assert "chmod 700" in capsys.readouterr().err
