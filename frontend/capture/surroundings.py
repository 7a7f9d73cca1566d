"""Holds off other threads, interrupts, random numbers and garbage collection in a capture."""

from __future__ import annotations

import _thread
import contextlib
import gc
import os
import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils.weak

from ...reuse.errors import CaptureError, CompileInterrupted
from ...reuse.ir.torch_fake_rules import kernels_own_rules
from ..effects.effects import EffectError, OnEffects
from ..tracing.torch_state import plain_autograd

_LOCK = threading.RLock()
_DEFERRED_S = 0.02
_OUR_SEED = 0x1A2C1B0D0F5EED
_IMPORTING = "<frozen importlib"
_OPERATORS_FILE = sys.modules[type(torch.ops).__module__].__file__
_WEAK_FILES = frozenset({weakref.__file__, torch.utils.weak.__file__})
# A fork waits until a compile in another thread is done: otherwise the child would inherit PyTorch
# with a tracer's patches, and a lock that no thread releases.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
    )


def other_threads_waiting() -> AbstractContextManager[object]:
    """Makes threads wait for each other; tracing inside must use ``one_at_a_time`` in addition."""
    return _LOCK


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Makes threads wait for each other: PyTorch's tracers are one per process, not per thread.

    Not for use as a decorator: the frame that it adds would count as the user's.
    """
    try:
        with (
            _LOCK,
            _interrupted_between_changes(),
            plain_autograd(),  # anomaly mode and saved-tensor hooks are for the caller's graph only
            kernels_own_rules(),
            garbage_collection_paused(),
        ):
            yield
    except CompileInterrupted:
        raise
    except KeyboardInterrupt as interrupt:
        raise CompileInterrupted("interrupted while compiling") from interrupt


class _Deferring:
    """Handles SIGINT, but not inside an import, operator, finalizer or context's enter or exit."""

    def __init__(self, handler: Callable[[int, Any], Any]) -> None:
        self._handler = handler
        self.raised: BaseException | None = None

    def __call__(self, number: int, frame: Any) -> None:
        """Calls the user's handler, now or a little later."""
        if _is_changing(frame):
            # Tries again soon, when the import, the operator or the change may be done.
            again = threading.Timer(_DEFERRED_S, _thread.interrupt_main)
            again.daemon = True
            again.start()
            return
        try:
            self._handler(number, frame)
        except BaseException as error:
            self.raised = error
            raise


def _is_changing(frame: Any) -> bool:
    """Whether a frame runs inside an import, operator, finalizer or context's enter or exit."""
    # A PyTorch import that was cut short cannot be repeated in a process, nor half a change undone.
    # Where PyTorch's dispatcher calls Python, an exception may end the process (``noexcept``).
    # Python prints and drops exceptions of finalizers.
    top = frame
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_IMPORTING):
            return True
        if code.co_filename == _OPERATORS_FILE and frame is not top:
            return True
        if code.co_filename in _WEAK_FILES or code.co_name == "__del__":
            return True
        if code.co_filename == contextlib.__file__ and code.co_name in ("__enter__", "__exit__"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def _interrupted_between_changes() -> Iterator[None]:
    """Delays an interrupt until no import, operator or change is half done."""
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(handler) or isinstance(handler, _Deferring):
        yield
        return
    deferring = _Deferring(handler)
    signal.signal(signal.SIGINT, deferring)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if deferring.raised is not None:  # a callback from C swallowed it
        raise deferring.raised


@contextmanager
def no_python_randomness() -> Iterator[None]:
    """Raises CaptureError if the forward draws random numbers that are not PyTorch's."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    array = None if numpy is None else numpy.random.get_state()
    drawn = ""
    try:
        yield
    finally:
        # Restored even if the capture failed, because an eager run will draw the numbers again.
        if random.getstate() != python:
            drawn = "Python's random"
            random.setstate(python)
        if numpy is not None and array is not None:
            now = numpy.random.get_state()
            if now[2:] != array[2:] or now[1].tobytes() != array[1].tobytes():
                drawn = "numpy.random"
                numpy.random.set_state(array)
    if drawn:
        raise CaptureError(
            f"The model's forward (or another thread meanwhile) draws from {drawn}, and a "
            "compiled program would use the same numbers at every call. Draw them with torch "
            "(torch.rand), or outside the model."
        )


@contextmanager
def generator_kept(effects: OnEffects) -> Iterator[None]:
    """Restores PyTorch's default generator; raises EffectError if the forward seeded it.

    Tracing itself may draw from it, in an operator whose operands are all real tensors.
    """
    generator = torch.default_generator
    state = generator.get_state()
    # Calls from C (``map(generator.manual_seed, ...)``) are not seen, and seeding may restore the
    # same state. So the generator gets a seed of ours meanwhile, which nobody else would set.
    generator.manual_seed(_OUR_SEED)
    try:
        yield
        seeded = generator.initial_seed() != _OUR_SEED
    finally:
        generator.set_state(state)
    if seeded and effects == "refuse":
        raise EffectError(
            "The model's forward (or another thread meanwhile) sets the state of PyTorch's random "
            "generator."
        )


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pauses garbage collection: a capture makes many long-lived objects, so scans free little."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            # Moves the new objects to the oldest generation, so the next collections skip them.
            if not gc.get_freeze_count():  # else this would unfreeze the user's objects
                gc.freeze()
                gc.unfreeze()
            gc.enable()
