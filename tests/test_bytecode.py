"""What is read out of compiled code, which each version of Python lays out in its own way."""

import types

import pytest
import torch
from torch import Tensor, nn

import lazyinline
from lazyinline.reuse.evidence.functions import (
    globals_read,
    globals_used,
    modules_imported,
    texts_of,
)

pytestmark = pytest.mark.smoke


class Settings:
    scale, shift, power = 2.0, 3.0, 1.0


def scaled_by_a_tuple(x: Tensor) -> Tensor:
    for name in ("scale", "shift"):
        x = x * getattr(Settings, name)
    return x


def scaled_by_a_list(x: Tensor) -> Tensor:
    for name in ["scale", "shift", "power"]:
        x = x * getattr(Settings, name)
    return x


def scaled_by_a_set_and_keys(x: Tensor) -> Tensor:
    for name in {"scale": 1, "shift": 2}:
        x = x * getattr(Settings, name) if name in {"scale", "shift", "power"} else x
    return x


@pytest.mark.parametrize("forward", [scaled_by_a_tuple, scaled_by_a_list, scaled_by_a_set_and_keys])
def test_a_name_that_stands_among_others_is_watched(
    forward: types.FunctionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return forward(x)

    model = Model()
    compiled = lazyinline.compile(model, backend="eager")
    x = torch.ones(2)
    assert torch.equal(compiled(x), model(x))
    for name in ("scale", "shift"):
        monkeypatch.setattr(Settings, name, 5.0)
        assert torch.equal(compiled(x), model(x)), name


def test_what_code_names_is_found_wherever_the_compiler_put_it() -> None:
    scope: dict[str, types.FunctionType] = {}
    text = """
def function(x):
    import os.path
    global written
    written = first(x, ("a", ("b",)), {"c": 1, "d": 2})
    class Inner:
        second: third
        fourth = fifth
    return [sixth for _ in x if _ in {"e", "f"}]
"""
    exec(text, scope)
    code = scope["function"].__code__
    assert {"a", "b", "c", "d", "e", "f"} <= {t for c in _codes(code) for t in texts_of(c)}
    read = {name for c in _codes(code) for name in globals_read(c)}
    assert {"first", "fifth", "sixth"} <= read and "written" not in read
    assert "written" in globals_used(code)
    assert modules_imported(code) == ("os.path",)


def _codes(code: types.CodeType) -> list[types.CodeType]:
    inside = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return [code, *(found for c in inside for found in _codes(c))]
