"""What a forward warns of and logs: given as eager gives it, under each filter and level."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lazyinline

ACTIONS = ("default", "always", "module", "once", "ignore")
LOGGER = logging.getLogger("lazyinline_test_warnings")


class Warns(nn.Module):
    def __init__(self, act: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        self.act(x)
        return x * 2 + 1


def warn(x: Tensor) -> None:
    warnings.warn(f"of {x.dim()} dimensions", FutureWarning)  # noqa: B028


def warn_the_caller(x: Tensor) -> None:
    warnings.warn("seen from outside", stacklevel=3)


def warn_a_message(x: Tensor) -> None:
    warnings.warn(UserWarning("a message"))  # noqa: B028


def warn_and_need_a_number(x: Tensor) -> float:
    warnings.warn("before a number")  # noqa: B028
    return float(x.sum())


WARNINGS = (warn, warn_the_caller, warn_a_message, warn_and_need_a_number)


def given(run: Callable[..., Any], action: str, calls: int) -> list[list[tuple[Any, ...]]]:
    """Returns what each call warns of."""
    found = []
    globals().pop("__warningregistry__", None)
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter(action)  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", message=".*runs eagerly")
        for _ in range(calls):
            run(torch.ones(2, 2))
            found.append([(str(w.message), w.category, w.filename, w.lineno) for w in log])
            log.clear()
    return found


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("act", WARNINGS)
def test_a_warning_is_given_as_often_as_eager_gives_it(act: Any, action: str) -> None:
    model = Warns(act)
    compiled = lazyinline.compile(model, backend="eager")
    expected, found = given(model, action, 4), given(compiled, action, 4)
    if act is warn_the_caller:  # who calls the forward is another one
        expected, found = ([[w[:2] for w in call] for call in log] for log in (expected, found))
    assert found == expected


def test_a_warning_that_is_given_once_does_not_keep_a_model_from_being_compiled() -> None:
    compiled = lazyinline.compile(Warns(warn), backend="eager")
    assert [len(call) for call in given(compiled, "default", 2)] == [1, 0]
    assert not compiled.last_report.ran_eagerly


def test_a_warning_that_a_filter_shows_from_now_on_is_given() -> None:
    compiled = lazyinline.compile(Warns(warn), backend="eager")
    assert [len(given(compiled, action, 1)[0]) for action in ("ignore", "always", "default")] == [
        0,
        1,
        1,
    ]


def test_a_warning_that_is_an_error_is_raised() -> None:
    compiled = lazyinline.compile(Warns(warn), backend="eager")
    with pytest.raises(FutureWarning, match="of 2 dimensions"):
        given(compiled, "error", 1)


def test_a_log_is_written_from_the_call_on_where_its_level_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Warns(lambda x: LOGGER.debug("a debug line"))
    compiled = lazyinline.compile(model, backend="eager")
    for level, count in ((logging.WARNING, 0), (logging.DEBUG, 1), (logging.WARNING, 0)):
        LOGGER.setLevel(level)
        for _ in range(2):
            caplog.clear()
            compiled(torch.ones(2, 2))
            assert len([r for r in caplog.records if r.name == LOGGER.name]) == count


def test_a_forward_that_asks_for_a_level_is_told_it_at_each_call() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if LOGGER.isEnabledFor(logging.INFO) else x

    model, x = Asks(), torch.ones(2, 2)
    compiled = lazyinline.compile(model, backend="eager")
    for level in (logging.WARNING, logging.INFO, logging.ERROR):
        LOGGER.setLevel(level)
        assert torch.equal(compiled(x), model(x))
        assert not compiled.last_report.ran_eagerly
