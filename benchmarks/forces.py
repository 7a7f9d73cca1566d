"""Training on energies and forces, side by side: eager, torch.compile, make_fx and lazyinline.

    python benchmarks/forces.py --models schnet --layers 3 --ways eager step --rounds 5

A SchNet and a PaiNN, 61 atoms and some 1,100 edges, in a number that never comes twice, Adam. Each
row is a process of its own with cold caches; CPU time, one thread:

    first, next    the first size, and the next three, with their compiles: CPU seconds, C++
                   compiler included
    new            each further size, milliseconds (median of what its first step takes more than
                   its second)
    step, eager    of a size that was seen, milliseconds, minima in turns; ratio: eager's over ours
    error          of the parameters after all steps against eager, relative (norm over norm); of
                   ways that do not train, of what they return

Ways: ``step`` is `lazyinline.compile_step`; ``natural`` is `lazyinline.compile` of the energy, the
gradient taken outside; both with ``dynamic=True``. ``md`` is the same without training: forces of
each step, and the error is theirs. ``rows`` and ``vmap`` are Hessians of 30 of the atoms by
`lazyinline.func.hessian`, beside `torch.autograd.functional.hessian` and `torch.func.hessian` of
the eager model; of one size. ``flag`` is `torch.compile` of energy and forces
with `torch._dynamo.config.trace_autograd_ops`, which is off by default; ``make_fx`` is what
DeePMD-kit and NequIP do: `make_fx` with symbols, then `torch.compile` of the graph.

In all ways `torch.set_flush_denormal` is on: a Gaussian of a distance that is far from its center
underflows to a denormal number, each of which costs a matrix product some hundred cycles. With
``--denormals`` they stay: then products take four fifths of a compiled step, and of eager's.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from measurement import Stopwatch, kept_environment
from torch import Tensor, nn

WAYS = ("eager", "step", "natural", "md", "rows", "vmap", "flag", "make_fx")
HESSIANS = {"rows": torch.autograd.functional.hessian, "vmap": torch.func.hessian}
ATOMS, SMALL, CUTOFF, WIDTH, RADIAL = 61, 30, 5.0, 64, 20
Graph = tuple[Tensor, Tensor, Tensor]
Pair = tuple[Tensor, Tensor]


def graph(seed: int) -> Graph:
    """Returns kinds, positions and edges, in a number that the seed decides."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.cartesian_prod(*[torch.arange(4.0)] * 3)[:ATOMS] * 2.4
    positions = grid + 0.3 * torch.randn(ATOMS, 3, generator=generator)
    apart = torch.cdist(positions, positions).fill_diagonal_(math.inf)
    edges = (apart < CUTOFF).nonzero().T.contiguous()
    return torch.randint(4, (ATOMS,), generator=generator), positions, edges[:, seed:].contiguous()


def mlp(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inner, WIDTH), nn.SiLU(), nn.Linear(WIDTH, outer))


class SchNetLayer(nn.Module):
    """A continuous-filter convolution; vectors pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.out, self.send = mlp(RADIAL, WIDTH), mlp(WIDTH, WIDTH), mlp(WIDTH, WIDTH)

    def forward(self, state: Pair, near: Pair, unit: Tensor, edges: Tensor) -> Pair:
        (x, v), (radial, cut), (to, of) = state, near, edges
        messages = self.send(x)[of] * self.filter(radial) * cut
        return x + self.out(torch.zeros_like(x).index_add(0, to, messages)), v


class PaiNNLayer(nn.Module):
    """Scalars and vectors exchanged between atoms, and mixed in each."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.send = nn.Linear(RADIAL, 3 * WIDTH), mlp(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.update = mlp(2 * WIDTH, 3 * WIDTH)

    def forward(self, state: Pair, near: Pair, unit: Tensor, edges: Tensor) -> Pair:
        (q, v), (radial, cut), (to, of) = state, near, edges
        a, b, c = (self.send(q)[of] * self.filter(radial) * cut).split(WIDTH, -1)
        q = q.index_add(0, to, a)
        v = v.index_add(0, to, b[:, None] * unit[..., None] + c[:, None] * v[of])
        one, two = self.mix(v).split(WIDTH, -1)
        size = (one.square().sum(1) + 1e-8).sqrt()
        a, b, c = self.update(torch.cat([q, size], -1)).split(WIDTH, -1)
        return q + a + c * (one * two).sum(1), v + b[:, None] * one


class Potential(nn.Module):
    """The energy of a graph, by layers of either kind."""

    def __init__(self, kind: type[nn.Module], layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, WIDTH)
        self.register_buffer("centers", torch.linspace(0, CUTOFF, RADIAL))
        self.layers = nn.ModuleList(kind() for _ in range(layers))
        self.read = mlp(WIDTH, 1)

    def forward(self, kinds: Tensor, positions: Tensor, edges: Tensor) -> Tensor:
        apart = positions[edges[1]] - positions[edges[0]]
        distance = apart.norm(dim=1, keepdim=True)
        cut = 0.5 * (torch.cos(distance * math.pi / CUTOFF) + 1) * (distance < CUTOFF)
        radial, unit = torch.exp(-10 * (distance - self.centers) ** 2), apart / distance
        x = self.embed(kinds)
        state = x, x[:, None] * torch.zeros(1, 3, 1)
        for layer in self.layers:
            state = layer(state, (radial, cut), unit, edges)
        return self.read(state[0]).sum()


KINDS = {"schnet": SchNetLayer, "painn": PaiNNLayer}


class Forces(nn.Module):
    """Energy and forces of a potential; the gradient is taken in the forward."""

    def __init__(self, energy: nn.Module) -> None:
        super().__init__()
        self.energy = energy

    def forward(self, kinds: Tensor, positions: Tensor, edges: Tensor) -> Pair:
        positions = positions.detach().requires_grad_()
        energy = self.energy(kinds, positions, edges)
        return energy, -torch.autograd.grad(energy, positions, create_graph=True)[0]


def loss_of(found: Pair) -> Tensor:
    """Returns a loss of energy and forces against made-up truth."""
    energy, forces = found
    return (energy / ATOMS - 1).square() + 10 * (forces - 0.1).square().mean()


def by_backward(forward: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Any:
    """Returns a step: forward, backward, update."""

    def step(*data: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(forward(*data)).backward()
        optimizer.step()

    return step


def traced(model: nn.Module, data: Graph) -> Callable[..., Any]:
    """Returns energy and forces as a graph with symbols, compiled by Inductor."""
    from torch.fx.experimental.proxy_tensor import make_fx

    forces, names = Forces(model), [n for n, _ in Forces(model).named_parameters()]

    def function(parameters: list[Tensor], *data: Tensor) -> Any:
        return torch.func.functional_call(forces, dict(zip(names, parameters, strict=True)), data)

    given = [p.detach().clone().requires_grad_() for p in model.parameters()]
    module = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(given, *data)
    compiled = torch.compile(module, dynamic=True)
    return lambda *data: compiled(list(model.parameters()), *data)


def dynamics(energy: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a step of molecular dynamics: the forces."""

    def step(kinds: Tensor, positions: Tensor, edges: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_()
        return -torch.autograd.grad(energy(kinds, positions, edges), positions)[0]

    return step


def small(data: Graph) -> Graph:
    """Returns the part of a graph between its first atoms."""
    kinds, positions, edges = data
    return kinds[:SMALL], positions[:SMALL], edges[:, (edges < SMALL).all(0)]


def modes(model: nn.Module, way: str, data: Graph) -> tuple[Any, Any]:
    """Returns what computes a Hessian compiled, and eagerly."""
    from lazyinline import func

    kinds, _, edges = small(data)

    def energy(flat: Tensor) -> Tensor:
        return model(kinds, flat.reshape(-1, 3), edges)  # type: ignore[no-any-return]

    own, other = func.hessian(energy), HESSIANS[way]
    plain = other(energy) if way == "vmap" else lambda flat: other(energy, flat)
    flat = (small(data)[1].flatten(),)
    return lambda *_: own(*flat).dense(), lambda *_: plain(*flat)


def made(way: str, model: nn.Module, data: Graph) -> Any:
    """Returns one way's step."""
    optimizer, plain = torch.optim.Adam(model.parameters(), 1e-4, fused=True), Forces(model)
    if way == "eager":
        return by_backward(plain, optimizer)
    if way == "make_fx":
        return by_backward(traced(model, data), optimizer)
    if way == "flag":
        torch._dynamo.config.trace_autograd_ops = True  # type: ignore[attr-defined]
        return by_backward(torch.compile(plain, dynamic=True), optimizer)
    import lazyinline

    if way == "md":
        return dynamics(lazyinline.compile(model, dynamic=True))
    if way == "step":
        return lazyinline.compile_step(plain, loss_fn=loss_of, optimizer=optimizer, dynamic=True)
    return by_backward(Forces(lazyinline.compile(model, dynamic=True)), optimizer)


def measured(way: str, kind: str, layers: int, sizes: int, rounds: int) -> dict[str, float]:
    """Trains one model in one way, beside eager."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    eager = Potential(KINDS[kind], layers)
    model = copy.deepcopy(eager)
    if way in HESSIANS:
        step, beside = modes(model, way, graph(0))
        sizes, seeds = 2, [0] * 2
    else:
        beside = dynamics(eager) if way == "md" else made("eager", eager, graph(0))
        step, seeds = None, list(range(sizes))
    watches, further = [], []
    for seed in seeds:
        wanted = beside(*graph(seed))
        watches.append(Stopwatch())
        with watches[-1].running():
            step = step or made(way, model, graph(seed))
            found = step(*graph(seed))
        if len(watches) > 4:
            again, wanted = Stopwatch(), beside(*graph(seed))
            with again.running():
                found = step(*graph(seed))
            further.append(1e3 * (watches[-1].cpu_s - again.cpu_s))
    times: dict[str, list[float]] = {"own": [], "eager": []}
    for _ in range(rounds):
        for name, run in (("eager", beside), ("own", step)):
            begun = time.process_time()
            run(*graph(seeds[-1]))
            times[name].append(1e3 * (time.process_time() - begun))
    own, other = (min(times[name]) for name in ("own", "eager"))
    pairs = [(found, wanted)]
    if wanted is None:
        pairs = list(zip(model.parameters(), eager.parameters(), strict=True))
    error = max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)
    new = statistics.median(further) if further else math.nan
    first, *then = (one.cpu_s for one in watches[:4])
    return {
        "first": first,
        "next": sum(then),
        "new": new,
        "step": own,
        "eager": other,
        "error": error,
    }


def row(way: str, kind: str, layers: int, rest: list[str]) -> str:
    """Measures in a process of its own, with cold caches."""
    command = [sys.executable, __file__, "--child", "--models", kind, "--ways", way, *rest]
    with tempfile.TemporaryDirectory() as folder:
        own = {"TORCHINDUCTOR_CACHE_DIR": folder, "LAZYINLINE_CACHE": "0", "OMP_NUM_THREADS": "1"}
        env = {**kept_environment(), **own, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command += ["--layers", str(layers)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    start = f"{kind:7s} {layers:6d} {way:8s}"
    if done.returncode:
        return f"{start} fails: {(done.stderr.strip().splitlines() or [''])[-1][:90]}"
    r = json.loads(done.stdout.strip().splitlines()[-1])
    cells = f"{r['first']:7.1f} {r['next']:7.2f} {r['new']:7.1f} {r['step']:7.1f} {r['eager']:7.1f}"
    return f"{start} {cells} {r['eager'] / r['step']:6.2f} {r['error']:8.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--layers", type=int, nargs="*", default=[3, 12])
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS[1:])
    parser.add_argument("--sizes", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--denormals", action="store_true", help="do not flush them to zero")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        torch.set_flush_denormal(not options.denormals)
        one = (options.ways[0], options.models[0], options.layers[0])
        print(json.dumps(measured(*one, options.sizes, options.rounds)))
        return
    rest = ["--sizes", str(options.sizes), "--rounds", str(options.rounds)]
    rest += ["--denormals"] if options.denormals else []
    print("model   layers way        first    next     new    step   eager  ratio    error")
    for kind, layers, way in itertools.product(options.models, options.layers, options.ways):
        print(row(way, kind, layers, rest), flush=True)


if __name__ == "__main__":
    main()
