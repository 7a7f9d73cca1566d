"""Memory planning problems as CSV files, in the format of the public collections.

Columns id, lower, upper and size, in any order and beside others: the buffer ``id`` of ``size``
bytes lives in ``[lower, upper)``. MiniMalloc and idealloc use this format.
"""

from __future__ import annotations

import csv
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lazyinline.backend.arena import Buffers, IntArray
from lazyinline.reuse.errors import PlanError

COLUMNS = ("id", "lower", "upper", "size")
LARGEST = 2**62


@dataclass(frozen=True, eq=False)
class Problem:
    """The buffers of a file, and what the file calls them."""

    ids: tuple[str, ...]
    buffers: Buffers


def read_problem_csv(path: str | pathlib.Path) -> Problem:
    """Reads a problem.

    Raises:
        PlanError: the file cannot be read, or what it says makes no sense; the message names the
            line.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = list(_rows(csv.DictReader(file), str(path)))
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise PlanError(f"{path} is not a CSV file: {error}") from error
    table = np.array([numbers for _, numbers in rows], np.int64).reshape(-1, 3)
    buffers = Buffers(table[:, 0], table[:, 1], table[:, 2])
    return Problem(tuple(name for name, _ in rows), buffers)


def _rows(reader: csv.DictReader[str], path: str) -> Iterator[tuple[str, list[int]]]:
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise PlanError(
            f"{path}, line 1: no column {', '.join(missing)}. The first line must name the "
            f"columns {', '.join(COLUMNS)}; it is {','.join(reader.fieldnames or ())!r}."
        )
    lines: dict[str, int] = {}
    for row in reader:
        where = f"{path}, line {reader.line_num}"
        name = row["id"]
        if name in lines:
            raise PlanError(f"{where}: id {name} is taken by line {lines[name]}; ids must differ.")
        lines[name] = reader.line_num
        yield name, _numbers(row, where)


def _numbers(row: Mapping[str, str | None], where: str) -> list[int]:
    numbers = [_number(row[name], name, where) for name in COLUMNS[1:]]
    lower, upper, size = numbers
    if lower >= upper:
        raise PlanError(
            f"{where}: lower {lower} is not below upper {upper}. A buffer lives in [lower, upper): "
            "give at least one time, or leave the buffer out."
        )
    if size < 0:
        raise PlanError(f"{where}: size {size} is negative; give bytes.")
    return numbers


def _number(text: str | None, name: str, where: str) -> int:
    if text is None:
        raise PlanError(f"{where}: too few values: no {name}.")
    try:
        number = int(text)
    except ValueError:
        raise PlanError(f"{where}: {name} is {text!r}; give an integer.") from None
    if abs(number) >= LARGEST:
        raise PlanError(f"{where}: {name} is {number}; give less than 2**62.")
    return number


def write_offsets_csv(path: str | pathlib.Path, problem: Problem, offsets: IntArray) -> None:
    """Writes the problem with a further column, offset, in bytes.

    Raises:
        PlanError: the file cannot be written.
    """
    buffers = problem.buffers
    columns = (buffers.birth, buffers.death, buffers.size, offsets)
    try:
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow((*COLUMNS, "offset"))
            writer.writerows(zip(problem.ids, *(c.tolist() for c in columns), strict=True))
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error.strerror}") from error
