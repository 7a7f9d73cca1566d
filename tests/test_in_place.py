"""``compile(model, in_place=True)``: the user's own object, whose calls run the program."""

import copy
import inspect
import pathlib
import pickle
from typing import Any

import hugging_face
import pytest
import torch
from comparing import assert_close, assert_equals_eager, assert_same_gradients, twin
from models import MarkedBlock, Net
from torch import Tensor, nn

import lazyinline
from lazyinline import CaptureError, CompileReport, PlanError


class Small(Net):
    """Three blocks with dropout, and a head."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(lambda: MarkedBlock(8, dropout=0.5), 3, width=8)


def batch(*, seed: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def pair(kind: type[nn.Module] = Small, **options: Any) -> tuple[Any, Any]:
    """Returns a model in eval mode that is compiled in place, and its twin for eager."""
    model = kind().eval()
    expected = twin(model)
    return lazyinline.compile(model, **{"backend": "eager", **options}, in_place=True), expected


def report(model: nn.Module) -> CompileReport:
    return lazyinline.last_report(model)  # type: ignore[return-value]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def test_a_restored_model_runs_its_own_python_and_can_be_compiled_again() -> None:
    model, expected = pair()
    x = batch()
    model(x)
    plain = lazyinline.restore(model)
    assert plain is model
    assert vars(plain).keys() == vars(expected).keys()
    with pytest.raises(PlanError, match="was not compiled by lazyinline"):
        lazyinline.restore(plain)
    assert_close(plain(x), expected(x))
    again = lazyinline.compile(model, backend="eager", in_place=True)
    assert_close(again(x), expected(x))
    assert report(again).num_block_calls == 3
    wrapper = lazyinline.compile(expected, backend="eager")
    assert lazyinline.restore(wrapper) is expected


@pytest.mark.smoke
@pytest.mark.sweep(keep="eager")
def test_a_model_compiled_in_place_is_the_users_object_and_trains_as_before(backend: str) -> None:
    model = Small()
    before = dict(vars(model))
    batches = [(batch(seed=step),) for step in range(3)]
    outcome = assert_equals_eager(
        model, batches=batches, door="in place", backend=backend, optimizer=adamw, tolerance=1e-4
    )
    assert outcome.compiled is model and type(model) is Small
    assert vars(model).items() >= before.items()
    assert outcome.told.num_block_calls == 3
    assert outcome.told.ran_eagerly == ""


def test_what_tools_look_at_is_the_models() -> None:
    model, expected = pair()
    assert lazyinline.last_report(model) is None
    assert inspect.signature(model.forward) == inspect.signature(expected.forward)
    assert repr(model) == repr(expected)
    assert list(model.state_dict()) == list(expected.state_dict())
    for when in ("before", "after"):
        assert inspect.getmembers(model), when
        model(batch())


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
def test_copies_of_it_are_plain_models(kind: Any, copied: Any, tmp_path: pathlib.Path) -> None:
    model, expected = pair(kind)
    model(batch())
    other = copied(model, tmp_path)
    assert type(other) is kind
    if copied is copy.copy or kind is Small:
        assert_close(other(batch()), expected(batch()))
        with pytest.raises(PlanError, match="was not compiled by lazyinline"):
            lazyinline.last_report(other)
    assert_close(model(batch()), expected(batch()))
    assert report(model).num_compiles == 1


class Around(Small):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 2


def test_a_class_with_a_call_of_its_own_is_refused_in_place_only() -> None:
    with pytest.raises(PlanError, match=r"Around overrides __call__.*in_place=False"):
        lazyinline.compile(Around(), in_place=True)
    assert_equals_eager(Around(), (batch(),), calls=1)


def outer(inner: nn.Module) -> nn.Module:
    return nn.Sequential(inner, nn.ReLU(), nn.Linear(2, 2)).eval()


def test_a_compile_of_what_is_around_goes_through_what_was_compiled_in_place() -> None:
    inner, _ = pair()
    around = outer(inner)
    expected = twin(around)
    assert_close(around(batch()), expected(batch()))
    alone = report(inner)
    compiled = lazyinline.compile(around, backend="eager")
    assert_close(compiled(batch()), expected(batch()))
    assert compiled.last_report.num_block_calls == 3
    assert report(inner) is alone
    lazyinline.compile(inner, backend="eager", in_place=True)  # nothing that the outer one reads
    compiled(batch())
    assert compiled.last_report.num_compiles == 1
    assert lazyinline.last_report(inner) is None


def test_blocks_compiled_one_by_one_train_as_before() -> None:
    model = Small().eval()
    expected = twin(model)
    for layer in model.blocks:
        lazyinline.compile(layer, backend="eager", in_place=True)
    for run in (model, expected):
        optimizer = adamw(run.parameters())
        for step in range(2):
            run(batch(seed=step)).square().mean().backward()
            optimizer.step()
    assert_same_gradients(model, expected)
    assert all(report(layer).ran_eagerly == "" for layer in model.blocks)


def test_what_torch_compile_holds_in_the_same_place_is_captured_through() -> None:
    model = Small().eval()
    expected = twin(model)
    for layer in model.blocks:
        layer.compile(backend="eager")
    compiled = lazyinline.compile(model, backend="eager")
    assert_close(compiled(batch()), expected(batch()))
    assert compiled.last_report.num_block_calls == 3


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.sweep(keep="gpt2")
def test_a_model_of_hugging_face_stays_what_it_is(name: str, tmp_path: pathlib.Path) -> None:
    model, inputs = hugging_face.example(name, layers=2)
    outcome = assert_equals_eager(
        model, (), {**inputs, "labels": inputs["input_ids"]}, door="in place"
    )
    assert outcome.told.num_block_calls == 2
    model.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").exists()
    loaded = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)


def test_a_module_that_torch_compile_returned_is_refused_with_what_to_do() -> None:
    for in_place in (False, True):
        with pytest.raises(CaptureError, match=r"Compile the module itself: lazyinline.compile"):
            lazyinline.compile(torch.compile(Small()), in_place=in_place)  # type: ignore[call-overload]
    with pytest.raises(CaptureError, match=r"0 was returned by torch.compile"):
        lazyinline.compile(outer(torch.compile(Small())))


def test_the_wrapper_shows_the_models_signature_and_reading_it_never_raises() -> None:
    wrapper = lazyinline.compile(Small().eval(), backend="eager")
    expected = inspect.signature(Small().forward)
    assert inspect.signature(wrapper) == inspect.signature(wrapper.forward) == expected
    for _ in range(2):
        for name in dir(wrapper):
            getattr(wrapper, name, None)  # absent is an AttributeError, and nothing else
        inspect.getmembers(wrapper)
        wrapper(batch())


def test_a_forward_put_on_the_wrapper_runs() -> None:
    wrapper: Any = lazyinline.compile(Small().eval(), backend="eager")
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
