"""The page of one compile: a verdict, the program, who shares, and what it took."""

from __future__ import annotations

from collections.abc import Mapping

from ..records.compile_record import CompileRecord, part_lines
from .about import about
from .arena import arena_section
from .gpu import gpu_tiles
from .passes import passes_section
from .predicted import compile_rows, predicted_section
from .program import program_section
from .recompute import recompute_section
from .reuse import reuse_section
from .texts import bytes_text, count_text, flops_text, times_less
from .write import PageData

Tile = dict[str, str]


def compile_page(record: CompileRecord, title: str = "") -> PageData:
    """Returns the data of a compile's page.

    Args:
        record: what the compile did.
        title: what was compiled.
    """
    kind = "training" if record.train else "inference"
    return {
        "title": title or _name(record),
        "subtitle": f"{kind}, backend {record.backend}, reuse {record.reuse}",
        "verdict": {"sentence": _sentence(record), "tiles": _tiles(record), "notes": notes(record)},
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
        "predicted": predicted_section([*compile_rows(record)]),
        "about": about(),
    }


def notes(record: CompileRecord) -> list[str]:
    """Says what a reader should know, in sentences."""
    found = []
    if record.ran_eagerly:
        found.append(f"The model ran eagerly: {record.ran_eagerly}")
        found += part_lines(part for part in record.parts if not part.is_small)
    if record.unplanned:
        found.append(f"Memory is not planned: {record.unplanned}.")
    if record.why_static:
        found.append(f"Sizes are numbers, because {record.why_static}.")
    if record.recompute_chosen_for:
        found.append(f"Recompute was chosen for inputs of {record.recompute_shapes}.")
    if record.num_links or record.num_compiles > 1:
        found.append(f"{record.num_compiles} compiles and {record.num_links} links so far.")
    if record.num_backwards > 1:
        found.append(f"{record.num_backwards} backwards: losses used only some of the outputs.")
    if record.num_gradients:
        found.append(f"Gradients compiled, for derivatives of them: {record.num_gradients}.")
    found += [f"{one}." for one in map(str, record.modes)]
    found += [f"No Taylor rule, forward mode nested: {one}." for one in record.nested_forward]
    found += [f"Run operator by operator, {one}." for one in record.eager_kernels]
    if record.cache.directory:
        found.append(" ".join(str(record.cache).split()))
    return found


def node_tile(record: CompileRecord) -> Tile:
    """How many graph nodes are held."""
    held, inlined = record.num_nodes, record.num_nodes_if_inlined
    return {
        "label": "Graph nodes held",
        "value": times_less(held, inlined),
        "note": f"{held:,} of {inlined:,} if inlined",
        "state": "good" if held < inlined else "plain",
    }


def arena_tile(record: CompileRecord) -> Tile | None:
    """How large the arena is, and how near to what no plan can go below."""
    if record.peak_bytes is None or not record.lower_bound_bytes:
        return None
    over = record.peak_bytes / record.lower_bound_bytes - 1
    return {
        "label": "Planned memory",
        "value": bytes_text(record.peak_bytes),
        "note": f"lower bound +{over:.1%}",
        "state": "good" if over <= 0.01 else "plain",
    }


def _name(record: CompileRecord) -> str:
    return record.model or "Compiled model"


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


def _tiles(record: CompileRecord) -> list[Tile]:
    if record.ran_eagerly:
        return []
    tiles: list[Tile | None] = [
        node_tile(record),
        {
            "label": "Compile",
            "value": f"{record.cpu_s:.2f} CPU s",
            "note": f"{record.wall_s:.2f} s on the clock",
            "state": "plain",
        },
        {
            "label": "Operators compiled",
            "value": f"{record.num_operators:,}",
            "note": f"{record.num_launches:,} launches in a run",
            "state": "plain",
        },
        arena_tile(record),
    ]
    if record.saved_bytes is not None:
        again = record.recomputed_flops
        note = f"{flops_text(again)} computed again" if again else "nothing computed again"
        value = bytes_text(record.saved_bytes)
        tiles.append(
            {"label": "Saved for backward", "value": value, "note": note, "state": "plain"}
        )
    return [*(tile for tile in tiles if tile is not None), *gpu_tiles(record.gpu)]
