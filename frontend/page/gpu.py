"""The tiles of a program for a GPU that is not here: what it will hold and take, predicted."""

from __future__ import annotations

from ..records.gpu_record import GpuRecord
from .texts import bytes_text, flops_text, seconds_text

Tile = dict[str, str]


def gpu_tiles(gpu: GpuRecord | None, what: str = "") -> list[Tile]:
    """Returns the tiles; none without a GPU.

    Args:
        gpu: what is known of the program.
        what: distinguishes it where there are several.
    """
    if gpu is None:
        return []
    name, suffix = gpu.target.name, f", {what}" if what else ""
    outside = gpu.outside_bytes + gpu.workspace_bytes
    total = bytes_text(gpu.target.memory_bytes)
    return [
        {
            "label": f"Memory on {name}{suffix}",
            "value": bytes_text(gpu.peak_bytes),
            "note": f"{'fits in' if gpu.fits else 'more than'} {total}: parameters and inputs "
            f"{bytes_text(gpu.given_bytes)}, arena {bytes_text(gpu.arena_bytes)}, "
            f"outside {bytes_text(outside)}",
            "state": "good" if gpu.fits else "warn",
        },
        {
            "label": f"Step on {name}{suffix}",
            "value": f"\u2265 {seconds_text(gpu.prediction.seconds)}",
            "note": f"predicted by the roofline, not measured: {flops_text(gpu.prediction.flops)} "
            f"in products, {bytes_text(gpu.prediction.moved_bytes)} moved",
            "state": "plain",
        },
        {
            "label": f"Kernels for {name}{suffix}",
            "value": f"{gpu.num_built} as machine code",
            "note": f"of {gpu.num_kernels}; {gpu.prediction.num_triton:,} of "
            f"{gpu.prediction.num_launches:,} launches",
            "state": "good" if gpu.num_built == gpu.num_kernels else "warn",
        },
    ]
