"""Writes docs/integrations.md: what people train with, whether it works, and whether it is eager's.

Each row is a test of ``tests/integrations`` or of the backend of ``torch.compile``: it works and is
equal where its test passed. Seconds are of the whole test, eager's run and the compiles included.

    python benchmarks/integrations_table.py
"""

import ast
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "integrations.md"
TESTS = (ROOT / "tests" / "integrations", ROOT / "tests" / "test_dynamo_backend.py")
HEAD = """# What people train with

Written by `benchmarks/integrations_table.py`: a row for each test (`make integrations` installs
what they need and runs them; the backend's are in `make test`). It compares with eager, by the
tolerance that the test states. Seconds are of the whole test: eager's run, the compiles and ours.

accelerate's list of backends is fixed, so `Accelerator(dynamo_backend="lazyinline")` and Trainer's
`torch_compile_backend="lazyinline"` are a ValueError of accelerate's. The one line that works is
`model.compile(backend="lazyinline")` before `prepare` or `Trainer`.

| integration | what | works and equal to eager | seconds |
|---|---|---|---|
"""


class Outcomes:
    """Collects what became of each test."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str, float]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            path, _, name = report.nodeid.partition("::")
            verdict = {"passed": "yes", "failed": "**no**"}.get(report.outcome, report.outcome)
            self.rows.append((title(ROOT / path), readable(name), verdict, report.duration))


def title(path: pathlib.Path) -> str:
    """Returns what a test file is about: the first words of its docstring."""
    text = ast.get_docstring(ast.parse(path.read_text())) or path.stem
    return text.partition("\n")[0].rstrip(".")


def readable(name: str) -> str:
    """Returns a test's name as a sentence, its parameters behind."""
    words, _, parameters = name.removeprefix("test_").partition("[")
    behind = f" ({parameters.rstrip(']')})" if parameters else ""
    return words.replace("_", " ") + behind


def lines(rows: list[tuple[str, str, str, float]]) -> Iterator[str]:
    for integration, what, verdict, seconds in rows:
        yield f"| {integration} | {what} | {verdict} | {seconds:.1f} |"


def main() -> None:
    outcomes = Outcomes()
    pytest.main(["-q", *map(str, TESTS)], plugins=[outcomes])
    PAGE.write_text(HEAD + "\n".join(lines(outcomes.rows)) + "\n")


if __name__ == "__main__":
    main()
