"""Rates of a mesh that are measured once, kept in a file, and found by plans."""

import pathlib

import pytest
import torch
from parallel_models import mesh_of, tiny, tokens
from rank_threads import one_of_many, run_in_threads

import lazyinline
from lazyinline.pipeline_parallel.mesh.layouts import AxisRates
from lazyinline.pipeline_parallel.mesh.planner import axes_of_mesh
from lazyinline.reuse.ir.costs import Rates


def test_rates_are_the_same_on_every_rank_and_in_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "links.json"

    def measured(rank: int) -> dict[str, AxisRates]:
        return lazyinline.measure_links(mesh_of(data=2, tensor=2), path)

    first, *others = run_in_threads(4, measured)
    assert list(first) == ["data", "tensor"]
    assert all(one == first for one in others)
    assert all(one.latency_s > 0 and one.bytes_per_s > 0 for one in first.values())
    axes = axes_of_mesh(("data", "tensor"), (2, 2), "cpu", path)
    rates = {axis.name: (axis.rates.bytes_per_s, axis.rates.latency_s) for axis in axes}
    assert rates == {name: (r.bytes_per_s, r.latency_s) for name, r in first.items()}


@pytest.mark.parametrize(
    ("bytes_per_s", "is_split"), [(1e12, True), (1e3, False)], ids=["fast", "slow"]
)
def test_a_plan_is_found_by_the_rates_of_the_mesh(
    bytes_per_s: float, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazyinline.frontend.mesh_planner, "CPU", Rates(2e6, 8e6))
    links = {"tensor": AxisRates(bytes_per_s, 1e-7)}
    with one_of_many(2):
        parallel = lazyinline.parallelize(
            tiny(1),
            tokens(rows=1),
            mesh=mesh_of(tensor=2),
            plan="auto",
            links=links,
            backend="eager",
        )
    plan = parallel.plan.layouts
    assert plan is not None
    lies = [*plan.parameters.values(), *plan.batch]
    assert any(p.is_shard() for layout in lies for p in layout) is is_split


def test_what_is_no_file_of_rates_is_said(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "links.json"
    for text in ("", "[]", '{"tensor": {"bytes": 1}}'):
        path.write_text(text)
        with pytest.raises(lazyinline.PlanError, match=r"links.json.*is no file of"):
            axes_of_mesh(("tensor",), (2,), "cpu", path)
    with pytest.raises(lazyinline.PlanError, match="has the dimension 'tensor'"):
        axes_of_mesh(("tensor",), (2,), "cpu", {"data": AxisRates(1.0, 1.0)})
    with one_of_many(2), pytest.raises(lazyinline.PlanError, match="links= are for plan='auto'"):
        lazyinline.parallelize(
            tiny(1), (torch.zeros(2, 8, dtype=torch.long),) * 2, mesh=mesh_of(tensor=2), links={}
        )
