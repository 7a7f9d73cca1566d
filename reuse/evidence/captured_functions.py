"""The functions that ran, where they have captured variables.

A running frame shows only its code object, which several functions may share, each with variables
of its own. After it returns, ``gc.get_referents(frame)`` shows the function (Python 3.11 and
later), so frames are held until then. On 3.10 functions are searched for by their code. A function
that is gone when the run ends, such as a comprehension, does not matter: nobody can call it again.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Iterable

from ..errors import CaptureError

_MAX_FRAMES = 64


class Closures:
    """Finds the functions that frames ran, without keeping the frames."""

    def __init__(self) -> None:
        self._frames: list[types.FrameType] = []
        self._codes: dict[int, types.CodeType] = {}
        self._found: dict[int, weakref.ref[types.FunctionType]] = {}

    def ran(self, frame: types.FrameType) -> None:
        """Notes a frame that has just begun."""
        self._frames.append(frame)
        if len(self._frames) > _MAX_FRAMES:
            self.let_go()
        if len(self._frames) > _MAX_FRAMES:  # they tell nothing, so their code has to do
            self._codes.update(_codes_of(self._frames))
            self._frames = []

    def functions(self) -> list[types.FunctionType]:
        """Returns the functions of all frames that were noted, if they are still there.

        Raises:
            CaptureError: if one cannot be found, because ``gc.freeze`` hid it.
        """
        self.let_go()
        wanted = {**self._codes, **_codes_of(self._frames)}
        if wanted:
            self._find_by_code(wanted)
        return [function for found in self._found.values() if (function := found()) is not None]

    def absorb(self, later: Closures) -> None:
        """Takes over what ran since the last frame noted here."""
        later.let_go()
        self._frames += later._frames
        self._codes.update(later._codes)
        self._found.update(later._found)
        self.let_go()

    def let_go(self) -> None:
        """Lets go of the frames that have ended, which hold all that was in their variables."""
        running = []
        for frame in self._frames:
            function = _function_of(frame)
            if function is None:
                running.append(frame)
            else:
                self._found[id(function)] = weakref.ref(function)
        self._frames = running

    def _find_by_code(self, wanted: dict[int, types.CodeType]) -> None:
        """Takes all functions of the code of frames that do not tell: running ones, generators."""
        for function in gc.get_referrers(*wanted.values()):
            if isinstance(function, types.FunctionType) and id(function.__code__) in wanted:
                self._found[id(function)] = weakref.ref(function)
        alive = [function for found in self._found.values() if (function := found()) is not None]
        known = {id(function.__code__) for function in alive}
        lost = [code for number, code in wanted.items() if number not in known]
        if lost and gc.get_freeze_count():
            raise CaptureError(
                f"The captured variables of {lost[0].co_name} ({lost[0].co_filename}:"
                f"{lost[0].co_firstlineno}) cannot be watched: gc.freeze() hides the function. "
                "Call gc.unfreeze() before the model is compiled."
            )


def _codes_of(frames: Iterable[types.FrameType]) -> dict[int, types.CodeType]:
    return {id(frame.f_code): frame.f_code for frame in frames}


def _function_of(frame: types.FrameType) -> types.FunctionType | None:
    """Returns what an ended frame ran; what else it refers to may be any function."""
    for found in gc.get_referents(frame):
        if isinstance(found, types.FunctionType) and found.__code__ is frame.f_code:
            return found
    return None
