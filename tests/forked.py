"""Starts Python processes as forks of one that has imported PyTorch.

A process that imports PyTorch, Inductor and the package takes 6 CPU-seconds before it does
anything; a fork of one that has imported them takes none. Where a test is about a new interpreter
(what it imports, variables that are read at its start), it starts one by ``subprocess`` instead.
"""

import contextlib
import multiprocessing
import os
import pathlib
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

HERE = str(pathlib.Path(__file__).parent)
IMPORTED = (
    *("lazyinline", "lazyinline.pipeline_parallel.mesh.planner", "torch._inductor.compile_fx"),
    *("torch.distributed.tensor", "torch.distributed.checkpoint", "pytest"),
    "torch.utils.cpp_extension",  # which Inductor imports for a first kernel
)
METHOD = "forkserver" if sys.platform == "linux" else "spawn"  # elsewhere, forks may hang in BLAS


class Forked:
    """A process that runs ``code`` with these arguments, as ``python -c`` does.

    Args:
        code: what it runs.
        arguments: what it finds in ``sys.argv``.
        environment: replaces all variables; today's by default. Those that a library reads when it
            is imported are the ones of the first fork.
    """

    def __init__(
        self, code: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        file, name = tempfile.mkstemp()
        os.close(file)
        self._output = pathlib.Path(name)
        work = (code, arguments, dict(os.environ if environment is None else environment), name)
        context: Any = multiprocessing.get_context(METHOD)
        self._process = context.Process(target=_run, args=work, daemon=True)
        with _found_by_the_server():
            self._process.start()

    @property
    def returncode(self) -> int | None:
        """The exit status, or minus the signal that ended it; None before the end."""
        code: int | None = self._process.exitcode
        return code

    def wait(self, limit_s: float | None = None) -> str:
        """Waits for the end; returns what was printed to both outputs.

        Raises:
            TimeoutError: it has not ended after ``limit_s`` seconds.
        """
        self._process.join(limit_s)
        if self.returncode is None:
            raise TimeoutError(f"a process of a test did not end within {limit_s} s")
        return self._output.read_text(encoding="utf-8")

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Ends the process, if it has not ended, and removes its file of outputs."""
        self._process.kill()
        self._process.join()
        self._output.unlink(missing_ok=True)


def run(code: str, *arguments: str, limit_s: float = 300, **environment: str) -> str:
    """Runs ``code`` in a fork and returns what it printed; fails unless it ends well.

    Args:
        limit_s: how long it may take, in seconds.
        environment: variables to set.
    """
    process = Forked(code, *arguments, environment={**os.environ, **environment})
    try:
        output = process.wait(limit_s)
        assert process.returncode == 0, f"ended with {process.returncode}:\n{output[-6000:]}"
        return output
    finally:
        process.kill()


@contextlib.contextmanager
def _found_by_the_server() -> Iterator[None]:
    """Has the server, which the first process starts, find the modules of tests and import them."""
    multiprocessing.set_forkserver_preload(list(IMPORTED))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _run(code: str, arguments: tuple[str, ...], environment: dict[str, str], output: str) -> None:
    with open(output, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
