"""Which block instances share one closure, and why not: each case also equals eager PyTorch.

Whatever value they hold, and however they reach it, is in ``test_soundness.py``.
"""

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from comparing import assert_equals_eager
from models import Around, Stack, block, example
from torch import nn
from values import HELPERS
from worlds import World, assert_as_eager

import lazyinline
from lazyinline.frontend.capture.capture import Subject, capture_model
from lazyinline.reuse.evidence.evidence import Evidence
from lazyinline.reuse.evidence.reads import Reads

SETUP = """
TANH = lambda self, x: x + torch.tanh(self.linear(x))
SCALED = lambda self, x: torch.tanh(self.linear(x)) * self.scale
def scaled(*scales):
    B = block(SCALED)
    return [B(scale=s) for s in scales]
def pair(forward=TANH, first={}, second=None):
    B = block(forward)
    return Stack(B(**first), B(**(first if second is None else second)))
def acts(first, second):
    return pair(lambda self, x: self.act(self.linear(x)), {"act": first}, {"act": second})
def times(factor): return lambda x: x * factor
class Times:
    def __init__(self, factor): self.factor = factor
    def __call__(self, x): return x * self.factor
def outer(*factors):
    inner, kind = block(SCALED), block(lambda self, x: self.linear(self.second(self.first(x))))
    return Stack(*(kind(first=inner(scale=f), second=inner(scale=f)) for f in factors))
def inner_that_was_shared():
    B, outer = block(SCALED), block(lambda self, x: self.inner(x))
    return Stack(B(scale=2.0), outer(inner=B(scale=2.0)), outer(inner=B(scale=3.0)))
class Lora(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(example(4, 2, seed=1, grad=False))
        self.up = nn.Parameter(example(2, 4, seed=2, grad=False))
    def forward(self, x): return self.layer(x) + x @ self.down @ self.up
def with_lora(*places):
    model = stack(4)
    for place in places: model.layers[place].linear = Lora(model.layers[place].linear)
    return model
def stack(count, forward=TANH, **attributes):
    B = block(forward)
    return Stack(*(B(**copy.deepcopy(attributes)) for _ in range(count)))
def after(model, change, *places):
    for place in places or range(len(model.layers)): change(model.layers[place])
    return model
def weight_norm(layer): nn.utils.parametrizations.weight_norm(layer.linear)
def spectral_norm(layer): nn.utils.parametrizations.spectral_norm(layer.linear)
def doubling(module, args, output): return output * 2
def table(seed):
    first, second = (example(seed=s, grad=False) for s in (seed, seed + 9))
    return {"table": first, "nested": {"a": [second]}}
def tie(layer, other=None): layer.other.weight = layer.linear.weight
def recursive(self, x, depth=2):
    x = torch.tanh(self.linear(x))
    return self(x, depth - 1) if depth else x
def dropped(self, x):
    run = lambda v: torch.dropout(torch.tanh(self.linear(v)), 0.5, True)
    return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False) * torch.rand_like(x)
def middle():
    inner, mid = block(TANH), block(lambda self, x: self.b(self.a(x)))
    out = block(lambda self, x: self.m(x) * 2)
    return Stack(*(out(m=mid(a=inner(), b=inner())) for _ in range(3)))
def repeated(*times):
    inner = block(TANH)
    def forward(self, x):
        for _ in range(self.times): x = self.inner(x)
        return x
    B = block(forward)
    return Stack(*(B(inner=inner(), times=n) for n in times))
def tied_embedding_and_head():
    def body(layers, x):
        h = layers[0](torch.arange(3))
        for layer in layers[1:3]: h = layer(h)
        return layers[3](h) + x.sum()
    B, embedding = block(TANH), nn.Embedding(9, 4, dtype=torch.float64)
    head = nn.Linear(4, 9, bias=False)
    head.weight = embedding.weight
    return Around(body, embedding, B(), B(), head)
def held_weights():
    B = block(lambda self, x: self.linear(x) * self.held[0].sum())
    model = Stack(B(), B())
    for layer in model.layers: layer.held = [model.layers[0].linear.weight]
    return model
def own_or_not():
    def forward(self, x, z):
        self.norm.running_mean.add_(1)
        return torch.tanh(self.linear(x)) * z
    def body(layers, x):
        return layers[1](layers[0](x, x.new_ones(4)), layers[1].norm.running_mean[:])
    B = block(forward)
    return Around(body, *(B(norm=nn.BatchNorm1d(4, dtype=torch.float64)) for _ in range(2)))
def local(factor): return block(lambda self, x: self.linear(x) * factor)
def unmarked(): return block(TANH, mark=False)
def marked_after():
    B = unmarked()
    model = Stack(B(), B())
    lazy_inline(B)
    return model
def child():
    base = block(TANH)
    class Child(base):
        def forward(self, x): return super().forward(x) * 2
    return Stack(base(), Child(), Child())
def marked_init():
    class Marked(nn.Module):
        @lazy_inline
        def __init__(self, scale=1.0):
            super().__init__()
            self.linear, self.scale = linear(), scale
        forward = SCALED
    return Stack(Marked(), Marked(scale=1.0))
"""


class Case(NamedTuple):
    """A model; how many block calls share; a part of the reason why another one does not."""

    model: str
    shared: int
    reason: str = ""


# fmt: off
CASES = {
    # ---- attributes
    "argument that is used": Case("Stack(*scaled(1, 2))", 0, "attribute scale is 2, not 1"),
    "two groups": Case("Stack(*scaled(1, 2, 1, 2))", 2, "attribute scale is 2, not 1"),
    "one and True": Case("Stack(*scaled(1, True))", 0, "attribute scale is True, not 1"),
    "attribute that only one has": Case(
        "pair(lambda self, x: self.linear(x) * getattr(self, 'scale', 5.0), {}, {'scale': 2.0})", 0,
        "attribute scale is 2.0, not <missing>"),
    "closures": Case("acts(times(2), times(3))", 0, "attribute act is <function>"),
    "bound methods": Case("acts(Times(2).__call__, Times(3).__call__)", 0,
        "attribute act is <method>"),
    "forward of one": Case(
        "after(pair(), lambda h: setattr(h, 'forward', types.MethodType(lambda self, x: "
        "self.linear(x) * 5, h)), 1)", 0, "attribute forward is <method>"),
    # ---- modules, parameters and modes
    "class of a module inside": Case("acts(nn.ReLU(), nn.Tanh())", 0, "class of act differs"),
    "modules inside": Case(
        "pair(lambda self, x: self.more(self.linear(x)), *({'more': nn.Sequential(*(linear() "
        "for _ in range(n)))} for n in (1, 2)))", 0, "sub-modules, not"),
    "frozen in one": Case("after(pair(), lambda h: h.linear.weight.requires_grad_(False), 1)", 0,
        "parameters of linear differs (weight: requires_grad)"),
    "frozen in all": Case("after(pair(), lambda h: h.linear.weight.requires_grad_(False))", 1),
    "tied in one": Case(
        "after(pair(lambda self, x: self.other(torch.tanh(self.linear(x))), {'other': "
        "linear()}, {'other': linear()}), tie, 1)", 0,
        "parameters of other differs (weight: tying)"),
    "tied in all": Case(
        "after(pair(lambda self, x: self.other(torch.tanh(self.linear(x))), {'other': "
        "linear()}, {'other': linear()}), tie)", 1),
    "tied between instances": Case(
        "made(pair(), 'v.layers[1].linear.weight = v.layers[0].linear.weight')", 1),
    "precision of one": Case(
        "after(pair(lambda self, x: x + "
        "self.linear(x.to(self.linear.weight.dtype)).to(x.dtype)), lambda h: h.float(), 1)", 0,
        "(weight: layout)"),
    "mode of one": Case(
        "after(pair(lambda self, x: self.linear(x) * (2 if self.training else 3)), lambda h: "
        "h.eval(), 1)", 0, "train/eval mode of the block differs (training is False, not True)"),
    "mode of one dropout": Case(
        "after(pair(lambda self, x: self.drop(self.linear(x)), {'drop': nn.Dropout(0.5)}, "
        "{'drop': nn.Dropout(0.5)}), lambda h: h.drop.eval(), 1)", 0,
        "train/eval mode of drop differs"),
    "hook inside one": Case(
        "after(pair(), lambda h: h.linear.register_forward_pre_hook(lambda m, a: (a[0] * 2,)), 1)",
        0, "it has forward hooks"),
    # ---- classes and the mark
    "local classes of one name": Case("Stack(local(2)(), local(3)())", 0),
    "subclass": Case("child()", 1),
    "mark on init": Case("marked_init()", 1),
    "mark after instances": Case("marked_after()", 1),
    "one instance twice": Case("Stack(*(lambda b: (b, b))(block(TANH)()))", 1),
    "arguments of two layouts": Case(
        "Around(lambda b, x: b[1](b[0](x).t().contiguous().t()), *pair().layers)",
        0, "of strides (1, 3) on cpu, not f64[3,4] of strides (4, 1) on cpu"),
    # ---- nesting
    "nested and different": Case("outer(2.0, 3.0)", 2, "attribute scale is 3.0, not 2.0"),
    "three deep": Case("middle()", 3),
    "inner that was shared": Case("inner_that_was_shared()", 1,
        "inner: attribute scale is 3.0, not 2.0"),
    "a block that calls itself": Case("stack(2, recursive)", 1),
    "marked but outside its tree": Case(
        "pair(lambda self, x: self.linear(self.helper[0](x)), *({'helper': h} for h in "
        "[[block(TANH)()]] * 2))", 1, "outside its own tree"),
    # ---- what layers are made of
    "adapters on some": Case("with_lora(1, 3)", 2, "class of linear differs"),
    "weight norm": Case("after(stack(4), weight_norm, 1, 3)", 1, "class of linear differs"),
    "spectral norm, which counts": Case("after(stack(4), spectral_norm, 0)", 2,
        "class of linear differs"),
    "embedding and head tied": Case("tied_embedding_and_head()", 1),
    "dropout in a checkpoint": Case("stack(3, dropped)", 2),
    # ---- tensors of blocks
    "tensor of each": Case(
        "pair(lambda self, x: self.linear(x) * self.table + self.nested['a'][0], table(1), "
        "table(2))", 1),
    "tensor in a partial": Case(
        "acts(*(functools.partial(torch.mul, example(seed=s, grad=False)) for s in (1, 2)))", 1),
    "tensors of two shapes": Case(
        "pair(lambda self, x: self.linear(x) * self.t, *({'t': example(*s, grad=False)} for "
        "s in ((3, 1), (1, 4))))", 0, "attribute t"),
    "list of its own or another's weight": Case("held_weights()", 0, "are two tensors here"),
    "a tensor, or a view of its own buffer": Case("own_or_not()", 0,
        "seen through a view"),
    "parameters()": Case(
        "pair(lambda self, x: self.linear(x) + sum(p.sum() for p in self.parameters()))", 1),
}
# fmt: on


ALIKE = ("two groups", "closures", "frozen in all", "tied in all", "mark on init", "three deep")
ALIKE += ("spectral norm, which counts", "parameters()", "one instance twice", "modules inside")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sweep(keep=[f"[{name}]" for name in CASES if name not in ALIKE])
def test_sharing(name: str) -> None:
    model, shared, reason = CASES[name]
    setting = "def setting(name, value): return lambda h: setattr(h, name, value)"
    # Who shares does not depend on derivatives, but where some have none.
    grad = name.startswith(("frozen", "tied", "dropout in", "nested"))
    outcome = assert_as_eager(HELPERS, SETUP, setting, f"model = {model}", grad=grad)
    assert not outcome.eagerly
    assert outcome.shared == shared, outcome.reasons
    if reason:
        assert any(reason in found for found in outcome.reasons), outcome.reasons
    else:
        assert outcome.reasons == ()


# The forward of a block, where Y is its tanh(linear(x)); what the model does with its ``layers``;
# how many share; why another one does not.
# fmt: off
GIVEN = "Y * s + (0 if z is None else z)"
BODIES = {
    "iterator that all read": ("Y * next(self.held)",
        "it = itertools.count(1)\nfor l in layers:\n    vars(l)['held'] = it\n    x = l(x)", 0,
        "forward changes Block.held"),
    "object changed between layers": ("Y * self.held.value",
        "for i, l in enumerate(layers):\n    l.held.value = i + 1.0\n    x = "
        "l(x)\nl.held.value = 1.0", 0, "attribute held.value is 2.0, not 1.0"),
    "object that its forward changes": (
        "(setattr(self.held, 'value', self.held.value + 1), Y * self.held.value)[1]",
        "layers[0].held.value = 0.0\nfor l in layers: x = l(x)\nlayers[0].held.value = 1.0", 0,
        "its forward changes Block.held"),
    "object that its own method changes": ("Y * METER.step()",
        "METER.value = 0.0\nfor l in layers: x = l(x)", 0, "its forward changes the global METER"),
    "class that its forward changes": (
        "(setattr(type(self), 'n', type(self).n + 1), Y * type(self).n)[1]",
        "type(layers[0]).n = 0.0\nfor l in layers: x = l(x)", 0, "its forward changes Block.n"),
    "defaults spelled out": (GIVEN,
        "x = layers[1](layers[0](x), None, s=1.0)", 1, ""),
    "other number": (GIVEN, "x = layers[1](layers[0](x, s=2.0), s=3.0)",
        0, ""),
    "1 and 1.0": (GIVEN, "x = layers[1](layers[0](x, s=1), s=1.0)", 0,
        ""),
    "None and a tensor": (GIVEN, "x = layers[1](layers[0](x), x)", 0,
        ""),
    "another shape": ("Y", "x = layers[1](torch.cat([layers[0](x), x]))", 0, ""),
    "same tensor twice, or not": (GIVEN,
        "x = layers[1](layers[0](x, x), x)", 0, ""),
    "same tensor twice in both": (GIVEN,
        "y = layers[0](x, x)\nx = y + layers[1](y, y)", 1, ""),
    "a view of the other argument": (GIVEN,
        "y = layers[0](x, x.sum())\nx = layers[1](y, y[0])", 0, ""),
    "gradient wanted or not": ("Y", "x = layers[1](layers[0](x).detach())", 0, ""),
    "list that blocks add to": ("(z.append(x), Y * sum(z))[1]",
        "seen = []\nx = layers[1](layers[0](x, seen), seen)", 0, "its forward changes an argument"),
    "no_grad around one": ("Y", "with torch.no_grad(): z = layers[0](x)\nx = layers[1](z) * x", 0,
        ""),
    "expanded": ("Y", "x = layers[1](layers[0](x[:1].expand(3, 4)))", 0, ""),
    "with an offset": ("Y", "x = layers[1](layers[0](torch.cat([x, x])[3:]))", 1, ""),
    "parts of one tensor": (GIVEN,
        "z = torch.cat([x, x])\nfor i, l in enumerate(layers): x = l(x, z[3 * i : 3 * i + 3])", 1,
        ""),
    "a view that it returns": ("(z[1:], Y * z)",
        "a, z = [], torch.cat([x, x])\nfor i, l in enumerate(layers):\n    "
        "v, x = l(x, z[3 * i : 3 * i + 3])\n    a.append(v)\nx = x * torch.cat(a).sum()", 0,
        "returns a view of what it is given"),
    "two views at another distance": (GIVEN,
        "z = torch.cat([x, x])\nx = layers[1](z[:3], layers[0](z[:3], z[3:]) + z[2:5])", 0, ""),
    "written, and seen through a view": ("(x.mul_(2), self.linear(x))[1]",
        "y = torch.sin(x)\nview = y[0]\nx = layers[1](layers[0](y)) + view", 0,
        "seen through a view"),
    "written where it is expanded": ("(x.__setitem__(0, 0.5), x + torch.tanh(self.linear(x)))[1]",
        "for l in layers: x = l((x * 2)[:1].expand(3, 4))", 0, ""),
    "attributes of tensors between blocks": (
        'made(self.linear(x) * getattr(x, \'n\', 1.0), f\'v.n = {getattr(x, "n", 1.0) + 1}\')',
        "for l in layers: x = l(x)", 0, ""),
}
# fmt: on
BODY = """
class Meter(Value):
    def step(self):
        self.value += 1
        return self.value
METER, OTHER = Meter(), made(nn.Identity(), "v.factor = 1.0")
def forward(self, x, z=None, *, s=1.0):
    return {forward}
def body(layers, x):
    x = torch.sin(x)
{body}
    return x
B, HELD = block(forward), Value()
model = Around(body, B(held=HELD), B(held=HELD))
"""


@pytest.mark.parametrize("name", BODIES)
def test_sharing_follows_the_calls(name: str) -> None:
    forward, body, shared, reason = BODIES[name]
    lines = "\n".join("    " + line for line in body.split("\n"))
    text = BODY.format(forward=forward.replace("Y", "torch.tanh(self.linear(x))"), body=lines)
    grad = any(word in name + forward + body for word in ("grad", "checkpoint"))
    outcome = assert_as_eager(HELPERS, text, state="HELD", grad=grad)
    if not outcome.eagerly:
        assert outcome.shared == shared, outcome.reasons
    assert all(reason in found for found in outcome.reasons), outcome.reasons


OPERANDS = ["x.to(torch.float64)", "x.contiguous()", "torch.dropout(x, 0.5, False)"]
OPERANDS += ["x.flatten(1)", "x.type_as(x)", "x.expand_as(x)"]


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.sweep(keep=["x.contiguous", "True-x.to("])
def test_an_operand_returned_under_no_grad_keeps_its_gradient(operand: str, marked: bool) -> None:
    forward = f"""
def forward(self, x):
    with torch.no_grad(): z = self.linear({operand})
    return x + z
B = block(forward, mark={marked})
model = Stack(B(), B())
"""
    assert assert_as_eager(forward).shared == int(marked)


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex128"])
@pytest.mark.sweep(keep=["bfloat16", "complex"])
def test_blocks_in_another_dtype(dtype: str) -> None:
    text = f"""
dtype = torch.{dtype}
def body(layers, x):
    for layer in layers: x = layer(x.to(dtype))
    return torch.view_as_real(x) if dtype.is_complex else x
B = block(lambda self, x: self.linear(x) * 0.5)
model = Around(body, B(), B(), B()).to(dtype)
def inputs(): return [example(grad=False).to(dtype)]
"""
    tolerance = 1e-10 if dtype == "complex128" else 1e-2
    assert assert_as_eager(text, tolerance=tolerance).shared == 1


BODIES_OF_PRECISIONS = """
def mixed(layers, x):
    x = layers[0](x)
    with torch.autocast("cpu", dtype=torch.bfloat16): x = layers[1](x)
    return layers[4](layers[3](layers[2](x.half()).float()))
def several(body, num_layers):
    B = block(lambda self, x: self.linear(x))
    return Around(body, *(B() for _ in range(num_layers))).float()
def inputs(): return [example(grad=False).float()]
"""


def test_blocks_of_several_precisions() -> None:
    """Some in half precision, some under autocast."""
    model = "model = made(several(mixed, 5), 'v.layers[2].half()')"
    assert assert_as_eager(BODIES_OF_PRECISIONS, model, tolerance=1e-2).shared == 1


def test_blocks_traced_apart_still_share_an_equal_graph() -> None:
    """The evidence says no (an attribute differs), the graphs turn out equal: one closure."""
    kind = block(lambda self, x: self.linear(x) * (2 if self.scale > 0 else 3))
    captured = capture_model(Subject(Stack(kind(scale=1), kind(scale=5)), (example(),)), train=True)
    assert sum(not d.shared for d in captured.decisions) == 2
    assert len(captured.program.closures) == 1


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
        captured = capture_model(Subject(model, (example(),), effects="undo"), train=True)
    assert [str(w.message) for w in seen].count("forward ran") == 1
    assert sum(not d.shared for d in captured.decisions) == (2 if nested else 1)
    assert captured.program.num_nodes() - len(captured.program.calls) <= 4


def test_what_a_block_inside_read_counts_for_the_block_around_as_it_was_then() -> None:
    module = nn.Linear(2, 2)
    module.scale = [1.0]
    inner, outer = Reads(), Reads()
    inner.attribute(module, "scale")
    module.scale.append(2.0)
    outer.absorb(inner)
    outer.attribute(module, "scale")
    assert outer.attributes == inner.attributes
    assert Evidence(module, outer).side_effect == "its forward changes Linear.scale"


def test_a_forward_that_tells_instances_apart_runs_eagerly_and_says_how() -> None:
    outcome = assert_as_eager(
        "B = block(lambda self, x: x * (id(self) * 0 + 1))", "model = Stack(B(), B())"
    )
    assert all("by id() at" in reason for reason in outcome.eagerly)


def test_a_function_that_remembers_plain_results_keeps_no_block_apart() -> None:
    factor = "factor = functools.cache(lambda name: float(len(name)))\nfactor('ab')"
    blocks = "B = block(lambda self, x: self.linear(x) * factor('ab'))\nmodel = Stack(B(), B())"
    assert assert_as_eager(factor, blocks).shared == 1


def test_a_block_that_reaches_a_computed_tensor_by_a_function_is_not_shared() -> None:
    outcome = assert_as_eager("""
        def body(layers, x):
            for layer in layers:
                y = x.sin()
                x = layer(x, lambda: y)
            return x
        B = block(lambda self, x, get: self.linear(get() + x))
        model = Around(body, B(), B(), B())
    """)
    said = "it uses a tensor that is neither an argument nor one of its own"
    assert outcome.reasons == (said,) * 3


def test_a_block_whose_result_has_an_attribute_is_not_shared() -> None:
    outcome = assert_as_eager("""
        def told(y):
            y.factor = 2.0
            return y
        def body(layers, x):
            for layer in layers:
                x = layer(x)
                x = torch.tanh(x) * getattr(x, "factor", 1.0)
            return x
        B = block(lambda self, x: told(self.linear(x)))
        model = Around(body, B(), B(), B())
    """)
    assert set(outcome.reasons) == {"a tensor that it is given or returns has attributes"}


# What changes with each run, or is asked of an input, runs eagerly, and is refused if it may not.
# fmt: off
ASKED = {
    "gradient": "1.0 if self.linear.weight.grad is None else 2.0",
    "version": "1.0 + self.linear.weight._version",
    "address": "1.0 + self.linear.weight.data_ptr() * 0",
    "storage": "1.0 + self.linear.weight.untyped_storage().nbytes()",
    "written attribute": "setattr(self.linear.weight, 'seen', True) or 1.0",
    "attribute of an input": "getattr(x, 'factor', 1.0)",
}
# fmt: on


@pytest.mark.parametrize("what", ASKED)
@pytest.mark.sweep(keep=["version", "written", "input"])  # others are in test_tensor_answers.py
def test_what_only_a_run_can_answer_is_refused_or_run(what: str) -> None:
    text = f"""
model = block(lambda self, x: self.linear(x).sin() * ({ASKED[what]}))()
def inputs(): return [made(example(), "v.factor = 3.0")]
"""
    compiled = lazyinline.compile(World(text).model, backend="eager", fallback="error")
    with pytest.raises(lazyinline.CaptureError):
        compiled(*World(text).inputs()[0])
    assert assert_as_eager(text).eagerly or what == "attribute of an input"


SCENES = {
    "what a method calls is replaced, and the forward": (
        "B = block(lambda self, x: self.act(self.linear(x)))\nB.act = lambda self, x: x.tanh()\n"
        "model = Stack(B(), B())",
        ["", "B.act = lambda self, x: x.sin()", "B.forward = lambda self, x: self.linear(x)"],
    ),
    "a hook on all modules comes and goes": (
        "model = stack(3)",
        ["", "h = nn.modules.module.register_module_forward_hook(doubling)", "h.remove()"],
    ),
    "a backward hook on all modules comes and goes": (
        "model = stack(3)",
        ["", "h = nn.modules.module.register_module_full_backward_hook(halving)", "h.remove()"],
    ),
}
HALVING = """
def halving(module, inputs, outputs): return tuple(None if g is None else g / 2 for g in inputs)
def halving_first(module, outputs): return tuple(g / 2 for g in outputs)
SEEN = []
def seeing(module, inputs, outputs): SEEN.append([*inputs, *outputs])
"""


@pytest.mark.parametrize("name", SCENES)
def test_scene(name: str) -> None:
    model, scene = SCENES[name]
    assert_as_eager(HELPERS, SETUP, HALVING, model, scene=scene)


HOOKS = {
    "register_full_backward_hook": "halving",
    "register_full_backward_pre_hook": "halving_first",
    "register_backward_hook": "halving",
}


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("place", ["layers.1", "layers.1.linear", ""])
@pytest.mark.sweep(
    keep=[
        "1-register_full_backward_hook",
        "linear-register_backward_hook",
        "[-register_full_backward_pre",
    ]
)
def test_a_backward_hook_runs_at_each_backward_and_is_the_reason(register: str, place: str) -> None:
    owner = f"model.get_submodule({place!r})"
    scene = ["", "", f"h = {owner}.{register}({HOOKS[register]})", "", "h.remove()"]
    outcome = assert_as_eager(HELPERS, SETUP, HALVING, "model = stack(3)", scene=scene)
    assert len(outcome.eagerly) == 2
    assert f"{place or 'The model'} (" in outcome.eagerly[0]
    without = assert_as_eager(
        HELPERS, SETUP, HALVING, "model = stack(3)", scene=scene[2:4], grad=False
    )
    assert not without.eagerly  # no backward, so nothing stands in the way


def test_a_backward_hook_sees_what_it_sees_in_eager() -> None:
    hook = "model.layers[1].register_full_backward_hook(seeing)"
    assert_as_eager(SETUP, HALVING, "model = stack(3)", hook, scene=[""] * 3, state="SEEN")


def test_dropout_masks_of_micro_batches_equal_eagers_under_one_seed() -> None:
    kind = block(lambda self, x: torch.dropout(self.linear(x), 0.5, True))

    def body(layers: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x.square().sum()

    model, x = Around(body, *(kind() for _ in range(3))), example(6, 4, grad=False)
    assert assert_equals_eager(model, [x], door="step", micro_batches=3).shared == 1
