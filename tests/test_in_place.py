"""``compile(model, in_place=True)``: the user's own object, whose calls run the program."""

import copy
import inspect
import pathlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import hugging_face
import pytest
import torch
from comparing import assert_close, assert_same_gradients, twin
from models import MarkedBlock, Net
from torch import Tensor, nn

import lazyinline
from lazyinline import CaptureError, CompileReport, PlanError
from lazyinline.frontend.measure import measure

Log = list[Any]


class Small(Net):
    """Three blocks with dropout, and a head."""

    def __init__(self) -> None:
        super().__init__(lambda: MarkedBlock(8, dropout=0.5), 3, width=8)


def batch(*, seed: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def pair(kind: type[nn.Module] = Small, **options: Any) -> tuple[Any, Any]:
    """Returns a model compiled in place, and its twin for eager."""
    torch.manual_seed(0)
    model = kind()
    expected = twin(model)
    return lazyinline.compile(model, **{"backend": "eager", **options}, in_place=True), expected


def report(model: nn.Module) -> CompileReport:
    found = lazyinline.last_report(model)
    assert found is not None
    return found


def assert_trains_like(model: nn.Module, expected: nn.Module, steps: int = 3) -> None:
    results = []
    for run in (model, expected):
        optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2)
        torch.manual_seed(7)  # the masks of dropout
        losses = []
        for step in range(steps):
            optimizer.zero_grad()
            loss = run(batch(seed=step)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        results.append(torch.stack(losses))
    torch.testing.assert_close(*results)
    assert_same_gradients(model, expected)


# ---- the same object -------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.sweep(keep="eager")
def test_a_model_compiled_in_place_is_the_users_object_and_trains_as_before(backend: str) -> None:
    torch.manual_seed(0)
    model = Small()
    expected, before = twin(model), dict(vars(model))
    assert lazyinline.compile(model, backend=backend, in_place=True) is model
    assert type(model) is Small
    assert vars(model).items() >= before.items()
    assert lazyinline.last_report(model) is None
    assert_trains_like(model, expected)
    assert report(model).num_block_calls == 3
    assert report(model).ran_eagerly == ""


def test_what_tools_look_at_is_the_models() -> None:
    model, expected = pair()
    assert inspect.signature(model.forward) == inspect.signature(expected.forward)
    assert repr(model) == repr(expected)
    assert list(model.state_dict()) == list(expected.state_dict())
    for when in ("before", "after"):
        assert inspect.getmembers(model), when
        model(batch())


def test_train_and_eval_are_the_models_and_each_has_its_program() -> None:
    model, expected = pair()
    model(batch())
    assert_close(model.eval()(batch()), expected.eval()(batch()))
    with torch.no_grad():
        assert_close(model(batch(), scale=2.0), expected(batch(), scale=2.0))
    assert_trains_like(model.train(), expected.train())


def test_a_state_dict_is_loaded_into_the_compiled_model(tmp_path: pathlib.Path) -> None:
    model, _ = pair()
    model.eval()(batch())
    other = Small().eval()
    torch.save(other.state_dict(), tmp_path / "weights.pt")
    model.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert_close(model(batch()), other(batch()))
    assert report(model).num_compiles == 1


class OwnState(Small):
    """Hands everything on when it is copied."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


def through_a_file(model: nn.Module, folder: pathlib.Path) -> nn.Module:
    torch.save(model, folder / "model.pt")
    loaded: nn.Module = torch.load(folder / "model.pt", weights_only=False)
    return loaded


@pytest.mark.parametrize("kind", [Small, OwnState])
@pytest.mark.parametrize(
    "copied",
    [
        lambda model, folder: copy.deepcopy(model),
        lambda model, folder: copy.copy(model),
        lambda model, folder: pickle.loads(pickle.dumps(model)),
        through_a_file,
    ],
)
@pytest.mark.sweep(keep=["<lambda>0-Small", "through_a_file-OwnState"])
def test_copies_of_it_are_plain_models(
    kind: type[nn.Module], copied: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    model, expected = pair(kind)
    model.eval()(batch())
    other = copied(model, tmp_path)
    assert type(other) is kind
    if copied is copy.copy or kind is Small:
        assert_close(other(batch()), expected.eval()(batch()))
        with pytest.raises(PlanError, match="was not compiled by lazyinline"):
            lazyinline.last_report(other)
    assert_close(model(batch()), expected.eval()(batch()))
    assert report(model).num_compiles == 1


@pytest.mark.sweep
def test_compiled_again_the_new_options_hold() -> None:
    model, _ = pair(reuse="off")
    model(batch())
    assert report(model).num_block_calls == 0
    lazyinline.compile(model, backend="eager", in_place=True)
    assert lazyinline.last_report(model) is None
    model(batch())
    assert report(model).num_block_calls == 3


@pytest.mark.sweep
def test_what_was_not_compiled_has_no_report() -> None:
    with pytest.raises(PlanError, match="This Small was not compiled by lazyinline"):
        lazyinline.last_report(Small())
    compiled = lazyinline.compile(Small(), backend="eager")
    compiled(batch())
    assert lazyinline.last_report(compiled) is compiled.last_report
    step = lazyinline.compile_step(Small(), loss_fn=torch.sum, backend="eager")
    step(batch())
    assert lazyinline.last_report(step) is step.last_report is not None


class Around(Small):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 2


def test_a_class_with_a_call_of_its_own_is_refused_in_place_only() -> None:
    with pytest.raises(PlanError, match=r"Around overrides __call__.*in_place=False"):
        lazyinline.compile(Around(), in_place=True)
    model = Around().eval()
    compiled = lazyinline.compile(model, backend="eager")
    assert_close(compiled(batch()), twin(model)(batch()))


# ---- hooks -----------------------------------------------------------------------------------


def doubled(module: nn.Module, args: Any, output: Any = None) -> Any:
    return (args[0] * 2,) if output is None else output * 2


def on_forward(model: Small, log: Log) -> Any:
    return model.register_forward_hook(doubled)


def on_forward_of_a_layer(model: Small, log: Log) -> Any:
    return model.blocks[1].register_forward_hook(doubled)


def before_forward(model: Small, log: Log) -> Any:
    return model.register_forward_pre_hook(doubled)


def with_keywords(model: Small, log: Log) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "scale": 3.0}

    return model.register_forward_pre_hook(hook, with_kwargs=True)


def that_collects(model: Small, log: Log) -> Any:
    return model.register_forward_hook(lambda m, a, output: log.append(output.detach().clone()))


def of_a_layer_that_collects(model: Small, log: Log) -> Any:
    return model.blocks[0].register_forward_hook(lambda m, a, o: log.append(o.detach().clone()))


def on_backward(model: Small, log: Log) -> Any:
    def hook(module: nn.Module, inward: Any, outward: Any) -> None:
        log.append(outward[0].clone())

    return model.register_full_backward_hook(hook)


def before_backward(model: Small, log: Log) -> Any:
    return model.blocks[1].register_full_backward_pre_hook(lambda m, outward: (outward[0] * 2,))


def on_all_modules(model: Small, log: Log) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 2 if isinstance(module, nn.Linear) else None

    return nn.modules.module.register_module_forward_hook(hook)


HOOKS = [
    on_forward,
    on_forward_of_a_layer,
    before_forward,
    with_keywords,
    that_collects,
    of_a_layer_that_collects,
    on_backward,
    before_backward,
    on_all_modules,
]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("compiled_before", [False, True])
@pytest.mark.sweep(keep=["False-on_backward", "True-that_collects"])
def test_hooks_run_at_each_call_as_in_eager(
    hook: Callable[[Any, Log], Any], compiled_before: bool
) -> None:
    model, expected = pair()
    model.eval(), expected.eval()
    if compiled_before:
        model(batch())
    logs: list[Log] = [[], []]
    for run, log in zip((model, expected), logs, strict=True):
        handle = hook(run, log)
        for seed in range(3):
            x = batch(seed=seed).requires_grad_()
            run(x).square().sum().backward()
        handle.remove()
    assert_same_gradients(model, expected)
    assert_close(*logs)
    assert all(type(tensor) is Tensor for tensor in logs[0])
    assert_close(model(batch()), expected(batch()))


# ---- among others ----------------------------------------------------------------------------


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.last = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.inner(x)))


def test_a_compile_of_what_is_around_goes_through_what_was_compiled_in_place() -> None:
    inner, _ = pair()
    outer = Outer(inner).eval()
    expected = twin(outer)
    assert_close(outer(batch()), expected(batch()))
    alone = report(inner)
    compiled = lazyinline.compile(outer, backend="eager")
    assert_close(compiled(batch()), expected(batch()))
    assert compiled.last_report.num_block_calls == 3
    assert report(inner) is alone
    lazyinline.compile(inner, backend="eager", in_place=True)  # nothing that the outer one reads
    compiled(batch())
    assert compiled.last_report.num_compiles == 1
    assert lazyinline.last_report(inner) is None


def test_blocks_compiled_one_by_one_train_as_before() -> None:
    torch.manual_seed(0)
    model = Small()
    expected = twin(model)
    for layer in model.blocks:
        lazyinline.compile(layer, backend="eager", in_place=True)
    assert_trains_like(model, expected)
    assert all(report(layer).ran_eagerly == "" for layer in model.blocks)


@pytest.mark.sweep
def test_other_ways_in_take_it_as_the_model_that_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ROUND_S", 0.001)
    model, expected = pair()
    model.eval(), expected.eval()
    step = lazyinline.compile_step(model, loss_fn=torch.sum, backend="eager")
    assert_close(step(batch()).detach(), expected(batch()).sum().detach())
    assert lazyinline.capture(model, (batch(),)).num_nodes() > 0
    wrapped = lazyinline.compile(model, backend="eager")
    assert_close(wrapped(batch()), expected(batch()))
    measured = lazyinline.measure(model, (batch(),), backend="eager")
    assert measured.steps.keys() == {"eager", "late", "early"}
    assert lazyinline.last_report(model) is None


def test_what_torch_compile_holds_in_the_same_place_is_captured_through() -> None:
    torch.manual_seed(0)
    model = Small().eval()
    expected = twin(model)
    for layer in model.blocks:
        layer.compile(backend="eager")
    compiled = lazyinline.compile(model, backend="eager")
    assert_close(compiled(batch()), expected(batch()))
    assert compiled.last_report.num_block_calls == 3


def test_parameters_swapped_for_a_call_are_the_ones_that_count() -> None:
    model, expected = pair()
    model.eval(), expected.eval()
    model(batch())
    other = {name: p.detach() * 2 for name, p in expected.named_parameters()}
    found = torch.func.functional_call(model, other, (batch(),))
    assert_close(found, torch.func.functional_call(expected, other, (batch(),)))
    assert_close(model(batch()), expected(batch()))


# ---- Hugging Face ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.sweep(keep="gpt2")
def test_a_model_of_hugging_face_stays_what_it_is(name: str, tmp_path: pathlib.Path) -> None:
    model, inputs = hugging_face.example(name)
    expected = twin(model)
    lazyinline.compile(model, backend="eager", in_place=True)
    labels = inputs["input_ids"]
    for _ in range(2):
        results = [run(**inputs, labels=labels) for run in (model, expected)]
        assert type(results[0]) is type(results[1])
        assert_close(results[0].loss, results[1].loss)
        for result in results:
            result.loss.backward()
        assert_same_gradients(model, expected)
        for run in (model, expected):
            torch.optim.SGD(run.parameters(), lr=0.1).step()
    assert report(model).num_block_calls == 3
    model.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").exists()
    loaded = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)


# ---- other compilers, other dtypes, copies of what ran ---------------------------------------


def test_a_module_that_torch_compile_returned_is_refused_with_what_to_do() -> None:
    for in_place in (False, True):
        with pytest.raises(CaptureError, match=r"Compile the module itself: lazyinline.compile"):
            lazyinline.compile(torch.compile(Small()), in_place=in_place)  # type: ignore[call-overload]
    with pytest.raises(CaptureError, match=r"inner is what torch.compile returned"):
        lazyinline.compile(Outer(torch.compile(Small())))  # type: ignore[arg-type]


def test_another_dtype_is_another_program() -> None:
    model, expected = pair()
    model.eval()(batch())
    assert model.to(torch.float64) is model
    x = batch().double()
    assert_close(model(x), expected.eval().double()(x))
    assert report(model).num_compiles == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))])
@pytest.mark.sweep(keep="deepcopy")
def test_a_step_that_ran_is_copied_and_compiles_anew(copied: Callable[..., Any]) -> None:
    model = Small().eval()
    step = lazyinline.compile_step(model, loss_fn=torch.sum, backend="eager")
    loss = step(batch())
    other = copied(step)
    assert other.last_report is None
    assert_close(other(batch()), loss)
    assert_close(step(batch()), loss)


# ---- the wrapper -----------------------------------------------------------------------------


@pytest.fixture
def wrapper() -> Iterator[Any]:
    torch.manual_seed(0)
    yield lazyinline.compile(Small().eval(), backend="eager")


def test_the_wrapper_shows_the_models_signature(wrapper: Any) -> None:
    expected = inspect.signature(Small().forward)
    assert inspect.signature(wrapper) == inspect.signature(wrapper.forward) == expected


def test_reading_what_a_wrapper_has_never_raises(wrapper: Any) -> None:
    for _ in range(2):
        for name in dir(wrapper):
            getattr(wrapper, name, None)  # absent is an AttributeError, and nothing else
        inspect.getmembers(wrapper)
        wrapper(batch())


def test_a_forward_put_on_the_wrapper_runs(wrapper: Any) -> None:
    own, expected = wrapper.forward, wrapper(batch())
    wrapper.forward = lambda x: own(x) + 1  # as accelerate does
    assert_close(wrapper(batch()), expected + 1)
    del wrapper.forward
    assert_close(wrapper(batch()), expected)


def test_a_model_may_have_attributes_named_like_ours() -> None:
    class Named(Small):
        calls = 3
        options = "own"

    compiled = lazyinline.compile(Named(), backend="eager")
    assert (compiled.calls, compiled.options) == (3, "own")
