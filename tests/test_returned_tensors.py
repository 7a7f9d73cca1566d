"""What a model returns is the very tensor that eager returns, or shares its memory as there."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from comparing import assert_equals_eager
from contracts import passing
from models import Made
from torch import Tensor, nn
from worlds import assert_as_eager

import lazyinline


def returns(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    self.count.add_(1)
    hidden = self.linear(x)
    bias = self.linear.bias
    own = hidden, hidden, hidden.detach(), torch.zeros_like(hidden), hidden[0]
    return *own, self.count, x, x[0], bias, bias.detach()


def _relations(model: Any, x: Tensor, results: tuple[Tensor, ...]) -> list[object]:
    known = [x, model.count, model.linear.bias, *results]
    return [
        (
            [other is result for other in known],
            [other.untyped_storage()._cdata == result.untyped_storage()._cdata for other in known],
            result.requires_grad,
            result.storage_offset(),
        )
        for result in results
    ]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.sweep(keep="eager")
def test_results_are_the_tensors_that_eager_returns(backend: str, train: bool) -> None:
    model: Any = Made(returns, linear=nn.Linear(4, 4), count=nn.Buffer(torch.zeros(4)))
    compiled, x = lazyinline.compile(model, backend=backend), torch.randn(3, 4)
    with torch.set_grad_enabled(train):
        wanted = model(x)
        for _ in range(2):
            found = compiled(x)
            assert _relations(model, x, found) == _relations(model, x, wanted)
            assert any(result is x for result in found)
            assert any(result is model.count for result in found)


# Two results that share memory, made of one tensor of shape (3, 4).
SHARING: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "itself and flat": lambda h: (h, h.view(-1)),
    "flat and itself": lambda h: (h.view(-1), h),
    "detached": lambda h: (h, h.detach()),
    "detached first": lambda h: (h.detach(), h),
    "columns": lambda h: (h[:, 1:3], h),
    "transposed": lambda h: (h.t(), h),
    "expanded": lambda h: (h, h[:1].expand(3, 4)),
    "halves": lambda h: (h[:, :2], h[:, 2:]),
    "saved for the backward": lambda h: (h.exp().view(-1), h.exp()),
    "one saved for the backward": lambda h: (lambda e: (e.view(-1), e))(h.exp()),
    "chunks": lambda h: (h, h.chunk(2, dim=1)[1]),
    "equal, and apart": lambda h: (h.exp(), h.exp()),
}
ROWS = {"rows": lambda h: (h[1], h[1:, 2:])}


def sharing(name: str) -> nn.Module:
    """Returns a model whose results share memory."""
    return Made(lambda self, x: (SHARING | ROWS)[name](self.linear(x)), linear=nn.Linear(4, 4))


def played(
    model: nn.Module, run: Callable[..., Any], changed: int, used: Sequence[int]
) -> list[Tensor] | str:
    """Returns results and gradients after one of two results was changed in place, or the error."""
    found = []
    x = torch.linspace(-1, 1, 12).view(3, 4)
    for _ in range(2):
        results = run(x)
        try:
            results[changed].mul_(2.0)
            sum((results[i] ** 2 * (i + 1)).sum() for i in used).backward()
        except RuntimeError as error:
            return str(error).split(":")[0]
        found += [r.detach().clone() for r in results]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


# A compiled model is one node of autograd's graph: what its backward saved must not be changed,
# whichever results the loss uses.
SAVED = ("saved for the backward", "equal, and apart")
USED = [(name, (0, 1)) for name in SHARING]
USED += [(name, used) for name in SHARING if name not in SAVED for used in ((0,), (1,))]


@pytest.mark.sweep(
    keep=[
        *(f"eager-{i % 2}-{name}-(0, 1)" for i, name in enumerate(SHARING) if i % 3),
        *("eager-0-columns-(1,)", "eager-1-chunks-(0,)"),
    ]
)
@pytest.mark.parametrize(("name", "used"), USED, ids=str)
@pytest.mark.parametrize("changed", [0, 1])
def test_results_that_share_memory_may_be_changed_in_place(
    backend: str, name: str, changed: int, used: Sequence[int]
) -> None:
    torch.manual_seed(0)
    model = sharing(name)
    other = copy.deepcopy(model)
    expected = played(model, model, changed, used)
    found = played(other, lazyinline.compile(other, backend=backend), changed, used)
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected or isinstance(expected, str)
        return
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.sweep(keep="eager")
def test_parts_of_one_tensor_that_is_not_returned_are_refused_when_changed(backend: str) -> None:
    run = lazyinline.compile(sharing("rows"), backend=backend)
    for _ in range(2):
        results = run(torch.ones(3, 4))
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            results[0].mul_(2.0)


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.sweep(
    keep=["eager-flat", "eager-det", "eager-exp", "eager-chunks", "inductor-columns"]
)
def test_without_gradients_results_share_memory_as_in_eager(backend: str, name: str) -> None:
    model = sharing(name)
    compiled, x = lazyinline.compile(model, backend=backend), torch.randn(3, 4)
    left: list[int] = []
    with torch.no_grad():
        for run in (model, compiled, compiled):
            first, second = run(x)
            first.zero_()
            left.append(int(second.count_nonzero()))
    assert left[1:] == [left[0], left[0]]


def test_a_function_of_the_users_that_returns_a_view_has_its_own_gradient() -> None:
    turned = passing(lambda gradient: -gradient)
    model = Made(lambda self, x: (h := self.linear(x), turned.apply(h)), linear=nn.Linear(4, 4))
    assert_equals_eager(model, (torch.ones(3, 4),))


MODEL = """
SHARED = {"list": [1, 2]}

class Held: pass
class Slotted:
    __slots__ = ("value",)
    def __init__(self, value): self.value = value

def captured(value): return lambda: value
def holder(value): return types.SimpleNamespace(value=value)
def twice(y):
    both = [y]
    return both, both
def inputs(): return example(), [[torch.ones(2)]]
def forward(self, x, given):
    y = self.linear(x)
    return y, RESULT

model = made(block(forward)(table={"a": 1}, nested={"a": [1]}), "v.eval()")
"""

# What is returned beside a tensor y, and how the tensors in a result r are read.
LEADING: dict[str, tuple[str, str]] = {
    "generator": ("(y * i for i in range(2))", "list(r)"),
    "iterator": ("iter([y])", "list(r)"),
    "set": ("{y}", "list(r)"),
    "function": ("captured(y)", "[r()]"),
    "object": ("holder(y)", "[r.value]"),
    "slots": ("Slotted([y])", "r.value"),
    "cell": ("types.CellType(y)", "[r.cell_contents]"),
    "exception": ("ValueError(y)", "[r.args[0]]"),
    "module": ("self.linear", "[r.weight]"),
}


READ_ONCE = ("generator", "iterator")


@pytest.mark.parametrize("name", LEADING)
def test_a_result_that_leads_to_tensors_leads_to_eagers(name: str) -> None:
    result, read = LEADING[name]
    reading = f"def read(r, y): return [type(r).__name__, *({read})]"
    look = "[r[0], *read(r[1], r[0]), *(type(t).__name__ for t in read(r[1], r[0]))]"
    if name in READ_ONCE:
        look = "[r[0], *read(r[1], r[0])]"
    assert_as_eager(MODEL.replace("RESULT", result), reading, look=look, scene=[""] * 3)


# The very object that the user has.
SAME: dict[str, tuple[str, str]] = {
    "in an argument": ("given[0]", "r[1] is given[1][0]"),
    "in an attribute": ("[self.nested['a']]", "r[1][0] is model.nested['a']"),
    "in a global": ("{'n': SHARED['list']}", "r[1]['n'] is SHARED['list']"),
    "twice": ("twice(y)", "r[1][0] is r[1][1]"),
}


@pytest.mark.parametrize("name", SAME)
def test_a_returned_list_is_the_one_that_eager_returns(name: str) -> None:
    result, is_same = SAME[name]
    outcome = assert_as_eager(MODEL.replace("RESULT", result), look=is_same)
    assert [seen["outputs"] for seen in outcome.seen] == [True, True]


CLASSES = """
def inputs():
    x = torch.ones(2 + next(lengths), 2)
    return x, x.shape
lengths = itertools.count(1)
model = block(lambda self, x, size: (RESULT))()
def classes(value):
    if isinstance(value, dict):
        return [type(value), *(part for k, v in value.items() for part in (k, classes(v)))]
    if isinstance(value, (list, tuple)):
        return [type(value), *map(classes, value)]
    return type(value)
"""


@pytest.mark.parametrize(
    "result",
    [
        *("x.shape", "[x, {'size': x.size()}]", "collections.OrderedDict(b=x, a=x.shape)"),
        *("collections.defaultdict(list, a=[x])", "(x, size.numel(), size)"),
    ],
)
def test_a_result_has_the_classes_that_eager_gives_it(result: str) -> None:
    """The last two lengths are run by one program, whose sizes are symbols."""
    look = "[r, str(classes(r))]"
    outcome = assert_as_eager(
        CLASSES.replace("RESULT", result), look=look, scene=[""] * 3, fallback="error"
    )
    assert not outcome.eagerly
