"""Whatever ``torch.Tensor`` has, asked or set by a forward: answers and changes are eager's."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_same
from models import Made
from torch import Tensor, nn

import lazyinline
from lazyinline.frontend.tracing.torch_tensor_answers import ANSWERS, OPERATORS, watched_names

OWN = sorted(name for name in set(dir(Tensor)) - set(dir(object)) if name != "__module__")
METHODS = [n for n in OWN if n in watched_names() or n[0] != "_" or n[:2] == "__"]
PLACES = ("input", "intermediate", "parameter", "buffer")
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.Size)


def run_net(self: Any, x: Tensor) -> Any:
    """Does something with a tensor of one place, and computes."""
    hidden = self.linear(x)
    places = {
        "input": x,
        "intermediate": hidden,
        "parameter": self.linear.weight,
        "buffer": self.table,
    }
    answer = self.do(places[self.place])
    return _shown(answer), self.linear(x) * 2 + self.table.sum()


def _shown(answer: Any) -> Any:
    """What can be compared of an answer."""
    if isinstance(answer, Tensor):
        return answer if answer.layout is torch.strided else str(answer.layout)
    if isinstance(answer, (tuple, list)):
        return [_shown(item) for item in answer]
    return answer if answer is None or isinstance(answer, _PLAIN) else type(answer).__name__


def with_as_little_as_it_takes(name: str, ask: Callable[..., Any], tensor: Tensor) -> Any:
    error: Exception | None = None
    other = tensor * 2
    for arguments in ((), (0,), (other,), (2.0,), (torch.float64,), (0, 1), (other, other)):
        try:
            return ask(*arguments)
        except (TypeError, IndexError) as now:
            error = now
    raise TypeError(name) from error


def asking(name: str) -> Callable[[Tensor], Any]:
    """Reads the attribute; calls it with as little as it takes."""

    def ask(tensor: Tensor) -> Any:
        found = getattr(tensor, name)
        return with_as_little_as_it_takes(name, found, tensor) if callable(found) else found

    return ask


def keeping(name: str) -> Callable[[Tensor], Any]:
    """Asks by what was found before anything was watched: ``f = torch.Tensor.name``."""
    kept = inspect.getattr_static(Tensor, name)
    kept = kept if callable(kept) else kept.__get__

    def ask(tensor: Tensor) -> Any:
        def both(*arguments: Any) -> Any:
            return kept(tensor, *arguments), list(map(kept, [tensor], *([a] for a in arguments)))

        return with_as_little_as_it_takes(name, both, tensor)

    return ask


def inputs() -> list[Tensor]:
    """Inputs of one layout that differ in all else that a tensor can be asked for."""
    view = torch.randn(4, 3)[1:]
    with torch.inference_mode():
        inference = torch.randn(3, 3)
    had = torch.randn(3, 3)
    had.add_(1)
    return [torch.randn(3, 3), view, inference, had]


def leaves() -> list[Tensor]:
    """The same of those that want a gradient."""
    first, second = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    second.grad = torch.ones(3, 3)
    third = torch.randn(3, 3, requires_grad=True) * 2
    return [first, second, third]


def state(tensor: Tensor | None) -> Any:
    """What is compared of a tensor after a run besides its numbers."""
    if tensor is None or tensor.layout is not torch.strided:
        return None
    held: Any = tensor
    return (
        *(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device),
        *(tensor.requires_grad, tensor.is_leaf, len(vars(tensor)), type(tensor)),
        *(held._backward_hooks is None, held._post_accumulate_grad_hooks is None),
        held.retains_grad,
    )


def played(model: Any, own: nn.Module, x: Tensor) -> Any:
    """Everything that a call returns and leaves, or the class of its error."""
    try:
        result = model(x)
    except lazyinline.LazyInlineError:
        raise
    except Exception as error:
        return type(error).__name__
    tensors = [x, *own.parameters(), *own.buffers()]
    gradients = [t.grad for t in tensors if t.is_leaf]
    return [result, [state(t) for t in tensors], tensors, gradients]


def assert_as_eager(do: Callable[[Tensor], Any], place: str, xs: list[Tensor]) -> list[str]:
    """Returns why calls ran eagerly; those that did not are compared with an eager run."""
    torch.manual_seed(0)
    net = Made(
        run_net, linear=nn.Linear(3, 3), table=nn.Buffer(torch.ones(3, 3)), place=place, do=do
    )
    eager = copy.deepcopy(net)
    compiled = lazyinline.compile(net, backend="eager")
    reasons = []
    for x in xs:
        twin = copied(x)
        torch.manual_seed(1)
        found = played(compiled, net, x)
        torch.manual_seed(1)
        expected = played(eager, eager, twin)
        report = compiled.last_report
        reasons.append(report.ran_eagerly if report is not None else "failed")
        if not reasons[-1]:
            assert_same(found, expected, "a call", 2e-6)
    return reasons


def copied(x: Tensor) -> Tensor:
    """An equal tensor, in equal memory of its own."""
    if x.is_inference():
        with torch.inference_mode():
            return x.clone()
    if not x.is_leaf:
        return (x.detach() / 2).requires_grad_(True) * 2
    held = x.detach().untyped_storage().clone()
    twin = torch.empty(0).set_(held, x.storage_offset(), x.shape, x.stride())
    if x.grad is not None:
        twin.grad = x.grad.clone()
    for _ in range(x._version):
        twin.add_(0)
    return twin.requires_grad_(x.requires_grad)


# Hidden ones of which PyTorch does not tell its own tracers either.
UNTOLD = ("__weakref__", "_python_dispatch", "_reduce_ex_internal", "__dict__")
# A capsule for other libraries is neither called nor asked of a tensor.
CAPSULES = ("__dlpack_c_exchange_api__",)
KEPT = [name for name in METHODS if name not in (*UNTOLD, *CAPSULES)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.sweep(
    keep=[
        *(f"[{name}-input" for name in ("data_ptr", "_version", "set_")),
        "[grad-parameter",
    ]
)
def test_whatever_a_tensor_has_is_as_eager(name: str, place: str) -> None:
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert_as_eager(asking(name), place, leaves() if grad else inputs())


@pytest.mark.parametrize("place", ["input", "parameter"])
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.sweep(keep=["[storage_offset-input", "[grad-parameter", "[tolist-input"])
def test_what_was_kept_of_a_tensors_class_asks_the_callers_tensor(name: str, place: str) -> None:
    with torch.no_grad():
        assert_as_eager(keeping(name), place, inputs()[:2])


SETTABLE = [name for name in OWN if hasattr(getattr(Tensor, name), "__set__")]


@pytest.mark.parametrize("place", ["input", "parameter"])
@pytest.mark.parametrize("name", SETTABLE)
@pytest.mark.sweep(keep=["[data-parameter", "[grad-input", "[requires_grad-input"])
def test_an_attribute_that_is_set_is_set(name: str, place: str) -> None:
    for value in (True, torch.ones(3, 3)):
        with torch.no_grad():
            assert_as_eager(lambda tensor, v=value: setattr(tensor, name, v), place, inputs()[:1])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.sweep(keep=["input", "intermediate"])
def test_an_attribute_of_pythons_own_is_set_on_the_callers_tensor(place: str) -> None:
    reasons = assert_as_eager(lambda tensor: setattr(tensor, "mark", 2), place, leaves())
    assert place == "intermediate" or reasons[0]


def test_a_result_that_bears_an_attribute_is_eagers() -> None:
    def marked(tensor: Tensor) -> Tensor:
        doubled = tensor * 2
        doubled.mark = 2  # type: ignore[attr-defined]
        return doubled

    assert all(assert_as_eager(marked, "input", leaves()[:2]))


def test_every_listed_name_is_one_of_a_tensors() -> None:
    """A name that this version of PyTorch lacks may be another's; a misspelt one is nobody's."""
    listed = [name for table in (ANSWERS, OPERATORS) for names in table.values() for name in names]
    assert len(listed) == len(set(listed))
    assert len([name for name in listed if not hasattr(Tensor, name)]) <= 2
