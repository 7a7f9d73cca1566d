"""Compiled programs as files: the same numbers, bytes and refusals, without the model's source."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
import zoo
from comparing import gradients
from hugging_face import example as of_hugging_face
from models import BatchNormBlock, Block, Made, MarkedBatchNormBlock, MarkedBlock, Net, batch
from safetensors.torch import load_file
from torch import Tensor, nn

import lazyinline
from lazyinline import FileError
from lazyinline_command.main import main


def compiled_for(
    model: nn.Module, *args: Any, backend: Any = "eager", dynamic: bool | None = None, **kwargs: Any
) -> Any:
    """Returns a compiled model that was called in training and in inference."""
    compiled = lazyinline.compile(model, backend=backend, dynamic=dynamic, fallback="error")
    compiled(*args, **kwargs)
    with torch.no_grad():
        compiled(*args, **kwargs)
    return compiled


def reloaded(compiled: Any, folder: Path, **options: Any) -> Any:
    """Saves and loads; saved again, the file has the same bytes."""
    path, again = folder / "model.lz", folder / "again.lz"
    lazyinline.save(compiled, path, **options)
    loaded = lazyinline.load(path)
    lazyinline.save(loaded, again, **options)
    assert again.read_bytes() == path.read_bytes()
    return loaded


def trained(model: nn.Module, *args: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    out = model(*args)
    out.square().sum().backward()
    return out, gradients(model)


def assert_trains_as(loaded: nn.Module, compiled: nn.Module, x: Tensor) -> None:
    """Results and every gradient have the same bits."""
    (out, grads), (expected, expected_grads) = trained(loaded, x), trained(compiled, x)
    assert torch.equal(out, expected)
    assert grads.keys() == expected_grads.keys()
    assert all(torch.equal(grads[name], grad) for name, grad in expected_grads.items())


def biased(self: Any, x: Tensor) -> Tensor:
    """Attention whose bias is learned, as Swin's and T5's: another kernel gives its gradient."""
    heads = x.view(1, 4, 2, 8).transpose(1, 2)
    attended = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=self.bias)
    plain = F.scaled_dot_product_attention(attended, heads, heads)
    return plain.transpose(1, 2).flatten(2)


def of_any_name() -> nn.Module:
    """Its tensors and modules are named as a model of a file might name its own."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.class_name(x) * self.tensor + self.set_modes["forward_tensor"]

    held = nn.ParameterDict({"forward_tensor": torch.ones(2)})
    own = {"tensor": nn.Parameter(torch.ones(2)), "class_name": nn.Linear(2, 2)}
    return Made(forward, **own, set_modes=held)


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "blocks with statistics": (lambda: Net(MarkedBatchNormBlock, 3), batch()),
    "attention with a learned bias": (
        lambda: Made(biased, bias=nn.Parameter(torch.randn(4, 4))),
        batch(4, 16),
    ),
    "any names": (of_any_name, batch(4, 2)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sweep(keep="eager")
def test_a_loaded_model_computes_trains_and_takes_another_state_as_the_compiled_one(
    name: str, backend: str, tmp_path: Path
) -> None:
    make, x = MODELS[name]
    compiled = compiled_for(make(), x, backend=backend)
    loaded = reloaded(compiled, tmp_path)
    assert_trains_as(loaded, compiled, x)
    with torch.no_grad():
        assert torch.equal(loaded(x), compiled(x))
    assert list(loaded.state_dict()) == list(compiled.state_dict())
    for model in (compiled, loaded):
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            trained(model, x)
            optimizer.step()
    for key, tensor in compiled.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    other = {key: tensor * 2 + 1 for key, tensor in compiled.state_dict().items()}
    loaded.load_state_dict(other)
    assert not torch.equal(loaded(x), compiled(x))
    compiled.load_state_dict(other)
    assert torch.equal(loaded(x), compiled(x))
    with pytest.raises(lazyinline.LazyInlineError, match="none of them is for a call like this"):
        loaded(x[:-1])


class Tied(nn.Module):
    """An embedding that is the head's weight, a buffer that no state_dict has, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.table = torch.arange(4.0)

    def forward(self, ids: Tensor, *, loss: bool) -> dict[str, Any]:
        logits = self.head(self.frozen(self.embedding(ids)) * self.scale + self.table)
        return {"logits": logits, "extra": (None, 3), "loss": F.cross_entropy(logits, ids)}


def test_ties_frozen_parameters_buffers_and_nested_results_are_kept(tmp_path: Path) -> None:
    ids = torch.tensor([1, 5, 6])
    compiled = compiled_for(Tied(), ids, loss=True)
    loaded: Any = reloaded(compiled, tmp_path)
    result, expected = loaded(ids, loss=True), compiled(ids, loss=True)
    assert result.keys() == expected.keys()
    assert torch.equal(result["logits"], expected["logits"])
    assert result["extra"] == (None, 3)
    result["loss"].backward()
    expected["loss"].backward()
    assert loaded.head.weight is loaded.embedding.weight
    assert torch.equal(loaded.head.weight.grad, compiled.head.weight.grad)
    assert not loaded.frozen.weight.requires_grad
    assert "scale" not in loaded.state_dict()


@pytest.mark.sweep
def test_a_second_derivative_is_that_of_the_compiled_model(tmp_path: Path) -> None:
    x = batch().requires_grad_()
    compiled = compiled_for(Net(Block), x)
    loaded = reloaded(compiled, tmp_path)

    def penalty(model: nn.Module) -> dict[str, Tensor | None]:
        model.zero_grad()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return gradients(model)

    found, expected = penalty(loaded), penalty(compiled)
    assert all(expected[n] is None or torch.equal(found[n], expected[n]) for n in expected)


def test_a_model_of_hugging_face_is_saved_with_its_default_cache(tmp_path: Path) -> None:
    model, inputs = of_hugging_face("llama", layers=2)
    model.config.use_cache = True
    compiled = lazyinline.compile(model, backend="eager")
    with torch.no_grad():
        expected = compiled(**inputs)
        result = reloaded(compiled, tmp_path)(**inputs)
    assert torch.equal(result.logits, expected.logits)
    assert torch.equal(result["logits"], result[0])
    caches = [found[list(found)[-1]] for found in (result, expected)]
    assert torch.equal(caches[0].layers[1].values, caches[1].layers[1].values)


SOURCE = """
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return x + torch.tanh(self.linear(x))

    class Model(nn.Sequential):
        def __init__(self):
            super().__init__(*(Layer() for _ in range(3)))

        def forward(self, x):
            y = super().forward(x)
            return y, y.square()
"""
LOADS = """
    import sys
    import torch
    import lazyinline
    from torch._subclasses import FakeTensorMode

    def no_trace(*args, **kwargs):
        raise AssertionError("it traces")

    FakeTensorMode.__init__ = no_trace
    loaded = lazyinline.load(sys.argv[1])
    x, expected = torch.load(sys.argv[2])
    with torch.no_grad():
        assert all(map(torch.equal, loaded(x), expected))
    loaded(x)[0].sum().backward()  # a loss of one result
    assert "secret_model" not in sys.modules
    for heavy in ("torch._dynamo", "torch._inductor.compile_fx"):
        assert heavy not in sys.modules, "its import takes longer than to open a file"
    print(loaded.last_report.num_kernels, [type(m).__name__ for m in loaded.modules()][:1])
"""


@pytest.mark.parametrize("dynamic", [None, True], ids=["plain", "sizes"])
@pytest.mark.sweep(keep="sizes")
def test_a_file_is_opened_where_the_source_of_the_model_cannot_be_imported(
    dynamic: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "secret_model.py"
    source.write_text(textwrap.dedent(SOURCE), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    from secret_model import Model  # type: ignore[import-not-found]

    x = batch(2, 8)
    if dynamic:  # which keeps nothing: this builds the native loop that a load takes from the cache
        lazyinline.compile(nn.Linear(8, 8))(x)
    compiled: Any = lazyinline.compile(Model(), dynamic=dynamic)
    compiled(x)[0].sum().backward()
    with torch.no_grad():
        expected = compiled(x)
    path, numbers = tmp_path / "elsewhere" / "model.lz", tmp_path / "numbers.pt"
    path.parent.mkdir()
    lazyinline.save(compiled, path)
    torch.save((x, expected), numbers)
    source.unlink()
    del sys.modules["secret_model"]

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOADS), str(path), str(numbers)],
        capture_output=True,
        text=True,
        check=False,
        cwd=path.parent,
        env={**os.environ, "LAZYINLINE_VERIFY": "0"},  # which reads operators
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0 "), "kernels that this machine has signed are taken"


def attends(self: Any, x: Tensor) -> Tensor:
    """Causal attention between two products."""
    q, k, v = (part.view(1, 16, 2, 32).transpose(1, 2) for part in self.up(x).chunk(3, -1))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.down(F.gelu(attended.transpose(1, 2).flatten(2))).float().square().mean()


@pytest.mark.parametrize("kind", ["module", "step"])
@pytest.mark.sweep(keep="step")
def test_a_program_for_a_gpu_that_is_not_here_is_a_file_with_its_plan(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    model, x = (
        Made(attends, up=nn.Linear(64, 192), down=nn.Linear(64, 64)).bfloat16(),
        torch.randn(1, 16, 64, dtype=torch.bfloat16),
    )
    compiled: Any = (
        lazyinline.compile(model, target="cuda:sm_90")
        if kind == "module"
        else lazyinline.compile_step(
            model, optimizer=torch.optim.AdamW(model.parameters()), target="cuda:sm_90"
        )
    )
    not_here = partial(
        pytest.raises, lazyinline.PlanError, match="for cuda:sm_90, which is not here"
    )
    with not_here():
        compiled(x)
    loaded = reloaded(compiled, tmp_path)
    assert (found := loaded.last_report.gpu) == compiled.last_report.gpu
    assert found.num_built == found.num_kernels > 0
    with not_here():
        loaded(x)
    assert main(["report", str(tmp_path / "model.lz")]) == 0
    assert "(NVIDIA H100 SXM): compiled and planned, not run" in capsys.readouterr().out
    # On another machine it is compiled again, of its text.
    monkeypatch.setenv("LAZYINLINE_CACHE_DIR", str(tmp_path / "cache"))
    again = lazyinline.load(tmp_path / "model.lz").last_report
    assert again is not None
    assert again.num_kernels > 0
    assert again.gpu == found


def test_weights_are_beside_a_file_or_come_from_a_state_dict(tmp_path: Path) -> None:
    x, path = batch(), tmp_path / "model.lz"
    model = Net()
    compiled = compiled_for(model, x)
    lazyinline.save(compiled, path, weights="beside")
    assert torch.equal(lazyinline.load(path)(x), compiled(x))
    beside = load_file(tmp_path / "model.lz.safetensors")
    assert beside.keys() == compiled.state_dict().keys()
    assert all(torch.equal(beside[name], t) for name, t in compiled.state_dict().items())
    lazyinline.save(compiled, path, weights="none")
    with pytest.raises(FileError, match="has no weights: give load a state_dict"):
        lazyinline.load(path)
    other = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    loaded = lazyinline.load(path, state_dict=other)
    model.load_state_dict(other)
    assert torch.equal(loaded(x), compiled(x))
    with pytest.raises(FileError, match=r"head\.weight of the state_dict is of another type"):
        lazyinline.load(path, state_dict=other | {"head.weight": torch.zeros(3)})
    with pytest.raises(FileError, match=r"the state_dict has no head\.weight"):
        lazyinline.load(path, state_dict={k: v for k, v in other.items() if k != "head.weight"})


def test_tensors_of_a_large_file_have_storages_of_their_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1024, 1023), nn.Linear(1023, 7), nn.Tanh())
    loaded = reloaded(compiled_for(model, torch.randn(2, 1024)), tmp_path)
    tensors = list(loaded.parameters())
    for tensor, saved in zip(tensors, model.parameters(), strict=True):
        assert torch.equal(tensor, saved)
        assert not tensor._is_view() and tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == 4 * tensor.numel()
    spans = sorted((t.data_ptr(), t.data_ptr() + t.untyped_storage().nbytes()) for t in tensors)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    shared = copy.deepcopy(loaded).share_memory()
    assert all(map(torch.equal, shared.parameters(), tensors))


def test_kernels_of_another_machine_are_made_again_unless_they_are_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, path = batch(2, 8), tmp_path / "model.lz"
    compiled = lazyinline.compile(Net(lambda: Block(8), width=8))
    with torch.no_grad():
        expected = compiled(x)
    lazyinline.save(compiled, path)
    monkeypatch.setenv("LAZYINLINE_CACHE_DIR", str(tmp_path / "another machine"))
    made = {}
    for trust in (True, False):
        loaded = lazyinline.load(path, trust=trust)
        with torch.no_grad():
            assert torch.equal(loaded(x), expected)
        made[trust] = loaded.last_report.cache.num_made  # type: ignore[union-attr]
    assert made[True] < made[False]


@torch.library.custom_op("saved_tests::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


@double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(double(x))


class Printing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        print("called")
        return super().forward(x)


class Filling(nn.Linear):
    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        given["y"] = super().forward(given["x"])
        return given


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "an operator of one's own": (lambda: Doubling(4, 4), batch(), "no operator of PyTorch's own"),
    "eager": (lambda: Printing(4, 4), batch(), "it runs eagerly"),
    "filled arguments": (lambda: Filling(4, 4), {"x": batch()}, "changes dictionaries"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_file_cannot_say_is_refused_by_name(case: str, tmp_path: Path) -> None:
    make, given, message = REFUSED[case]
    compiled = lazyinline.compile(make(), backend="eager")
    with torch.no_grad():
        compiled(copy.copy(given))
    with pytest.raises(FileError, match=message):
        lazyinline.save(compiled, tmp_path / "model.lz")
    assert not list(tmp_path.iterdir())


def test_what_was_not_compiled_or_not_called_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="save takes what"):
        lazyinline.save(Net(), tmp_path / "model.lz")
    with pytest.raises(FileError, match="call the compiled model once"):
        lazyinline.save(lazyinline.compile(Net()), tmp_path / "model.lz")


def test_a_further_layer_takes_at_most_2_kb_beside_weights(tmp_path: Path) -> None:
    sizes = []
    for num_blocks in (4, 8):
        path = tmp_path / f"{num_blocks}.lz"
        lazyinline.save(compiled_for(Net(MarkedBlock, num_blocks), batch()), path)
        with zipfile.ZipFile(path) as archive:
            parts = [e for e in archive.infolist() if e.filename != "weights.safetensors"]
        sizes.append(sum(part.file_size for part in parts))
    assert sizes[1] - sizes[0] <= 4 * 2000


def with_loss(block: Any = BatchNormBlock) -> nn.Module:
    return Made(lambda self, x, y: F.mse_loss(self.net(x), y), net=Net(block))


OPTIMIZERS: dict[str, Any] = {
    "none": lambda parameters: None,
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "clipped": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
}


@pytest.mark.sweep(keep=["AdamW-2-sizes", "clipped-1-plain"])
@pytest.mark.parametrize("dynamic", [None, True], ids=["plain", "sizes"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loaded_step_goes_on_as_the_compiled_one(
    optimizer: str, micro_batches: int, dynamic: bool | None, tmp_path: Path
) -> None:
    model = with_loss(MarkedBlock if dynamic else BatchNormBlock)
    made = OPTIMIZERS[optimizer](model.parameters())
    options: dict[str, Any] = {"micro_batches": micro_batches, "dynamic": dynamic}
    options |= {"max_norm": 0.01} if optimizer == "clipped" else {}
    step = lazyinline.compile_step(model, optimizer=made, backend="eager", **options)
    step(batch(12), batch(12, 2))
    loaded: Any = reloaded(step, tmp_path)
    for size in (12, 20) if dynamic else (12, 12):
        x, y = batch(size), batch(size, 2)
        assert torch.equal(loaded(x, y), step(x, y))
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    found, expected = gradients(loaded.model), gradients(model)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] is None) == (grad is None)
        assert grad is None or torch.equal(found[name], grad)
    assert (loaded.optimizer is None) == (optimizer == "none")


def test_a_step_whose_optimizer_runs_behind_it_is_refused(tmp_path: Path) -> None:
    model = with_loss()
    step = lazyinline.compile_step(
        model, optimizer=torch.optim.Adagrad(model.parameters()), backend="eager"
    )
    step(batch(4), batch(4, 2))
    with pytest.raises(FileError, match="Adagrad has no fused update"):
        lazyinline.save(step, tmp_path / "model.lz")


@lazyinline.lazy_inline
class Steps(nn.Module):
    """Saves more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(torch.exp(torch.sin(self.linear(x))))


RECOMPUTED: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "a budget": {"recompute": lazyinline.Budget(fraction=0.5)},
    "a mark": {"is_marked": True},
}


@pytest.mark.parametrize("policy", RECOMPUTED)
@pytest.mark.sweep(keep="a budget")  # full: test_saved_losses.py
def test_a_file_holds_what_a_recompute_policy_holds(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step_of(**options: Any) -> Any:
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Steps() for _ in range(3)))
        if options.pop("is_marked", False):
            lazyinline.recompute(blocks[0])
        model = Made(lambda self, x: self.blocks(x).square().mean(), blocks=blocks)
        step: Any = lazyinline.compile_step(model, backend="eager", **options)
        step(batch(64))
        return step

    step = step_of(**RECOMPUTED[policy])
    files = [reloaded(step, tmp_path)]
    monkeypatch.setenv("LAZYINLINE_CACHE_DIR", str(tmp_path / "another machine"))
    files.append(lazyinline.load(tmp_path / "model.lz"))
    for loaded in files:
        assert torch.equal(loaded(batch(64)), step(batch(64)))
        found = gradients(loaded.model)
        assert all(torch.equal(found[name], g) for name, g in gradients(step.model).items())
        assert loaded.stats.saved_bytes == step.stats.saved_bytes
        assert loaded.stats.peak_bytes == step.stats.peak_bytes
    assert step.stats.saved_bytes < step_of().stats.saved_bytes


def sized(self: Any, x: Tensor) -> Tensor:
    """Halves of what it is given, which is even, and as many numbers as there are in a row."""
    if x.shape[0] > 40:
        return self.net(x) * 2
    first, second = self.net(x).view(2, -1, 2)
    return first + second * x.shape[0]


@pytest.mark.sweep(keep="eager")  # kernels are taken: the test of a file without its source
def test_sizes_that_vary_are_linked_without_source_or_tracing(backend: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net(MarkedBlock, 2)
    compiled = compiled_for(Made(sized, net=net), batch(8), backend=backend, dynamic=True)
    loaded: Any = reloaded(compiled, tmp_path)
    for train in (True, False):
        with torch.set_grad_enabled(train):
            for size in (6, 8, 12, 40):
                x = batch(size)
                if train:
                    assert_trains_as(loaded, compiled, x)
                else:
                    assert torch.equal(loaded(x), compiled(x)), size
            report = loaded.last_report
            assert report.opened_from or report.num_links
            assert not report.num_kernels, "kernels that this machine signed are taken"
            for size, said in ((42, "<= 40"), (7, r"Mod\(")):
                said += rf".* has to hold, and s\d+ = {size}"
                with pytest.raises(lazyinline.NoProgramError, match=said):
                    loaded(batch(size))
    assert list(loaded.state_dict()) == list(compiled.state_dict())


def run_twice(self: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Takes twice as many of one input as of the other, and returns what it computes of sizes."""
    size = x.shape[0]
    total = torch.tanh(torch.cat([part(x) for part in self.parts]) + y)
    told = (3 * size + 1, y.shape[0] // 2, size / 4, size > 5, self.parts[0].in_features)
    return {"total": total, "told": told}


def test_sizes_that_are_computed_of_others_are_taken_and_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Made(run_twice, parts=nn.ModuleList(nn.Linear(3, 3) for _ in range(2)))
    compiled: Any = lazyinline.compile(model, backend="eager", dynamic=True, fallback="error")
    for size in (4, 6):  # a comparison of sizes is a condition: each answer is a program
        compiled(batch(size, 3), batch(2 * size, 3))
    with torch.no_grad():  # a second program: a file has them in one order, however often saved
        compiled(batch(4, 3), batch(8, 3))
    reloaded(compiled, tmp_path)
    monkeypatch.setenv("LAZYINLINE_CACHE_DIR", str(tmp_path / "another machine"))
    loaded: Any = lazyinline.load(tmp_path / "model.lz")
    for size in (4, 5, 11):
        x, y = batch(size, 3), batch(2 * size, 3)
        found, expected = loaded(x, y), model(x, y)
        assert torch.equal(found["total"], compiled(x, y)["total"])
        torch.testing.assert_close(found["total"], expected["total"])
        assert found["told"] == expected["told"]
        assert list(map(type, found["told"])) == list(map(type, expected["told"]))
    with pytest.raises(lazyinline.NoProgramError, match=r"is 11, and has to be 2\*s\d+"):
        loaded(batch(5, 3), batch(11, 3))


def test_commands_take_a_file_as_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, onnx, page = (tmp_path / name for name in ("model.lz", "model.onnx", "page.html"))
    lazyinline.save(compiled_for(Net(MarkedBlock, 3), batch()), path)
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("// Net, inference") == shown.count("// Net, training") == 1
    assert shown.count("call @MarkedBlock(") == 6
    assert main(["report", str(path), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "weights.safetensors" in shown
    assert "opened from a file" in shown
    assert "MarkedBlock" in page.read_text(encoding="utf-8")
    assert main(["export", str(path), str(onnx)]) == 0
    session = onnxruntime.InferenceSession(onnx)
    (found,) = session.run(None, {session.get_inputs()[0].name: batch().numpy()})
    with torch.no_grad():
        expected = lazyinline.load(path)(batch())
    assert torch.allclose(torch.from_numpy(found), expected, atol=1e-5)
    path.write_text("no file of ours", encoding="utf-8")
    assert main(["inspect", str(path)]) == 2
    assert "cannot be opened as a compiled program" in capsys.readouterr().err


FAMILIES = {family.name: family for family in (*zoo.ASKED, *zoo.FURTHER)}
REFUSED_FAMILIES = {("Bloom", False), ("Bloom", True)}  # an autograd.Function of its own


@pytest.mark.sweep
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_saved_and_loaded(name: str, train: bool, tmp_path: Path) -> None:
    model, inputs = FAMILIES[name].build()
    compiled: Any = lazyinline.compile(model.eval(), backend="eager")
    with torch.set_grad_enabled(train):
        for _ in range(2):  # the first call of some notes something, and runs eagerly
            expected = compiled(**inputs)
        if compiled.last_report.ran_eagerly or (name, train) in REFUSED_FAMILIES:
            with pytest.raises(FileError):
                lazyinline.save(compiled, tmp_path / "model.lz")
            return
        loaded = reloaded(compiled, tmp_path)
        found = loaded(**inputs)
    tensors = {key: held for key, held in expected.items() if isinstance(held, Tensor)}
    assert tensors
    assert all(torch.equal(found[key], held) for key, held in tensors.items())
