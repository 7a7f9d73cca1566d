"""Interatomic potentials as their packages write them, each where it is installed."""

import copy
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lazyinline

NAMES = ("H", "C", "O")
SIZES = (2, 3)  # atoms of each crystal
CUTOFFS = (2.6, 3.0, 2.8)
Crystals = dict[str, Tensor]
Made = tuple[nn.Module, Callable[[Crystals], tuple[Any, ...]]]  # a model, and what it is given


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def crystals(cutoff: float) -> Crystals:
    """Returns two crystals and their edges, across the faces of the cells too."""
    draw = torch.Generator().manual_seed(0)
    cell = 2.4 * torch.eye(3) + 0.2 * torch.randn(2, 3, 3, generator=draw)
    batch = torch.repeat_interleave(torch.tensor(SIZES))
    place = torch.rand(sum(SIZES), 3, generator=draw)
    at = (place[:, None] @ cell[batch]).squeeze(1)
    images = torch.cartesian_prod(*[torch.arange(-1.0, 2)] * 3)
    apart = at[None, :, None] + (images @ cell)[batch][:, None] - at[:, None, None]
    far = apart.norm(dim=-1).masked_fill((batch[:, None] != batch)[..., None], torch.inf)
    *ends, image = ((far < cutoff) & (far > 0)).nonzero(as_tuple=True)
    edges, moved = torch.stack(ends), images[image]
    atoms = {"kinds": torch.arange(sum(SIZES)) % 3, "place": place, "at": at, "batch": batch}
    return {**atoms, "cell": cell, "edges": edges, "moved": moved}


def nequip() -> Made:
    importlib.import_module("nequip.utils.global_state").set_global_state()
    sizes = {"num_layers": 2, "num_features": 4, "radial_mlp_width": 8, "avg_num_neighbors": 9.0}
    settings = {"seed": 0, "model_dtype": "float64", "type_names": NAMES, "r_max": 4.0, **sizes}
    model = importlib.import_module("nequip.model").NequIPGNNModel(**settings)
    keys = {"pos": "at", "atom_types": "kinds", "edge_index": "edges", "batch": "batch"}
    keys |= {"cell": "cell", "edge_cell_shift": "moved"}
    count = {"num_atoms": torch.tensor(SIZES)}
    return model, lambda c: ({key: c[name] for key, name in keys.items()} | count,)


def matgl(kind: str, **options: Any) -> Made:
    made = getattr(importlib.import_module("matgl.models"), kind)(element_types=NAMES, **options)
    graphs = importlib.import_module("torch_geometric.data")

    def given(c: Crystals) -> tuple[Any, ...]:
        parts = []
        for index, count in enumerate(SIZES):
            own, of = c["batch"] == index, c["batch"][c["edges"][0]] == index
            edges = c["edges"][:, of] - sum(SIZES[:index])
            shared = {"edge_index": edges, "pbc_offset": c["moved"][of], "num_nodes": count}
            atoms = {"frac_coords": c["place"][own], "node_type": c["kinds"][own]}
            parts.append(graphs.Data(**shared, **atoms))
        return graphs.Batch.from_data_list(parts), c["cell"]

    return importlib.import_module("matgl.apps.pes").Potential(made).double(), given


def tensornet() -> Made:
    return matgl("TensorNet", is_intensive=False, units=8, num_rbf=4, nblocks=2, use_warp=False)


def chgnet() -> Made:
    widths = {f"dim_{name}_embedding": 4 for name in ("atom", "bond", "angle")}
    hidden = {f"{name}_hidden_dims": (4,) for name in ("atom_conv", "bond_conv", "final")}
    return matgl("CHGNet", num_blocks=1, threebody_cutoff=2.4, **widths, **hidden)


def loss_of(found: Any) -> Tensor:
    keys = ("total_energy", "forces", "stress")
    parts = [found[key] for key in keys] if isinstance(found, dict) else found[:3]
    return torch.stack([part.square().mean() for part in parts]).sum()


def trained(model: nn.Module, run: Callable[..., Any], batches: Any) -> list[Any]:
    """Returns losses, gradients and parameters of steps of Adam."""
    optimizer, told = torch.optim.Adam(model.parameters()), []
    for inputs in batches:
        optimizer.zero_grad()
        found = run(*copy.deepcopy(inputs))
        loss = found if isinstance(found, Tensor) else loss_of(found)
        if loss.requires_grad:  # that of a compiled step has gone backward
            loss.backward()
        optimizer.step()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        told.append(copy.deepcopy((loss.detach(), gradients, dict(model.state_dict()))))
    return told


ROWS = [(nequip, "step"), (tensornet, "step"), (tensornet, "compile"), (chgnet, "compile")]


@pytest.mark.parametrize(("made", "door"), ROWS)
def test_energies_forces_and_stresses_equal_eager(made: Any, door: str) -> None:
    pytest.importorskip("nequip" if made is nequip else "matgl")
    model, given = made()
    eager, batches = copy.deepcopy(model), [given(crystals(cutoff)) for cutoff in CUTOFFS]
    options: dict[str, Any] = {"backend": "eager", "dynamic": True}
    if door == "step":
        run = lazyinline.compile_step(model, loss_fn=loss_of, **options)
    else:
        run = lazyinline.compile(model, **options)
    theirs, ours = trained(eager, eager, batches), trained(model, run, batches)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    told = lazyinline.last_report(run)
    assert told is not None
    if made is chgnet:  # it counts angles
        assert "needs the value of a tensor" in told.ran_eagerly
    else:
        assert (told.num_compiles, told.num_links, told.ran_eagerly) == (1, 2, "")
