"""A soak: thousands of mixed steps, compared with eager now and then, in memory that stays flat.

One small model and a copy of it that is run eagerly go through the same events: several lengths,
train and eval, Python floats and lists that change, conversions to another type and back,
gradients that are kept and dropped, graphs that are kept, optimizer steps, and several threads.

    python benchmarks/soak.py --steps 10000
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import resource
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import lazyinline
from lazyinline.frontend.kept_programs import CompiledRepeatedlyWarning

LENGTHS = (3, 4, 5, 7, 9)
NUM_ROWS = 15
NUM_THREADS = 3
MAX_GROWN_TENSORS = 40
MAX_GROWN_BYTES = 2**20
MAX_GROWN_RSS_BYTES = 48 * 2**20
WARM_UP = 0.35


@lazyinline.lazy_inline
class Block(nn.Module):
    """A feed-forward block with a switch of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * scale


class Model(nn.Module):
    """Blocks, a list that says which of them are used, and a buffer."""

    def __init__(self, width: int = 16, num_layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.norm = nn.BatchNorm1d(width)
        self.active = list(range(num_layers))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for index in self.active:
            x = self.blocks[index](x, scale)
        return (x + self.norm(x.transpose(1, 2)).transpose(1, 2)).pow(2).mean()


class Soak:
    """The model, its copy, and what runs them.

    Args:
        seed: of everything that happens.
        backend: of the compiled module and step.
    """

    def __init__(self, seed: int, backend: str) -> None:
        torch.manual_seed(seed)
        self._random = random.Random(seed)
        self._model = Model()
        self._eager = copy.deepcopy(self._model)
        self._compiled = lazyinline.compile(self._model, backend=backend)
        self._step = lazyinline.compile_step(self._model, backend=backend)
        self._both = (self._model, self._eager)
        self._optimizers = self._make_optimizers()
        self._kept: list[torch.Tensor] = []
        self._dtype = torch.float32
        self.counts: dict[str, int] = {}
        self.max_error = 0.0

    def run_one(self) -> None:
        """One event, chosen at random."""
        events: dict[Callable[[], None], int] = {
            self._train: 40,
            self._run_step: 40,
            self._infer: 15,
            self._use_threads: 3,
            self._switch_mode: 4,
            self._switch_blocks: 4,
            self._convert: 2,
            self._keep_graph: 6,
            self._clear_gradients: 6,
        }
        (event,) = self._random.choices(list(events), list(events.values()))
        self.counts[event.__name__] = self.counts.get(event.__name__, 0) + 1
        event()

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.5) for m in self._both]

    def _batch(self) -> tuple[torch.Tensor, float]:
        x = torch.randn(2, self._random.choice(LENGTHS), 16).to(self._dtype)
        return x, self._random.choice((1.0, 0.5, 0.25 + self._random.random()))

    def _train(self) -> None:
        for _ in range(self._random.choice((1, 1, 2))):
            batch = self._batch()
            losses = [self._compiled(*batch), self._eager(*batch)]
            for loss in losses:
                loss.backward()
            self._compare("loss", *losses)
        self._compare_gradients()
        self._update()

    def _run_step(self) -> None:
        batch = self._batch()
        loss = self._step(*batch)
        self._eager.zero_grad()
        expected = self._eager(*batch)
        expected.backward()
        self._compare("loss of a step", loss, expected)
        self._compare_gradients()
        self._update()

    def _infer(self) -> None:
        batch = self._batch()
        with torch.no_grad():
            self._compare("inference", self._compiled(*batch), self._eager(*batch))

    def _use_threads(self) -> None:
        self._set_mode(train=False)  # the buffers of a batch norm are not for several threads
        batches = [self._batch() for _ in range(NUM_THREADS)]
        found: list[Any] = [None] * NUM_THREADS

        def work(number: int) -> None:
            with torch.no_grad():
                for _ in range(3):
                    found[number] = self._compiled(*batches[number])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with torch.no_grad():
            for batch, loss in zip(batches, found, strict=True):
                self._compare("inference in a thread", loss, self._eager(*batch))

    def _switch_mode(self) -> None:
        self._set_mode(train=not self._model.training)

    def _set_mode(self, *, train: bool) -> None:
        for model in self._both:
            model.train(train)

    def _switch_blocks(self) -> None:
        active = self._random.choice(([0, 1, 2], [0, 2]))
        for model in self._both:
            model.active = list(active)

    def _convert(self) -> None:
        """To another type, and mostly back before long."""
        self._dtype = torch.float64 if self._dtype == torch.float32 else torch.float32
        self._kept.clear()
        for model in self._both:
            model.zero_grad()
            model.to(self._dtype)
        self._optimizers = self._make_optimizers()

    def _keep_graph(self) -> None:
        """Keeps a graph that nobody goes back through, and drops an old one."""
        self._kept = [*self._kept[-3:], self._compiled(*self._batch())]
        self._eager.load_state_dict(self._model.state_dict())  # a batch norm has counted

    def _clear_gradients(self) -> None:
        to_none = self._random.random() < 0.5
        for model in self._both:
            model.zero_grad(set_to_none=to_none)

    def _update(self) -> None:
        if self._random.random() < 0.3:
            return
        self._kept.clear()  # what is in flight must not see other weights
        for optimizer in self._optimizers:
            optimizer.step()
        self._eager.load_state_dict(self._model.state_dict())  # rounding must not add up
        if self._random.random() < 0.7:
            self._clear_gradients()

    def _compare_gradients(self) -> None:
        ours, theirs = (dict(model.named_parameters()) for model in self._both)
        for name, parameter in ours.items():
            expected = theirs[name].grad
            if parameter.grad is None or expected is None:
                blank = parameter.grad if expected is None else expected
                if blank is not None and bool(blank.any()):
                    raise AssertionError(f"only one of the two gradients of {name} is there")
            else:
                self._compare(f"the gradient of {name}", parameter.grad, expected)

    def _compare(self, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        error = float((found - expected).detach().norm() / (1e-3 + expected.detach().norm()))
        self.max_error = max(self.max_error, error)
        if not error < 1e-4:
            raise AssertionError(f"{what} is off by {error:.2e} (dtype {found.dtype})")


def held() -> tuple[int, int, int]:
    """Live tensors, the bytes of their memory, and the process's resident bytes."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    return len(tensors), sum(memory.values()), resident


def main() -> int:
    """Runs the soak and prints a table; returns 1 if memory grew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    options = parser.parse_args()
    warnings.simplefilter("ignore", CompiledRepeatedlyWarning)
    soak, rows, start = Soak(options.seed, options.backend), [], time.perf_counter()
    print(f"{'steps':>8}{'seconds':>9}{'tensors':>9}{'MiB held':>10}{'RSS MiB':>9}")
    for number in range(1, NUM_ROWS + 1):
        done = options.steps * (number - 1) // NUM_ROWS
        for _ in range(done, options.steps * number // NUM_ROWS):
            soak.run_one()
        rows.append(held())
        tensors, num_bytes, resident = rows[-1]
        print(
            f"{options.steps * number // NUM_ROWS:>8}{time.perf_counter() - start:>9.1f}"
            f"{tensors:>9}{num_bytes / 2**20:>10.2f}{resident / 2**20:>9.0f}",
            flush=True,
        )
    print(", ".join(f"{name.strip('_')} {n}" for name, n in sorted(soak.counts.items())))
    print(f"largest relative error against eager: {soak.max_error:.1e}")
    warm = rows[: max(1, int(WARM_UP * len(rows)))]
    before = [max(column) for column in zip(*warm, strict=True)]
    grown = [a - b for a, b in zip(rows[-1], before, strict=True)]
    bounds = (MAX_GROWN_TENSORS, MAX_GROWN_BYTES, MAX_GROWN_RSS_BYTES)
    for name, growth, bound in zip(
        ("tensors", "bytes", "resident bytes"), grown, bounds, strict=True
    ):
        print(f"{name} since warm-up: {growth:+}, allowed {bound}")
    return int(any(g > b for g, b in zip(grown, bounds, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
