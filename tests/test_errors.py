"""Every error that a user can meet by mistake: its class, and that its message says what to do."""

import pathlib
import pickle
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_close
from torch import Tensor, nn

import lazyinline
from lazyinline import CaptureError, PipelineError, PlanError, ReuseError, lazy_inline

HERE = pathlib.Path(__file__).name
ONES = torch.ones(2, 4)


def line_of(text: str) -> int:
    """Returns the number of the one line of this file that ends with a text."""
    lines = pathlib.Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(text))
    return number


LINEAR = nn.Linear(2, 2)
COMPILE: Any = lazyinline.compile
ONE_INPUT = [lazyinline.capture, lazyinline.advise, lazyinline.measure]
MISTAKES: list[tuple[Any, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (COMPILE, (LINEAR,), {"reuse": "sometimes"}, ReuseError, "'sometimes'.*marked.*off"),
    (COMPILE, (LINEAR,), {"backend": "cuda"}, PlanError, "'cuda'.*inductor.*eager"),
    (COMPILE, (LINEAR,), {"recompute": "all of it"}, PlanError, "recompute='all of it'"),
    (COMPILE, (LINEAR,), {"dynamic": "yes"}, PlanError, "dynamic='yes'"),
    (COMPILE, (LINEAR,), {"target": "cuda:sm_70"}, PlanError, "cuda:sm_80, cuda:sm_90, cuda:sm_1"),
    (COMPILE, (LINEAR,), {"target": "cuda:sm_90", "backend": "eager"}, PlanError, "='inductor'"),
    (COMPILE, (LINEAR, "marked"), {}, TypeError, "positional"),
    *((COMPILE, (x,), {}, PlanError, r"takes an nn\.Module") for x in (nn.Linear, None, [LINEAR])),
    (
        lazyinline.compile_step,
        (LINEAR,),
        {"loss_fn": nn.MSELoss()},
        PlanError,
        "called with one argument, the model's output",
    ),
    (
        lazyinline.pipeline,
        (LINEAR, (ONES,)),
        {"num_stages": 1, "micro_batches": 1, "sums": "float32"},
        PipelineError,
        "sums='float32' is for a step without stages",
    ),
    *(
        (function, (LINEAR, torch.ones(3, 2)), {}, PlanError, r"not Tensor; write \(x,\) for one")
        for function in ONE_INPUT
    ),
    *(
        (function, (nn.Linear, (ONES,)), {}, PlanError, r"takes an nn\.Module, not type")
        for function in ONE_INPUT
    ),
]


@pytest.mark.parametrize(("door", "args", "options", "error", "text"), MISTAKES)
def test_a_mistake_is_told_before_anything_runs(
    door: Any, args: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        door(*args, **options)


def test_a_loss_that_is_no_scalar_is_told() -> None:
    with pytest.raises(CaptureError, match=r"^The loss must be a scalar tensor, not \(2, 4\)"):
        lazyinline.compile_step(stack(Doubling), backend="eager")(ONES)


def test_compiling_what_is_compiled() -> None:
    inner = lazyinline.compile(nn.Linear(2, 2), backend="eager")
    assert inner.last_report is None
    model = nn.Sequential(nn.Tanh(), inner)
    with pytest.raises(CaptureError, match="1 is a compiled module already"):
        lazyinline.compile(model, backend="eager")(torch.ones(1, 2))
    assert model(torch.ones(1, 2)).shape == (1, 2)


def a_function() -> None:
    pass


@pytest.mark.parametrize(
    "thing",
    [nn.Linear(2, 2), int, a_function, "Block", None, nn.Linear.forward, type("Plain", (), {})],
    ids=lambda thing: type(thing).__name__,
)
def test_marking_a_wrong_thing(thing: Any) -> None:
    with pytest.raises(ReuseError, match=r"lazy_inline marks a subclass of nn\.Module") as caught:
        lazy_inline(thing)
    assert " at 0x" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_mark_on_forward_names_the_line() -> None:
    with pytest.raises(ReuseError) as caught:

        class Marked(nn.Module):
            @lazy_inline
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x

    assert re.search(r"Marked\.forward \(test_errors\.py:\d+\)\. Put", str(caught.value))


class Blocks(nn.Module):
    """What the blocks of these tests have."""

    def __init__(self, num_outputs: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(4, num_outputs)


@lazy_inline
class Doubling(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Mixed(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # one type only


@lazy_inline
class Telling(Blocks):
    """Does in its forward what no program does."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.how(x))


def stack(block: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), block(), block())


def by_numpy(x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.detach().numpy())  # numpy


def by_item(x: Tensor) -> Tensor:
    return x * x.mean().item()  # item


def by_random(x: Tensor) -> Tensor:
    return x * random.uniform(1, 2)  # random


def by_print(x: Tensor) -> Tensor:
    print("a line")  # print
    return x


@pytest.mark.parametrize(
    ("how", "line", "texts"),
    [
        (by_numpy, "# numpy", ["leaves PyTorch", ".numpy()", "torch.library.custom_op"]),
        (by_item, "# item", ["needs the value", ".item()", "torch.where", "outside"]),
        (by_random, "# random", ["draws from Python's random", "lazyinline.compile"]),
        (by_print, "# print", ["prints or logs", "lazyinline.compile"]),
    ],
)
def test_what_no_program_does_is_told_with_the_line_and_what_to_write_instead(
    how: Callable[[Tensor], Tensor], line: str, texts: list[str]
) -> None:
    model = stack(lambda: Telling(how))
    with pytest.raises(CaptureError) as caught:
        lazyinline.compile_step(model, loss_fn=torch.sum, backend="eager")(ONES)
    told = str(caught.value)
    assert f"{HERE}:{line_of(f'  {line}')} {how.__name__}" in told
    assert all(text in told for text in texts), told
    assert "LossModel" not in told and "aten." not in told
    compiled = lazyinline.compile(model, backend="eager")
    compiled(ONES)
    (row,) = [x for x in str(compiled.last_report).splitlines() if "(Telling)" in x]
    assert row.startswith("  1, 2 (Telling): runs eagerly")


@pytest.mark.sweep(keep="eager")
def test_a_block_of_another_type_is_named_before_anything_runs(backend: str) -> None:
    model = stack(lambda: nn.Sequential(Mixed()))
    model[1].bfloat16()
    line = line_of("# one type only")
    with pytest.raises(CaptureError) as caught:
        lazyinline.compile_step(model, loss_fn=torch.sum, backend=backend)(ONES)
    assert f"{HERE}:{line} Mixed.forward multiplies" in str(caught.value)
    assert all(name in str(caught.value) for name in ("float32", "bfloat16", "autocast"))
    with pytest.raises(RuntimeError, match="dtype"):  # eager's own, from the user's own frame
        lazyinline.compile(model, backend=backend)(ONES)
    with torch.autocast("cpu"):
        assert_close(lazyinline.compile(model, backend=backend)(ONES), model(ONES))


def test_a_missing_compiler_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    monkeypatch.setenv("LAZYINLINE_CACHE", "0")
    try:
        with config.patch({"cpp.cxx": (None, "no-such-compiler")}):
            compiled = lazyinline.compile(
                nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))
            )
            with pytest.raises(PlanError, match=r"no-such-compiler.*apt install g\+\+.*eager"):
                compiled(ONES)
    finally:
        cpp_builder.cpp_compiler_search.cache_clear()


def test_errors_share_one_base_and_show_the_name_by_which_they_are_caught() -> None:
    things = [getattr(lazyinline, name) for name in lazyinline.__all__]
    errors = [x for x in things if isinstance(x, type) and issubclass(x, Exception)]
    assert len(errors) >= 4
    for error in errors:
        assert error.__module__ == "lazyinline" and pickle.loads(pickle.dumps(error)) is error
        assert issubclass(error, lazyinline.LazyInlineError)


def test_a_model_on_the_meta_device_is_captured_but_not_run() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    program = lazyinline.capture(model, (torch.empty(2, 4, device="meta"),), train=True)
    assert program.num_nodes_if_inlined() == 3
    compiled = lazyinline.compile(model, backend="eager")
    with pytest.raises(PlanError, match=r"0\.weight is on the meta device.*to_empty"):
        compiled(ONES)
    real = model.to_empty(device="cpu")
    for parameter in real.parameters():
        nn.init.ones_(parameter)
    assert_close(compiled(ONES), real(ONES))


@pytest.mark.parametrize("place", ["inside", "itself"])
def test_a_torchscript_module_is_named(place: str) -> None:
    traced = torch.jit.trace(nn.Linear(4, 4), torch.randn(2, 4))
    model = nn.Sequential(nn.Linear(4, 4), traced) if place == "inside" else traced
    with pytest.raises(CaptureError, match=r"(1|The model) was scripted or traced by torch.jit"):
        lazyinline.compile(model, fallback="error")
    if place == "itself":  # there is nothing else to compile
        with pytest.raises(CaptureError, match=r"The model was scripted"):
            lazyinline.compile(model)
