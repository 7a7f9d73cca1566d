"""Parts of a model on devices of their own: the mark, and models on two devices."""

import copy
import pickle

import forked
import pytest
import torch
from link_tree import ROOT
from torch import nn

import lazyinline
from lazyinline.frontend.passes.link import other_devices


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


SWEPT = "options or kept or inside or says and embedding or step_trains and inductor"


@pytest.mark.parametrize("cases", [f"not ({SWEPT})", SWEPT])
@pytest.mark.sweep(keep="not")
def test_models_on_two_devices_have_eagers_numbers(cases: str) -> None:
    # A process has one device of its own for users, for as long as it lives.
    code = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    forked.run(code, "-q", "-k", cases, str(ROOT / "tests" / "second_device_cases.py"))


def test_a_placed_module_keeps_what_the_user_has_of_it() -> None:
    model = Pair()
    parameters, names = dict(model.named_parameters()), list(model.state_dict())
    handle = model.first.register_forward_hook(lambda module, args, result: None)
    assert lazyinline.place(model.first, "meta") is model.first
    assert list(model.state_dict()) == names
    assert {p.device.type for p in model.first.parameters()} == {"meta"}
    assert len(model.first._forward_hooks) == 2
    handle.remove()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.first.weight.device.type == "meta" and twin.second.weight.device.type == "cpu"
        assert len(twin.first._forward_hooks) == len(twin.first._forward_pre_hooks) == 1
    assert parameters["second.weight"] is model.second.weight


def test_a_place_that_changes_nothing_leaves_no_hooks() -> None:
    model = Pair()
    parameters = list(model.parameters())
    lazyinline.place(model.first, "cpu")
    assert not model.first._forward_hooks and not model.first._forward_pre_hooks
    assert all(map(torch.Tensor.is_set_to, parameters, model.parameters()))


def test_what_cannot_be_placed_is_told() -> None:
    model = Pair()
    with pytest.raises(lazyinline.ReuseError, match="takes a module"):
        lazyinline.place(nn.Linear, "cpu")  # type: ignore[arg-type]
    with pytest.raises(lazyinline.PlanError, match="do not exist"):
        lazyinline.place(nn.ReLU(), "cpu")
    lazyinline.place(model.first, "meta")
    with pytest.raises(lazyinline.PlanError, match="on cpu, meta"):
        lazyinline.place(nn.ModuleList([nn.Linear(1, 1, device="meta"), nn.Linear(1, 1)]), "cpu")
    with pytest.raises(lazyinline.PlanError, match="first in this Pair is placed already"):
        lazyinline.place(model, "meta")


def test_memory_is_planned_where_addresses_can_be_told() -> None:
    known = [torch.device(name) for name in ("cuda:0", "cuda:1", "cpu")]
    assert other_devices(known) is None
    why = other_devices([*known, torch.device("xla")])
    assert why is not None and "the program uses xla" in why.reason
