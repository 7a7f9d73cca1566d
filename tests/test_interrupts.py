"""An interrupted compile leaves everything as it was, in few lines; so do errors of our own."""

import builtins
import gc
import logging
import pathlib
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import forked
import pytest
import torch
import torch.utils.weak
from models import Block
from torch import Tensor, nn

import lazyinline
from lazyinline.frontend import compiler
from lazyinline.frontend.capture.surroundings import one_at_a_time
from lazyinline.frontend.compiler import PASSES
from lazyinline.frontend.passes.state import Pass
from lazyinline.reuse.errors import CompileInterrupted

MAX_FRAMES = 8


def body() -> nn.Module:
    return nn.Sequential(*(Block(8) for _ in range(2)))


def state() -> list[Any]:
    """What a capture changes in PyTorch, Python and the process for its time."""
    module, tensor = nn.Module, Tensor
    return [
        *(module.__call__, module.__getattribute__, module.__getattr__, module.__setattr__),
        *(tensor.register_hook, tensor.tolist, tensor.data_ptr, tensor.__repr__, tensor.__format__),
        *(torch.autograd.grad, torch.autograd.backward, torch.save, torch.set_default_dtype),
        *(builtins.print, logging.Logger.handle, gc.isenabled(), torch.is_grad_enabled()),
        *(sys.getprofile(), signal.getsignal(signal.SIGINT), torch.get_rng_state().tolist()),
    ]


def assert_ends_here(error: BaseException) -> None:
    assert len(traceback.extract_tb(error.__traceback__)) <= MAX_FRAMES
    shown = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    assert "cause of the following" not in shown and "During handling" not in shown


def all_passes() -> list[str]:
    """The names of the passes that ``compile`` of a training model runs."""
    compiled = lazyinline.compile(body(), backend="eager")
    compiled(torch.randn(2, 8)).sum().backward()
    return [one.name for one in compiled.last_report.passes]


def interrupting(one: Pass, when: str) -> Pass:
    """Returns a pass that is interrupted before it begins or after it has ended."""

    def function(given: Any) -> Any:
        if when == "after":
            one.function(given)
        raise KeyboardInterrupt

    return replace(one, function=function)


@pytest.mark.parametrize("way", ["compile", "step"])
@pytest.mark.sweep(keep="compile")
def test_an_interrupt_in_any_pass_leaves_everything_as_it_was(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = body(), torch.randn(2, 8)
    expected = net(x)
    names = all_passes()
    assert {"capture", "autodiff", "lower", "link"} <= {*names}
    for name, when in [(names[0], "before"), *((name, "after") for name in names)]:
        if way == "step":
            compiled: Any = lazyinline.compile_step(net, loss_fn=torch.sum, backend="eager")
        else:
            compiled = lazyinline.compile(net, backend="eager")
        before = state()
        passes = [interrupting(one, when) if one.name == name else one for one in PASSES]
        monkeypatch.setattr(compiler, "PASSES", passes)
        with pytest.raises(KeyboardInterrupt) as caught:
            compiled(x)
        monkeypatch.setattr(compiler, "PASSES", PASSES)
        assert state() == before, (name, when)
        assert isinstance(caught.value, CompileInterrupted)
        assert_ends_here(caught.value)
        torch.testing.assert_close(compiled(x), expected.sum() if way == "step" else expected)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.sweep(keep="True")
def test_an_interrupt_at_any_call_of_a_capture_leaves_everything_as_it_was(in_place: bool) -> None:
    class Interrupting(Block):
        at = -1

        def forward(self, x: Tensor) -> Tensor:
            Interrupting.at -= 1
            if Interrupting.at == 0:
                raise KeyboardInterrupt
            return super().forward(x)

    x = torch.randn(2, 8)
    for at in (1, 2):
        net = nn.Sequential(Interrupting(8), Block(8), Interrupting(8))
        expected = net(x)
        compiled = lazyinline.compile(net, backend="eager", in_place=in_place)
        before = state()
        Interrupting.at = at
        with pytest.raises(KeyboardInterrupt) as caught:
            compiled(x)
        assert state() == before
        assert_ends_here(caught.value)
        Interrupting.at = -1
        torch.testing.assert_close(compiled(x), expected)


class Finalized:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def interrupted_in_a_finalizer() -> None:
    Finalized()


def interrupted_in_a_callback() -> None:
    table = torch.utils.weak.WeakIdKeyDictionary()
    key, value = torch.zeros(1), Finalized()
    table[key] = value
    del key, value  # the table's callback drops the value


@pytest.mark.parametrize("ends", [interrupted_in_a_finalizer, interrupted_in_a_callback])
def test_an_interrupt_where_python_would_forget_it_comes_at_once_after(
    ends: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", forgotten.append)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    came_late = False
    try:
        with pytest.raises(CompileInterrupted), one_at_a_time():
            ends()
            for _ in range(1000):
                time.sleep(0.01)
            came_late = True
    finally:
        signal.signal(signal.SIGINT, before)
    assert not forgotten and not came_late


SCRIPT = """
import os, signal, sys, threading, time
import torch
from torch import nn
import lazyinline

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)) * 2)

net, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(2, 8)
expected = net(x)
compiled = lazyinline.compile(net, backend=sys.argv[1])
timer = threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGINT))
timer.start()
try:
    compiled(x).sum().backward()
    time.sleep(60)
except KeyboardInterrupt as interrupt:
    print(type(interrupt).__name__)
torch.testing.assert_close(compiled(x), expected)
assert not compiled.last_report.ran_eagerly and not compiled.last_report.eager_kernels
print("works")
"""


@pytest.mark.sweep(keep="inductor-1.0")
@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.5, 1.0, 2.0, 4.0])
def test_a_signal_at_any_time_leaves_a_process_that_compiles(
    backend: str, seconds: float, tmp_path: pathlib.Path
) -> None:
    printed = forked.run(SCRIPT, backend, str(seconds), LAZYINLINE_CACHE_DIR=str(tmp_path))
    assert re.search(r"(?s)Interrupt.*\nworks\n$", printed), printed


class Asks(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() else x


ERRORS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "fallback": lambda m, x: lazyinline.compile(m, backend="eager", fallback="error")(x),
    "in place": lambda m, x: lazyinline.compile(
        m, backend="eager", fallback="error", in_place=True
    )(x),
    "recompute": lambda m, x: lazyinline.compile(m, backend="eager", recompute="full")(x),
    "step": lambda m, x: lazyinline.compile_step(m, loss_fn=torch.sum, backend="eager")(x),
    "capture": lambda m, x: lazyinline.capture(m, (x,)),
    "export": lambda m, x: lazyinline.export_onnx(m, (x,), "unwritten.onnx"),
    "advise": lambda m, x: lazyinline.advise(m, (x,), backend="eager"),
    "pipeline": lambda m, x: lazyinline.pipeline(m, (x,), num_stages=2, micro_batches=2),
}


@pytest.mark.parametrize("way", ERRORS)
@pytest.mark.sweep(keep=["fallback", "step", "export", "pipeline"])
def test_the_traceback_of_an_error_of_ours_ends_at_the_public_function(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = nn.Sequential(Block(8), Asks(8)), torch.randn(4, 8)
    with pytest.raises(lazyinline.LazyInlineError) as caught:
        ERRORS[way](net, x)
    assert_ends_here(caught.value)
    monkeypatch.setenv("LAZYINLINE_DEBUG", "1")
    with pytest.raises(lazyinline.LazyInlineError) as whole:
        ERRORS[way](net, x)
    assert str(whole.value) == str(caught.value)
    shown, all_ = (traceback.extract_tb(e.value.__traceback__) for e in (caught, whole))
    assert len(all_) > len(shown)
