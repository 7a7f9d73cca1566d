"""Operators on operands in every layout; ``benchmarks/operators.py`` has all operators."""

import importlib
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def operators() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("operators")


@pytest.mark.parametrize("kind", ["real", "complex"])
def test_operators_in_all_layouts_in_turn(kind: str, operators: Any) -> None:
    chosen = {name: operators.ANY[name] for name in operators.CORE}
    chosen |= operators.COMPLEX if kind == "complex" else {}
    layouts = list(operators.layouts_of(kind).values())
    assert not operators.wrong_operators(chosen, layouts, kind, "eager")


def test_generated_kernels_on_conjugates(operators: Any) -> None:
    chosen = {name: operators.ANY[name] for name in operators.CORE[:10]} | operators.COMPLEX
    layouts = [operators.LAYOUTS["conjugate"]]
    assert not operators.wrong_operators(chosen, layouts, "complex", "inductor")


def test_generated_kernels_put_elements_into_a_copy_of_what_is_expanded(operators: Any) -> None:
    chosen = {name: operators.ANY[name] for name in ("index_put", "index_add")}
    layouts = [operators.LAYOUTS["expanded"]]
    assert not operators.wrong_operators(chosen, layouts, "real", "inductor")
