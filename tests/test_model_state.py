"""A compiled module and its model are one state; what changes in it counts at the next call."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_equals_eager
from decoders import llama
from torch import Tensor, nn
from values import HELPERS
from ways import HOLDING
from worlds import World, assert_as_eager

import lazyinline
from lazyinline import CompileReport
from lazyinline.reuse.torch_names import MARKED_BY_DYNAMO

NET = """
@lazy_inline
class Block(nn.Module):
    factor = 1.0
    def __init__(self, config):
        super().__init__()
        self.config, self.linear, self.dropout = config, nn.Linear(8, 8), nn.Dropout(0.0)
        self.gain, self.table = 2.0, torch.linspace(0, 1, 8)
        self.tables, self.options = [torch.ones(8), torch.zeros(8)], {"act": "tanh", "power": 1}
        self.register_buffer("offset", torch.full((8,), 0.5))
    def forward(self, x):
        h = self.dropout(self.linear(x)) * self.gain * self.factor
        h = h * self.config.scale + self.config.inner.shift + self.table + self.offset
        h = h * self.tables[0] + self.tables[1]
        h = h.tanh() if self.options["act"] == "tanh" else h.sigmoid()
        return x + h ** self.options["power"]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = NS(scale=1.5, inner=NS(shift=0.25))
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.temperature, self.extra, self.names = 1.0, None, ["a", "b"]
    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks: x = block(x)
        x = x if self.extra is None else self.extra(x)
        return self.head(x) / self.temperature * len(self.names) * self.config.scale
def inputs(): return [torch.arange(6).view(2, 3)]
model = Net()
"""
IDS = torch.arange(6).view(2, 3)


def build(backend: str = "eager") -> tuple[Any, Any]:
    model = World(HELPERS, NET).model
    return lazyinline.compile(model, backend=backend), model


def test_names_and_objects_are_the_models() -> None:
    compiled, model = build()
    assert list(compiled.state_dict()) == list(model.state_dict())
    for kind in ("named_parameters", "named_buffers", "named_children"):
        ours, theirs = dict(getattr(compiled, kind)()), dict(getattr(model, kind)())
        assert ours.keys() == theirs.keys()
        assert all(ours[name] is theirs[name] for name in theirs)
    assert compiled.blocks is model.blocks
    assert compiled.get_parameter("head.weight") is model.embedding.weight


@pytest.mark.sweep(keep="eager")
def test_state_dict_goes_round_between_compiled_and_eager(backend: str) -> None:
    compiled, model = build(backend)
    compiled(IDS).sum().backward()
    plain = build()[1]
    plain.load_state_dict(compiled.state_dict())
    assert_close(compiled(IDS), plain(IDS))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.5)
    loaded = compiled.load_state_dict(plain.state_dict())
    assert not loaded.missing_keys and not loaded.unexpected_keys
    assert_close(compiled(IDS), plain(IDS))
    compiled.load_state_dict(build()[1].state_dict(), assign=True)
    assert_close(compiled(IDS), model(IDS))


def test_a_module_around_a_compiled_one_saves_and_loads_it() -> None:
    inner, (ids, _) = llama(2, hidden=16, num_heads=2, vocab=31, seq=4)  # non-persistent buffers
    outer = nn.Sequential(lazyinline.compile(inner, backend="eager"))
    other, _ = llama(2, seed=1, hidden=16, num_heads=2, vocab=31, seq=4)
    assert list(outer.state_dict()) == [f"0.{name}" for name in inner.state_dict()]
    outer.load_state_dict({f"0.{name}": value for name, value in other.state_dict().items()})
    assert_close(outer(ids), other(ids))


def test_attributes_are_read_and_written_through() -> None:
    compiled, model = build()
    before = compiled(IDS)
    compiled.temperature = 2.0
    assert model.temperature == 2.0 and compiled.temperature == 2.0
    assert_close(compiled(IDS), before / 2)
    compiled.extra = nn.Linear(8, 8)
    assert isinstance(model.extra, nn.Linear)
    assert "extra.weight" in compiled.state_dict()
    assert_close(compiled(IDS), model(IDS))
    compiled.note = "n"
    del compiled.note
    assert not hasattr(model, "note")
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = compiled.nothing_of_that_name


# fmt: off
ON_MEMORY = {
    "parameter": "b[1].linear.weight = nn.Parameter(torch.randn(8, 8))",
    "data": "b[1].linear.weight.data = torch.randn(8, 8)",
    "storage": "with torch.no_grad(): b[0].linear.bias.set_(torch.randn(8))",
    "buffer": "b[0].offset = torch.randn(8)",
    "plain tensor": "b[1].table = torch.randn(8)",
    "to double": "model.double()",
    "to bfloat16 and back": "model.bfloat16().float()",
    "transposed data": "b[0].linear.weight.data = b[0].linear.weight.data.t()",
    "untied": "model.head.weight = nn.Parameter(torch.randn(11, 8))",
    "tied": "b[1].linear.weight = b[0].linear.weight",
    "frozen": "b[0].linear.weight.requires_grad_(False)",
    "weights in place":
        "with torch.no_grad(): [p.add_(torch.randn_like(p)) for p in model.parameters()]",
    "tensors in place": "b[0].offset.mul_(2); b[1].table.mul_(2)",
}
CHANGES = {
    "class attribute hidden": "b[0].factor = 4.0",
    "attributes replaced": "b[0].__dict__ = {**vars(b[0]), 'gain': 3.0}",
    "an entry past the module": "vars(b[1]).update(gain=5.0)",
    "parameters replaced": "b[0].linear._parameters = nn.Linear(8, 8)._parameters",
    "block": "b[1] = Block(model.config)",
    "block more": "b.append(Block(model.config))",
    "other order": "first, second, *_ = b\nb[0], b[1] = second, first",
    "bias dropped": "b[0].linear.bias = None",
    "modules replaced": "b[0]._modules = {'linear': nn.Linear(8, 8), 'dropout': nn.Dropout(0.0)}",
    "forward of one": "b[1].linear.forward = lambda x: F.linear(x, b[1].linear.weight) * 5",
    "class":
        "b[1].__class__ = type('Doubled', (Block,), {'forward': lambda s, x: 2 * "
        "Block.forward(s, x)})",
    "hook": "b[1].linear.register_forward_hook(lambda module, args, out: out * 2)",
    "hooks replaced": "b[0].linear._forward_hooks = {0: lambda *args: args[2] * 2}",
    "parametrized":
        "nn.utils.parametrize.register_parametrization(b[0].linear, 'weight', nn.Softplus())",
    "how a class is called": "Block.__call__ = lambda self, x: self.forward(x) * 3",
    "bases of a class": "Block.__bases__ = (type('Base', (nn.Module,), {}),)",
}
# fmt: on
NUM_TOGETHER = 8


def in_groups(names: Sequence[str], size: int = NUM_TOGETHER) -> list[Any]:
    groups = [list(names)[i : i + size] for i in range(0, len(names), size)]
    return [pytest.param(group, id=group[0]) for group in groups]


def assert_noticed(names: Sequence[str], backend: str) -> None:
    changes = {**ON_MEMORY, **CHANGES}
    scene = ["", "", *(f"model.zero_grad()\nb = model.blocks\n{changes[n]}" for n in names), ""]
    options: dict[str, Any] = {"backend": backend, "tolerance": 1e-4, "grad": names[0] in ON_MEMORY}
    outcome = assert_as_eager(HELPERS, NET, scene=scene, **options)
    before = outcome.seen[1]["outputs"]
    for name, seen in zip(names, outcome.seen[2:], strict=False):
        now = seen["outputs"]
        is_same = name in ("frozen", "to bfloat16 and back", "to double", "bases of a class")
        assert is_same or not torch.allclose(before, now), f"{name}: changes nothing"
        before = now


@pytest.mark.parametrize("names", in_groups([*ON_MEMORY, *CHANGES]))
def test_a_change_after_compiling_counts_at_the_next_call(names: list[str]) -> None:
    assert_noticed(names, "eager")


@pytest.mark.parametrize("names", in_groups([*ON_MEMORY], 5))  # of the first, none compiles anew
@pytest.mark.sweep(keep="[parameter]")
def test_a_change_of_memory_counts_with_bound_memory(names: list[str]) -> None:
    assert_noticed(names, "inductor")


# What a forward computes of ``y = self.linear(x)``, and what changes it, and back.
# fmt: off
READ = {
    "mode of a module outside": ("y * (2 if OTHER.training else 3)", "OTHER.eval()"),
    "parameter of one": ("OTHER(y)", "OTHER.weight = nn.Parameter(torch.ones(4, 4, dtype=y_type))"),
    "forward of one": ("OTHER(y)", "OTHER.forward = torch.neg"),
    "hook on one": ("OTHER(y)", "OTHER.register_forward_hook(lambda m, a, r: r * 2)"),
    "attribute of a hidden one": ("y * self.hidden.out_features", "model.hidden.out_features = 5"),
    "size of a parameter": ("y * self.linear.weight.shape[0] + len(self.w)",
        "model.w = nn.Parameter(torch.ones(5))"),
    "attribute of a weight": ("y * self.linear.weight.scale", "model.linear.weight.scale = 3.0"),
    "name that is a method's": ("y * self.half", "model.half = 3.0"),
    "name of its own": ("y * vars(self).get('half', 1) * (2 if 'more' in self.__dict__ else 3)",
        "model.half = 5.0; model.more = 1", "model.half = 2.0; del model.more"),
    "name that hides a parameter": ("y * self.w.sum() * (2 if 'w' in self.__dict__ else 3)",
        "vars(model)['w'] = torch.full((3,), 2.0, dtype=y_type)", "del vars(model)['w']"),
    "global that is a parameter": ("y * globals()['SHARED'].sum()",
        "model.w = nn.Parameter(torch.ones(3) * 7)"),
    "function of PyTorch": ("F.gelu(y)", "KEPT = F.gelu; F.gelu = lambda *a: a[-1] * 3",
        "F.gelu = KEPT"),
    "name in a module that is looked up": ("y * sys.modules['world_settings'].value",
        "sys.modules['world_settings'].value = 3.0"),
    "by a partial": ("torch.sigmoid(y)",
        "S = torch.sigmoid; torch.sigmoid = functools.partial(torch.mul, 3)", "torch.sigmoid = S"),
    "method of a tensor in C": ("y.relu()", "Tensor.relu = lambda t: t * 3", "del Tensor.relu"),
    "operator of a tensor": ("y * y", "Tensor.__mul__ = lambda a, b: a + b", "del Tensor.__mul__"),
    "method of a layer": ("self.conv(y[None, None])",
        "C = nn.Conv2d._conv_forward; nn.Conv2d._conv_forward = lambda s, x, *_: x * 5",
        "nn.Conv2d._conv_forward = C"),
    "a setting": ("y * (2 if torch.are_deterministic_algorithms_enabled() else 1)",
        "torch.use_deterministic_algorithms(True)", "torch.use_deterministic_algorithms(False)"),
    "a cache that keeps": ("y * cached(2)", "FACTOR = 3.0", "cached.cache_clear()"),
}
# fmt: on
READING = """
FACTOR, OTHER = 2.0, linear()
y_type = torch.float64
sys.modules["world_settings"] = made(types.ModuleType("settings"), "v.value = 2.0")
@functools.lru_cache
def cached(power): return FACTOR ** power
def forward(self, x):
    y = self.linear(x)
    return [EACH]
model = block(forward)(conv=nn.Conv2d(1, 1, 1, dtype=y_type), half=2.0)
model.w = nn.Parameter(torch.ones(3))
object.__setattr__(model, "hidden", nn.Linear(4, 4))
model.linear.weight.scale = 1.0
SHARED = model.w
"""


@pytest.mark.parametrize("names", in_groups([*READ]))
def test_a_change_of_what_else_a_forward_reads_is_noticed(names: list[str]) -> None:
    text = READING.replace("EACH", ", ".join(READ[name][0] for name in names))
    changes = [change for name in names for change in READ[name][1:]]
    assert_as_eager(text, scene=["", "", *changes, ""], grad=False)


# How a block holds its parameter ``a`` besides its module's table, and how its forward finds it.
# fmt: off
HOLDERS = {
    **{name: (HOLDING[name].put, HOLDING[name].get)
       for name in ("list", "object", "table in a namespace", "closure")},
    "list of a module outside": ("h.v = [made(nn.Module(), 'v.held = []')]; h.v[0].held.append(V)",
        "self.v[0].held[0]"),
    "list made anew": ("pass", "(setattr(self, 'v', [self.a, self.b]), self.v[0])[1]"),
    "list filled anew": ("h.v = []", "(self.v.clear(), self.v.append(self.a), self.v[0])[2]"),
    "ParameterList": ("h.v = nn.ParameterList([V])", "self.v[:1][0]"),
}
EXCHANGES = {
    "replaced": "model[1].a = nn.Parameter(torch.full((4,), 3.0, dtype=torch.float64))",
    "exchanged": "model[1].a, model[1].b = model[1].b, model[1].a",
    "frozen": "model[1].a.requires_grad_(False)",
}
# fmt: on
HOLDING = """
class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.rand(4, dtype=torch.float64)) for _ in range(2))
    def forward(self, x): return torch.tanh(x * {find}) * self.b
lazy_inline(Holding)
def hold(h):
    V = h.a
    {hold}
    return h
model = nn.Sequential(*(hold(Holding()) for _ in range(3)))
EVERY = list(model.parameters())
def train():
    EVERY.extend(p for p in model.parameters() if all(p is not k for k in EVERY))
    torch.optim.SGD(EVERY, lr=0.1).step()
    for p in EVERY: p.grad = None
"""


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.sweep(keep=["[list-ex", "closure-frozen", "list made anew-replaced", "List-exchanged"])
def test_a_parameter_held_twice_is_read_where_eager_reads_it(holder: str, exchange: str) -> None:
    hold, find = HOLDERS[holder]
    scene = ["", "train()", f"train()\n{EXCHANGES[exchange]}", "train()"]
    assert_as_eager(HELPERS, HOLDING.format(hold=hold, find=find), scene=scene, state="EVERY")


@pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in place"])
@pytest.mark.sweep(keep="eager")
def test_functional_call_with_other_parameters(backend: str, in_place: bool) -> None:
    def use(run: nn.Module, ids: Tensor) -> list[Tensor]:
        before = run(ids)
        other = {n: torch.randn_like(p).requires_grad_() for n, p in run.named_parameters()}
        out = torch.func.functional_call(run, other, (ids,))
        slopes = torch.autograd.grad(out.square().mean(), list(other.values()))
        return [before, out.detach(), *slopes, run(ids)]

    door: Any = "in place" if in_place else "compile"
    assert_equals_eager(build()[1], (IDS,), calls=1, door=door, backend=backend, use=use)


def test_what_the_model_never_reads_makes_no_compile(compiles: list[CompileReport]) -> None:
    compiled, model = build()
    out = compiled(IDS)
    model.step = 1
    model.blocks[0].note = "unused"
    model.blocks[1].gain = float("2.0")  # another object, the same number
    model.zero_grad()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1)
    model.load_state_dict(model.state_dict())
    assert_close(compiled(IDS), out)
    assert len(compiles) == 1


def test_the_first_torch_compile_of_the_process_does_not_compile_it_again(
    compiles: list[CompileReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(nn.Module, MARKED_BY_DYNAMO, raising=False)
    compiled, _ = build()
    out = compiled(IDS)
    monkeypatch.setattr(nn.Module, MARKED_BY_DYNAMO, False, raising=False)  # as Dynamo does
    assert_close(compiled(IDS), out)
    assert len(compiles) == 1


def test_a_change_taken_back_finds_its_program_again(compiles: list[CompileReport]) -> None:
    compiled, model = build()
    for gain in (2.0, 3.0, 2.0):
        model.blocks[0].gain = gain
        assert_close(compiled(IDS), model(IDS))
    assert len(compiles) == 2


def test_layers_taken_out_of_a_sequential_are_gone_from_the_wrapper() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 5))
    compiled = lazyinline.compile(model, backend="eager")
    compiled(torch.randn(2, 2))
    del model[1:]  # gives the model another table of its modules
    compiled.append(nn.ReLU())
    compiled.register_buffer("seen", torch.zeros(1))
    assert [*compiled.state_dict()] == ["seen", "0.weight", "0.bias"]
    assert [*map(id, compiled.parameters())] == [*map(id, model[0].parameters())]
    assert [*compiled.children()] == [model[0], model[1]]
    assert len(compiled) == 2 and [*compiled] == [*model] and compiled[-1] is model[1]
    x = torch.randn(2, 2)
    assert_close(compiled(x), model(x))


def test_a_model_without_a_length_has_none_compiled_and_is_true() -> None:
    compiled = lazyinline.compile(nn.Linear(2, 3), backend="eager")
    assert compiled
    with pytest.raises(TypeError, match="'Linear' has no len"):
        len(compiled)
