"""Every error that a user can meet by mistake: its class, and that its message says what to do."""

import pathlib
import pickle
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_same_gradients, twin
from torch import Tensor, nn

import lazyinline
from lazyinline import CaptureError, LazyInlineError, PlanError, ReuseError, lazy_inline

HERE = pathlib.Path(__file__).name


def line_of(text: str) -> int:
    """Returns the number of the one line of this file that ends with a text."""
    lines = pathlib.Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(text))
    return number


# ---- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"reuse": "sometimes"}, ReuseError, "'sometimes'.*marked.*off"),
        ({"backend": "cuda"}, PlanError, "'cuda'.*inductor.*eager"),
        ({"recompute": "all of it"}, PlanError, "recompute='all of it'"),
        ({"dynamic": "yes"}, PlanError, "dynamic='yes'"),
    ],
)
def test_unknown_options_are_named_with_the_known_ones(
    options: dict[str, Any], error: type[LazyInlineError], text: str
) -> None:
    with pytest.raises(error, match=text):
        lazyinline.compile(nn.Linear(2, 2), **options)


def test_options_are_keywords() -> None:
    with pytest.raises(TypeError, match="positional"):
        lazyinline.compile(nn.Linear(2, 2), "marked")  # type: ignore[misc]


@pytest.mark.parametrize("thing", [nn.Linear, torch.relu, None, "model", [nn.Linear(2, 2)]])
def test_compiling_what_is_no_module(thing: Any) -> None:
    with pytest.raises(PlanError, match=r"takes an nn\.Module"):
        lazyinline.compile(thing)


def test_compiling_what_is_compiled() -> None:
    inner = lazyinline.compile(nn.Linear(2, 2), backend="eager")
    with pytest.raises(CaptureError, match="1 is a compiled module already"):
        lazyinline.compile(nn.Sequential(nn.Tanh(), inner), backend="eager")(torch.ones(1, 2))
    assert_close(nn.Sequential(nn.Tanh(), inner)(torch.ones(1, 2)).shape, torch.Size([1, 2]))


def test_report_before_the_first_call() -> None:
    assert lazyinline.compile(nn.Linear(2, 2)).last_report is None


# ---- marks ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("function", [lazyinline.capture, lazyinline.advise, lazyinline.measure])
def test_one_input_wants_a_tuple_around_it(function: Any) -> None:
    with pytest.raises(PlanError, match=r"not Tensor; write \(x,\) for one input"):
        function(nn.Linear(2, 2), torch.ones(3, 2))
    with pytest.raises(PlanError, match=r"takes an nn\.Module, not type"):
        function(nn.Linear, (torch.ones(3, 2),))


def test_a_mark_leaves_constructor_errors_alone() -> None:
    @lazy_inline
    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

    with pytest.raises(TypeError, match="width"):
        Block()  # type: ignore[call-arg]


# ---- models that cannot be captured -----------------------------------------------------------


@lazy_inline
class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the user's line
            return self.linear(x)
        return x


@lazy_inline
class Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x  # the shapes differ


def stack(block: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), block(), block())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.sweep(keep="eager")
def test_control_flow_on_data_in_a_marked_block_names_the_users_line(backend: str) -> None:
    line = line_of("# the user's line")
    with pytest.raises(CaptureError) as caught:
        lazyinline.compile(stack(Branching), backend=backend, fallback="error")(torch.ones(2, 4))
    text = str(caught.value)
    assert f"{HERE}:{line} Branching.forward" in text
    assert "value of a tensor" in text and "torch.where" in text


def test_an_error_of_the_model_itself_names_the_users_line_and_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = line_of("# the shapes differ")
    monkeypatch.setenv("LAZYINLINE_DEBUG", "1")
    with pytest.raises(CaptureError) as caught:
        lazyinline.compile(stack(Raising), backend="eager", fallback="error")(torch.ones(2, 4))
    assert f"{HERE}:{line} Raising.forward: RuntimeError: " in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


@lazy_inline
class Telling(nn.Module):
    """Does in its forward what no program does."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.how(x))  # what is told of


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
    x = torch.ones(2, 4)
    with pytest.raises(CaptureError) as caught:
        lazyinline.compile_step(model, loss_fn=torch.sum, backend="eager")(x)
    told = str(caught.value)
    assert f"{HERE}:{line_of(f'  {line}')} {how.__name__}" in told
    assert all(text in told for text in texts), told
    assert "LossModel" not in told and "aten." not in told
    compiled = lazyinline.compile(model, backend="eager")
    compiled(x)
    (row,) = [x for x in str(compiled.last_report).splitlines() if "(Telling)" in x]
    assert row.startswith("  1, 2 (Telling): runs eagerly")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.sweep(keep="eager")
def test_a_block_of_another_type_is_named_before_anything_runs(backend: str) -> None:
    model = stack(lambda: nn.Sequential(Mixed()))
    model[1].bfloat16()
    line = line_of("# one type only")
    with pytest.raises(CaptureError) as caught:
        lazyinline.compile_step(model, loss_fn=torch.sum, backend=backend)(torch.ones(2, 4))
    assert f"{HERE}:{line} Mixed.forward multiplies" in str(caught.value)
    assert all(name in str(caught.value) for name in ("float32", "bfloat16", "autocast"))
    with pytest.raises(RuntimeError, match="dtype"):  # eager's own, from the user's own frame
        lazyinline.compile(model, backend=backend)(torch.ones(2, 4))
    with torch.autocast("cpu"):
        x = torch.ones(2, 4)
        assert_close(lazyinline.compile(model, backend=backend)(x), model(x))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # one type only


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
                compiled(torch.ones(2, 4))
    finally:
        cpp_builder.cpp_compiler_search.cache_clear()


@pytest.mark.parametrize("loss_fn", [lambda output, target: output, nn.MSELoss()])
def test_a_loss_of_two_arguments_is_told_before_anything_runs(loss_fn: Any) -> None:
    with pytest.raises(PlanError, match=r"called with one argument, the model's output"):
        lazyinline.compile_step(stack(Doubling), loss_fn=loss_fn)
    with pytest.raises(CaptureError, match=r"^The loss must be a scalar tensor, not \(2, 4\)"):
        lazyinline.compile_step(stack(Doubling), backend="eager")(torch.ones(2, 4))


def test_errors_show_the_name_by_which_they_are_caught() -> None:
    for name in lazyinline.__all__:
        thing = getattr(lazyinline, name)
        if isinstance(thing, type) and issubclass(thing, Exception):
            assert thing.__module__ == "lazyinline" and pickle.loads(pickle.dumps(thing)) is thing


def test_after_an_error_everything_works_again() -> None:
    bad, good = stack(Branching), stack(Doubling)
    x = torch.ones(2, 4)
    for _ in range(2):
        with pytest.raises(CaptureError):
            lazyinline.compile(bad, backend="eager", fallback="error")(x)
        assert_close(lazyinline.compile(good, backend="eager")(x), good(x))
        assert_close(bad(x), bad(x))
    assert type(bad[0].weight) is nn.Parameter and "forward" not in vars(bad[1])
    assert nn.Module.__call__ is not None and not torch.is_inference_mode_enabled()


@lazy_inline
class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


# ---- the meta device --------------------------------------------------------------------------


def test_a_model_on_the_meta_device_is_captured_but_not_run() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    program = lazyinline.capture(model, (torch.empty(2, 4, device="meta"),), train=True)
    assert program.num_nodes_if_inlined() == 3
    compiled = lazyinline.compile(model, backend="eager")
    with pytest.raises(PlanError, match=r"0\.weight is on the meta device.*to_empty"):
        compiled(torch.ones(2, 4))
    real = model.to_empty(device="cpu")
    for parameter in real.parameters():
        nn.init.ones_(parameter)
    assert_close(compiled(torch.ones(2, 4)), real(torch.ones(2, 4)))


@pytest.mark.parametrize("run", [lazyinline.compile, lazyinline.compile_step])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.sweep(keep="eager")
def test_a_parameter_whose_memory_holds_other_numbers_is_refused_whenever_it_comes(
    run: Callable[..., Any], backend: str
) -> None:
    """``is_neg`` is a flag of the tensor: neither its address nor its layout tells."""
    model, x = nn.Linear(4, 4, bias=False), torch.ones(2, 4)
    is_step = run is lazyinline.compile_step
    options: Any = {"loss_fn": torch.sum} if is_step else {"fallback": "error"}
    compiled = run(model, backend=backend, **options)
    compiled(x)
    numbers = model.weight.data.clone()
    model.weight.data = torch.complex(numbers, -numbers).conj().imag
    assert model.weight.is_neg()
    with pytest.raises(CaptureError, match=r"weight is a lazily negated view.*resolve_neg\(\)"):
        compiled(x)
    model.weight.data = model.weight.data.resolve_neg()
    expected = model(x).sum().detach() if is_step else model(x)
    assert_close(compiled(x), expected)


# ---- unusual arguments and results that work --------------------------------------------------


class Unhashable:
    """An argument that can be neither hashed nor compared."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.table = [factor, {"nested": [factor]}]

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared by the user's own ==")


@lazy_inline
class Configured(nn.Module):
    def __init__(self, config: Unhashable, extra: Any = None) -> None:
        super().__init__()
        self.config = config
        self.extra = extra
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.config.factor
        return y


def test_unhashable_constructor_arguments_are_compared_by_content() -> None:
    torch.manual_seed(0)
    factors = (2.0, 2.0, 3.0, 2.0)
    blocks = (Configured(Unhashable(f), extra=[{"a": {1, 2}}, torch.ones(2)]) for f in factors)
    model = nn.Sequential(*blocks)
    expected = twin(model)
    compiled = lazyinline.compile(model, backend="eager")
    x = torch.ones(2, 4).requires_grad_()  # as between layers
    compiled(x).sum().backward()
    expected(x).sum().backward()
    assert_same_gradients(model, expected)
    report = compiled.last_report
    assert [d.shared for d in report.decisions] == [False, True, False, True]
    assert "factor" in report.decisions[2].reason or "config" in report.decisions[2].reason


@dataclass
class Result:
    """An object that PyTorch's trees do not know."""

    value: Tensor
    name: str


@lazy_inline
class ReturnsAnObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Result:
        return Result(self.linear(x), "linear")


class Unpacking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReturnsAnObject() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            result = block(x)
            x = x + result.value * len(result.name)
        return x


def test_a_block_may_return_an_object_and_is_then_traced_each_time() -> None:
    torch.manual_seed(0)
    model = Unpacking()
    expected = twin(model)
    compiled = lazyinline.compile(model, backend="eager")
    x = torch.ones(2, 4)
    for seed in range(2):  # the second call must not return what the first one made
        x = torch.full((2, 4), float(seed + 1))
        out = compiled(x)
        assert_close(out, expected(x))
        out.sum().backward()
        expected(x).sum().backward()
    assert_same_gradients(model, expected)
    decisions = compiled.last_report.decisions
    assert not any(d.shared for d in decisions)
    assert all("neither a tensor nor plain data" in d.reason for d in decisions)


def test_a_model_that_returns_an_object_full_of_tensors_is_refused() -> None:
    model = nn.Sequential(ReturnsAnObject())
    compiled = lazyinline.compile(model, backend="eager", fallback="error")
    with pytest.raises(LazyInlineError, match="Result"):
        compiled(torch.ones(2, 4))


@lazy_inline
class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        return self.linear(x), None, 0.5, {"name": "plain", "pair": (x, x.shape[0])}


def test_plain_data_beside_tensors_is_shared_and_kept() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Plain() for _ in range(3))

        def forward(self, x: Tensor) -> Any:
            out: Any = None
            for block in self.blocks:
                out = block(x)
                x = out[0] * out[2]
            return out

    torch.manual_seed(0)
    model = Model()
    compiled = lazyinline.compile(model, backend="eager")
    x = torch.ones(2, 4).requires_grad_()
    assert_close(compiled(x), model(x))
    assert [d.shared for d in compiled.last_report.decisions] == [False, True, True]


@pytest.mark.parametrize("place", ["inside", "itself"])
def test_a_torchscript_module_is_named(place: str) -> None:
    traced = torch.jit.trace(nn.Linear(4, 4), torch.randn(2, 4))
    model = nn.Sequential(nn.Linear(4, 4), traced) if place == "inside" else traced
    with pytest.raises(CaptureError, match=r"(1|The model) was scripted or traced by torch.jit"):
        lazyinline.compile(model, fallback="error")
    if place == "itself":  # there is nothing else to compile
        with pytest.raises(CaptureError, match=r"The model was scripted"):
            lazyinline.compile(model)
