"""A soak: thousands of mixed steps, compared with eager, in memory that stays flat.

One small model and a copy of it that is run eagerly go through the same events: several lengths,
train and eval, Python floats and lists that change, conversions to another type and back,
gradients that are kept and dropped, graphs that are kept, optimizer steps, and several threads.
The variants are a closed set, each of which is met during warm-up: after that nothing is compiled,
and nothing may grow.

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
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from itertools import product
from typing import Any

import torch
from torch import nn

import lazyinline
from lazyinline.frontend.guard import CompiledRepeatedlyWarning

STATES = (  # type, train or eval, which blocks are active
    (torch.float32, True, (0, 1)),
    (torch.float32, False, (0, 1)),
    (torch.float32, True, (0,)),
    (torch.float64, True, (0, 1)),
)
BATCHES = ((3, 1.0), (5, 1.0), (7, 1.0), (5, 0.5))  # length, and the argument `scale`
NUM_ROWS = 20
NUM_THREADS = 3
NUM_WARM_ROWS = 4
"""Of the rows, how many may still grow: pools and allocators find their sizes."""


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

    def __init__(self, width: int = 8, num_layers: int = 2) -> None:
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
        self._state = STATES[0]
        self._added_up = False  # gradients that a step leaves alone where it has none
        self.counts: Counter[str] = Counter()
        self.max_error = 0.0
        self.num_compiles = 0
        self._reports: tuple[Any, Any] = (None, None)

    def warm_up(self) -> None:
        """Meets every variant there is, twice: sizes that came in two lengths become symbols."""
        for _ in range(2):
            for state, batch in product(STATES, BATCHES):
                self._enter(state)
                for event in (self._train, self._run_step, self._infer):
                    event(batch)
                    self._count_compiles()
        self._enter(STATES[0])
        self.counts.clear()

    def run_one(self) -> None:
        """One event, chosen at random."""
        events: dict[Callable[[], None], int] = {
            self._train: 40,
            self._run_step: 40,
            self._infer: 15,
            self._use_threads: 3,
            self._switch: 8,
            self._keep_graph: 6,
            self._clear_gradients: 6,
        }
        (event,) = self._random.choices(list(events), list(events.values()))
        self.counts[event.__name__.strip("_")] += 1
        event()
        self._count_compiles()

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.5) for m in self._both]

    def _batch(self, batch: tuple[int, float] | None = None) -> tuple[torch.Tensor, float]:
        length, scale = batch or self._random.choice(BATCHES)
        return torch.randn(2, length, 8, dtype=self._state[0]), scale

    def _count_compiles(self) -> None:
        reports = self._compiled.last_report, self._step.last_report
        self.num_compiles += sum(a is not b for a, b in zip(reports, self._reports, strict=True))
        self._reports = reports

    def _train(self, kind: tuple[int, float] | None = None) -> None:
        for _ in range(self._random.choice((1, 1, 2))):
            batch = self._batch(kind)
            losses = [self._compiled(*batch), self._eager(*batch)]
            for loss in losses:
                loss.backward()
            self._added_up = True
            self._compare("loss", *losses)
        self._compare_gradients()
        self._update()

    def _run_step(self, kind: tuple[int, float] | None = None) -> None:
        batch = self._batch(kind)
        if self._added_up:
            self._clear_gradients()
        loss = self._step(*batch)
        self._eager.zero_grad()
        expected = self._eager(*batch)
        expected.backward()
        self._compare("loss of a step", loss, expected)
        self._compare_gradients()
        self._update()

    def _infer(self, kind: tuple[int, float] | None = None) -> None:
        batch = self._batch(kind)
        with torch.no_grad():
            self._compare("inference", self._compiled(*batch), self._eager(*batch))

    def _use_threads(self) -> None:
        self._enter(STATES[1])  # the buffers of a batch norm are not for several threads
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

    def _switch(self) -> None:
        self._enter(self._random.choice(STATES))

    def _enter(self, state: tuple[torch.dtype, bool, tuple[int, ...]]) -> None:
        """Another type and back, train and eval, another list of blocks that is a new object."""
        dtype, train, active = state
        if dtype != self._state[0]:
            self._kept.clear()
            for model in self._both:
                model.zero_grad()
                model.to(dtype)
            self._optimizers = self._make_optimizers()
        for model in self._both:
            model.train(train)
            model.active = list(active)
        self._state = state

    def _keep_graph(self) -> None:
        """Keeps a graph that nobody goes back through, and drops an old one."""
        self._kept = [*self._kept[-3:], self._compiled(*self._batch())]
        self._eager.load_state_dict(self._model.state_dict())  # a batch norm has counted

    def _clear_gradients(self) -> None:
        to_none = self._random.random() < 0.5
        for model in self._both:
            model.zero_grad(set_to_none=to_none)
        self._added_up = False

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


@dataclass(frozen=True)
class Held:
    """What the process holds, after garbage was collected.

    Attributes:
        tensors: live ones that Python knows, fake ones too.
        tensor_bytes: of the memory of real ones, each once.
        objects: that the garbage collector knows.
        threads: of the process.
        resident_bytes: of the process.
    """

    tensors: int
    tensor_bytes: int
    objects: int
    threads: int
    resident_bytes: int


ALLOWED = Held(tensors=400, tensor_bytes=2**18, objects=8000, threads=0, resident_bytes=16 * 2**20)
"""Growth of the least row that is none: which programs hold memory when it is taken differs."""


def held() -> Held:
    """Returns what the process holds now."""
    gc.collect()
    objects = gc.get_objects()
    tensors = [x for x in objects if issubclass(type(x), torch.Tensor)]
    storages = [x.untyped_storage() for x in tensors if type(x) in (torch.Tensor, nn.Parameter)]
    memory = {storage.data_ptr(): storage.nbytes() for storage in storages}
    with open("/proc/self/statm") as file:
        resident_bytes = int(file.read().split()[1]) * resource.getpagesize()
    with open("/proc/self/status") as file:
        threads = next(int(x.split()[1]) for x in file if x.startswith("Threads"))
    return Held(len(tensors), sum(memory.values()), len(objects), threads, resident_bytes)


def main() -> int:
    """Runs the soak and prints a table; returns 1 if memory grew or something was compiled."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    options = parser.parse_args()
    warnings.simplefilter("ignore", CompiledRepeatedlyWarning)
    soak, rows, start = Soak(options.seed, options.backend), [], time.perf_counter()
    soak.warm_up()
    print(f"{'steps':>8}{'seconds':>9}{'compiles':>9}{'tensors':>9}{'MiB held':>10}", end="")
    print(f"{'objects':>9}{'threads':>9}{'RSS MiB':>9}")
    for number in range(NUM_ROWS + 1):
        steps = options.steps * number // NUM_ROWS
        for _ in range(options.steps * max(0, number - 1) // NUM_ROWS, steps):
            soak.run_one()
        rows.append(now := held())
        seconds = time.perf_counter() - start
        print(f"{steps:>8}{seconds:>9.1f}{soak.num_compiles:>9}{now.tensors:>9}", end="")
        print(f"{now.tensor_bytes / 2**20:>10.3f}{now.objects:>9}{now.threads:>9}", end="")
        print(f"{now.resident_bytes / 2**20:>9.1f}", flush=True)
        if number == NUM_WARM_ROWS:
            num_warm_compiles = soak.num_compiles
    print(", ".join(f"{name} {n}" for name, n in sorted(soak.counts.items())))
    print(f"largest relative error against eager: {soak.max_error:.1e}")
    before, after = (
        [min(column) for column in zip(*map(astuple, some), strict=True)]
        for some in (rows[: NUM_WARM_ROWS + 1], rows[-NUM_WARM_ROWS - 1 :])
    )
    grown = [a - b for a, b in zip(after, before, strict=True)]
    for field, growth, bound in zip(fields(Held), grown, astuple(ALLOWED), strict=True):
        print(f"{field.name} since warm-up: {growth:+}, allowed {bound}")
    late_compiles = soak.num_compiles - num_warm_compiles
    print(f"compiles since warm-up: {late_compiles}")
    has_grown = any(g > b for g, b in zip(grown, astuple(ALLOWED), strict=True))
    return int(late_compiles > 0 or has_grown)


if __name__ == "__main__":
    sys.exit(main())
