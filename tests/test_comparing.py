"""The comparison with eager itself: every door leads through it, and it sees what differs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import DOORS, Door, assert_equals_eager
from models import Attention, BatchNormBlock, Block, Net, batch
from torch import Tensor, nn

from lazyinline import lazy_inline


@pytest.mark.smoke
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.sweep(keep="eager")
def test_dropout_and_running_statistics_are_eagers_by_every_door(door: Door, backend: str) -> None:
    kinds = (lambda: Block(8, norm=True, dropout=0.1), lambda: BatchNormBlock(8))
    for kind in kinds:
        model = Net(kind, width=8)
        data = [(batch(5, 8, seed=seed),) for seed in range(3)]
        assert_equals_eager(
            model,
            batches=data,
            door=door,
            backend=backend,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        )
        if door == "compile":
            model.zero_grad()  # a copy has no gradients
            assert_equals_eager(model.eval(), (batch(5, 8),), backend=backend)


def test_blocks_are_shared_marked_or_not() -> None:
    tokens = torch.randn(2, 5, 8).requires_grad_()  # as between layers
    for kind in (Attention, lazy_inline(type("Marked", (Attention,), {}))):
        outcome = assert_equals_eager(nn.Sequential(kind(), kind(), kind()), (tokens,))
        assert outcome.shared == 2


class Differs(nn.Module):
    """Another function in its copy."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.is_copy = what, False
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        other = Differs(self.what)
        other.load_state_dict(self.state_dict())
        other.is_copy = True
        return other

    def forward(self, x: Tensor) -> Any:
        if self.is_copy and self.what == "inputs":
            x.detach().add_(1)
            x = x - 1
        y = self.linear(x)
        if not self.is_copy:
            return y
        if self.what == "buffers":
            self.calls.add_(1)
        if self.what == "generators":
            torch.rand(1)
        if self.what == "gradients":
            return y.detach() + (y - y.detach()) * 2
        return {"numbers": y + 1e-3, "layout": y.t().contiguous().t(), "type": (y,)}.get(
            self.what, y
        )


@pytest.mark.parametrize(
    "what", ["numbers", "layout", "type", "gradients", "buffers", "generators", "inputs"]
)
def test_what_differs_from_eager_is_seen(what: str) -> None:
    with pytest.raises(AssertionError):
        assert_equals_eager(Differs(what), (batch(),))
    assert_equals_eager(Differs(""), (batch(),))


@pytest.fixture
def only_when_comparing(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        pytest.skip("writing golden texts")


@pytest.mark.usefixtures("only_when_comparing")
def test_same_text_passes_and_other_text_shows_the_difference(
    golden: Callable[[str, str], None],
) -> None:
    golden("golden_fixture", "first line\nsecond line")
    with pytest.raises(pytest.fail.Exception, match=r"\n first line\n-second line\n\+third line"):
        golden("golden_fixture", "first line\nthird line")


@pytest.mark.usefixtures("only_when_comparing")
def test_missing_text_says_how_to_write_it(golden: Callable[[str, str], None]) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"never\.txt does not exist.*--update-golden"):
        golden("never", "text")
