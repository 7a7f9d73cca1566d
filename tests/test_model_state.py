"""A compiled module and its model are one state; what changes in it counts at the next call."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_same_gradients, relative_error, twin
from decoders import llama
from torch import Tensor, nn

import lazyinline
from lazyinline import CompileReport, lazy_inline


class Config:
    def __init__(self) -> None:
        self.scale = 1.5
        self.inner = types.SimpleNamespace(shift=0.25)


@lazy_inline
class Block(nn.Module):
    factor = 1.0

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.0)
        self.gain = 2.0
        self.table = torch.linspace(0, 1, 8)
        self.tables = [torch.ones(8), torch.zeros(8)]
        self.options: dict[str, Any] = {"activation": "tanh", "power": 1}
        self.register_buffer("offset", torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.linear(x)) * self.gain * self.factor
        h = h * self.config.scale + self.config.inner.shift + self.table + self.offset
        h = h * self.tables[0] + self.tables[1]
        h = h.tanh() if self.options["activation"] == "tanh" else h.sigmoid()
        return x + h ** self.options["power"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.temperature = 1.0
        self.extra: nn.Module | None = None
        self.names = ["a", "b"]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        x = x if self.extra is None else self.extra(x)
        logits: Tensor = self.head(x) / self.temperature * len(self.names) * self.config.scale
        return logits


IDS = torch.arange(6).view(2, 3)


@pytest.fixture(params=["eager", "inductor"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def build(backend: str = "eager") -> tuple[Any, Net]:
    torch.manual_seed(0)
    model = Net()
    return lazyinline.compile(model, backend=backend), model


# ---- names and tables -------------------------------------------------------------------------


def test_names_and_objects_are_the_models() -> None:
    compiled, model = build()
    assert list(compiled.state_dict()) == list(model.state_dict())
    for kind in ("named_parameters", "named_buffers", "named_children"):
        ours, theirs = dict(getattr(compiled, kind)()), dict(getattr(model, kind)())
        assert ours.keys() == theirs.keys()
        assert all(ours[name] is theirs[name] for name in theirs)
    assert compiled.blocks is model.blocks
    assert compiled.get_parameter("head.weight") is model.embedding.weight


def test_state_dict_goes_round_between_compiled_and_eager(backend: str) -> None:
    compiled, model = build(backend)
    compiled(IDS).sum().backward()
    plain = Net()
    plain.load_state_dict(compiled.state_dict())
    assert_close(compiled(IDS), plain(IDS))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.5)
    loaded = compiled.load_state_dict(plain.state_dict())
    assert not loaded.missing_keys and not loaded.unexpected_keys
    assert_close(compiled(IDS), plain(IDS))
    compiled.load_state_dict(Net().state_dict(), assign=True)
    assert_close(compiled(IDS), model(IDS))


def test_a_module_around_a_compiled_one_saves_and_loads_it() -> None:
    inner, (ids, _) = llama(2, hidden=16, num_heads=2, vocab=31, seq=4)  # non-persistent buffers
    outer = nn.Sequential(lazyinline.compile(inner, backend="eager"))
    other, _ = llama(2, seed=1, hidden=16, num_heads=2, vocab=31, seq=4)
    assert list(outer.state_dict()) == [f"0.{name}" for name in inner.state_dict()]
    outer.load_state_dict({f"0.{name}": value for name, value in other.state_dict().items()})
    assert_close(outer(ids), other(ids))


def test_hooks_of_the_model_see_its_state_dict() -> None:
    compiled, model = build()
    seen = []
    model.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    model.register_load_state_dict_pre_hook(lambda *_: seen.append("loading"))
    model.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    compiled.load_state_dict(compiled.state_dict())
    outer = nn.Sequential(compiled)
    outer.load_state_dict(outer.state_dict())
    assert seen == ["saved", "loading", "loaded"] * 2


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


def test_an_optimizer_made_before_compiling_keeps_its_state() -> None:
    torch.manual_seed(0)
    model = Net()
    expected = twin(model)
    pairs = []
    for owner in (model, expected):
        optimizer = torch.optim.AdamW(owner.parameters(), lr=1e-2)
        owner(IDS).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        pairs.append((owner, optimizer))
    compiled = lazyinline.compile(model, backend="eager")
    for run, optimizer in ((compiled, pairs[0][1]), (expected, pairs[1][1])):
        run(IDS).square().mean().backward()
        optimizer.step()
    assert_same_gradients(model, expected)
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert pairs[0][1].state[parameter]["step"] == 2
        ours = pairs[0][1].state[parameter]["exp_avg_sq"]
        assert relative_error(ours, pairs[1][1].state[other]["exp_avg_sq"]) <= 1e-5
        assert relative_error(parameter, other) <= 1e-5


# ---- changes after compiling ------------------------------------------------------------------


def replace_parameter(model: Net) -> None:
    model.blocks[1].linear.weight = nn.Parameter(torch.randn(8, 8))


def replace_data(model: Net) -> None:
    model.blocks[1].linear.weight.data = torch.randn(8, 8)


def swap_data_of_two(model: Net) -> None:
    a, b = model.blocks[0].linear.weight, model.blocks[1].linear.weight
    a.data, b.data = b.data, a.data


def set_storage(model: Net) -> None:
    with torch.no_grad():
        model.blocks[0].linear.bias.set_(torch.randn(8))


def transpose_data(model: Net) -> None:
    model.blocks[0].linear.weight.data = model.blocks[0].linear.weight.data.t()


def to_double(model: Net) -> None:
    model.double()


def to_bfloat16_and_back(model: Net) -> None:
    model.bfloat16().float()


def untie(model: Net) -> None:
    model.head.weight = nn.Parameter(torch.randn(11, 8))


def untie_the_other(model: Net) -> None:
    model.embedding.weight = nn.Parameter(torch.randn(11, 8))


def tie(model: Net) -> None:
    model.blocks[1].linear.weight = model.blocks[0].linear.weight


def replace_buffer(model: Net) -> None:
    model.blocks[0].offset = torch.randn(8)


def replace_plain_tensor(model: Net) -> None:
    model.blocks[1].table = torch.randn(8)


def replace_tensor_in_a_list(model: Net) -> None:
    model.blocks[1].tables[0] = torch.full((8,), 3.0)


def replace_block(model: Net) -> None:
    model.blocks[1] = Block(model.config)


def replace_inner_module(model: Net) -> None:
    model.blocks[1].linear = nn.Linear(8, 8, bias=False)


def append_block(model: Net) -> None:
    model.blocks.append(Block(model.config))


def remove_block(model: Net) -> None:
    del model.blocks[0]


def reorder_blocks(model: Net) -> None:
    first, second = model.blocks
    model.blocks[0], model.blocks[1] = second, first


def set_module_that_was_none(model: Net) -> None:
    model.extra = nn.Linear(8, 8)


def set_bias_that_was_none(model: Net) -> None:
    model.head.bias = nn.Parameter(torch.randn(11))


def drop_bias(model: Net) -> None:
    model.blocks[0].linear.bias = None


def change_number(model: Net) -> None:
    model.blocks[1].gain = 3.0


def change_number_of_the_model(model: Net) -> None:
    model.temperature = 0.5


def shadow_class_attribute(model: Net) -> None:
    model.blocks[0].factor = 4.0


def change_config(model: Net) -> None:
    model.config.scale = 0.5


def change_nested_config(model: Net) -> None:
    model.config.inner.shift = -3.0


def change_dictionary(model: Net) -> None:
    model.blocks[0].options["activation"] = "sigmoid"


def change_list(model: Net) -> None:
    model.names.append("c")


def override_forward(model: Net) -> None:
    linear = model.blocks[1].linear
    linear.forward = types.MethodType(lambda self, x: 5 * nn.Linear.forward(self, x), linear)


def change_class(model: Net) -> None:
    class Doubled(Block):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model.blocks[1].__class__ = Doubled


def add_forward_hook(model: Net) -> None:
    model.blocks[1].linear.register_forward_hook(lambda module, args, out: out * 2)


def add_forward_pre_hook(model: Net) -> None:
    model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def parametrize(model: Net) -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    nn.utils.parametrize.register_parametrization(model.blocks[0].linear, "weight", Double())


CHANGES: list[Callable[[Net], None]] = [
    replace_parameter,
    replace_data,
    swap_data_of_two,
    set_storage,
    transpose_data,
    to_double,
    to_bfloat16_and_back,
    untie,
    untie_the_other,
    tie,
    replace_buffer,
    replace_plain_tensor,
    replace_tensor_in_a_list,
    replace_block,
    replace_inner_module,
    append_block,
    remove_block,
    reorder_blocks,
    set_module_that_was_none,
    set_bias_that_was_none,
    drop_bias,
    change_number,
    change_number_of_the_model,
    shadow_class_attribute,
    change_config,
    change_nested_config,
    change_dictionary,
    change_list,
    override_forward,
    change_class,
    add_forward_hook,
    add_forward_pre_hook,
    parametrize,
]
# Where memory is bound ahead of the call, these would read the old one.
ON_MEMORY = CHANGES[:13]


def assert_noticed(backend: str, change: Callable[[Net], None]) -> None:
    compiled, model = build(backend)
    before = compiled(IDS)
    before.square().mean().backward()
    compiled(IDS).square().mean().backward()  # from the pool of what the first run bound
    model.zero_grad()
    torch.manual_seed(1)
    change(model)
    expected = twin(model)
    want, out = expected(IDS), compiled(IDS)
    changed = change is not to_bfloat16_and_back
    error = relative_error(before.detach(), want.detach())
    assert error > (1e-2 if changed else 1e-4) or change is to_double
    assert_close(out, want)
    out.square().mean().backward()
    want.square().mean().backward()
    assert_same_gradients(model, expected)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.sweep(
    keep=[
        "replace_parameter",
        "to_bfloat16_and_back",
        "[untie]",
        "replace_block",
        "drop_bias",
        "change_number]",
        "change_config",
        "override_forward",
        "add_forward_hook",
        "parametrize",
    ]
)
def test_a_change_after_compiling_counts_at_the_next_call(change: Callable[[Net], None]) -> None:
    assert_noticed("eager", change)


@pytest.mark.parametrize("change", ON_MEMORY, ids=lambda change: change.__name__)
@pytest.mark.sweep(keep=["replace_parameter", "replace_data", "swap_data", "set_storage"])
def test_a_change_of_memory_counts_with_bound_memory(change: Callable[[Net], None]) -> None:
    assert_noticed("inductor", change)


def test_weights_changed_in_place_are_read_anew(backend: str) -> None:
    compiled, model = build(backend)
    compiled(IDS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
        model.blocks[0].offset.mul_(2)
        model.blocks[1].table.mul_(2)
    assert_close(compiled(IDS), model(IDS))


def test_averaged_weights_swapped_in_for_evaluation(backend: str) -> None:
    compiled, model = build(backend)
    average = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for _ in range(2):
        with torch.no_grad():
            trained = compiled(IDS)
            assert_close(trained, model(IDS))
            for name, parameter in model.named_parameters():
                parameter.data, average[name] = average[name], parameter.data
            averaged = compiled(IDS)
            assert_close(averaged, model(IDS))
        assert relative_error(trained, averaged) > 1e-2


def test_functional_call_with_other_parameters(backend: str) -> None:
    compiled, model = build(backend)
    compiled(IDS)
    other = {n: torch.randn_like(p).requires_grad_() for n, p in model.named_parameters()}
    found = []
    for run in (compiled, model):
        out = torch.func.functional_call(run, other, (IDS,))
        found.append((out, *torch.autograd.grad(out.square().mean(), list(other.values()))))
    assert_close(*found)
    assert_close(compiled(IDS), model(IDS))


def test_what_the_model_never_reads_does_not_compile_it_again(
    compiles: list[CompileReport],
) -> None:
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


def test_a_change_taken_back_finds_its_program_again(compiles: list[CompileReport]) -> None:
    compiled, model = build()
    for gain in (2.0, 3.0, 2.0, 3.0):
        model.blocks[0].gain = gain
        assert_close(compiled(IDS), model(IDS))
    assert len(compiles) == 2
