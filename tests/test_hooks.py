"""Hooks on parameters run in ``compile_step`` as in eager; what sees a backward is refused."""

import copy
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_equals_eager, assert_same_gradients
from models import Made, MarkedBlock, block, example
from torch import Tensor, nn

import lazyinline
from lazyinline.reuse.errors import CaptureError, PlanError

Remove = Callable[[], object]
Log = list[Any]


class Net(nn.Module):
    """Two blocks, tied weights, a frozen bias and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(MarkedBlock() for _ in range(2))
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[0].up.bias.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.blocks:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


IDS = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 0]])


def trained(net: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in net.named_parameters() if p.requires_grad}


def masked(net: Net, log: Log) -> list[Any]:
    mask = torch.arange(4) % 2
    return [net.embedding.weight.register_hook(lambda g: g * mask)]


def scaled_twice(net: Net, log: Log) -> list[Any]:
    weight = net.blocks[1].up.weight
    return [
        weight.register_hook(lambda g: g * 3),
        weight.register_hook(lambda g: (log.append(float(g.sum())), g + 1)[1]),
    ]


def after_accumulation(parameters: Iterable[Any], hook: Callable[[Any], None]) -> list[Any]:
    return [p.register_post_accumulate_grad_hook(hook) for p in parameters]


def changed_in_place(net: Net, log: Log) -> list[Any]:
    def clip(parameter: Any) -> None:
        log.append(float(parameter.grad.norm()))
        parameter.grad.mul_(0.5)

    return after_accumulation(trained(net).values(), clip)


def replaced(net: Net, log: Log) -> list[Any]:
    def replace(parameter: Any) -> None:
        parameter.grad = parameter.grad.sign()

    return after_accumulation([net.blocks[0].down.weight], replace)


def stepped_in_backward(net: Net, log: Log) -> list[Any]:
    """The optimizer in the backward: gradients are gone as soon as they are used."""

    def step(parameter: Any) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    return after_accumulation(trained(net).values(), step)


def on_the_node(net: Net, log: Log) -> list[Any]:
    weights = (net.head.weight, net.blocks[0].up.weight)
    nodes: list[Any] = [torch.autograd.graph.get_gradient_edge(p).node for p in weights]
    handles = [n.register_prehook(lambda gs: tuple(g * 2 for g in gs)) for n in nodes]
    handles += [n.register_hook(lambda made, gs: log.append(float(gs[0].sum()))) for n in nodes]
    return [*handles, SimpleNamespace(remove=nodes.clear)]  # which holds the nodes until then


def over_several(net: Net, log: Log) -> list[Any]:
    given = tuple(trained(net).values())[:3]
    kind = torch.autograd.graph.register_multi_grad_hook
    first = kind(given, lambda g: log.append(float(g.sum())), mode="any")
    return [kind(given, lambda gs: log.append([float(g.sum()) for g in gs])), first]  # type: ignore[union-attr]


HOOKS = [masked, scaled_twice, changed_in_place, replaced, stepped_in_backward, on_the_node]
HOOKS += [over_several]


class Pair:
    """A net under ``compile_step`` and its twin in eager, with the same hooks and optimizer."""

    def __init__(self, backend: str, micro_batches: int = 1) -> None:
        self.nets = (Net(), Net())
        self.step: Any = lazyinline.compile_step(
            self.nets[0], backend=backend, micro_batches=micro_batches
        )
        self.optimizers = [torch.optim.SGD(n.parameters(), lr=0.1) for n in self.nets]
        self.logs: tuple[Log, Log] = ([], [])

    def put(self, hooks: Callable[[Net, Log], list[Any]]) -> Remove:
        handles = [*hooks(self.nets[0], self.logs[0]), *hooks(self.nets[1], self.logs[1])]

        def remove() -> None:
            for handle in handles:
                handle.remove()
            handles.clear()

        return remove

    def run(self, times: int = 1) -> None:
        """Runs steps of each, compared."""
        for _ in range(times):
            loss, expected = self.step(IDS), self.nets[1](IDS)
            expected.backward()
            assert_close(loss, expected.detach())
            for ours, theirs in zip(*(n.parameters() for n in self.nets), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(*self.logs, rtol=1e-4, atol=1e-5)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for ours, theirs in zip(*(n.parameters() for n in self.nets), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_hooks_of_all_kinds_run_one_after_another_as_in_eager_on_generated_kernels() -> None:
    pair = Pair("inductor")
    for hooks in HOOKS:
        for _ in range(2):  # they come and go; a node that nobody holds goes, with its hooks
            remove = pair.put(hooks)
            pair.run(2)
            remove()
            pair.run(2)


@pytest.mark.sweep(keep="eager")
def test_an_error_in_a_hook_reaches_the_caller_and_the_next_step_is_right(backend: str) -> None:
    pair = Pair(backend)
    pair.run()

    def fail(gradient: Tensor) -> None:
        raise KeyError("mine")

    handle = pair.nets[0].blocks[0].up.weight.register_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        pair.step(IDS)
    handle.remove()
    pair.run()


def test_what_sees_a_backward_is_refused_by_name() -> None:
    step = lazyinline.compile_step(Net(), backend="eager")
    step(IDS)
    with torch.autograd.graph.save_on_cpu(), pytest.raises(PlanError, match="saved tensors"):
        step(IDS)
    with torch.autograd.set_detect_anomaly(True), pytest.raises(PlanError, match="anomaly"):
        step(IDS)
    step(IDS)


def hooks_a_gradient(y: Tensor) -> Tensor:
    y.register_hook(lambda g: g * 2)
    return y.tanh().sum()


def hooks_a_node(y: Tensor) -> Tensor:
    y.grad_fn.register_prehook(lambda gs: tuple(g * 2 for g in gs))  # type: ignore[union-attr]
    return y.tanh().sum()


def hooks_what_is_saved(y: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return y.tanh().sum()


def offloads(y: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return y.tanh().sum()


def hooking(put: Callable[[Tensor], Tensor]) -> nn.Module:
    """Puts a hook into its own backward."""
    return block(lambda self, x: put(self.linear(x)), mark=False)()


@pytest.mark.parametrize("put", [hooks_a_gradient, hooks_a_node, hooks_what_is_saved])
def test_a_forward_that_hooks_its_own_backward_is_refused(put: Any) -> None:
    net, x = hooking(put), example(grad=False)
    for run in (
        lazyinline.compile_step(net, backend="eager"),
        lazyinline.compile(net, backend="eager", fallback="error"),
    ):
        with pytest.raises(CaptureError, match=r"test_hooks\.py"):
            run(x)
    assert torch.autograd.graph.saved_tensors_hooks.__enter__.__module__ == "torch.autograd.graph"


def test_a_forward_that_offloads_what_it_saves_is_stepped_as_it_changes_nothing() -> None:
    assert_equals_eager(hooking(offloads), (example(grad=False),), door="step")


def branching() -> Any:
    """Returns a model that uses another parameter in each mode."""
    run = lambda self, x: getattr(self, self.mode)(self.shared(x)).square().mean()  # noqa: E731
    layers = {name: nn.Linear(3, 3) for name in ("shared", "one", "other")}
    return Made(run, mode="one", **layers)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.sweep(keep="eager")
def test_a_gradient_of_another_variant_is_taken_back(backend: str, hooked: bool) -> None:
    net = branching()
    expected = copy.deepcopy(net)
    if hooked:
        for model in (net, expected):
            model.shared.weight.register_hook(lambda g: g * 2)
    step = lazyinline.compile_step(net, backend=backend)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.1) for n in (net, expected)]
    x = torch.randn(2, 3)
    for mode in ("one", "other", "one", "one", "other"):
        net.mode = expected.mode = mode
        step(x)
        optimizers[1].zero_grad()
        expected(x).backward()
        assert_same_gradients(net, expected)
        for optimizer in optimizers:
            optimizer.step()


def test_a_gradient_that_is_the_users_own_stays() -> None:
    net, x = branching(), torch.randn(2, 3)
    step = lazyinline.compile_step(net, backend="eager")
    step(x)
    own = torch.ones(3, 3)
    net.one.weight.grad = own
    net.mode = "other"
    step(x)
    assert net.one.weight.grad is own
    assert net.one.bias.grad is None
