"""Models too large to hold are compiled whole, from their layouts alone."""

import torch
from torch import nn

from lazyinline.frontend.compiler import Compiler, Options
from lazyinline.frontend.large_models import compile_large


def test_kernels_are_built_and_planned_for_a_model_without_data() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)), torch.empty(4, 64)
    _, report = Compiler(Options()).compile(model, (x,), {}, train=False)
    assert (report.num_kernels, report.unplanned) == (1, "")
    assert report.num_launches == 3
    assert report.peak_bytes is not None and report.peak_bytes >= 4 * 64 * 4


def test_13_billion_parameters_are_planned_without_data() -> None:
    report = compile_large("llama-13b", backend="eager", layers=4, order="one_by_one")
    weights_bytes = 4 * report.num_parameters
    assert report.num_parameters > 1.5e9
    assert report.peak_bytes > weights_bytes  # one gradient for each weight is in the arena
    assert report.peak_bytes <= 1.01 * report.lower_bound_bytes
    assert "parameters, training step of 16 micro-batches, one_by_one" in str(report)


def test_nodes_held_grow_by_two_calls_and_the_sums_of_a_layer() -> None:
    shallow = compile_large("llama-13b", backend="eager", layers=2)
    deeper = compile_large("llama-13b", backend="eager", layers=6)
    weights_per_layer = 7
    growth = (deeper.num_nodes - shallow.num_nodes) / 4
    assert growth <= 2 + weights_per_layer
    assert deeper.num_launches > 2.5 * shallow.num_launches
