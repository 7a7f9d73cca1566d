"""ONNX export: cost by depth, against torch.onnx.export, and the memory of a large export.

    python benchmarks/onnx_export.py                 # depth and torch.onnx, all in one process
    python benchmarks/onnx_export.py --gigabytes 3   # one large export; needs that much disk twice

CPU-seconds of this process, with ``verify=False`` (torch.onnx does not verify either); both
exporters have run once before on a small model, and models are built before. Rounds are
interleaved and the least is taken.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import resource
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import decoders as models
import onnx
import torch
from torch import Tensor, nn

import lazyinline

lazyinline.lazy_inline(models.DecoderBlock)
SIZES = {"hidden": 64, "num_heads": 4, "ffn": 172, "vocab": 100, "seq": 16}


def build(layers: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model, (ids, _) = models.llama(layers, **SIZES)
    return model.eval(), (ids,)


Subject = tuple[nn.Module, tuple[Tensor, ...]]


def export_ours(subject: Subject, path: pathlib.Path) -> None:
    model, args = subject
    lazyinline.export_onnx(model, args, path, verify=False, external_data=True)


def export_torch(subject: Subject, path: pathlib.Path) -> None:
    model, args = subject
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, args, path, dynamo=True, opset_version=18, verbose=False, external_data=True
        )


def cpu_seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def nodes(path: pathlib.Path) -> int:
    """Counts the nodes of the main graph and of each function, once."""
    model = onnx.load(path, load_external_data=False)
    return sum(1 for graph in (model.graph, *model.functions) for _ in nodes_of(graph))


def nodes_of(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes_of(attribute.g)
            for inner in attribute.graphs:
                yield from nodes_of(inner)


def by_depth(folder: pathlib.Path, rounds: int) -> None:
    """Prints the cost of 4 and 48 layers."""
    path = folder / "ours.onnx"
    export_ours(build(2), path)
    seconds: dict[int, list[float]] = {4: [], 48: []}
    sizes: dict[int, tuple[int, int]] = {}
    for _ in range(rounds):
        for layers, found in seconds.items():
            subject = build(layers)
            found.append(cpu_seconds(functools.partial(export_ours, subject, path)))
            sizes[layers] = (nodes(path), path.stat().st_size)
    few, many = min(seconds[4]), min(seconds[48])
    print(f"4 layers {few:.2f} s, 48 layers {many:.2f} s: {many / few:.2f} times (asked <= 1.5)")
    print(f"stored nodes per layer: {(sizes[48][0] - sizes[4][0]) / 44:.2f} (asked 1)")
    print(f"graph bytes per layer: {(sizes[48][1] - sizes[4][1]) / 44:.0f} (asked <= 2500)")


def against_torch(folder: pathlib.Path, rounds: int) -> None:
    """Prints the cost of both exporters at 32 layers."""
    path, other = folder / "ours.onnx", folder / "torch.onnx"
    export_ours(build(2), path)
    export_torch(build(2), other)
    subject = build(32)
    theirs = cpu_seconds(lambda: export_torch(subject, other))
    ours = min(cpu_seconds(lambda: export_ours(subject, path)) for _ in range(rounds))
    print(
        f"32 layers: torch.onnx.export {theirs:.2f} s, {nodes(other)} nodes; lazyinline "
        f"{ours:.2f} s, {nodes(path)} nodes: {theirs / ours:.1f} times faster (asked >= 8), "
        f"{nodes(other) / nodes(path):.1f} times fewer nodes (asked >= 10)"
    )


class PeakMemory:
    """Watches the resident memory of this process while it is open, in bytes."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        page = resource.getpagesize()
        while not self._stop.wait(0.02):
            pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
            self.peak_bytes = max(self.peak_bytes, pages * page)


def large(folder: pathlib.Path, gigabytes: float) -> None:
    """Exports a model of this size and prints the peak resident memory."""
    export_ours(build(2), folder / "warm.onnx")
    hidden = 2048
    layers = max(1, round(gigabytes * 1e9 / (16 * hidden * hidden * 4)))
    config = models.DecoderConfig(layers, hidden, num_heads=16, vocab=1000, seq=16)
    with torch.device("meta"):
        model = models.Decoder(config)
    model = model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(0.01)
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    path = folder / "large.onnx"
    ids = torch.zeros(1, 16, dtype=torch.long)
    with PeakMemory() as memory:
        seconds = cpu_seconds(lambda: lazyinline.export_onnx(model, (ids,), path, verify=False))
    onnx.checker.check_model(str(path))
    extra = memory.peak_bytes - weights
    print(
        f"{weights / 1e9:.2f} GB of weights in {layers} layers: {seconds:.1f} s, peak "
        f"{memory.peak_bytes / 1e9:.2f} GB = weights + {extra / 1e9:.2f} GB (asked <= 1), file "
        f"{path.stat().st_size / 1e3:.0f} kB and {(folder / 'large.onnx.data').stat().st_size} B"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=0.0)
    parser.add_argument("--only", choices=("depth", "torch"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if options.gigabytes:
            large(pathlib.Path(folder), options.gigabytes)
            return
        if options.only != "torch":
            by_depth(pathlib.Path(folder), options.rounds)
        if options.only != "depth":
            against_torch(pathlib.Path(folder), options.rounds)


if __name__ == "__main__":
    main()
