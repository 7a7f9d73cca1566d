"""compile_step(optimizer=): the update in the program has the bits of fused=True, or runs after."""

import copy
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from decoders import DecoderBlock, llama
from models import Around, Block, batch, block
from torch import Tensor, nn

import lazyinline
from lazyinline import PlanError
from lazyinline.autodiff.training_program import NotUpdatedError, Order, Updates
from lazyinline.backend.link.link import FlatProgram, Launch, check_flat
from lazyinline.frontend.passes import programs
from lazyinline.frontend.torch_optimizer import StepOptimizer
from lazyinline.reuse.errors import VerifyError

Make = Callable[..., torch.optim.Optimizer]
# Rules of each kind; `**more` is fused=True for the optimizer that PyTorch runs.
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda params, **more: torch.optim.AdamW(params, lr=1e-2, **more),
    "Adam": lambda params, **more: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1, **more),
    "maximize": lambda params, **more: torch.optim.Adam(params, maximize=True, **more),
    "SGD": lambda params, **more: torch.optim.SGD(params, lr=1e-2, weight_decay=0.1, **more),
    "momentum": lambda params, **more: torch.optim.SGD(params, lr=1e-2, momentum=0.9, **more),
    "nesterov": lambda params, **more: torch.optim.SGD(
        params, lr=1e-2, momentum=0.9, nesterov=True, **more
    ),
}


def decoder() -> tuple[nn.Module, tuple[Tensor, ...]]:
    lazyinline.lazy_inline(DecoderBlock)
    sizes: dict[str, Any] = {"hidden": 32, "num_heads": 2, "vocab": 700, "seq": 8}
    return llama(num_layers=1, batch=2, **sizes)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices decay, vectors do not and learn slower."""
    large = [p for p in model.parameters() if p.dim() > 1]
    small = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": large, "weight_decay": 0.1}, {"params": small, "lr": 1e-3}]


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=20)


def assert_same_training(
    model: nn.Module,
    expected: nn.Module,
    ours: torch.optim.Optimizer,
    theirs: torch.optim.Optimizer,
) -> None:
    """Parameters and state are equal to the bit, under the same names."""
    for (name, p), q in zip(expected.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), name
    state, wanted = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert state.keys() == wanted.keys()
    for index, values in wanted.items():
        for key, value in values.items():
            if value is not None:
                assert torch.equal(state[index][key], value), (index, key)
                assert state[index][key].dtype == value.dtype


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.sweep(keep=["Adam-eager", "AdamW-eager", "maximize-eager", "nesterov-inductor"])
@pytest.mark.smoke
def test_steps_by_a_schedule_of_two_groups_have_the_bits_of_fused(kind: str, backend: str) -> None:
    small = net_of_a_loss()
    model, args = decoder() if kind == "AdamW" else (small, (batch(),))
    next(model.parameters()).requires_grad_(False)
    expected = copy.deepcopy(model)
    ours = OPTIMIZERS[kind](groups(model))
    theirs = OPTIMIZERS[kind](groups(expected), fused=True)
    schedules = [one_cycle(one) for one in (ours, theirs)]
    step = lazyinline.compile_step(model, backend=backend, optimizer=ours)
    apart = lazyinline.compile_step(expected, backend=backend)
    for _ in range(3):
        want = apart(*args)
        theirs.step()
        assert torch.equal(step(*args), want)
        for schedule in schedules:
            schedule.step()
    assert_same_training(model, expected, ours, theirs)
    assert not step.last_report.update_after
    assert step.last_report.num_compiles == 1
    assert all(p.grad is None for p in model.parameters())
    assert model is small or step.stats.peak_bytes < apart.stats.peak_bytes


@pytest.mark.parametrize("order", get_args(Order))
@pytest.mark.sweep(keep="one_by_one")
def test_micro_batches_are_added_up_before_an_update(order: Any) -> None:
    model, x = net(), batch(6)
    expected = copy.deepcopy(model)
    ours = torch.optim.AdamW(model.parameters())
    theirs = torch.optim.AdamW(expected.parameters(), fused=True)
    more: dict[str, Any] = {"micro_batches": 3, "order": order}
    step, apart = step_of(model, ours, **more), step_of(expected, None, **more)
    for _ in range(3):
        assert torch.equal(step(x), apart(x))
        theirs.step()
    assert_same_training(model, expected, ours, theirs)
    assert step.stats.lower_bound_bytes <= apart.stats.lower_bound_bytes


def test_a_checkpoint_saved_in_the_middle_resumes_to_the_bit() -> None:
    model, x = net(), batch()
    optimizer = torch.optim.AdamW(model.parameters())
    step = step_of(model, optimizer)
    for _ in range(2):
        step(x)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    later = [step(x) for _ in range(3)]
    for place in (step, None):  # in the same step, and in a new one
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        again = place or step_of(model, optimizer)
        assert [again(x).item() for _ in range(3)] == [loss.item() for loss in later]
    assert step.last_report.num_compiles == 1


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def loss_of(y: Tensor) -> Tensor:
    return y.square().mean()


def net_of_a_loss() -> nn.Module:
    return Around(lambda layers, x: loss_of(layers[0](x)), net())


def step_of(model: nn.Module, optimizer: Any, **options: Any) -> Any:
    options = {"loss_fn": loss_of, "backend": "eager", "optimizer": optimizer, **options}
    return lazyinline.compile_step(model, **options)


def assert_trains_beside(
    step: Any,
    model: nn.Module,
    expected: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    *,
    max_norm: float | None = None,
) -> None:
    """Takes a step, and one in eager; all parameters are close then."""
    optimizer.zero_grad()
    want = loss_of(expected(x))
    want.backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(expected.parameters(), max_norm)
    optimizer.step()
    torch.testing.assert_close(step(x), want.detach())
    torch.testing.assert_close([*model.parameters()], [*expected.parameters()])


AFTER: dict[str, tuple[Make, dict[str, Any], str]] = {
    "RMSprop": (lambda p: torch.optim.RMSprop(p, lr=1e-2), {}, "RMSprop"),
    "amsgrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), {}, "amsgrad=True"),
    "dampening": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
        {},
        "dampening=0.5",
    ),
    "norm": (lambda p: torch.optim.AdamW(p), {"max_norm": 0.01}, "the norm of all"),
    "scaler": (
        lambda p: torch.optim.SGD(p, lr=0.1),
        {"scaler": lambda: torch.amp.GradScaler("cpu", init_scale=8.0)},
        "GradScaler",
    ),
}


@pytest.mark.parametrize("case", AFTER)
def test_what_cannot_be_in_the_program_is_done_after_it_and_named(case: str) -> None:
    make, options, reason = AFTER[case]
    model, expected = net(), net()
    ours, theirs = make(model.parameters()), make(expected.parameters())
    step = step_of(model, ours, **{k: v() if callable(v) else v for k, v in options.items()})
    for _ in range(4):
        assert_trains_beside(
            step, model, expected, theirs, batch(), max_norm=options.get("max_norm")
        )
    assert reason in step.last_report.update_after
    assert reason in str(step.last_report)


@pytest.mark.parametrize("where", ["optimizer", "parameter", "step"])
def test_hooks_run_also_if_they_come_after_a_compile(where: str) -> None:
    model, x = net(), batch()
    optimizer = torch.optim.AdamW(model.parameters())
    step = step_of(model, optimizer)
    step(x)
    assert not step.last_report.update_after
    seen: list[int] = []
    if where == "optimizer":
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
    elif where == "step":
        plain = optimizer.step
        optimizer.step = lambda: (seen.append(1), plain())[1]  # type: ignore[method-assign]
    else:
        next(model.parameters()).register_hook(lambda gradient: seen.append(1))
    before = [p.detach().clone() for p in model.parameters()]
    step(x)
    assert seen == [1] and "hooks" in step.last_report.update_after
    assert not any(map(torch.equal, before, model.parameters()))


def test_state_replaced_by_hand_is_what_the_next_step_reads() -> None:
    model, expected, x = net(), net(), batch()
    ours = torch.optim.AdamW(model.parameters())
    theirs = torch.optim.AdamW(expected.parameters(), fused=True)
    step, apart = step_of(model, ours), step_of(expected, None)
    for number in range(3):
        step(x), apart(x)
        theirs.step()
        for one in (ours, theirs):
            if number:
                for values in one.state.values():
                    values["exp_avg"] = torch.full_like(values["exp_avg"], 0.1)
    assert_same_training(model, expected, ours, theirs)
    _, has_its_state = StepOptimizer(ours).bound(Updates(), [])
    assert has_its_state()
    next(iter(ours.state.values()))["exp_avg"] = torch.zeros(1)
    assert not has_its_state()


def test_a_group_added_later_is_updated_and_others_keep_their_gradient() -> None:
    model, x = net(), batch()
    first, second = model
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    step = step_of(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    step(x)
    assert all(p.grad is not None for p in second.parameters())
    assert all(p.grad is None for p in first.parameters())
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n, _ in model.named_parameters() if n.startswith("0")}
    optimizer.add_param_group({"params": list(second.parameters()), "lr": 0.01})
    before = copy.deepcopy(model.state_dict())
    step(x)
    assert not any(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("when", [0, 1])
def test_parameters_that_share_memory_are_updated_after_the_step(when: int) -> None:
    """In the program one would be updated while another block still reads the other."""
    wide, x = block(lambda self, x: self.linear(x).tanh()), torch.randn(8, 160)
    parts = (wide(linear=nn.Linear(160, 160, bias=False)) for _ in range(3))
    model = nn.Sequential(*parts)
    model.register_buffer("sparse", torch.eye(2).to_sparse())  # has no memory of its own
    expected = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=20.0) for m in (model, expected))
    step = step_of(model, ours)
    for number in range(3):
        if number == when:
            for one in (model, expected):
                one[1].linear.weight.data = one[2].linear.weight.data
        assert_trains_beside(step, model, expected, theirs, x)
        assert ("shares its memory" in step.last_report.update_after) == (number >= when)


@pytest.mark.parametrize("where", ["model", "group"])
def test_a_parameter_that_the_optimizer_does_not_hold_any_more_is_not_updated(where: str) -> None:
    model, x = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = step_of(model, optimizer)
    step(x)
    if where == "model":
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    else:
        optimizer.param_groups[0]["params"][:] = [nn.Parameter(torch.ones(2)) for _ in range(8)]
    before = copy.deepcopy(model.state_dict())
    step(x)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("kind", ["linked", "compiled", "refused"])
@pytest.mark.sweep(keep=["linked", "refused"])
def test_programs_for_several_sizes_share_state_and_read_the_same_numbers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where a program cannot hold the update, those compiled before go on.
    model, expected = net().double(), net().double()
    ours, theirs = (torch.optim.AdamW(m.parameters()) for m in (model, expected))
    step = step_of(model, ours, dynamic=None if kind == "linked" else False)
    for number, rows in enumerate((3, 5, 7, 3) if kind == "linked" else (3, 5, 3)):
        if number and kind == "refused":
            monkeypatch.setattr(programs, "with_updates", refuse)
        for one in (ours, theirs):
            one.param_groups[0]["lr"] = 0.01 * (number + 1)
        assert_trains_beside(step, model, expected, theirs, batch(rows).double())
    assert ("no room" in step.last_report.update_after) == (kind == "refused")


def refuse(*_: Any) -> Any:
    raise NotUpdatedError("there is no room")


def test_reading_a_parameter_after_its_update_is_an_error() -> None:
    model, x = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = step_of(model, optimizer)
    flats: list[FlatProgram] = []
    step._watch = lambda one, before, after: flats.extend(after.flats.values())  # type: ignore[method-assign]
    step(x)
    flat = flats[0]
    update = next(one for one in flat.launches if one.leaf.name == "sgd")
    others = [one for one in flat.launches if one is not update]
    free = [Launch(one.leaf, one.operands, one.results, (), one.path) for one in (update, *others)]
    wrong = FlatProgram(
        (*flat.inputs, *(s for one in others for s in one.results)),
        (free[0], *(one for one in free[1:] if set(one.operands) & set(update.operands))),
        (),
        flat.slot_types,
    )
    with pytest.raises(VerifyError, match="an update has taken over"):
        check_flat(wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": torch.optim.LBFGS([torch.ones(1)])}, "in LBFGS's closure"),
        ({"optimizer": "AdamW"}, "takes a torch.optim.Optimizer"),
        ({"max_norm": 1.0}, "pass the optimizer too"),
    ],
)
def test_wrong_arguments_say_what_is_taken(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        lazyinline.compile_step(Block(), **options)
