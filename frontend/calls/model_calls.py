"""What runs the calls of a whole model: where it runs itself, its parts are compiled."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..options import Options
from ..report import CompileReport
from .calls import Calls
from .parts import Parts, alone


class ModelCalls(Calls):
    """Takes a model's calls; where no program can stand for one, its parts are compiled."""

    def __init__(self, model: nn.Module, options: Options, dynamic: bool | None = None) -> None:
        super().__init__(model, options, dynamic)
        self._parts: Parts | None = None

    def _run_itself(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.options.fallback == "error":
            return super()._run_itself(reason, args, kwargs)
        if self._parts is None:
            self._parts = Parts(self.model, self.options, self.dynamic, self._compiler)
        with self._parts.routed(), alone(self._parts.thread, reason):
            return super()._run_itself(reason, args, kwargs)

    @property
    def last_report(self) -> CompileReport | None:
        """What the newest compile did, with what became of the parts by now."""
        if self._report is not None and self._report.ran_eagerly and self._parts is not None:
            self._report.parts = self._parts.records()
        return self._report
