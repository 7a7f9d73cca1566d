"""Which block instances share one closure, and why not: each case also equals eager PyTorch."""

import collections
import contextvars
import copy
import functools
import itertools
import operator
import pickle
import re
import sys
import threading
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from blocks import Around, Stack, block, example, linear
from equality import Outcome, assert_equals_eager
from torch import nn

import lazyinline
from lazyinline import ReuseError, lazy_inline
from lazyinline.frontend.capture.capture import capture_model
from lazyinline.reuse.evidence.evidence import Evidence
from lazyinline.reuse.evidence.reads import Reads


@dataclass(frozen=True)
class Case:
    """A model; how many instances share; a part of the reason why another one does not."""

    make: Callable[[], nn.Module]
    shared: int
    reason: str


CASES: dict[str, Case] = {}


def case(shared: int, reason: str = "") -> Callable[[Callable[[], nn.Module]], None]:
    def register(make: Callable[[], nn.Module]) -> None:
        assert make.__name__ not in CASES
        CASES[make.__name__] = Case(make, shared, reason)

    return register


def tanh(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(self.linear(x))


def scaled(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(self.linear(x)) * self.scale


def configured(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(self.linear(x)) * self.config.scale


def activated(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.act(self.linear(x))


class Config:
    def __init__(self, scale: float = 1.0, inner: Any = None) -> None:
        self.scale = scale
        self.inner = inner


def pair(kind: type[nn.Module], first: dict[str, Any], second: dict[str, Any]) -> Stack:
    return Stack(kind(**first), kind(**second))


# ---- attributes ----------------------------------------------------------------------------------


@case(shared=2)
def argument_that_forward_does_not_use() -> nn.Module:
    kind = block(tanh)
    return Stack(*(kind(index=i) for i in range(3)))


@case(shared=0, reason="attribute scale is 2, not 1")
def argument_that_forward_uses() -> nn.Module:
    return pair(block(scaled), {"scale": 1}, {"scale": 2})


@case(shared=2, reason="attribute scale is 2, not 1")
def two_groups_of_equal_instances() -> nn.Module:
    kind = block(scaled)
    return Stack(*(kind(scale=s) for s in (1, 2, 1, 2)))


@case(shared=0, reason="attribute scale is True, not 1")
def one_and_true() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (3 if self.scale is True else 2)

    return pair(block(forward), {"scale": 1}, {"scale": True})


@case(shared=0, reason="attribute scale is 3.0, not 1.0")
def attribute_changed_after_init() -> nn.Module:
    model = pair(block(scaled), {"scale": 1.0}, {"scale": 1.0})
    model.layers[1].scale = 3.0
    return model


@case(shared=0, reason="attribute scale is 2.0, not <missing>")
def attribute_only_one_has() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * getattr(self, "scale", 5.0)

    return pair(block(forward), {}, {"scale": 2.0})


@case(shared=0, reason="attribute scale is 2.0, not 1.0")
def attribute_read_through_dict() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * vars(self)["scale"]

    return pair(block(forward), {"scale": 1.0}, {"scale": 2.0})


@case(shared=0, reason="attribute _scale is 2.0, not 1.0")
def attribute_behind_a_property() -> nn.Module:
    kind = block(scaled)
    kind.scale = property(lambda self: self._scale)  # type: ignore[attr-defined]
    return pair(kind, {"_scale": 1.0}, {"_scale": 2.0})


@case(shared=0, reason="attribute scale[1] is 3.0, not 2.0")
def list_attribute() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * sum(self.scale)

    return pair(block(forward), {"scale": [1.0, 2.0]}, {"scale": [1.0, 3.0]})


@case(shared=0, reason="attribute scale is <dict>")
def order_of_a_dict_attribute() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * next(iter(self.scale.values()))

    return pair(block(forward), {"scale": {"a": 1, "b": 2}}, {"scale": {"b": 2, "a": 1}})


@case(shared=0, reason="attribute scale is <ndarray>")
def middle_of_a_large_array() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * float(self.scale.sum())

    arrays = np.ones(5000), np.ones(5000)
    arrays[1][2500] = 2.0
    return pair(block(forward), {"scale": arrays[0]}, {"scale": arrays[1]})


@case(shared=1)
def equal_arrays() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * float(self.scale.sum())

    return pair(block(forward), {"scale": np.ones(5)}, {"scale": np.ones(5)})


@case(shared=0, reason="attribute pick is <itemgetter object>")
def objects_of_builtin_classes() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.pick((2.0, 3.0))

    pick = operator.itemgetter
    return pair(block(forward), {"pick": pick(0)}, {"pick": pick(1)})


@case(shared=0, reason="attribute pattern is <Pattern object>, not")
def patterns() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2.0 if self.pattern.match("a") else 3.0)

    return pair(block(forward), {"pattern": re.compile("a")}, {"pattern": re.compile("b")})


# ---- configurations ------------------------------------------------------------------------------


@case(shared=1)
def fresh_but_equal_configs() -> nn.Module:
    inner = {"a": [1, 2]}
    configs = [Config(2.0, Config(3.0, copy.deepcopy(inner))) for _ in range(2)]
    return pair(block(configured), {"config": configs[0]}, {"config": configs[1]})


@case(shared=0, reason="attribute config.scale is 2.0, not 1.0")
def different_configs() -> nn.Module:
    return pair(block(configured), {"config": Config(1.0)}, {"config": Config(2.0)})


@case(shared=0, reason="attribute config.scale is 2.0, not 1.0")
def different_namespaces() -> nn.Module:
    configs = [types.SimpleNamespace(scale=s) for s in (1.0, 2.0)]
    return pair(block(configured), {"config": configs[0]}, {"config": configs[1]})


def changing_the_config(layers: Any, x: torch.Tensor) -> torch.Tensor:
    """One object that all layers hold: changed between their calls, and put back at the end."""
    before = layers[0].config.scale
    for index, layer in enumerate(layers):
        layer.config.scale = index + 1.0
        x = layer(x)
    layers[0].config.scale = before
    return x


@case(shared=0, reason="attribute config.scale is 2.0, not 1.0")
def one_config_changed_between_layers() -> nn.Module:
    kind, config = block(configured), Config()
    return Around(changing_the_config, kind(config=config), kind(config=config))


@case(shared=0, reason="attribute config.scale is 2.0, not 1.0")
def one_namespace_changed_between_layers() -> nn.Module:
    kind, config = block(configured), types.SimpleNamespace(scale=1.0)
    return Around(changing_the_config, kind(config=config), kind(config=config))


@case(shared=0, reason="attribute scale[0] is 2.0, not 1.0")
def one_queue_changed_between_layers() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale[0]

    def body(layers: Any, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(layers):
            layer.scale[0] = index + 1.0
            x = layer(x)
        layers[0].scale[0] = 0.0
        return x

    kind, queue = block(forward), collections.deque([0.0])
    return Around(body, kind(scale=queue), kind(scale=queue))


@case(shared=0, reason="forward changes Block.config")
def config_that_forward_changes() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.config.scale += 1
        return self.linear(x) * self.config.scale

    def body(layers: Any, x: torch.Tensor) -> torch.Tensor:
        layers[0].config.scale = 0.0
        for layer in layers:
            x = layer(x)
        layers[0].config.scale = 1.0
        return x

    kind, config = block(forward), Config()
    return Around(body, kind(config=config), kind(config=config))


# ---- functions as attributes ---------------------------------------------------------------------


def times(factor: float) -> Callable[[Any], Any]:
    return lambda x: x * factor


class Times:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Any) -> Any:
        return x * self.factor

    def apply(self, x: Any) -> Any:
        return x * self.factor


def acts(first: Any, second: Any) -> nn.Module:
    return pair(block(activated), {"act": first}, {"act": second})


@case(shared=1)
def equal_closures() -> nn.Module:
    return acts(times(2), times(2))


@case(shared=0, reason="attribute act is <function>")
def closures_over_different_values() -> nn.Module:
    return acts(times(2), times(3))


@case(shared=0, reason="attribute act is <function>")
def different_lambdas() -> nn.Module:
    return acts(lambda x: x * 2, lambda x: x * 3)


@case(shared=1)
def lambdas_over_one_loop_variable() -> nn.Module:
    """Python binds late: both read the loop variable's last value."""
    functions = []
    for factor in (2, 3):
        functions.append(lambda x: x * factor)  # noqa: B023
    return acts(*functions)


@case(shared=0, reason="attribute act is <function>")
def lambdas_over_defaults_in_a_loop() -> nn.Module:
    return acts(*(lambda x, k=factor: x * k for factor in (2, 3)))


@case(shared=0, reason="attribute act is <partial>")
def different_partials() -> nn.Module:
    return acts(functools.partial(torch.mul, other=2), functools.partial(torch.mul, other=3))


@case(shared=0, reason="attribute act.factor is 3, not 2")
def different_callables() -> nn.Module:
    return acts(Times(2), Times(3))


@case(shared=0, reason="attribute act is <method>")
def bound_methods_of_different_objects() -> nn.Module:
    return acts(Times(2).apply, Times(3).apply)


@case(shared=0, reason="attribute forward is <method>")
def forward_replaced_on_one_instance() -> nn.Module:
    model = pair(block(tanh), {}, {})
    other = types.MethodType(lambda self, x: self.linear(x) * 5, model.layers[1])
    model.layers[1].forward = other  # type: ignore[method-assign]
    return model


# ---- sub-modules, parameters and modes -----------------------------------------------------------


@case(shared=0, reason="class of act differs")
def sub_module_swapped() -> nn.Module:
    model = acts(nn.ReLU(), nn.ReLU())
    model.layers[1].act = nn.Tanh()
    return model


@case(shared=0, reason="it has 4 sub-modules, not 3")
def sub_module_more() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in self.more:
            x = torch.tanh(layer(x))
        return x

    lists = [nn.ModuleList(linear() for _ in range(n)) for n in (1, 2)]
    model = pair(block(forward), {"more": lists[0]}, {"more": lists[1]})
    for layer in model.layers:
        del layer.linear
    return model


@case(shared=0, reason="parameters of linear differs (weight: requires_grad)")
def parameter_frozen_in_one() -> nn.Module:
    model = pair(block(tanh), {}, {})
    model.layers[1].linear.weight.requires_grad_(False)
    return model


@case(shared=1)
def parameter_frozen_in_all() -> nn.Module:
    model = pair(block(tanh), {}, {})
    for layer in model.layers:
        layer.linear.weight.requires_grad_(False)
    return model


@case(shared=0, reason="parameters of other differs (weight: tying)")
def parameters_tied_in_one() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.tanh(self.linear(x)))

    model = pair(block(forward), {"other": linear()}, {"other": linear()})
    model.layers[1].other.weight = model.layers[1].linear.weight
    return model


@case(shared=1)
def parameters_tied_in_all() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.tanh(self.linear(x)))

    model = pair(block(forward), {"other": linear()}, {"other": linear()})
    for layer in model.layers:
        layer.other.weight = layer.linear.weight
    return model


@case(shared=1)
def parameters_tied_between_instances() -> nn.Module:
    model = pair(block(tanh), {}, {})
    model.layers[1].linear.weight = model.layers[0].linear.weight
    return model


@case(shared=0, reason="parameters of linear differs")
def bias_in_one() -> nn.Module:
    model = pair(block(tanh), {}, {})
    model.layers[1].linear = linear(bias=False)
    return model


@case(shared=0, reason="parameters of linear differs (weight: layout)")
def half_the_precision_in_one() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x.to(self.linear.weight.dtype)).to(x.dtype)

    model = pair(block(forward), {}, {})
    model.layers[1].float()
    return model


@case(shared=0, reason="train/eval mode of the block differs (training is False, not True)")
def one_in_eval_mode() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2 if self.training else 3)

    model = pair(block(forward), {}, {})
    model.layers[1].eval()
    return model


@case(shared=0, reason="train/eval mode of drop differs")
def one_dropout_in_eval_mode() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(x))

    model = pair(block(forward), {"drop": nn.Dropout(0.5)}, {"drop": nn.Dropout(0.5)})
    model.layers[1].drop.eval()
    return model


@case(shared=0, reason="it has forward hooks")
def forward_hook_on_one() -> nn.Module:
    model = pair(block(tanh), {}, {})
    model.layers[1].register_forward_hook(lambda module, args, output: output * 2)
    return model


@case(shared=0, reason="it has forward hooks")
def forward_pre_hook_inside_one() -> nn.Module:
    model = pair(block(tanh), {}, {})
    model.layers[1].linear.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return model


@case(shared=0, reason="it has forward hooks")  # what else they do, no evidence would tell
def equal_hooks_on_both() -> nn.Module:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    model = pair(block(tanh), {}, {})
    for layer in model.layers:
        layer.register_forward_hook(hook)
    return model


# ---- classes -------------------------------------------------------------------------------------


@case(shared=0)
def local_classes_of_one_name() -> nn.Module:
    def make(factor: float) -> type[nn.Module]:
        return block(lambda self, x: self.linear(x) * factor)

    return Stack(make(2)(), make(3)())


@case(shared=1)
def subclass_is_marked_and_a_class_of_its_own() -> nn.Module:
    base = block(tanh)

    class Child(base):  # type: ignore[misc,valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    return Stack(base(), Child(), Child())


@case(shared=1)
def mark_on_init() -> nn.Module:
    class Marked(nn.Module):
        @lazy_inline
        def __init__(self, scale: float = 1.0) -> None:
            super().__init__()
            self.linear = linear()
            self.scale = scale

        forward = scaled

    return Stack(Marked(), Marked(scale=1.0))


@case(shared=1)
def mark_put_on_after_instances_exist() -> nn.Module:
    kind = block(tanh, mark=False)
    model = Stack(kind(), kind())
    lazy_inline(kind)
    return model


@case(shared=0)
def without_a_mark() -> nn.Module:
    kind = block(tanh, mark=False)
    return Stack(kind(), kind())


@case(shared=1)
def init_arguments_that_cannot_be_hashed() -> nn.Module:
    return pair(block(tanh), {"sizes": [1, {2}]}, {"sizes": [3, {4}]})


@case(shared=1)
def deep_copies() -> nn.Module:
    first = block(scaled)(scale=2.0)
    return Stack(first, copy.deepcopy(first))


@case(shared=1)
def one_instance_called_twice() -> nn.Module:
    layer = block(tanh)()
    return Stack(layer, layer)


# ---- nesting -------------------------------------------------------------------------------------


def outer_block(*factors: float) -> list[nn.Module]:
    inner = block(scaled)
    outer = block(lambda self, x: self.linear(self.second(self.first(x))))
    return [outer(first=inner(scale=f), second=inner(scale=f)) for f in factors]


@case(shared=2)  # the second inner of the first outer; the second outer, with both inside
def nested_blocks() -> nn.Module:
    return Stack(*outer_block(2.0, 2.0))


@case(shared=2, reason="attribute scale is 3.0, not 2.0")
def nested_blocks_that_differ_inside() -> nn.Module:
    return Stack(*outer_block(2.0, 3.0))


@case(shared=3)
def nested_three_deep() -> nn.Module:
    inner = block(tanh)
    middle = block(lambda self, x: self.b(self.a(x)))
    outer = block(lambda self, x: self.m(x) * 2)
    return Stack(*(outer(m=middle(a=inner(), b=inner())) for _ in range(3)))


@case(shared=1, reason="inner: attribute scale is 3.0, not 2.0")
def inner_instance_that_was_itself_shared() -> nn.Module:
    """The second outer's inner was traced elsewhere; its evidence still counts."""
    inner, outer = block(scaled), block(lambda self, x: self.inner(x))
    layers = [inner(scale=2.0), outer(inner=inner(scale=2.0)), outer(inner=inner(scale=3.0))]
    return Stack(*layers)


@case(shared=1)
def different_numbers_of_inner_calls_by_attribute() -> nn.Module:
    inner = block(tanh)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.inner(x)
        return x

    outer = block(forward)
    return Stack(outer(inner=inner(), times=1), outer(inner=inner(), times=1))


# ---- globals, captured variables, outside objects ------------------------------------------------

FACTOR = 1.0
NAMESPACE = types.SimpleNamespace(factor=1.0)
TABLE = {"factor": [1.0]}
SETTINGS = types.ModuleType("settings")
SETTINGS.factor = 1.0  # type: ignore[attr-defined]
OBJECT = Config()
STEPS = itertools.count()


class Shared:
    factor = 1.0


class Meter:
    def __init__(self) -> None:
        self.count = 0.0

    def step(self) -> float:
        self.count += 1
        return self.count


METER = Meter()


def act(x: torch.Tensor) -> torch.Tensor:
    return x * act.factor  # type: ignore[attr-defined]


act.factor = 1.0  # type: ignore[attr-defined]


class Holder:
    """Gives out a value in ways that name no attribute."""

    def __init__(self) -> None:
        self.values = [1.0]

    def __getitem__(self, index: int) -> float:
        return self.values[index]

    def __call__(self) -> float:
        return self.values[0]


HOLDER = Holder()
DEEP = Config(inner=Config(inner=Config(inner=Config(1.0))))
CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
THREAD = threading.local()
THREAD.factor = 1.0


def deep() -> Any:
    return DEEP.inner.inner.inner


def set_global(value: float) -> None:
    global FACTOR
    FACTOR = value


OUTSIDE: dict[str, tuple[Callable[[], float], Callable[[float], None], str]] = {
    "the global FACTOR": (lambda: FACTOR, set_global, "the global FACTOR"),
    "an entry of a global dict": (
        lambda: TABLE["factor"][0],
        lambda value: operator.setitem(TABLE["factor"], 0, value),
        "the global TABLE",
    ),
    "an attribute of a global namespace": (
        lambda: NAMESPACE.factor,
        lambda value: setattr(NAMESPACE, "factor", value),
        "the global NAMESPACE",
    ),
    "an attribute of a global object": (
        lambda: OBJECT.scale,
        lambda value: setattr(OBJECT, "scale", value),
        "the global OBJECT",
    ),
    "an attribute reached by getattr": (
        lambda: getattr(OBJECT, "sca" + "le"),
        lambda value: setattr(OBJECT, "scale", value),
        "the global OBJECT",
    ),
    "an object's __getitem__": (
        lambda: HOLDER[0],
        lambda value: operator.setitem(HOLDER.values, 0, value),
        "the global HOLDER",
    ),
    "an object's __call__": (
        lambda: HOLDER(),
        lambda value: operator.setitem(HOLDER.values, 0, value),
        "the global HOLDER",
    ),
    "an object deep below, through a helper": (
        lambda: deep().scale,
        lambda value: setattr(DEEP.inner.inner.inner, "scale", value),
        "the global DEEP",
    ),
    "a context variable": (lambda: CONTEXT.get(), CONTEXT.set, "the global CONTEXT"),
    "a thread's variable": (
        lambda: THREAD.factor,
        lambda value: setattr(THREAD, "factor", value),
        "the global THREAD",
    ),
    "an attribute of a global class": (
        lambda: Shared.factor,
        lambda value: setattr(Shared, "factor", value),
        "Shared.factor",
    ),
    "a variable of a module": (
        lambda: SETTINGS.factor,  # type: ignore[attr-defined]
        lambda value: setattr(SETTINGS, "factor", value),
        "settings.factor",
    ),
    "an attribute of a function": (
        lambda: act(torch.ones(())).item() and act.factor,  # type: ignore[attr-defined]
        lambda value: setattr(act, "factor", value),
        "act.factor",
    ),
}
# act() runs a tensor operator, whose value a capture cannot have: read the attribute alone.
OUTSIDE["an attribute of a function"] = (
    lambda: act.factor,  # type: ignore[attr-defined]
    *OUTSIDE["an attribute of a function"][1:],
)


# Not attributes of an object that the forward reads: a change is seen as one of the whole model.
OTHERS_STATE = {"an attribute of a global class", "a variable of a module"}


def ran_itself(outcome: Outcome) -> bool:
    """Whether the model changes at each call what is outside of it, as no program would."""
    return "forward changes" in outcome.compiled.last_report.ran_eagerly


def writes_as_eager(outcome: Outcome, name: str) -> bool:
    """Whether what a forward writes outside is there after a call, also if others wrote there.

    A plain value that each call leaves the same settles; a program runs only where it stands.
    """
    get, put, _ = OUTSIDE[name]
    left = []
    for _ in range(3):
        put(7.0)
        outcome.compiled(example())
        left.append(get())
    return left == [2.0] * 3


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.smoke
@pytest.mark.sweep(keep=["the global FACTOR", "an object's __call__", "a context variable"])
def test_outside_value_changed_between_calls_keeps_blocks_apart(name: str) -> None:
    get, put, what = OUTSIDE[name]
    kind = block(lambda self, x: torch.tanh(self.linear(x)) * get())

    def body(layers: Any, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(layers):
            put(index + 1.0)
            x = layer(x)
        return x

    outcome = assert_equals_eager(Around(body, kind(), kind()), [example()])
    assert outcome.shared == 0
    if name in OTHERS_STATE:
        assert writes_as_eager(outcome, name)
    else:
        assert outcome.reasons == (f"{what} changed between the calls",)


@pytest.mark.parametrize("name", OUTSIDE)
def test_outside_value_that_stays_does_not_keep_blocks_apart(name: str) -> None:
    get, put, _ = OUTSIDE[name]
    put(2.0)
    kind = block(lambda self, x: torch.tanh(self.linear(x)) * get())
    assert assert_equals_eager(Stack(kind(), kind()), [example()]).shared == 1


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.sweep(keep=["the global FACTOR", "an object's __call__", "a context variable"])
def test_outside_value_that_forward_changes_keeps_blocks_apart(name: str) -> None:
    get, put, what = OUTSIDE[name]

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        put(get() + 1.0)
        return torch.tanh(self.linear(x)) * get()

    def body(layers: Any, x: torch.Tensor) -> torch.Tensor:
        put(0.0)
        for layer in layers:
            x = layer(x)
        return x

    kind = block(forward)
    outcome = assert_equals_eager(Around(body, kind(), kind()), [example()])
    assert outcome.shared == 0
    if name in OTHERS_STATE:
        assert writes_as_eager(outcome, name)
    else:
        # Its method, which the forward captured, leads to it as well.
        changed = "Block.forward" if name == "a context variable" else what
        assert outcome.reasons == (f"its forward changes {changed}",) * 2


def test_object_that_its_own_method_changes_keeps_blocks_apart() -> None:
    kind = block(lambda self, x: self.linear(x) * METER.step())

    def body(layers: Any, x: torch.Tensor) -> torch.Tensor:
        METER.count = 0.0
        for layer in layers:
            x = layer(x)
        return x

    outcome = assert_equals_eager(Around(body, kind(), kind()), [example()])
    assert outcome.reasons == ("its forward changes the global METER",) * 2


def test_captured_class_changed_between_calls_keeps_blocks_apart() -> None:
    class Local:
        factor = 0.0

    kind = block(lambda self, x: self.linear(x) * Local.factor)

    def body(layers: Any, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(layers):
            Local.factor = index + 1.0
            x = layer(x)
        return x

    outcome = assert_equals_eager(Around(body, kind(), kind()), [example()])
    assert outcome.reasons == ("Local.factor changed between the calls",)


def test_class_attribute_that_forward_changes_keeps_blocks_apart() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return self.linear(x) * type(self).calls

    kind = block(forward)

    def body(layers: Any, x: torch.Tensor) -> torch.Tensor:
        kind.calls = 0.0  # type: ignore[attr-defined]
        for layer in layers:
            x = layer(x)
        return x

    outcome = assert_equals_eager(Around(body, kind(), kind()), [example()])
    assert outcome.reasons == ("its forward changes Block.calls",) * 2


def test_variable_imported_in_forward_keeps_blocks_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "settings_of_this_test", SETTINGS)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        from settings_of_this_test import factor

        return self.linear(x) * factor

    def body(layers: Any, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(layers):
            SETTINGS.factor = index + 1.0  # type: ignore[attr-defined]
            x = layer(x)
        return x

    kind = block(forward)
    outcome = assert_equals_eager(Around(body, kind(), kind()), [example()])
    assert outcome.reasons == ("settings.factor changed between the calls",)


LAYERS: list[nn.Module] = []


def by_its_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.linear(x) * (1 + LAYERS.index(self))


def by_its_parent(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.linear(x) * (2 if self is self.parent[0].layers[-1] else 3)


@pytest.mark.parametrize("forward", [by_its_place, by_its_parent])
def test_block_that_looks_for_itself_outside_is_not_shared(forward: Callable[..., Any]) -> None:
    def body(layers: Any, x: torch.Tensor) -> torch.Tensor:
        LAYERS[:] = layers
        for layer in layers:
            x = layer(x)
        return x

    kind = block(forward)
    model = Around(body, *(kind() for _ in range(3)))
    for layer in model.layers:
        layer.parent = [model]
    outcome = assert_equals_eager(model, [example()])
    assert outcome.shared == 0
    assert all("leads to this very block" in reason for reason in outcome.reasons)


def test_global_iterator_keeps_blocks_apart() -> None:
    kind = block(lambda self, x: self.linear(x) * next(STEPS))

    def body(layers: Any, x: torch.Tensor) -> torch.Tensor:
        global STEPS
        STEPS = itertools.count(1)
        for layer in layers:
            x = layer(x)
        return x

    outcome = assert_equals_eager(Around(body, kind(), kind()), [example()])
    assert "forward reads a count" in outcome.compiled.last_report.ran_eagerly


def test_one_iterator_that_all_blocks_read_moves_on_in_each() -> None:
    def body(layers: Any, x: torch.Tensor) -> torch.Tensor:
        steps = itertools.count(1)
        for layer in layers:
            vars(layer)["steps"] = steps
            x = layer(x)
        return x

    kind = block(lambda self, x: self.linear(x) * next(self.steps))
    outcome = assert_equals_eager(Around(body, kind(), kind()), [example()])
    assert "forward reads a count" in outcome.compiled.last_report.ran_eagerly


def test_captured_variable_that_forward_changes_keeps_blocks_apart() -> None:
    count = 0.0

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return self.linear(x) * count

    def body(layers: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count = 0.0
        for layer in layers:
            x = layer(x)
        return x

    kind = block(forward)
    outcome = assert_equals_eager(Around(body, kind(), kind()), [example()])
    assert "may set the captured variable count" in outcome.compiled.last_report.ran_eagerly


@pytest.mark.smoke
def test_captured_variable_changed_between_calls_keeps_blocks_apart() -> None:
    factor = 0.0
    helper = lambda x: x * factor  # noqa: E731
    kind = block(lambda self, x: helper(self.linear(x)))

    def body(layers: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal factor
        for index, layer in enumerate(layers):
            factor = index + 1.0
            x = layer(x)
        return x

    assert assert_equals_eager(Around(body, kind(), kind()), [example()]).shared == 0


def test_attribute_of_a_module_outside_the_block_is_evidence() -> None:
    other = nn.Identity()
    other.factor = 1.0
    kind = block(lambda self, x: self.linear(x) * other.factor)

    def body(layers: Any, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(layers):
            vars(other)["factor"] = index + 1.0
            x = layer(x)
        return x

    outcome = assert_equals_eager(Around(body, kind(), kind()), [example()])
    assert outcome.shared == 0
    assert "changed between the calls" in outcome.reasons[0]


def test_inner_module_that_is_marked_but_outside_the_tree_keeps_blocks_apart() -> None:
    inner = block(tanh)()
    kind = block(lambda self, x: self.linear(self.helper[0](x)))
    outcome = assert_equals_eager(Stack(kind(helper=[inner]), kind(helper=[inner])), [example()])
    assert outcome.shared == 1  # the inner block itself
    assert "outside its own tree" in outcome.reasons[0]


# ---- arguments -----------------------------------------------------------------------------------


def offset(self: Any, x: Any, y: Any = None, *, scale: float = 1.0) -> torch.Tensor:
    return torch.tanh(self.linear(x)) * scale + (0 if y is None else y)


CALLS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], int]] = {
    "defaults spelled out": (lambda ls, x: ls[1](ls[0](x), None, scale=1.0), 1),
    "keyword for a positional argument": (lambda ls, x: ls[1](x=ls[0](x), y=None), 1),
    "order of keywords": (
        lambda ls, x: ls[1](ls[0](x, y=x.cos(), scale=2.0), scale=2.0, y=x.cos()),
        1,
    ),
    "other number": (lambda ls, x: ls[1](ls[0](x, scale=2.0), scale=3.0), 0),
    "1 and 1.0": (lambda ls, x: ls[1](ls[0](x, scale=1), scale=1.0), 0),
    "None and a tensor": (lambda ls, x: ls[1](ls[0](x), x), 0),
    "another shape": (lambda ls, x: ls[1](torch.cat([ls[0](x), x])), 0),
    "other strides": (lambda ls, x: ls[1](ls[0](x).t().contiguous().t()), 0),
    "another layout of y": (lambda ls, x: ls[1](ls[0](x, x), x[:1]), 0),
    "same tensor twice, or not": (lambda ls, x: ls[1](ls[0](x, x), x), 0),
    "same tensor twice in both": (lambda ls, x: (y := ls[0](x, x)) + ls[1](y, y), 1),
    "a view of the other argument": (lambda ls, x: ls[1](y := ls[0](x, x.sum()), y[0]), 0),
    "gradient wanted or not": (lambda ls, x: ls[1](ls[0](x).detach()), 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_call_signature_decides_like_python(name: str) -> None:
    body, shared = CALLS[name]
    kind = block(offset)
    # A first operator, so that every block is called with a result of another.
    model = Around(lambda layers, x: body(layers, torch.sin(x)), kind(), kind())
    assert assert_equals_eager(model, [example()]).shared == shared


def test_list_argument_that_blocks_add_to_keeps_them_apart() -> None:
    def forward(self: Any, x: torch.Tensor, seen: list[Any]) -> torch.Tensor:
        seen.append(x)
        return torch.tanh(self.linear(x)) * sum(seen)

    kind = block(forward)
    model = Around(lambda layers, x: layers[1](layers[0](x, seen := []), seen), kind(), kind())
    outcome = assert_equals_eager(model, [example()])
    assert outcome.reasons == ("its forward changes an argument",) * 2


def test_object_argument_that_blocks_fill_keeps_them_apart() -> None:
    def forward(self: Any, x: torch.Tensor, cache: Any) -> torch.Tensor:
        cache.scale = x
        return torch.tanh(self.linear(x))

    def body(layers: Any, x: torch.Tensor) -> torch.Tensor:
        total = x
        for layer in layers:
            x = layer(x, cache := Config())
            total = total + cache.scale
        return total

    kind = block(forward)
    outcome = assert_equals_eager(Around(body, kind(), kind()), [example()])
    assert outcome.reasons == ("its forward changes an argument",) * 2


def test_autocast_around_one_call_keeps_blocks_apart() -> None:
    def body(layers: Any, x: torch.Tensor) -> torch.Tensor:
        x = layers[0](x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layers[1](x)

    kind = block(lambda self, x: self.linear(x))
    model = Around(body, kind(), kind()).float()
    # bfloat16 has 8 bits; both sides round in the same places, sums of gradients differ in float32.
    outcome = assert_equals_eager(model, [example().detach().float()], tolerance=1e-5)
    assert outcome.shared == 0
    assert outcome.compiled(torch.zeros(3, 4)).dtype == torch.bfloat16


def test_no_grad_around_one_call_keeps_blocks_apart() -> None:
    def body(layers: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = layers[0](x)
        return layers[1](y) * x

    kind = block(tanh)
    assert assert_equals_eager(Around(body, kind(), kind()), [example()]).shared == 0


# ---- what a block's own tensors are ------------------------------------------------------------


@case(shared=1)
def tensor_attribute_of_each_instance() -> nn.Module:
    """Neither parameter nor buffer: each instance still uses its own."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.table + self.nested["a"][0]

    return pair(block(forward), *(tables(seed) for seed in (1, 2)))


def tables(seed: int) -> dict[str, Any]:
    return {
        "table": example(seed=seed, grad=False),
        "nested": {"a": [example(seed=seed + 10, grad=False)]},
    }


@case(shared=1)
def tensor_in_a_partial_of_each_instance() -> nn.Module:
    multiply = [functools.partial(torch.mul, example(seed=s, grad=False)) for s in (1, 2)]
    return acts(*multiply)


@case(shared=1)
def tensor_in_a_config_of_each_instance() -> nn.Module:
    configs = [Config(example(seed=s, grad=False)) for s in (1, 2)]  # type: ignore[arg-type]
    return pair(block(configured), {"config": configs[0]}, {"config": configs[1]})


@case(shared=0, reason="attribute table")
def tensor_attributes_of_different_shapes() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.table

    shapes = [example(3, 1, grad=False), example(1, 4, grad=False)]
    return pair(block(forward), {"table": shapes[0]}, {"table": shapes[1]})


@case(shared=1)
def parameters_read_through_parameters() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + sum(p.sum() for p in self.parameters())

    return pair(block(forward), {}, {})


@case(shared=1)
def constants_made_in_forward() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * torch.tensor([1.0, 2.0, 3.0, self.scale], dtype=torch.float64)

    return pair(block(forward), {"scale": 2.0}, {"scale": 2.0})


@case(shared=0, reason="attribute scale is 3.0, not 2.0")
def different_constants_made_in_forward() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * torch.tensor(self.scale, dtype=torch.float64)

    return pair(block(forward), {"scale": 2.0}, {"scale": 3.0})


def test_each_instance_uses_its_own_parameters() -> None:
    kind = block(tanh)
    model = Stack(*(kind() for _ in range(4)))
    program = lazyinline.capture(model, (example(),), train=True)
    used = [source.name for source in program.sources]
    assert used == ["x"] + [f"layers.{i}.linear.{n}" for i in range(4) for n in ("weight", "bias")]
    assert [call.path for call in program.calls] == [f"layers.{i}" for i in range(4)]
    assert len(program.closures) == 1


def test_blocks_traced_apart_still_share_an_equal_graph() -> None:
    """The evidence says no (an attribute differs), the graphs turn out equal: one closure."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2 if self.scale > 0 else 3)

    model = pair(block(forward), {"scale": 1}, {"scale": 5})
    captured = capture_model(model, (example(),), train=True)
    assert captured.num_traced == 2
    assert len(captured.program.closures) == 1


# ---- the mark ------------------------------------------------------------------------------------


@lazy_inline
class Marked(nn.Module):
    """On module level, so that it can be pickled."""

    def __init__(self, size: int = 4, config: Any = None) -> None:
        super().__init__()
        self.linear = linear(size)
        self.config = config or Config(2.0)

    forward = configured


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_marked_modules_can_be_copied_and_pickled(way: Callable[[Any], Any]) -> None:
    model = Stack(Marked(), Marked(config=Config(2.0)))
    twin = way(model)
    assert_equals_eager(twin, [example()], reference=model)
    assert assert_equals_eager(way(model), [example()]).shared == 1


def test_mark_leaves_the_class_as_it_was() -> None:
    class Plain(nn.Module):
        def __init__(self, size: int, *, flag: bool = True) -> None:
            """Doc."""
            super().__init__()

    before = Plain.__init__
    assert lazy_inline(Plain) is Plain
    assert Plain.__init__.__doc__ == "Doc."
    assert Plain.__init__ is before
    assert list(Plain(3).state_dict()) == []
    assert lazy_inline(Plain).__init__ is before
    with pytest.raises(TypeError, match="size"):
        Plain()


@pytest.mark.parametrize("target", [3, len, nn.Linear(1, 1), int, tanh])
def test_mark_on_anything_else_is_refused(target: Any) -> None:
    with pytest.raises(ReuseError, match=r"lazy_inline marks a subclass of nn\.Module"):
        lazy_inline(target)


# ---- the cost ------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.smoke
def test_python_of_a_block_runs_once_whatever_the_depth(nested: bool) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("forward ran", stacklevel=1)  # held back, and brought out as often as it ran
        return torch.tanh(self.linear(x))

    kind = block(forward)
    outer = block(lambda self, x: self.inner(x)) if nested else None
    model = Stack(*((outer(inner=kind()) if outer else kind()) for _ in range(24)))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        captured = capture_model(model, (example(),), train=True, effects="undo")
    assert [str(w.message) for w in seen].count("forward ran") == 1
    assert captured.num_traced == (2 if nested else 1)
    assert captured.program.num_nodes() - len(captured.program.calls) <= 4


@pytest.mark.parametrize("name", CASES)
def test_sharing(name: str) -> None:
    given = CASES[name]
    outcome = assert_equals_eager(given.make(), [example()])
    assert outcome.shared == given.shared
    if given.reason:
        assert any(given.reason in reason for reason in outcome.reasons), outcome.reasons
    else:
        assert outcome.reasons == ()


def test_what_a_block_inside_read_counts_for_the_block_around_as_it_was_then() -> None:
    module = nn.Linear(2, 2)
    module.scale = [1.0]
    inner, outer = Reads(), Reads()
    inner.attribute(module, "scale")
    inner.unseen = "id()"
    module.scale.append(2.0)
    outer.absorb(inner)
    outer.attribute(module, "scale")
    assert outer.attributes == inner.attributes
    assert outer.unseen == "id()"
    outer.unseen = ""
    assert Evidence(module, outer).side_effect == "its forward changes Linear.scale"


def test_what_a_block_inside_reads_keeps_the_blocks_around_apart() -> None:
    inner = block(lambda self, x: torch.tanh(self.linear(x)) * self.scale[0])
    middle = block(lambda self, x: self.linear(self.inner(x)))
    outer = block(lambda self, x: self.linear(self.middle(x)))
    layers = [outer(middle=middle(inner=inner(scale=[scale]))) for scale in (1, 1, 2)]
    outcome = assert_equals_eager(Stack(*layers), [example()])
    assert outcome.shared == 1
    assert outcome.reasons[-1] == "attribute middle.inner.scale[0] is 2, not 1"
