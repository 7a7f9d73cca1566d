"""What each Hugging Face family reduces to: capture, derivative and decomposition; nothing runs.

    python benchmarks/primitives.py                   # the table; exit 1 where one does not reduce
    python benchmarks/primitives.py --only Llama T5   # some rows

A training step of each family (``zoo.py``) is captured, and its forward and backward are taken
apart into ``lazyinline.primitives()``. A row says with how many different operators the forward is
captured, to how many primitives forward and backward reduce, and what does not reduce. A family of
which only parts can be captured is shown as its parts.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn
from zoo import Family, add_families, chosen_families, scalar

import lazyinline
from lazyinline import CaptureError
from lazyinline.frontend.inspection import reduced
from lazyinline.reuse.ir.verify import NotPrimitive, not_primitive, operators_of

COLUMNS = ("family", "operators captured", "primitives", "nodes held", "not primitive")


@dataclass(frozen=True)
class Reduction:
    """What a family, or a part of it, reduces to.

    Attributes:
        captured: names of the operators of the forward as captured.
        reduced: how often each operator is held by forward and backward, reduced.
        whole: what no rule takes apart.
        num_parts: how many modules were captured; 0 where the model was, as one.
    """

    captured: frozenset[str]
    reduced: Counter[str]
    whole: tuple[NotPrimitive, ...] = ()
    num_parts: int = 0


def reduction_of(family: Family) -> Reduction:
    """Reduces a family's training step."""
    model, inputs = family.build()
    model.train()
    try:
        return reduction(model, (), inputs)
    except CaptureError:
        found = [reduction(*part) for part in parts(model, inputs)]
    totals: Counter[str] = sum((one.reduced for one in found), Counter())
    captured = frozenset(itertools.chain.from_iterable(one.captured for one in found))
    whole = tuple(itertools.chain.from_iterable(one.whole for one in found))
    return Reduction(captured, totals, whole, len(found))


def reduction(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reduction:
    """Reduces a training step of a module."""
    captured = lazyinline.capture(model, args, kwargs, train=True)
    programs = reduced(model, args, kwargs, train=True).values()
    totals: Counter[str] = sum(map(operators_of, programs), Counter())
    whole = itertools.chain.from_iterable(map(not_primitive, programs))
    return Reduction(frozenset(operators_of(captured)), totals, tuple(whole))


Call = tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]


def parts(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[Call]:
    """Yields the modules that ``compile`` captures of a model that runs eagerly, with inputs."""
    transformers.set_seed(1)  # some skip layers at random
    compiled = lazyinline.compile(model, backend="eager")
    scalar(compiled(**inputs)).backward()
    paths = [part.path for part in compiled.last_report.parts if part.num_programs]
    calls: dict[str, Call] = {}

    def note(
        path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        calls.setdefault(path, (module, args, kwargs))

    for path in paths:
        model.get_submodule(path).register_forward_pre_hook(
            lambda module, args, kwargs, path=path: note(path, module, args, kwargs),
            with_kwargs=True,
        )
    model.eval()(**inputs)  # which calls every layer; in training some are skipped at random
    model.train()
    for path in paths:
        model.get_submodule(path)._forward_pre_hooks.clear()
    yield from calls.values()


def row(family: Family, found: Reduction) -> str:
    """Returns one line of the table."""
    parts = f" ({found.num_parts} modules of it)" if found.num_parts else ""
    whole = ", ".join(dict.fromkeys(f"`{one.operator}`" for one in found.whole)) or "-"
    numbers = (len(found.captured), len(found.reduced), sum(found.reduced.values()))
    return f"| {family.name}{parts} | {' | '.join(map(str, numbers))} | {whole} |\n"


def table(rows: Mapping[str, str]) -> str:
    """Returns the table of some rows."""
    return f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n{''.join(rows.values())}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_families(parser)
    options = parser.parse_args()
    families = chosen_families(parser, options)
    rows: dict[str, str] = {}
    used: set[str] = set()
    failed = []
    print(table({}), end="")
    for family in families:
        name = family.name
        try:
            found = reduction_of(family)
        except Exception as error:  # a defect of ours: shown, and the other rows go on
            failed.append(name)
            print(
                f"| {name} | {type(error).__name__}: {str(error).splitlines()[0]} | | | |",
                flush=True,
            )
            continue
        if found.whole:
            failed.append(name)
        used |= found.reduced.keys()
        rows[name] = row(family, found)
        print(rows[name], end="", flush=True)
        for one in found.whole:
            print(f"  {one}")
    own = {one.name for one in lazyinline.primitives()}
    print(f"\n{len(rows)} families reduce to {len(used & own)} of {len(own)} primitives:")
    print(" ".join(sorted(used & own)))
    if failed:
        print(f"do not reduce: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
