"""The buffers of a training step of equal decoder blocks, as a planner sees them.

The two blocks below are one decoder block (hidden 1024, sequence 1024, float32) as PyTorch's
partitioner splits it, once with everything recomputed in the backward, once with a minimum cut.
Times are launches from the start of the call, sizes are in units of 4 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lazyinline.backend.arena import Buffers, IntArray, concatenate

UNIT_BYTES = 4096
ACTIVATION = 1024  # block input, output and their gradients

Rows = tuple[tuple[int, int, int], ...]  # birth, death, size


@dataclass(frozen=True)
class Block:
    """One closure pair: scratch of its forward and backward, and what is saved between them.

    Of a saved buffer the birth is in the forward, the death in the backward. The block's input is
    saved too, until ``input_used`` in the backward.
    """

    forward: Rows
    backward: Rows
    saved: Rows
    num_forward: int
    num_backward: int
    output_at: int
    input_used: int
    gradient_used: int


# fmt: off
RECOMPUTED = Block(
    forward=(
        (14, 18, 1024), (17, 43, 3072), (34, 37, 16384), (36, 38, 16384), (37, 43, 16384),
        (42, 46, 1024), (45, 50, 1024), (49, 52, 1024), (51, 64, 1024), (53, 57, 1024),
        (56, 59, 4096), (58, 62, 4096), (61, 64, 1024),
    ),
    backward=(
        (14, 136, 1024), (15, 142, 1), (16, 142, 1), (19, 119, 3072), (36, 39, 16384),
        (38, 40, 16384), (39, 113, 16384), (45, 49, 1024), (48, 97, 1024), (52, 55, 1024),
        (54, 88, 1024), (56, 82, 1024), (57, 88, 1), (58, 88, 1), (61, 77, 4096), (63, 71, 4096),
        (68, 77, 4096), (70, 147, 4096), (72, 147, 1), (76, 84, 4096), (79, 88, 1024),
        (81, 147, 4096), (83, 147, 4), (88, 92, 1024), (89, 147, 1), (90, 147, 1), (91, 146, 1024),
        (94, 109, 1024), (96, 147, 1024), (98, 147, 1), (106, 124, 1024), (108, 113, 16384),
        (112, 114, 16384), (113, 119, 16384), (116, 131, 1024), (118, 129, 1024), (123, 131, 1024),
        (128, 131, 1024), (130, 138, 3072), (133, 142, 1024), (135, 147, 3072), (137, 147, 3),
        (142, 146, 1024), (143, 147, 1), (144, 147, 1),
    ),
    saved=(),
    num_forward=65, num_backward=147, output_at=63, input_used=141, gradient_used=91,
)
SAVED = Block(
    forward=(
        (36, 39, 16384), (38, 40, 16384), (44, 48, 1024), (51, 54, 1024), (65, 68, 1024),
    ),
    backward=(
        (25, 35, 4096), (27, 102, 4096), (29, 102, 1), (34, 41, 4096), (36, 45, 1024),
        (38, 102, 4096), (40, 102, 4), (45, 49, 1024), (46, 102, 1), (47, 102, 1), (48, 101, 1024),
        (50, 66, 1024), (52, 102, 1024), (54, 102, 1), (64, 80, 1024), (65, 71, 16384),
        (70, 72, 16384), (71, 75, 16384), (73, 87, 1024), (74, 85, 1024), (79, 87, 1024),
        (84, 87, 1024), (86, 93, 3072), (88, 97, 1024), (90, 102, 3072), (92, 102, 3),
        (97, 101, 1024), (98, 102, 1), (99, 102, 1),
    ),
    saved=(
        (15, 97, 1), (16, 97, 1), (14, 91, 1024), (39, 69, 16384), (47, 53, 1024), (53, 45, 1024),
        (56, 45, 1), (57, 45, 1), (55, 39, 1024), (60, 34, 4096), (62, 28, 4096), (19, 75, 3072),
    ),
    num_forward=76, num_backward=102, output_at=67, input_used=96, gradient_used=48,
)
# fmt: on


def training_step(block: Block, *, layers: int, micro_batches: int, in_flight: int) -> Buffers:
    """Lays out a step in the order 1F1B of one rank.

    Args:
        block: what every layer is.
        layers: blocks one after the other.
        micro_batches: forwards and backwards of the whole stack.
        in_flight: micro-batches whose backward is outstanding, at most.
    """
    forward, backward = _starts(block, layers, micro_batches, in_flight)
    return concatenate(
        _relocated(forward, forward, block.forward),
        _relocated(backward, backward, block.backward),
        _relocated(forward, backward, block.saved),
        _activations(block, forward, backward),
    )


def _starts(block: Block, layers: int, micro_batches: int, in_flight: int) -> tuple[IntArray, ...]:
    """Returns when each forward and each backward begins, by micro-batch and layer."""
    starts = np.zeros((2, micro_batches, layers), np.int64)
    now = forwards = 0
    for backwards in range(micro_batches):
        while forwards < min(backwards + in_flight, micro_batches):
            starts[0, forwards] = now + block.num_forward * np.arange(layers)
            now += block.num_forward * layers
            forwards += 1
        starts[1, backwards] = now + block.num_backward * np.arange(layers)[::-1]
        now += block.num_backward * layers
    return starts[0], starts[1]


def _relocated(begin: IntArray, end: IntArray, rows: Rows) -> Buffers:
    """Returns each row for each call; births count from ``begin``, deaths from ``end``."""
    birth, death, size = np.array(rows, np.int64).reshape(-1, 3).T
    births, deaths = np.add.outer(begin.ravel(), birth), np.add.outer(end.ravel(), death)
    sizes = np.broadcast_to(size * UNIT_BYTES, births.shape)
    return Buffers(births.ravel(), deaths.ravel(), sizes.ravel())


def _activations(block: Block, forward: IntArray, backward: IntArray) -> Buffers:
    """Returns the output of each block, and the gradient of its input."""
    output_dead, gradient_dead = backward + 1, backward + block.num_backward
    output_dead[:, :-1] = backward[:, 1:] + block.input_used + 1
    gradient_dead[:, 1:] = backward[:, :-1] + block.gradient_used + 1
    births = np.stack([forward + block.output_at, backward + block.num_backward - 2])
    deaths = np.stack([output_dead, gradient_dead])
    sizes = np.full(births.size, ACTIVATION * UNIT_BYTES)
    return Buffers(births.ravel(), deaths.ravel(), sizes)
