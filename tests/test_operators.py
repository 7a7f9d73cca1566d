"""Operators on operands in every layout; ``benchmarks/operators.py`` has all operators."""

import importlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

BENCHMARKS = pathlib.Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def operators() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("operators")


@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.sweep(keep="real")
def test_operators_in_all_layouts_in_turn(kind: str, operators: Any) -> None:
    chosen = {name: operators.ANY[name] for name in operators.CORE}
    chosen |= operators.COMPLEX if kind == "complex" else {}
    layouts = list(operators.layouts_of(kind).values())
    assert not operators.wrong_operators(chosen, layouts, kind, "eager")


@pytest.mark.sweep
def test_generated_kernels_on_conjugates(operators: Any) -> None:
    chosen = {name: operators.ANY[name] for name in operators.CORE[:10]} | operators.COMPLEX
    layouts = [operators.LAYOUTS["conjugate"]]
    assert not operators.wrong_operators(chosen, layouts, "complex", "inductor")


def test_generated_kernels_put_elements_into_a_copy_of_what_is_expanded(operators: Any) -> None:
    chosen = {name: operators.ANY[name] for name in ("index_put", "index_add")}
    layouts = [operators.LAYOUTS["expanded"]]
    assert not operators.wrong_operators(chosen, layouts, "real", "inductor")


def test_generated_kernels_read_a_complex_tensor_after_a_part_of_it_is_written(
    operators: Any,
) -> None:
    def written(view: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def operator(x: Tensor, y: Tensor) -> Tensor:
            z = (x * y).contiguous()
            view(z).copy_(y[0, :3])
            return x @ z

        return operator

    chosen = {
        "diagonal": written(lambda z: z.diagonal(1, -1, 0)),
        "column": written(lambda z: z.select(-1, -2)[1:]),
        "row": written(lambda z: z[1, :3]),
        "strides": written(lambda z: z.as_strided((3,), (5,), 1)),
        "qr": operators.operators_of("complex")["qr"],
    }
    layouts = [operators.LAYOUTS["plain"]]
    assert not operators.wrong_operators(chosen, layouts, "complex", "inductor")


def test_generated_kernels_of_several_threads_add_where_they_are_told_to(operators: Any) -> None:
    names = (
        "index",
        "index_select",
        "contiguous",
        "in place",
        "in place through a view",
        "copy_",
    )
    chosen, layouts = {n: operators.ANY[n] for n in names}, [operators.LAYOUTS["unaligned"]]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert not operators.wrong_operators(chosen, layouts, "real", "inductor")
    finally:
        torch.set_num_threads(num_threads)
