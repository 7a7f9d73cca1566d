"""A call that eager refuses: eager's own error, at once, in few lines."""

import functools
import inspect
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from comparing import assert_equals_eager
from link_tree import package_folders
from models import Around, Block, Made
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import has_torch_function as ask_who_intercepts

import lazyinline
from lazyinline.frontend.capture import capture
from lazyinline.reuse.errors import INSTEAD

MAX_FRAMES_OF_OURS = 8
SAME_AS_TORCHS = {"model", "dynamic", "backend"}
PIPELINES = ("share_optimizer", "gather", "state_dict", "load_state_dict", "save", "load", "step")


class Net(nn.Module):
    """Raises where it is told to: in an embedding, in its own Python, in a block, at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.body = nn.Sequential(Block(8), Block(8))
        self.head = nn.Linear(8, 4)

    def forward(self, ids: Tensor, scale: Any = 1.0, table: Any = None) -> Tensor:
        if ids.dim() != 2:
            raise ValueError(f"ids have {ids.dim()} dimensions, and not two")
        hidden = self.body(self.embed(ids))
        if table is not None:
            hidden = hidden * table["factor"]
        return self.head(hidden) * scale


def ids(length: int = 5) -> Tensor:
    return torch.arange(2 * length).reshape(2, length) % 10


WRONG: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "an exception of its own": lambda run: run(ids().flatten()),
    "no tensor": lambda run: run([[1, 2], [3, 4]]),
    "an unknown keyword": lambda run: run(ids(), factor=2.0),
    "a text for a number": lambda run: run(ids(), torch.ones(2, 5, 4), {"factor": "x"}),
    "a shape that does not fit at the end": lambda run: run(ids(), torch.ones(3)),
    "a shape that does not fit": lambda run: run(ids(), 1.0, {"factor": torch.ones(2, 5, 9)}),
    "sizes that do not fit, others than before": lambda run: run(ids(7), torch.ones(2, 5, 4)),
}


def raised_by(call: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def num_frames_of_ours(error: Exception) -> int:
    frames = traceback.extract_tb(error.__traceback__)
    files = [pathlib.Path(frame.filename).resolve() for frame in frames]
    return sum(folder in file.parents for file in files for folder in package_folders())


@pytest.mark.sweep(keep=["own-0", "no tensor-0", "number-0", "before-0", "own-1", "at the end-2"])
@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_call_raises_what_eager_raises_after_one_capture(
    kind: str, before: int, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    compiled = lazyinline.compile(net, backend="eager")
    for length in range(5, 5 + before):
        compiled(ids(length)).sum().backward()
    expected = raised_by(lambda: WRONG[kind](net))
    with mock.patch.object(capture, "_record", wraps=capture._record) as captured:
        found = raised_by(lambda: WRONG[kind](compiled))
    assert (type(found), str(found)) == (type(expected), str(expected))
    assert found.__cause__ is None and found.__context__ is None
    assert num_frames_of_ours(found) <= MAX_FRAMES_OF_OURS
    tries = 1 + (before > 0)  # with sizes open, and as they are
    assert captured.call_count <= tries
    assert [r for r in caplog.records if r.name.startswith("torch._subclasses")] == []
    torch.testing.assert_close(compiled(ids()), net(ids()))
    assert not compiled.last_report.ran_eagerly


class Deciding(Net):
    """Runs eagerly, as it asks for the value of a tensor."""

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if ids.sum() > 0:
            ids = ids.flip(0)
        return super().forward(ids, *args, **kwargs)


@functools.cache  # each wrong call is to leave it as it was for the next one
def deciding() -> tuple[nn.Module, Any]:
    net = Deciding()
    return net, lazyinline.compile(net, backend="eager")


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.sweep(keep=["of its own", "no tensor", "[a shape that does not fit]"])
def test_a_wrong_call_of_a_model_that_runs_eagerly_raises_what_eager_raises(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    net, compiled = deciding()
    expected = raised_by(lambda: WRONG[kind](net))
    found = raised_by(lambda: WRONG[kind](compiled))
    assert (type(found), str(found)) == (type(expected), str(expected))
    assert [r for r in caplog.records if r.name.startswith("torch._subclasses")] == []
    torch.testing.assert_close(compiled(ids()), net(ids()))


def test_what_only_a_capture_fails_at_runs_alone_twice_and_then_in_parts() -> None:
    class Asking(Net):
        def forward(self, ids: Tensor) -> Tensor:
            if isinstance(self.head.weight, FakeTensor):
                raise RuntimeError("these are not my weights")
            return super().forward(ids)

    net = Around(lambda layers, ids: layers[0](ids) + layers[1](ids), Asking(), Net())
    compiled = lazyinline.compile(net, backend="eager")
    around = [set(), set(), {"layers.1"}, {"layers.1"}, {"layers.1", "layers.0.body"}]
    for expected in around:
        torch.testing.assert_close(compiled(ids()), net(ids()))
        assert "these are not my weights" in compiled.last_report.ran_eagerly
        found = {part.path for part in compiled.last_report.parts if part.num_programs}
        assert found == expected


class Asks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1 if x.sum().item() > 100 else x)


def nested(depth: int, inner: nn.Module) -> nn.Module:
    return inner if depth == 0 else nn.Sequential(nested(depth - 1, inner), nn.Linear(4, 4))


@pytest.fixture
def pythons_own_limit() -> Iterator[None]:
    before = sys.getrecursionlimit()  # parts of PyTorch raise it
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("pythons_own_limit")
@pytest.mark.parametrize("inner", [nn.Linear, Asks])
@pytest.mark.parametrize("depth", [25, 60, 100, 150, 200])
@pytest.mark.sweep(keep="200-Asks")
def test_modules_nested_deep_run_eagerly_at_once_where_no_capture_can_follow(
    depth: int, inner: type[nn.Module]
) -> None:
    net = nested(depth, inner(4, 4))
    x = torch.randn(2, 4)
    expected = net(x)
    compiled = lazyinline.compile(net, backend="eager")
    with mock.patch.object(capture, "_record", wraps=capture._record) as captured:
        for _ in range(4):
            torch.testing.assert_close(compiled(x), expected)
    assert captured.call_count <= (4 if depth > 25 else 4 * (depth + 1))
    if depth >= 150:  # where it begins depends on the frames that each level takes
        assert "nested so deep" in compiled.last_report.ran_eagerly
        with pytest.raises(lazyinline.CaptureError, match="nested so deep"):
            lazyinline.compile_step(net, loss_fn=torch.sum, backend="eager")(x)


@pytest.mark.parametrize(
    "name", sorted({*inspect.signature(torch.compile).parameters} - SAME_AS_TORCHS)
)
@pytest.mark.parametrize("function", [lazyinline.compile, lazyinline.compile_step])
def test_an_argument_of_torchs_compile_is_refused_with_what_to_do_instead(
    function: Callable[..., Any], name: str
) -> None:
    with pytest.raises(TypeError, match=name) as caught:
        function(Net(), **{name: None})
    assert INSTEAD.get(name, "unexpected keyword") in str(caught.value)


PUBLIC_FUNC = [getattr(lazyinline.func, name) for name in lazyinline.func.__all__]
DOORS = [*filter(inspect.isfunction, PUBLIC_FUNC)]
DOORS += [value for name, value in vars(lazyinline.Pipeline).items() if name in PIPELINES]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__qualname__)
def test_tracebacks_of_our_errors_end_at_a_public_function(door: Any) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise lazyinline.PlanError("no")

    (cell,) = door.__closure__  # which holds the function behind it
    behind, cell.cell_contents = cell.cell_contents, fails
    try:
        found = raised_by(door)
    finally:
        cell.cell_contents = behind
    assert behind is door.__wrapped__
    assert num_frames_of_ours(found) == 1


def test_a_forward_that_goes_on_after_an_error_of_numbers_does_so_at_each_call() -> None:
    def whitening(self: Any, x: Tensor) -> Tensor:
        matrix = torch.eye(4) * x.mean()
        try:
            factor = torch.linalg.cholesky(matrix)
        except torch.linalg.LinAlgError:
            factor = torch.linalg.cholesky(matrix + 9 * torch.eye(4))
        return self.linear(x) @ factor  # type: ignore[no-any-return]

    batches = [(torch.full((2, 4), float(mean)),) for mean in (1, 1, -1, 1, -2)]
    model = Made(whitening, linear=nn.Linear(4, 4))
    told = assert_equals_eager(model, batches=batches).told
    assert "names LinAlgError" in told.ran_eagerly


def test_a_forward_that_asks_who_intercepts_operators_runs_eagerly() -> None:
    """A tensor is of a class that does while it is traced."""
    asks = lambda self, x: self.linear(x) + float(ask_who_intercepts((x,)))  # noqa: E731
    model = Made(asks, linear=nn.Linear(4, 4))
    told = assert_equals_eager(model, batches=[(torch.ones(2, 4),)] * 3).told
    assert "_has_torch_function" in told.ran_eagerly
