"""Many kernels in one C++ file: the same bits, built once, and damage costs only time."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import damage
import models
import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache, PyCodeCache
from torch._inductor.cpu_vec_isa import pick_vec_isa

import lazyinline
from lazyinline.backend.files.torch_store import open_store
from lazyinline.backend.kernels import torch_inductor
from lazyinline.backend.kernels.bundles import (
    HEADER,
    BuiltKernels,
    Bundles,
    KernelSource,
    Promise,
    bundle_text,
    kernel_source,
)
from lazyinline.backend.kernels.torch_inductor import build_file, deferred_builds
from lazyinline.backend.launches import torch_facts, torch_native
from lazyinline.reuse.errors import CacheWarning

TYPES = ["const float*", "float*", "int64_t"]


def text_of(body: str, parameters: str = "const float* in_ptr0, float* out_ptr0, int64_t n") -> str:
    """A kernel as Inductor writes one."""
    return f'\n{HEADER}\nextern "C"  void  kernel({parameters})\n{{\n{body}\n}}\n'


def elementwise(vectors: str, numbers: str) -> str:
    """A kernel that makes ``vectors`` of a vector x, or ``numbers`` of a number x."""
    if not pick_vec_isa():  # ATEN_CPU_CAPABILITY may say so
        return text_of(f"""
    for (int64_t i = 0; i < n; i += 1) {{
        auto x = in_ptr0[i];
        out_ptr0[i] = {numbers};
    }}""")
    return text_of(f"""
    using V = at::vec::Vectorized<float>;
    #pragma GCC ivdep
    for (int64_t i = 0; i + V::size() <= n; i += V::size()) {{
        auto x = V::loadu(in_ptr0 + i);
        auto tmp0 = {vectors};
        tmp0.store(out_ptr0 + i);
    }}""")


BODY = elementwise("x.exp() * x + V(0.1f)", "std::exp(x) * x + 0.1f")


def source_of(text: str) -> KernelSource:
    source = kernel_source(TYPES, text)
    assert source is not None
    return source


def result_of(kernel: Callable[..., Any], x: Tensor) -> Tensor:
    out = torch.full_like(x, float("nan"))
    kernel(x, out, x.numel())
    return out


def bundles_in(
    folder: Path, built: list[str], num_threads: int = 2, setting: str = "test"
) -> Bundles:
    """Bundles whose builds are noted."""

    def build(text: str) -> Path:
        built.append(text)
        return build_file(text)

    def alone(types: Any, text: str) -> Any:
        pytest.fail("nothing is to be built alone")

    return Bundles(lambda: known_in(folder, setting), build, alone, num_threads)


def known_in(folder: Path, setting: str = "test") -> BuiltKernels:
    return BuiltKernels(open_store(folder), setting)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """A store in a fresh cache of Inductor's."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "lazyinline"


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.sweep(keep="True")
def test_what_inductor_writes_today_shares_files_and_gives_the_bits_of_kernels_built_alone(
    dynamic: bool, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("LAZYINLINE_CACHE", "0")
    model, x = models.Block(32, norm=True), torch.randn(4, 32)

    def step(source_of: Callable[..., KernelSource | None]) -> tuple[list[Tensor], list[bool]]:
        accepted = []

        def noted(types: list[str], text: str) -> KernelSource | None:
            source = source_of(types, text)
            accepted.append(source is not None)
            return source

        monkeypatch.setattr(torch_inductor, "kernel_source", noted)
        PyCodeCache.cache_clear()
        loss = lazyinline.compile(model, dynamic=dynamic)(x).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return [loss.detach(), *gradients], accepted

    together, accepted = step(kernel_source)
    assert accepted and all(accepted), "kernels look different: compiling takes five times as long"
    alone, accepted = step(lambda *_: None)
    assert accepted, "no kernel went Inductor's own way"
    assert all(map(torch.equal, together, alone))


REFUSED = {
    "another header": text_of("").replace("cpp_prefix", "other"),
    "a header inside": text_of("\n#include <vector>\n"),
    "a macro": text_of("\n#define x y\n"),
    "another function": text_of("") + "static void other() {}\n",
    "a function before it": text_of("").replace("extern", "static int k = 3;\nextern"),
    "its own name": text_of("auto f = kernel;"),
    "a second entry": text_of("}\nvoid other() {"),
    "a raw string": text_of('auto s = R"(})";'),
    "another name": text_of("").replace("kernel", "entry"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_one_plain_function_is_left_to_inductor(what: str) -> None:
    assert kernel_source(TYPES, REFUSED[what]) is None
    assert kernel_source(["float*", "std::string"], text_of("")) is None


def test_braces_in_strings_and_comments_are_no_blocks() -> None:
    assert kernel_source(TYPES, text_of("auto s = \"}\"; char c = '{'; // }\n/* { */")) is not None


def test_every_source_that_is_built_names_its_kind_of_cpu(monkeypatch: MonkeyPatch) -> None:
    """The flags are the same on every CPU, "for the one at hand", and folders may be shared."""
    built: list[str] = []

    def sources() -> list[str]:
        built.clear()
        with pytest.raises(KeyError), deferred_builds():
            AsyncCompile().cpp_pybinding(TYPES, REFUSED["its own name"])
            promise = AsyncCompile().cpp_pybinding(TYPES, BODY)
            raise KeyError
        assert isinstance(promise, Promise)
        promise.result()
        assert len(built) == 2
        return [*built, torch_native.native_source(), torch_inductor.build_setting()]

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda _, types, text: built.append(text))
    monkeypatch.setattr(
        CppPythonBindingsCodeCache, "load_pybinding", lambda types, text: built.append(text)
    )
    monkeypatch.setattr(BuiltKernels, "find", lambda *_: None)
    here = sources()
    for module in (torch_facts, torch_inductor):
        monkeypatch.setattr(module, "cpu_kind", lambda: "another")
    assert all(a != b for a, b in zip(here, sources(), strict=True))


def entry_in(folder: Path) -> Path:
    (entry,) = folder.glob("entries/[0-9a-f]*")
    return entry


def name_instead(folder: Path, named: Callable[[Any], str]) -> None:
    """Has the entry name something else, under the right digest."""
    store = open_store(folder)
    assert store is not None
    store.write(entry_in(folder).name, named(store))


def other_object(store: Any) -> str:
    made: str = store.write_object(build_file(bundle_text([source_of(BODY)], "test")))
    return made


FORGED: dict[str, Callable[[Path], None]] = {
    "another file": lambda folder: name_instead(folder, lambda _: "../../thesis"),
    "another object": lambda folder: name_instead(folder, other_object),
}
for way, spoil in damage.WAYS.items():
    FORGED |= {f"entry, {way}": lambda f, spoil=spoil: spoil(entry_in(f), Random(0))}
    FORGED |= {f"object, {way}": lambda f, spoil=spoil: spoil(next(f.glob("objects/*")), Random(0))}


@pytest.mark.parametrize("how", FORGED)
@pytest.mark.sweep(keep=["entry, cut off", "object, a bit flipped"])
def test_what_is_damaged_is_built_again(how: str, folder: Path) -> None:
    source = source_of(text_of("for (int64_t i = 0; i < n; ++i) out_ptr0[i] = in_ptr0[i] * 2;"))
    # Each its own setting: what a process has loaded stays loaded, whatever becomes of its file.
    known_in(folder, how).keep([source], build_file(bundle_text([source], how)))
    theirs = folder.parent / "thesis.so"
    theirs.write_text("two years of work")
    FORGED[how](folder)
    built: list[str] = []
    bundles = bundles_in(folder, built, 1, setting=how)
    with pytest.warns(CacheWarning, match="will be made anew"):
        promise = bundles.ask(source)
    bundles.finish()
    assert built
    assert torch.equal(result_of(promise.result(), torch.ones(8)), torch.full((8,), 2.0))
    assert known_in(folder, how).find(source) is not None
    assert theirs.read_text() == "two years of work"


def test_kernels_are_built_where_no_store_can_be(folder: Path) -> None:
    folder.write_text("")  # a file where the folder should be
    with pytest.warns(CacheWarning, match="The cache is not used"):
        bundles = bundles_in(folder, [])
        promise = bundles.ask(source_of(BODY))
    bundles.finish()
    x = torch.randn(64)
    assert torch.allclose(result_of(promise.result(), x), x.exp() * x + 0.1)
