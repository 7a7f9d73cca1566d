"""A capture that is given up leaves nothing: what an argument holds is as eager leaves it."""

import collections
import gc
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import lazyinline


class Kept:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []


class Slotted:
    """The same without a dictionary."""

    __slots__ = ("last", "tensors")

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []


class Listed(list[Tensor]):
    """A list that PyTorch does not take apart."""


def _fill_list(held: Any, new: Tensor) -> None:
    held.append(new)


def _fill_table(held: Any, new: Tensor) -> None:
    held[len(held)] = new


def _fill_object(held: Any, new: Tensor) -> None:
    held.tensors.append(new)
    held.last = new


def _fill_attribute(held: Any, new: Tensor) -> None:
    held.tensors = [*held.tensors, new]


def _deep(held: Any) -> Any:
    return held[0]["kept"]


HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], None]]] = {
    "object": (Kept, _fill_object),
    "object, bound anew": (Kept, _fill_attribute),
    "slots": (Slotted, _fill_object),
    "namespace": (lambda: types.SimpleNamespace(tensors=[]), _fill_object),
    "list": (list, _fill_list),
    "list of a class": (Listed, _fill_list),
    "deque": (collections.deque, _fill_list),
    "dictionary": (dict, _fill_table),
    "dictionary that counts": (collections.OrderedDict, _fill_table),
    "dictionary that makes": (lambda: collections.defaultdict(list), _fill_table),
    "object in containers": (
        lambda: ({"kept": Kept()},),
        lambda held, new: _fill_object(_deep(held), new),
    ),
    "object in an object": (
        lambda: types.SimpleNamespace(held=[Slotted()]),
        lambda held, new: _fill_object(held.held[0], new),
    ),
}


def tensors_in(held: Any) -> list[Tensor]:
    """Every tensor that can be reached, in the order in which they were put in."""
    found: dict[int, Tensor] = {}
    todo, seen = [held], set[int]()
    while todo:
        value = todo.pop(0)
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found[id(value)] = value
        else:
            todo += gc.get_referents(value)
    return list(found.values())


def goes_on(hidden: Tensor) -> None:
    """Nothing ends the capture."""


def needs_a_value(hidden: Tensor) -> None:
    hidden.sum().item()


def leaves_pytorch(hidden: Tensor) -> None:
    hidden.detach().numpy()


def shows_it(hidden: Tensor) -> None:
    str(hidden)


def fails_on_a_fake(hidden: Tensor) -> None:
    if isinstance(hidden, FakeTensor):
        raise ZeroDivisionError


ENDS = (goes_on, needs_a_value, leaves_pytorch, shows_it, fails_on_a_fake)


class Net(nn.Module):
    def __init__(
        self, fill: Callable[[Any, Tensor], None], end: Callable[[Tensor], None], returns: bool
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.fill, self.end, self.returns = fill, end, returns

    def forward(self, x: Tensor, held: Any) -> Any:
        self.fill(held, self.linear(x))
        all_of_them = torch.cat(tensors_in(held))
        self.end(all_of_them)
        return (all_of_them.mean(0), held) if self.returns else all_of_them.mean(0)


@pytest.mark.parametrize("end", ENDS, ids=lambda end: str(end.__name__))
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.sweep(keep=["slots", "list-", "dictionary-", "object in"])
def test_what_an_argument_holds_is_as_eager_leaves_it(
    holder: str, end: Callable[[Tensor], None]
) -> None:
    _plays_as_eager(holder, end, returns=True)


@pytest.mark.parametrize("holder", HOLDERS)
def test_an_argument_that_is_not_returned_is_filled_at_each_call(holder: str) -> None:
    _plays_as_eager(holder, goes_on, returns=False)


def _plays_as_eager(holder: str, end: Callable[[Tensor], None], *, returns: bool) -> None:
    make, fill = HOLDERS[holder]
    net = Net(fill, end, returns)
    compiled = lazyinline.compile(net, backend="eager")
    own, eagers = make(), make()
    with torch.no_grad():
        for length in (2, 2, 3):
            x = torch.randn(length, 3)
            result, expected = compiled(x, own), net(x, eagers)
            if returns:
                assert result[1] is own
                result, expected = result[0], expected[0]
            assert type(result) is Tensor
            torch.testing.assert_close(result, expected)
            for kept, eagers_kept in zip(tensors_in(own), tensors_in(eagers), strict=True):
                assert type(kept) is Tensor
                torch.testing.assert_close(kept, eagers_kept)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError, RecursionError])
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.sweep(keep=["slots", "list-", "object in"])
def test_an_error_of_any_kind_leaves_no_tensor_of_a_capture(
    holder: str, error: type[BaseException]
) -> None:
    make, fill = HOLDERS[holder]

    def end(hidden: Tensor) -> None:
        raise error

    own, kept = make(), list[Tensor]()

    def fill_both(held: Any, new: Tensor) -> None:
        fill(held, new)
        fill(own, new)  # what it captured
        kept.append(new)

    compiled = lazyinline.compile(Net(fill_both, end, returns=False), backend="eager")
    held = make()
    with pytest.raises(error):
        compiled(torch.randn(2, 3), held)
    assert all(type(tensor) is Tensor for tensor in tensors_in([held, own, kept]))


def test_the_door_raises_where_a_tensor_of_a_capture_was_left() -> None:
    from lazyinline.frontend.tracing.torch_tracing import new_fake_mode

    with new_fake_mode():
        left = torch.ones(3)

    class Leaky(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return [{"left": left}, x.sum().item()]

    with pytest.raises(lazyinline.VerifyError, match="a capture was left"):
        lazyinline.compile(Leaky(), backend="eager")(torch.randn(3))
