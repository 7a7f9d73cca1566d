"""The page of one compile: a verdict, figures beside what they are compared with, and sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from ..compile_record import CompileRecord, GpuRecord, part_lines
from .arena import arena_section
from .sections import (
    compile_rows,
    passes_section,
    predicted_section,
    program_section,
    recompute_section,
    reuse_section,
)
from .texts import bytes_text, count_text, flops_text, seconds_text, times_less
from .write import PageData, about

Tile: TypeAlias = dict[str, str]


def compile_page(record: CompileRecord, title: str = "") -> PageData:
    """Returns the data of a compile's page.

    Args:
        record: what the compile did.
        title: what was compiled.
    """
    kind = "training" if record.train else "inference"
    return {
        "title": title or record.model or "Compiled model",
        "subtitle": f"{kind}, backend {record.backend}, reuse {record.reuse}",
        "verdict": {
            "sentence": _sentence(record),
            "tiles": [*_tiles(record)],
            "notes": notes(record),
        },
        **compile_sections(record, {"compile": record}),
    }


def compile_sections(record: CompileRecord, sides: Mapping[str, CompileRecord]) -> PageData:
    """Returns the sections that a compile is shown in.

    Args:
        record: the compile whose program is drawn.
        sides: the compiles whose time is shown side by side.
    """
    made = record.made
    memory = made.memory if made is not None else None
    return {
        "program": program_section(made) if made is not None else None,
        "reuse": reuse_section(record.decisions, record.nothing_shared),
        "passes": passes_section(sides),
        "arena": arena_section(memory) if memory is not None else None,
        "recompute": recompute_section(record.recompute, made.frontiers() if made else ()),
        "predicted": predicted_section(compile_rows(record)),
        "about": about(),
    }


def notes(record: CompileRecord) -> list[str]:
    """Returns what a reader should know, in sentences."""
    found = []
    if record.ran_eagerly:
        found.append(f"The model ran eagerly: {record.ran_eagerly}")
        found += part_lines(part for part in record.parts if not part.is_small)
    if record.unplanned:
        found.append(f"Memory is not planned: {record.unplanned}.")
    found += [f"{note[0].upper()}{note[1:]}." for note in record.notes()]
    if record.cache.directory:
        found.append(" ".join(str(record.cache).split()))
    return found


def node_tile(record: CompileRecord) -> Tile:
    """Returns how many graph nodes are held."""
    held, inlined = record.num_nodes, record.num_nodes_if_inlined
    note = f"{held:,} of {inlined:,} if inlined"
    return tile("Graph nodes held", times_less(held, inlined), note, good=held < inlined)


def arena_tile(record: CompileRecord) -> Tile | None:
    """Returns how large the arena is, and how near to what no plan can go below."""
    if record.peak_bytes is None or not record.lower_bound_bytes:
        return None
    over = record.peak_bytes / record.lower_bound_bytes - 1
    size = bytes_text(record.peak_bytes)
    return tile("Planned memory", size, f"lower bound +{over:.1%}", good=over <= 0.01)


def gpu_tiles(gpu: GpuRecord | None, what: str = "") -> Iterator[Tile]:
    """Yields what a program for a GPU that is not here will hold and take; nothing without one.

    Args:
        gpu: what is known of the program.
        what: distinguishes it where there are several.
    """
    if gpu is None:
        return
    where = gpu.target.name + (f", {what}" if what else "")
    fits = "fits in" if gpu.fits else "more than"
    predicted = gpu.prediction
    yield tile(
        f"Memory on {where}",
        bytes_text(gpu.peak_bytes),
        f"{fits} {bytes_text(gpu.target.memory_bytes)}: parameters and inputs "
        f"{bytes_text(gpu.given_bytes)}, arena {bytes_text(gpu.arena_bytes)}, "
        f"outside {bytes_text(gpu.outside_bytes + gpu.workspace_bytes)}",
        good=gpu.fits,
        otherwise="warn",
    )
    yield tile(
        f"Step on {where}",
        f"\u2265 {seconds_text(predicted.cost.seconds)}",
        f"predicted by the roofline, not measured: {flops_text(predicted.cost.flops)} "
        f"in products, {bytes_text(predicted.cost.moved_bytes)} moved",
    )
    yield tile(
        f"Kernels for {where}",
        f"{gpu.num_built} as machine code",
        f"of {gpu.num_kernels}; {predicted.num_triton:,} of {predicted.num_launches:,} launches",
        good=gpu.num_built == gpu.num_kernels,
        otherwise="warn",
    )


def tile(
    label: str, value: str, note: str, *, good: bool = False, otherwise: str = "plain"
) -> Tile:
    """Returns a figure as the head of a page shows it.

    Args:
        label: what it is.
        value: the figure.
        note: what it is compared with.
        good: whether it is as one wishes.
        otherwise: its state if not: ``"plain"`` or ``"warn"``.
    """
    return {"label": label, "value": value, "note": note, "state": "good" if good else otherwise}


def _sentence(record: CompileRecord) -> str:
    if record.ran_eagerly:
        return "This model is not compiled as a whole: it runs its own Python."
    if record.nothing_shared:
        return record.nothing_shared
    shared = record.num_shared_calls
    if not shared:
        return f"No block is shared; compiled in {record.cpu_s:.1f} CPU s."
    return (
        f"{count_text(record.num_block_calls, 'block call')} needed "
        f"{count_text(record.num_block_calls - shared, 'trace')}: the compiler worked on "
        f"{record.num_nodes:,} graph nodes in place of {record.num_nodes_if_inlined:,}, for "
        f"{record.cpu_s:.1f} CPU s."
    )


def _tiles(record: CompileRecord) -> Iterator[Tile]:
    if record.ran_eagerly:
        return
    yield node_tile(record)
    yield tile("Compile", f"{record.cpu_s:.2f} CPU s", f"{record.wall_s:.2f} s on the clock")
    launches = f"{record.num_launches:,} launches in a run"
    yield tile("Operators compiled", f"{record.num_operators:,}", launches)
    planned = arena_tile(record)
    if planned is not None:
        yield planned
    if record.saved_bytes is not None:
        again = record.recomputed_flops
        note = f"{flops_text(again)} computed again" if again else "nothing computed again"
        yield tile("Saved for backward", bytes_text(record.saved_bytes), note)
    yield from gpu_tiles(record.gpu)
