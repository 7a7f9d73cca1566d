"""Side effects of a forward, which a compiled program would not have at each call.

Found by evidence after the run: what is changed outside the model or in its arguments, a tensor of
the trace among that, and what it prints or logs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch

from ...reuse import torch_pytree
from ...reuse.errors import CaptureError, VerifyError
from ...reuse.evidence.reads import Reads
from ...reuse.ir.types import TensorType
from ..tracing.frames import user_line
from .changes import OuterChanges, find_fake

OnEffects = Literal["refuse", "undo"]
"""Refuses a forward with side effects, or undoes them and goes on."""

_MAX_STATES = 8


class EffectError(CaptureError):
    """The forward does something at each call that a program could not do; run it eagerly."""


class Effects:
    """Watches one run for what it does outside.

    Args:
        changes: what the run could change.
        policy: ``"refuse"`` says so afterwards; ``"undo"`` puts everything back and goes on, for
            who only looks at the program or writes it to a file.

    Attributes:
        policy: as given.
        output: what was printed or logged, held back: the line, and what brings it out.
    """

    def __init__(self, changes: OuterChanges, policy: OnEffects) -> None:
        self.changes = changes
        self.output: dict[str, Callable[[], None]] = {}
        self.policy = policy
        self._error: EffectError | None = None
        self._kept: torch.Tensor | None = None

    def hold_back(self, emit: Callable[[], None], where: str) -> None:
        """Takes what would be printed or logged at a line."""
        # A line in a loop prints several times, and each counts.
        number = sum(key.startswith(where) for key in self.output)
        self.output[f"{where} ({number})" if number else where] = emit

    def emit(self, known: Sequence[str] = ()) -> None:
        """Brings out what was held back, but for some lines."""
        for where, emit in self.output.items():
            if where not in known:
                emit()

    def asks_for_text(self, tensor: torch.Tensor) -> None:
        """Refuses to write out a tensor: there are no numbers yet."""
        why = " (print, an f-string, a log), whose numbers are others at every call"
        self.refuse(f"writes out a {TensorType.of(tensor)} tensor", why)

    def refuse(self, doing: str, why: str = "") -> None:
        """Refuses what acts outside, or sets a state that a program would neither set nor obey."""
        self.note(doing, why)
        if self._error is not None:
            raise self._error

    def refuse_captured(self, name: str, where: str) -> None:
        """Refuses a function that sets a captured variable, whatever the policy: none is undone."""
        self._error = EffectError(
            f"The model's forward may set the captured variable {name} (nonlocal) at {where}, and "
            "a compiled program would not at each call. Keep it in an attribute of an object."
        )
        raise self._error

    def note(self, doing: str, why: str = "") -> None:
        """Refuses at the end of the run: what is being done now must be finished."""
        if self.policy == "refuse":
            self._error = EffectError(f"The model's forward {doing} at {user_line()}{why}.")

    def leaves_set(self, setting: str) -> None:
        """Refuses a forward after which one of PyTorch's settings is another one."""
        if self.policy == "refuse":
            raise EffectError(
                f"The model's forward leaves a setting of PyTorch's changed ({setting}), and a "
                "compiled program would leave it as it is."
            )

    def check_arguments(self, before: Any, arguments: Any) -> None:
        """Refuses a forward that changes a list or a dictionary that it is given."""
        leaves, spec = before
        now, now_spec = torch_pytree.flatten_outer(arguments)
        same = now_spec == spec and all(a is b for a, b in zip(now, leaves, strict=False))
        if not same and self.policy == "refuse":
            self._error = self._error or EffectError(
                "The model's forward changes a list, dictionary or object among its arguments, "
                "which a compiled program would leave as it is."
            )

    def check_result(self, arguments: Any, result: Any, is_held: Callable[[Any], bool]) -> None:
        """Refuses a result with a list that is the caller's or the model's: a run makes a copy.

        Args:
            arguments: those of the call.
            result: what the forward returns.
            is_held: whether the model or a module holds an object.
        """
        given = set(map(id, torch_pytree.changeable_parts(arguments)))
        for part in torch_pytree.changeable_parts(result):
            if self.policy == "refuse" and (id(part) in given or is_held(part)):
                raise EffectError(
                    f"The model's forward returns a {type(part).__name__} that it was given, that "
                    "the model holds, or twice: a compiled program would return a copy."
                )
            given.add(id(part))

    def check_containers(self, given: bool, held: Iterable[Any], results: Sequence[Any]) -> None:
        """Refuses what no run could bring up to date.

        Args:
            given: whether the call was given containers, for which the run had stand-ins.
            held: what the forward read of the model's attributes.
            results: what it returns, and what it left in the containers.
        """
        formless = torch_pytree.formless(results)
        kept = torch_pytree.formless(torch_pytree.flatten_outer(list(held))[0]) if given else ""
        if formless:
            text = f"returns or fills a {formless} whose state is more than tensors and numbers"
        elif kept:
            text = f"is given a cache, and reads a {kept} of its own that may be the same one"
        else:
            return
        raise EffectError(f"The model's forward {text}.")

    def find(self, reads: Reads) -> None:
        """Looks at what a finished run has left outside."""
        reads.closures.release()
        new = self.changes.find(reads)
        cached = self.changes.empty_caches()
        self._kept = cached if cached is not None else find_fake(new)

    def refusal(self) -> EffectError | None:
        """Returns why the next run would do again what this one did, if that is sure."""
        if self._kept is not None and self.policy == "refuse":
            line = f"; {self.changes.hooked} has a forward hook" if self.changes.hooked else ""
            return EffectError(
                f"The model's forward keeps a tensor ({TensorType.of(self._kept)}) outside of it, "
                f"at each call anew{line}."
            )
        return self._error

    def unsettled(self) -> str:
        """Says what the run did that the next may not do again, or returns an empty text."""
        if self.policy == "undo":
            return ""
        what = self.changes.what
        if what:
            return (
                f"The model's forward changes {what}, and a compiled program could not keep doing "
                "that at every call."
            )
        if self.output:
            return f"The model's forward prints or logs something at {next(iter(self.output))}."
        return ""


def refuse_traced(result: Any) -> None:
    """Raises VerifyError for a result in which a capture has left a tensor without numbers."""
    fake = find_fake([result])
    if fake is not None:
        raise VerifyError(
            f"A {TensorType.of(fake)} tensor of a capture was left where the model found it, and "
            "its result has no numbers. This is a bug of lazyinline: please report the model's "
            "Python that keeps tensors, and run it without lazyinline."
        )


class EffectsSeen:
    """Remembers the states of a model in which its forward has effects, so that it runs eagerly."""

    def __init__(self) -> None:
        self._seen: dict[Any, tuple[str, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._seen)

    def note(self, state: Any, reason: str) -> str:
        """Remembers why the model runs eagerly in a state; returns it."""
        count = self._seen.pop(state, ("", 1))[1]
        self._seen = {**dict([*self._seen.items()][-_MAX_STATES:]), state: (reason, count)}
        return reason

    def why_eager(self, state: Any) -> str:
        """Counts a call; returns why the model runs eagerly, or "" to find that out anew."""
        reason, count = self._seen.get(state, ("", 0))
        if not reason:
            return ""
        self._seen[state] = (reason, count + 1)
        # Tried again at the 2nd, 4th, 8th ... call: what a model keeps once only, such as a cache
        # that its first call fills, is no effect at the next.
        return reason if (count + 1).bit_count() > 1 else ""
