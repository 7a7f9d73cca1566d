"""Models too large to hold are compiled whole, from their layouts alone."""

from lazyinline.frontend.large_models import compile_large


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
