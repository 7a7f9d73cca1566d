"""The example of the Trainer runs as it says."""

import pathlib
import subprocess
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "trainer_without_marks.py"


def test_the_example_logs_the_losses_of_eager() -> None:
    command = [sys.executable, str(EXAMPLE), "--layers=2", "--steps=4", "--backend=eager"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith("#")]
    assert len(rows) == 4
    for _, eager, compiled, _ in rows:
        assert float(compiled) == pytest.approx(float(eager), abs=1e-3)
