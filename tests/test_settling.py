"""A forward that notes something in an object of the model: allowed once, refused if it goes on."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lazyinline
from lazyinline import CaptureError


class Noting(nn.Module):
    """Decides its kind of problem at the first call, as Hugging Face's classifiers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.config = SimpleNamespace(kind=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.kind is None:
            self.config.kind = "regression"
        return self.linear(x) if self.config.kind == "regression" else x


class FirstIsSpecial(Noting):
    """Computes something else at its first call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.kind is None:
            self.config.kind = "seen"
            return self.linear(x)
        return x


class Counting(Noting):
    """Counts its calls in an object."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.config.kind = (self.config.kind or 0) + 1
        return self.linear(x) * self.config.kind


class Growing(nn.Module):
    """Remembers the largest length it saw in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.length = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.length:
            self.length = len(x)
        return self.linear(x)


class CountingItself(Growing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.length += 1
        return self.linear(x)


class Making(Growing):
    """Makes an attribute at its first call, and goes another way at the second."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "made"):
            self.made = True
            return self.linear(x)
        return x


def test_a_plain_attribute_that_is_written_once_stays_written() -> None:
    model = Growing()
    expected = copy.deepcopy(model)
    compiled = lazyinline.compile(model, backend="eager")
    for rows in (2, 3, 3, 1):
        x = torch.randn(rows, 4)
        assert torch.equal(compiled(x), expected(x))
        assert model.length == expected.length


@pytest.mark.parametrize("kind", [CountingItself, Making])
def test_an_attribute_that_goes_on_changing_or_changes_the_program_is_refused(
    kind: type[Growing],
) -> None:
    model = kind()
    expected = copy.deepcopy(model)
    with pytest.raises(CaptureError, match="changes attribute"):
        lazyinline.compile_step(model, loss_fn=torch.sum, backend="eager")(torch.randn(2, 4))
    assert model.length == 0
    assert not hasattr(model, "made")
    compiled = lazyinline.compile(model, backend="eager")
    for _ in range(4):
        x = torch.randn(2, 4)
        assert torch.equal(compiled(x), expected(x))
        assert model.length == expected.length


def test_what_is_noted_once_stays_noted_and_the_numbers_are_eagers() -> None:
    model = Noting()
    expected = copy.deepcopy(model)
    compiled = lazyinline.compile(model, backend="eager")
    x = torch.randn(2, 4)
    for _ in range(2):
        assert torch.equal(compiled(x), expected(x))
    assert model.config.kind == expected.config.kind == "regression"


@pytest.mark.parametrize("kind", [FirstIsSpecial, Counting])
def test_forward_that_depends_on_what_it_changes_is_refused_and_put_back(
    kind: type[Noting],
) -> None:
    model = kind()
    expected = copy.deepcopy(model)
    with pytest.raises(lazyinline.CaptureError, match="changes a dictionary or object"):
        lazyinline.compile_step(model, loss_fn=torch.sum, backend="eager")(torch.randn(2, 4))
    assert model.config.kind is None
    compiled = lazyinline.compile(model, backend="eager")
    for _ in range(4):
        x = torch.randn(2, 4)
        assert torch.equal(compiled(x), expected(x))
        assert model.config.kind == expected.config.kind


class MakesItsLoss(nn.Module):
    """As the models of Hugging Face do for their labels."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.CrossEntropyLoss(label_smoothing=0.1)(self.head(x), target)


def test_a_module_that_the_forward_makes_is_its_own_and_changes_nothing() -> None:
    torch.manual_seed(0)
    model, expected = MakesItsLoss(), MakesItsLoss()
    expected.load_state_dict(model.state_dict())
    compiled = lazyinline.compile(model, backend="eager")
    for seed in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        target = torch.tensor([0, 1, 2, 0, 1])
        for each in (compiled, expected):
            each(x, target).backward()
    assert compiled.last_report.num_compiles == 1 and not compiled.last_report.ran_eagerly
    torch.testing.assert_close(model.head.weight.grad, expected.head.weight.grad)
