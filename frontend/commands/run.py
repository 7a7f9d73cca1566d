"""Which function runs which command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from .cache import run_cache
from .compiling import run_advise, run_bench, run_export, run_inspect, run_report
from .plan_memory import run_plan_memory

COMMANDS: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "advise": run_advise,
    "bench": run_bench,
    "cache": run_cache,
    "export": run_export,
    "inspect": run_inspect,
    "plan-memory": run_plan_memory,
    "report": run_report,
}
