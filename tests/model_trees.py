"""Random models for tests: classes made of random Python, trees of their instances, mutations.

A model is drawn by Hypothesis as plain data (:class:`ModelPlan`), so that a failing one shrinks and
can be printed, and is built from it afterwards. The forward of each class is source text put
together from the statements below: real Python, with everything that evidence must notice.
"""

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from models import WIDTH, linear
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # noqa: F401, the drawn classes use it

from lazyinline import lazy_inline

TABLE = torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64)


class Backwards(torch.autograd.Function):
    """Gives a gradient that is not the derivative, so that losing it shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.factor, None


def apply(layer: nn.Module, x: Tensor) -> Tensor:
    """Applies a linear layer of whatever precision."""
    result: Tensor = layer(x.to(layer.weight.dtype)).to(x.dtype)  # type: ignore[arg-type,call-overload]
    return result


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


class Act(nn.Module):
    """A sub-module with an attribute of its own."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.factor)


def loop_functions() -> list[Callable[[Tensor], Tensor]]:
    return [lambda x, k=factor: x * k for factor in (2.0, 3.0)]  # type: ignore[misc]


# How an activation is made; each instance gets one of its own.
ACTS: list[Callable[[], Any]] = [
    lambda: torch.tanh,
    lambda: times(2.0),
    lambda: times(3.0),
    lambda: functools.partial(torch.mul, other=0.5),
    lambda: loop_functions()[0],
    lambda: loop_functions()[1],
    lambda: Act(1.0),
    lambda: Act(2.0),
]

# Statements of any class. ``x`` has WIDTH columns before and after each.
OWN = [
    "x = x + torch.tanh(apply(self.lin, x))",
    "x = apply(self.lin, x) * self.scale",
    "x = torch.sin(x) if self.flag else x * 0.5",
    "x = x + self.index * 0.125",
    "x = x * [0.5, 1.5, 2.5][self.index % 3]",
    "x = x * (2.0 if self.index == 1 else 0.75)",
    "x = self.drop(x)",
    "x = torch.dropout(x, 0.5, self.training)",
    "x = x + torch.rand_like(x)",
    "x = x * 1.5 if self.training else x - 0.5",
    "x = self.act(x)",
    "x = x * self.config.scale",
    "x = x + self.table",
    "x = x * self.tables['a'][0]",
    "x = x * TABLE",
    "x = x + SETTINGS['shift']",
    "x = x + SHIFT",
    "x = x + torch.tensor([1.0, 2.0, 3.0, self.scale], dtype=x.dtype)",
    "x = x + torch.full((4,), self.scale, dtype=x.dtype)",
    "self.count.add_(1)",
    "self.count += 1",
    "x = x + self.count * 0.125",
    "x = x * self.mean.clone()",
    "with torch.no_grad():\n    self.mean.mul_(0.875).add_(x.mean(0), alpha=0.125)",
    "self.mean[1:3] = x.detach().mean(0)[:2]",
    "x = torch.sin(x)\nx.mul_(self.scale)",
    "x = torch.sin(x)\nx[0].add_(1)",
    "z = x * 2\nz[:, 1:3] = 0.5\nx = z",
    "x = x.clone()\nx.masked_fill_(x > 0.5, 0.25)",
    "x = x + torch.tanh(apply(self.lin, x)).detach()",
    "with torch.no_grad():\n    z = apply(self.lin, x)\nx = x + z",
    "x = Backwards.apply(x, self.scale)",
    "x = x + checkpoint(lambda v: torch.tanh(apply(self.lin, v)), x, use_reentrant=False)",
    "x = x + checkpoint(lambda v: self.drop(apply(self.lin, v)), x, use_reentrant=False)",
    "x = x if y is None else x * y",
    "x = x * gain",
    "x = x + getattr(self, 'extra', 0.5)",
    "x = x * getattr(self, 'extra', 1.25)",
    "x = self.norm(x)",
    "x = x + sum(p.sum() for p in self.lin.parameters()) * 0.01",
    "x = x + start.sum()",
    "x = x + torch.complex(x, x * 0.5).conj().imag",
    "z = torch.complex(torch.tanh(x), x.cos()).conj()\nx = x + (z @ z.mH @ z).imag * 0.125",
    "z = torch.complex(x, x * 2)\nz.conj().imag.mul_(self.scale)\nx = z.imag",
    "x = x + torch.fft.ifft(torch.fft.fft(x) * torch.fft.fft(self.table).conj()).real",
    "x = x + torch.sgn(x) * 0.5",
    "x = torch._neg_view(x)",
]
# Statements that change what the caller passed; it passes a temporary.
ON_THE_ARGUMENT = ["x.mul_(2)", "x.add_(self.index)", "x[0] = 0.5"]
# How a block is called.
CALLS = [
    "x = self.{c}(x)",
    "x = self.{c}(x=x)",
    "x = self.{c}(x, None, gain=1.0)",
    "x = self.{c}(x, gain=2.0)",
    "x = self.{c}(x, x)",
    "x = self.{c}(x, x.detach())",
    "x = self.{c}(x, y=x[0])",
    "x = self.{c}(x.t().contiguous().t())",
    "x = self.{c}(x[:1].expand(3, 4))",
    "x = torch.cat([self.{c}(x[:1]), self.{c}(x[1:])])",
    "x = x + checkpoint(self.{c}, torch.sin(x), use_reentrant=False)",
    "with torch.no_grad():\n    z = self.{c}(x)\nx = x + z",
    "x = self.{c}(torch.cos(x))",
    "z = torch.cos(x)\nx = self.{c}(z) + z",
    "x = self.{c}(torch.complex(x, x * 0.5).conj().imag)",
    "x = self.{c}(x)\nx = torch.tanh(self.{c}(x))",
    "for _ in range(self.index + 1):\n    x = self.{c}(x)",
    "x = self.{c}(x) if self.flag else x",
    "kept = self.config.scale\nself.config.scale = kept + 1.0\nx = self.{c}(x)\n"
    "self.config.scale = kept",
]
RESULTS = ["x", "x", "x", "x.view(-1, 4)", "x.t().t()", "x[:, :]", "x * 1.0", "start + x"]
RESULTS += ["torch._neg_view(x)"]


class Named(Tensor):
    """Results are of this class, too."""


# What the caller does with an input, or with a cotangent, before it hands it over.
HANDED: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "temporary": lambda x: x * 1.0,
    "part": lambda x: torch.cat((x, x), 1)[:, 1 : 1 + WIDTH],
    "unaligned": lambda x: torch.cat((x[0, :1], x.reshape(-1)))[1:].view_as(x),
    "transposed": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:1].expand_as(x),
    "negative": lambda x: torch._neg_view(x * 1.0),
    "imaginary part": lambda x: torch.complex(x, x).conj().imag,
    "zeros": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "of a class": lambda x: x.as_subclass(Named),
}
RUN_EAGERLY = ("zeros", "of a class")
"""Kinds of inputs that the model itself runs on."""


@dataclass(frozen=True)
class ClassPlan:
    """A block class: its statements, what it returns, whether it is marked."""

    statements: tuple[str, ...]
    result: str
    marked: bool


@dataclass(frozen=True)
class InstancePlan:
    """An instance of a class: attributes, and children by their number in the plan."""

    kind: int
    scale: float
    flag: bool
    index: int
    act: int
    config: int
    children: tuple[int, ...] = ()


@dataclass(frozen=True)
class Mutation:
    """A change of the model after it was compiled: a name in ``MUTATIONS``, where, how."""

    name: str
    place: int
    choice: int


@dataclass(frozen=True)
class ModelPlan:
    """A whole model: classes and instances (children first), its forward, later mutations.

    ``handed`` says of each call, in turn, how its input and its cotangent lie in memory.
    """

    classes: tuple[ClassPlan, ...]
    instances: tuple[InstancePlan, ...]
    layers: tuple[int, ...]
    forward: tuple[str, ...]
    initial: tuple[Mutation, ...]
    later: tuple[Mutation, ...]
    handed: tuple[tuple[str, str], ...]


# ---- drawing ---------------------------------------------------------------------------------


@st.composite
def _classes(draw: Any, nested: bool) -> ClassPlan:
    own = draw(st.lists(st.sampled_from(OWN), min_size=1, max_size=3))
    if draw(st.integers(0, 9)) == 0:
        own.insert(0, draw(st.sampled_from(ON_THE_ARGUMENT)))
    if nested:
        for _ in range(draw(st.integers(1, 2))):
            call = draw(st.sampled_from(CALLS)).format(c=draw(st.sampled_from("ab")))
            own.insert(draw(st.integers(0, len(own))), call)
    marked = draw(st.integers(0, 5)) > 0
    return ClassPlan(tuple(own), draw(st.sampled_from(RESULTS)), marked)


@st.composite
def _instances(draw: Any, kind: int, below: int) -> InstancePlan:
    children = draw(st.lists(st.integers(0, below - 1), min_size=2, max_size=2)) if below else ()
    return InstancePlan(
        kind,
        scale=draw(st.sampled_from([1.0, 1.0, 2.0])),
        flag=draw(st.integers(0, 3)) > 0,
        index=draw(st.sampled_from([0, 0, 1, 2])),
        act=draw(st.sampled_from([0, 0, *range(1, len(ACTS))])),
        config=draw(st.sampled_from([0, 0, 1])),
        children=tuple(children),
    )


@st.composite
def _mutations(draw: Any) -> Mutation:
    name = draw(st.sampled_from(sorted(MUTATIONS)))
    return Mutation(name, draw(st.integers(0, 11)), draw(st.integers(0, 3)))


def _without_checkpoint(statements: Sequence[str]) -> tuple[str, ...]:
    return tuple("x = torch.tanh(x)" if "checkpoint" in s else s for s in statements)


_handed = st.sampled_from(["plain", *HANDED])


@st.composite
def model_plans(draw: Any) -> ModelPlan:
    """Draws a model of up to three levels of blocks, and mutations before and after compiling."""
    classes: list[ClassPlan] = []
    instances: list[InstancePlan] = []
    for level in range(draw(st.sampled_from([1, 2, 2, 3]))):
        first, below = len(classes), len(instances)
        for _ in range(draw(st.integers(1, 2))):
            classes.append(draw(_classes(level > 0)))
        for _ in range(draw(st.integers(1, 3))):
            kind = draw(st.integers(first, len(classes) - 1))
            instances.append(draw(_instances(kind, below)))
    top = st.integers(0, len(instances) - 1)
    layers = draw(st.lists(top, min_size=2, max_size=4))
    forward = [
        draw(st.sampled_from(CALLS[:-4])).format(c=f"layers[{i}]") for i in range(len(layers))
    ]
    # Eager runs a checkpoint's function again in the backward, and so changes a buffer again (how
    # far it gets depends on what it saved); a compiled program changes it once.
    if any("self.mean" in s or "self.count" in s for c in classes for s in c.statements):
        classes = [replace(c, statements=_without_checkpoint(c.statements)) for c in classes]
        forward = list(_without_checkpoint(forward))
    return ModelPlan(
        tuple(classes),
        tuple(instances),
        tuple(layers),
        tuple(forward),
        tuple(draw(st.lists(_mutations(), max_size=2))),
        tuple(draw(st.lists(_mutations(), min_size=1, max_size=3))),
        tuple(draw(st.lists(st.tuples(_handed, _handed), min_size=1, max_size=4))),
    )


# ---- building --------------------------------------------------------------------------------


class Base(nn.Module):
    """What all random blocks hold."""

    def __init__(self, plan: InstancePlan, configs: Sequence[Any], children: Sequence[Any]) -> None:
        super().__init__()
        self.lin = linear()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.drop = nn.Dropout(0.5)
        self.scale, self.flag, self.index = plan.scale, plan.flag, plan.index
        self.act = ACTS[plan.act]()
        self.config = configs[plan.config]
        self.table = torch.rand(WIDTH, dtype=torch.float64)
        self.tables = {"a": [torch.rand(WIDTH, dtype=torch.float64)]}
        self.register_buffer("mean", torch.rand(WIDTH, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        for name, child in zip("ab", children, strict=False):
            setattr(self, name, child)


BLOCK_ARGUMENTS = "self, x, y=None, *, gain=1.0"


def _make_class(
    scope: dict[str, Any], name: str, text: str, marked: bool = False
) -> type[nn.Module]:
    exec(compile(text, "<random model>", "exec"), scope)
    kind: type[nn.Module] = scope[name]
    return lazy_inline(kind) if marked else kind


class Root(nn.Module):
    """Base of the whole model."""

    def __init__(self, layers: Sequence[nn.Module], configs: Sequence[Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.configs = list(configs)
        self.config, self.index, self.flag = configs[0], 0, True


@dataclass(frozen=True)
class Built:
    """A model and the globals of its classes."""

    model: Root
    scope: dict[str, Any]


def build(plan: ModelPlan) -> Built:
    """Makes the model of a plan; the same each time."""
    torch.manual_seed(1)
    scope = dict(globals(), SETTINGS={"shift": 0.25}, SHIFT=0.5)
    kinds = []
    for number, kind in enumerate(plan.classes):
        text = source_of(f"Block{number}", kind, BLOCK_ARGUMENTS)
        kinds.append(_make_class(scope, f"Block{number}", text, kind.marked))
    configs = [types.SimpleNamespace(scale=s) for s in (1.0, 1.5)]
    instances: list[nn.Module] = []
    for instance in plan.instances:
        children = [instances[i] for i in instance.children]
        instances.append(kinds[instance.kind](instance, configs, children))
    text = source_of("Model", ClassPlan(plan.forward, "x", False), "self, x", "Root")
    model = _make_class(scope, "Model", text)([instances[i] for i in plan.layers], configs)
    assert isinstance(model, Root)
    for mutation in plan.initial:
        mutate(Built(model, scope), mutation)
    return Built(model, scope)


def source_of(name: str, plan: ClassPlan, arguments: str, base: str = "Base") -> str:
    """Returns the text of a class whose forward runs these statements."""
    lines = [f"class {name}({base}):", f"    def forward({arguments}):", "        start = x"]
    for statement in plan.statements:
        lines += ["        " + line for line in statement.split("\n")]
    return "\n".join([*lines, f"        return {plan.result}", ""])


# ---- mutations -------------------------------------------------------------------------------


class Lora(nn.Module):
    """A low-rank adapter around a linear layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.rand(WIDTH, 2, dtype=layer.weight.dtype))
        self.up = nn.Parameter(torch.rand(2, WIDTH, dtype=layer.weight.dtype))

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) + x @ self.down @ self.up
        return result


def mutate(built: Built, mutation: Mutation) -> None:
    """Changes a model; the same change on equal models."""
    blocks = [m for m in built.model.modules() if isinstance(m, Base)]
    block, choice = blocks[mutation.place % len(blocks)], mutation.choice
    torch.manual_seed(100 + choice)
    names = {
        **globals(),
        "model": built.model,
        "scope": built.scope,
        "block": block,
        "choice": choice,
        "layer": _linear(block),
        "other": blocks[choice % len(blocks)],
    }
    exec(MUTATIONS[mutation.name], names)


def _linear(block: Base) -> nn.Linear:
    return next(m for m in block.lin.modules() if isinstance(m, nn.Linear))


def is_parametrized(layer: nn.Module) -> bool:
    return hasattr(layer, "parametrizations")


def add_hook(block: Base, choice: int) -> None:
    inner = block if choice < 2 else block.lin
    if choice % 2:
        inner.register_forward_hook(lambda module, args, output: output * 2)
    else:
        inner.register_forward_pre_hook(
            lambda module, args: (*[a * 2 for a in args[:1]], *args[1:])
        )


def add_backward_hook(block: Base, choice: int) -> None:
    inner = block if choice < 2 else block.norm

    def double(module: nn.Module, *gradients: Any) -> Any:
        """Doubles those of inputs, or those of outputs before the backward."""
        return tuple(None if g is None else g * 2 for g in gradients[0])

    if choice % 2:
        inner.register_full_backward_hook(double)
    else:
        inner.register_full_backward_pre_hook(double)


def remove_hooks(block: Base) -> None:
    for module in block.modules():
        for name, table in vars(module).items():
            if name.endswith("_hooks") and isinstance(table, dict):
                table.clear()


def _doubled(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = super(type(self), self).forward(x, *args, **kwargs) * 2
    return result


def change_class(block: Base, scope: dict[str, Any]) -> None:
    name = type(block).__name__ + "Child"
    if not type(block).__name__.endswith("Child"):
        if name not in scope:
            scope[name] = type(name, (type(block),), {"forward": _doubled})
        block.__class__ = scope[name]


SWAP_CHILD = """
child = getattr(block, "a", None)
if isinstance(child, Base):
    inner = [getattr(child, name) for name in "ab" if hasattr(child, name)]
    plan = InstancePlan(0, float(choice), True, choice, choice, 0)
    block.a = type(child)(plan, model.configs, inner)
"""
RELOAD = """
state = {k: v * 0.5 if v.is_floating_point() else v for k, v in block.state_dict().items()}
block.load_state_dict(state, assign=choice == 3)
"""
REPLACE_FORWARD = """
inner = block.act if isinstance(block.act, nn.Module) else block.norm
inner.forward = types.MethodType(lambda self, x, choice=choice: torch.cos(x) * (choice + 1), inner)
"""
DOUBLES = "torch.rand(WIDTH, dtype=torch.float64)"
# What each does to a ``block``, its linear ``layer``, an ``other`` block or the whole ``model``.
MUTATIONS = {
    "set scale": "block.scale = (1.0, 2.0, 3.0, 2)[choice]",
    "set flag": "block.flag = choice % 2 == 0",
    "set index": "block.index = (0, 1, 2, True)[choice]",
    "set extra": "block.extra = 1.0 + choice % 2",
    "remove extra": "vars(block).pop('extra', None)",
    "set act": "del block.act; block.act = ACTS[2 * choice]()",
    "set config": "block.config = model.configs[choice % 2]",
    "change config": "block.config.scale = (1.0, 0.5, 2.0, 3)[choice]",
    "set global": "scope['SHIFT'] = choice / 2",
    "set entry of global": "scope['SETTINGS']['shift'] = float(choice)",
    "replace tensor": f"block.table = {DOUBLES}",
    "change tensor": "block.table.mul_(choice)",
    "replace tensor in dict": f"block.tables['a'][0] = {DOUBLES}",
    "replace buffer": f"block.mean = {DOUBLES}",
    "replace parameter": "if not is_parametrized(layer): "
    "layer.weight = nn.Parameter(torch.rand_like(layer.weight))",
    "replace data": "p = next(layer.parameters()); p.data = torch.rand_like(p)",
    "transpose data": "square = [p for p in layer.parameters() if p.shape == (WIDTH, WIDTH)]\n"
    "for p in square: p.data = p.data.t()",
    "change parameter": "with torch.no_grad(): next(layer.parameters()).mul_(0.5)",
    "freeze": "list(layer.parameters())[choice % 2].requires_grad_(False)",
    "thaw": "block.requires_grad_(True)",
    "tie": "if not any(map(is_parametrized, (layer, _linear(other)))): "
    "layer.weight = _linear(other).weight",
    "no bias": "layer.bias = None",
    "weight norm": "if not is_parametrized(layer): nn.utils.parametrizations.weight_norm(layer)",
    "add adapter": "if isinstance(block.lin, nn.Linear): block.lin = Lora(block.lin)",
    "reload": RELOAD,
    "swap child": SWAP_CHILD,
    "same child": "if hasattr(block, 'a'): block.b = block.a",
    "swap layers": "a, b = model.layers[:2]; model.layers[0], model.layers[1] = b, a",
    "eval": "block.eval()",
    "eval alone": "block.training = False",
    "eval dropout": "block.drop.eval()",
    "train": "block.train()",
    "set dropout": "block.drop.p = choice / 4",
    "half precision": "block.lin.float()",
    "add hook": "add_hook(block, choice)",
    "add backward hook": "add_backward_hook(block, choice)",
    "remove hooks": "remove_hooks(block)",
    "replace forward": REPLACE_FORWARD,
    "change class": "change_class(block, scope)",
    "nothing": "block.note = choice",
}
