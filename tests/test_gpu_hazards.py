"""What would go wrong on a GPU, with stand-ins for what only a GPU has; CUDA's autocast."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import decoders as models
import pytest
import torch
import torch.nn.functional as F
from models import Around, Made
from programs import move_to
from test_on_gpu import assert_steps
from torch import Tensor, nn
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import lazyinline
from lazyinline import lazy_inline
from lazyinline.backend.gpu import torch_cuda
from lazyinline.backend.gpu.targets import target_named
from lazyinline.backend.gpu.torch_cuda import LoadedKernel, TritonKernel, capture_graph
from lazyinline.backend.gpu.torch_gpu import gpu_described, moved_leaf
from lazyinline.backend.kernels.lower import EagerBackend, InductorBackend, decompose_leaf
from lazyinline.backend.kernels.torch_corrections import settings
from lazyinline.backend.kernels.torch_recorder import record_graph
from lazyinline.backend.link.placement import Place, aligned
from lazyinline.backend.run.planned import Runtime
from lazyinline.frontend.autograd.torch_engine import GeneratorStates
from lazyinline.frontend.capture.capture import Subject, capture_model
from lazyinline.frontend.passes import link
from lazyinline.reuse.ir.program import Leaf, Program
from lazyinline.reuse.ir.types import TensorType

TARGET = "cuda:sm_90"
NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
SMALL = {"hidden": 32, "num_heads": 2, "vocab": 67, "seq": 16, "batch": 2}
INVALID = "operation failed due to a previous error during capture"


class StandIn:
    """Stands for CUDA: a present stream, a generator, an allocator's pools, cuBLAS's memory.

    Attributes:
        log: what was asked of it, in order.
        end_fails: whether the end of a capture raises.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.device, self.generator = "default", 0, "as it was"
        self.log: list[str] = []
        self.end_fails = False
        log = self.log.append
        fakes: dict[str, Any] = {
            "CUDAGraph": lambda: self,
            "Stream": lambda device: "its own",
            "stream": lambda stream: self.present("stream", stream),
            "device": lambda device: self.present("device", device.index),
            "current_device": lambda: self.device,
            "default_generators": [self, self],
            "synchronize": lambda: log("synchronize"),
            "empty_cache": lambda: log("empty_cache"),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        for name in ("clearCublasWorkspaces", "endAllocateToPool", "releasePool"):
            noted = lambda *args, name=name: log(f"{name}{args}")  # noqa: E731
            monkeypatch.setattr(torch._C, f"_cuda_{name}", noted, raising=False)

    @contextmanager
    def present(self, what: str, value: Any) -> Iterator[None]:
        before = getattr(self, what)
        setattr(self, what, value)
        try:
            yield
        finally:
            setattr(self, what, before)

    def clone_state(self) -> str:
        return self.generator

    def graphsafe_set_state(self, state: str) -> None:
        self.generator = state

    def capture_begin(self, *, capture_error_mode: str) -> None:
        self.generator = "in a capture"
        self.log.append(f"begin {capture_error_mode} on {self.stream}")

    def capture_end(self) -> None:
        self.log.append("end")
        if self.end_fails:
            raise RuntimeError(INVALID)
        self.generator = "as it was"

    def pool(self) -> tuple[int, int]:
        return (0, 7)

    def replay(self) -> None:
        self.log.append(f"replay on device {self.device}")


GPU = torch.device("cuda", 1)


def test_a_capture_is_of_its_thread_and_its_pool_holds_what_cublas_works_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory of cuBLAS from before is let go of, and so is that from within: Inductor does both."""
    cuda = StandIn(monkeypatch)
    results = [torch.zeros(1)]
    replay = capture_graph(lambda: results, GPU)
    assert replay() is results
    assert cuda.log == [
        "synchronize",
        "clearCublasWorkspaces()",
        "empty_cache",
        "begin thread_local on its own",
        "end",
        "clearCublasWorkspaces()",
        "replay on device 1",
    ]


@pytest.mark.parametrize(("run_fails", "end_fails"), [(True, False), (True, True), (False, True)])
def test_a_capture_that_fails_leaves_all_as_it_was(
    run_fails: bool, end_fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = StandIn(monkeypatch)
    cuda.end_fails = end_fails

    def run() -> list[torch.Tensor]:
        assert (cuda.stream, cuda.device) == ("its own", 1)
        if run_fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        return []

    # Of two errors the first, and not what the end says of it.
    with pytest.raises(RuntimeError, match="not permitted" if run_fails else INVALID):
        capture_graph(run, GPU)
    assert (cuda.stream, cuda.device, cuda.generator) == ("default", 0, "as it was")
    assert ("endAllocateToPool(1, (0, 7))" in cuda.log) == end_fails
    assert ("releasePool(1, (0, 7))" in cuda.log) == end_fails


def captured_step(
    capture: Callable[..., Any],
) -> tuple[lazyinline.TrainingStep, tuple[Any, ...], torch.Tensor]:
    """Returns a step that was run once, and is to be captured next."""
    lazyinline.lazy_inline(models.DecoderBlock)
    model, args = models.llama(1, **SMALL)
    step = lazyinline.compile_step(model, backend="eager")
    loss = step(*args).clone()
    program = step.entries.first._compiled.runner
    move_to(program, Place(graphs="captured"))
    program._capture = capture
    step.entries.first.rest()
    step(*args)
    return step, args, loss


def test_a_step_whose_capture_fails_says_so_once_and_goes_on() -> None:
    def capture(run: Any, device: torch.device) -> Any:
        raise RuntimeError(INVALID)

    step, args, loss = captured_step(capture)
    with pytest.warns(UserWarning, match="not one CUDA graph.*" + INVALID) as said:
        for _ in range(3):
            torch.testing.assert_close(step(*args), loss)
    assert len(said) == 1
    assert step.stats is not None and INVALID in step.stats.why_no_graph


def test_a_planned_step_is_captured_once_there_is_memory_and_replayed() -> None:
    """A graph stood in for by what runs the launches again: captured at the second step.

    Memory that is short in a capture is an error, and no reason to go on without a graph.
    """
    calls = []

    def capture(run: Any, device: torch.device) -> Any:
        calls.append("capture")
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return lambda: (calls.append("replay"), run())[1]

    step, args, _ = captured_step(capture)
    with pytest.raises(torch.OutOfMemoryError):
        step(*args)
    assert_steps(step, step._model, [args] * 2, 1e-5)
    assert calls == ["capture", "capture", "replay", "replay"]
    assert step.stats is not None and step.stats.why_no_graph == ""


def test_what_begins_anywhere_is_copied_in_its_layout() -> None:
    flat = torch.arange(24.0)
    views = [flat, flat[4:], flat[1:], flat[1:].view(1, 23), flat[1:21].view(4, 5).t()[1:4, ::2]]
    views += [flat[1:2].expand(3), flat[24:]]
    for view in views:
        found = aligned(view)
        assert not found.data_ptr() % 16
        assert torch.equal(found, view)
        assert found.stride() == view.stride()
        assert (found is view) == (not view.data_ptr() % 16)


@NEEDS_TRITON
@pytest.mark.parametrize("train", [False, True])
def test_kernels_are_handed_what_they_can_load_and_users_get_their_own_memory(train: bool) -> None:
    """The kernels of a GPU look at their operands, and compute nothing."""

    def forward(layers: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return layers[0](x), x[1:]

    body = lambda self, x: torch.tanh(self.linear(x.tanh()) * x.sigmoid())  # noqa: E731
    compiled = lazyinline.compile(
        Around(forward, Made(body, linear=nn.Linear(8, 8))), target=TARGET
    )
    x = torch.randn(33)[1:].view(4, 8).requires_grad_(train)
    assert x.data_ptr() % 16
    refused = pytest.raises(lazyinline.PlanError, match="which is not here")
    with refused, torch.set_grad_enabled(train):
        compiled(x)
    runtime = compiled.__dict__["_lazyinline_calls"].entries.first._compiled.runtime
    assert isinstance(runtime, Runtime)
    seen: list[int] = []

    def load(kernel: TritonKernel) -> Callable[..., None]:
        wide = kernel.aligned_arguments

        def launch(*args: Any) -> None:
            loaded = [a for i, a in enumerate(args) if i in wide and isinstance(a, torch.Tensor)]
            seen.extend(a.data_ptr() % 16 for a in loaded)

        return launch

    place = runtime.program._tools.place
    move_to(runtime.program, replace(place, missing="", device=torch.device("cpu"), load=load))
    with torch.set_grad_enabled(train):
        made, rest = compiled(x)
    assert rest.data_ptr() == x[1:].data_ptr()
    if train:
        cotangent = torch.randn(33)[1:].view(4, 8)
        made.backward(cotangent)
    assert len(seen) > 4 and not any(seen)


def test_a_kernel_is_launched_on_the_stream_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for Inductor's tuner, and for the stream."""
    cuda = StandIn(monkeypatch)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: 7 + index, raising=False
    )
    launched = []

    class Tuner:
        def run(self, *args: Any, stream: int) -> None:
            launched.append((args, stream, cuda.device))

    monkeypatch.setattr(torch_cuda, "_tuner_of", lambda text: Tuner())
    kernel = LoadedKernel(TritonKernel("triton_poi_0", ""))
    for index in (1, 0):
        meta = torch.empty(3, device="meta")
        tensor = FakeTensor(FakeTensorMode(), meta, torch.device("cuda", index))
        kernel(tensor, 3)
        assert launched.pop() == ((tensor, 3), 7 + index, index)
    assert cuda.device == 0


@NEEDS_TRITON
def test_ways_to_launch_are_chosen_before_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for Inductor's tuner, whose first run tries all ways and takes memory."""
    model = Around(lambda layers, x: layers[0](x).tanh().square().mean(), nn.Linear(8, 8))
    step = lazyinline.compile_step(model, target=TARGET, micro_batches=2)
    x = torch.randn(8, 8)
    with pytest.raises(lazyinline.PlanError, match="which is not here"):
        step(x)
    program = step.entries.first._compiled.runner
    chosen: dict[TritonKernel, str] = {}
    arenas: list[torch.Tensor] = []

    class Tuner:
        def __init__(self, kernel: TritonKernel) -> None:
            self.kernel = kernel

        def run(self, *args: Any, stream: int) -> None:
            assert [type(a) for a in args].count(torch.Tensor) == self.kernel.source.count("'*")
            chosen.setdefault(self.kernel, "in the arena" if arenas else "before")

    bind = program._bind

    def bound(tensors: Any, addresses: Any, arena: torch.Tensor, *others: Any) -> Any:
        arenas.append(arena)
        return bind(tensors, addresses, arena, *others)

    monkeypatch.setattr(program, "_bind", bound)
    monkeypatch.setattr(torch_cuda, "_tuner_of", Tuner)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    here = {"missing": "", "device": torch.device("cpu"), "load": LoadedKernel}
    move_to(program, replace(program._tools.place, first_launches="apart", **here))
    for _ in range(2):
        step(x)
    launches = [one.launch.function for part in program.layout.parts for one in part.launches]
    assert len(arenas) == 1
    assert chosen == {f: "before" for f in launches if isinstance(f, TritonKernel)} != {}


def test_second_derivatives_draw_what_the_forward_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.Generator()
    is_captured = [False]
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: gpu.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: gpu.set_state(state))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured[0])
    states = GeneratorStates([GPU, torch.device("cpu"), GPU])

    def draws() -> list[torch.Tensor]:
        return [torch.rand(3), torch.rand(3, generator=gpu)]

    first = draws()
    assert states.differ_from(GeneratorStates([GPU]))
    with states.again():
        torch.testing.assert_close(draws(), first, rtol=0, atol=0)
    after = draws()
    with states.again():
        draws()
    assert not any(map(torch.equal, after, first)), "later draws go on as without"
    is_captured[0] = True
    captured = GeneratorStates([GPU])
    with pytest.raises(RuntimeError, match="CUDA graph captured a forward"), captured.again():
        pass


def test_settings_of_a_user_do_not_make_graphs_inside_closures() -> None:
    asked = {"triton.cudagraphs": True, "graph_partition": True, "shape_padding": True}
    with config.patch(asked), settings():
        found = config.get_config_copy()
    assert not any(found[name] for name in asked)


@NEEDS_TRITON
@pytest.mark.parametrize("name", ["max_autotune", "benchmark_fusion"])
def test_what_would_measure_on_a_gpu_that_is_not_here_is_refused_by_name(name: str) -> None:
    step = lazyinline.compile_step(
        Around(lambda layers, x: layers[0](x).square().mean(), nn.Linear(4, 4)), target=TARGET
    )
    refused = pytest.raises(lazyinline.PlanError, match=f"Inductor's {name}")
    with config.patch({name: True}), refused:
        step(torch.randn(2, 4))
    with config.patch({name: True}), pytest.raises(lazyinline.PlanError, match="Switch that off"):
        InductorBackend().lower([leaf_on_a_gpu(lambda x: x.sin() * 2)], lambda: None)


def leaf_on_a_gpu(function: Callable[[torch.Tensor], torch.Tensor]) -> Leaf:
    """Returns a closure of a model on CUDA."""
    model = Around(lambda layers, x: function(x), nn.Identity())
    (leaf,) = lazyinline.capture(model, (torch.randn(8, 4),)).closures
    return moved_leaf(decompose_leaf(leaf, EagerBackend()), GPU)  # type: ignore[arg-type]


@NEEDS_TRITON
def test_what_inductor_leaves_to_pytorch_is_written_where_the_plan_has_it() -> None:
    """A reduction that ends in a sum and a cast: neither allocates, so nothing is copied."""
    with gpu_described(target_named(TARGET)):
        launches = record_graph(leaf_on_a_gpu(lambda x: x.sum(0).to(torch.bfloat16))).launches
    assert [launch.name for launch in launches] == ["sum.dim_IntList", "copy_"]
    assert not any(launch.results for launch in launches)


def test_a_stage_of_a_pipeline_on_a_gpu_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so no arena of the CPU, whose addresses its kernels would get."""
    state = SimpleNamespace(goal=SimpleNamespace(kind="rank"), linked=[])
    state.context = SimpleNamespace(options=SimpleNamespace(backend="inductor"))
    monkeypatch.setattr(link, "devices_of", lambda flats: [GPU])
    found = link.hindrance(state)  # type: ignore[arg-type]
    assert found is not None and found.reason == "a stage of a pipeline is planned on the CPU alone"


def does(what: Callable[..., Any], region: Callable[[], Any]) -> nn.Module:
    def forward(_: nn.Module, *args: Tensor) -> Any:
        with region():
            return what(*args)

    return Around(forward)


@lazy_inline
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).float().sin()


def on_gpu(enabled: bool = True) -> Any:
    return torch.autocast("cuda", dtype=torch.bfloat16, enabled=enabled)


def captured(model: nn.Module, *args: Tensor) -> Program:
    return capture_model(Subject(model, args), train=True, for_gpu=True).program


def result_dtype(what: Callable[..., Any], *args: Tensor, region: Any = on_gpu) -> torch.dtype:
    (result,) = captured(does(what, region), *args).outputs
    assert isinstance(result.type, TensorType)
    return result.type.dtype


IDS = torch.arange(4)
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
X, LOW, DOUBLE = torch.ones(4, 4), torch.ones(4, 4, dtype=BF16), torch.ones(4, 4, dtype=F64)
# https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float16
RULES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], torch.dtype]] = {
    "products are low": (torch.mm, (X, X), BF16),
    "of layers too": (F.linear, (X, X), BF16),
    "of what is composed too": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (X, X), BF16),
    "inside of what has no rule too": (lambda x: F.cross_entropy(x, IDS), (LOW,), F32),
    "norms are wide": (lambda x: F.layer_norm(x, (4,)), (LOW,), F32),
    "exponentials are wide": (torch.exp, (LOW,), F32),
    "a softmax is wide": (lambda x: x.softmax(-1), (LOW,), F32),
    "a sum is wide": (torch.sum, (LOW,), F32),
    "a sum that is told is as told": (lambda x: x.sum(dtype=BF16), (LOW,), BF16),
    "a norm of a matrix is wide": (torch.norm, (LOW,), F32),
    "the widest wins": (torch.addcmul, (X, LOW, LOW), F32),
    "double stays": (torch.mm, (DOUBLE, DOUBLE), F64),
    "others stay": (torch.sin, (LOW,), BF16),
    "what is low stays": (torch.mm, (LOW, LOW), BF16),
}


@pytest.mark.parametrize("rule", RULES)
def test_operators_get_what_pytorch_gives_them_on_a_gpu(rule: str) -> None:
    what, args, dtype = RULES[rule]
    assert result_dtype(what, *args) == dtype


def test_attention_is_cast_where_its_operands_are_not_low() -> None:
    low = torch.ones(1, 2, 4, 8, dtype=BF16)
    for num_wide in range(3):
        wide = [low.float()] * num_wide
        operands = *wide, *[low] * (3 - num_wide)
        program = captured(does(F.scaled_dot_product_attention, on_gpu), *operands)
        assert str(program).count("to.dtype") == num_wide


@pytest.mark.parametrize("device", ["cuda", "cpu"])  # a model asks its tensors for theirs
def test_a_region_that_is_off_is_off(device: str) -> None:
    def inside(a: Tensor) -> Tensor:
        with torch.autocast(device, enabled=False):
            return a @ a

    assert result_dtype(inside, X) == F32
    assert result_dtype(torch.mm, X, X, region=lambda: on_gpu(False)) == F32


def test_a_region_around_the_call_counts_and_is_left_as_it_was() -> None:
    init, dtype = torch.autocast.__init__, torch.get_autocast_dtype("cuda")
    with torch.autocast("cpu", dtype=BF16):
        assert result_dtype(torch.mm, X, X, region=torch.no_grad) == BF16
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")
    assert torch.autocast.__init__ is init
    assert torch.get_autocast_dtype("cuda") == dtype
    assert result_dtype(torch.mm, X, X, region=torch.no_grad) == F32


def test_blocks_in_and_out_of_a_region_share_nothing() -> None:
    def forward(layers: Any, x: Tensor) -> Tensor:
        with on_gpu():
            x = layers[1](layers[0](x))
        return layers[3](layers[2](x))

    text = str(captured(Around(forward, *(Block() for _ in range(4))), X))
    assert text.count("closure @Block") == 2
    assert text.count("bf16[4,4] = linear") == 1 and text.count("f32[4,4] = linear") == 1


def test_what_is_unsafe_in_a_region_is_refused_with_the_line_as_on_a_gpu() -> None:
    with pytest.raises(Exception, match="unsafe to autocast"):
        captured(does(F.binary_cross_entropy, on_gpu), X, X)
