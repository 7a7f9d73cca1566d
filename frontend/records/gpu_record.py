"""What is known of a program for a GPU that is not here: counted and predicted, never measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...backend.gpu.roofline import Prediction, predict
from ...backend.gpu.targets import GIB, Target
from ...backend.kernels.lower import GpuBackend, triton_kernels
from ...backend.launches.kernel_list import KernelList
from ...backend.run.planned import PlannedProgram


@dataclass(frozen=True)
class GpuRecord:
    """A program for a GPU, compiled and planned.

    Attributes:
        target: the GPU.
        num_kernels: different Triton kernels.
        num_built: those compiled to machine code.
        code_bytes: of that.
        given_bytes: parameters, buffers and inputs, which are the user's.
        arena_bytes: activations, gradients and scratch, as planned.
        outside_bytes: most bytes at one time in what launches allocate themselves.
        workspace_bytes: what cuBLAS works in: one place for each stream with products.
        allocating: names of those launches, each once.
        num_beside: launches on a second stream.
        prediction: of one run.
    """

    target: Target
    num_kernels: int
    num_built: int
    code_bytes: int
    given_bytes: int
    arena_bytes: int
    outside_bytes: int
    workspace_bytes: int
    allocating: Sequence[str]
    num_beside: int
    prediction: Prediction

    @property
    def peak_bytes(self) -> int:
        """What a run holds of the GPU's memory, at most: all of it, the optimizer's state not."""
        held = self.given_bytes + self.arena_bytes
        return held + self.outside_bytes + self.workspace_bytes

    @property
    def budget_bytes(self) -> int:
        """What the GPU leaves for activations, gradients, scratch and cuBLAS."""
        return max(self.target.memory_bytes - self.given_bytes, 0)

    @property
    def fits(self) -> bool:
        """Whether the GPU has that much."""
        return self.peak_bytes <= self.target.memory_bytes

    def lines(self) -> Iterator[str]:
        """Yields what a report says."""
        target, predicted = self.target, self.prediction
        yield f"for {target.name} ({target.board}): compiled and planned, not run"
        built = f"all {self.num_built}" if self.num_built == self.num_kernels else self.num_built
        others = predicted.num_launches - predicted.num_triton
        yield (
            f"  {predicted.num_launches} launches: {predicted.num_triton} of {self.num_kernels} "
            f"Triton kernels, {others} of PyTorch's"
        )
        if self.num_beside:
            yield f"  {self.num_beside} launches on a second stream, beside others"
        yield f"  {built} kernels compiled to machine code, {self.code_bytes / 2**10:.0f} KiB"
        verdict = "fits in" if self.fits else "does NOT fit in"
        yield f"  memory {_gib(self.peak_bytes)}, {verdict} {_gib(target.memory_bytes)}:"
        yield (
            f"    parameters and inputs {_gib(self.given_bytes)}, arena {_gib(self.arena_bytes)}, "
            f"cuBLAS {_gib(self.workspace_bytes)}"
        )
        if self.allocating:
            yield (
                f"    allocated by launches {_gib(self.outside_bytes)}: "
                f"{', '.join(self.allocating)}"
            )
        yield (
            f"  predicted {predicted.seconds * 1e3:.3g} ms at least, by the roofline: "
            f"{predicted.flops / 1e12:.3g} TFLOP in products ({predicted.product_s * 1e3:.3g} ms), "
            f"{_gib(predicted.moved_bytes)} moved"
        )


def gpu_record(
    program: PlannedProgram, lists: Sequence[tuple[KernelList, int]], backend: GpuBackend
) -> GpuRecord:
    """Returns what is known of a planned program.

    Args:
        program: planned, and not run.
        lists: the launches of each closure, and how often the program calls it.
        backend: made its kernels.
    """
    kernels = {kernel.content for kernel in triton_kernels(one for one, _ in lists)}
    built = [backend.built[content] for content in kernels if content in backend.built]
    given = [b for b in program.layout.instances if b.kind == "given"]
    return GpuRecord(
        target=backend.target,
        num_kernels=len(kernels),
        num_built=len(built),
        code_bytes=sum(len(made.code) for made in built),
        given_bytes=sum(b.num_bytes for b in given),
        arena_bytes=program.plan.peak_bytes,
        outside_bytes=program.outside_bytes - program.workspace_bytes,
        workspace_bytes=program.workspace_bytes,
        allocating=tuple(dict.fromkeys(program.foreign_launches())),
        num_beside=program.num_beside,
        prediction=predict(lists, backend.target),
    )


def _gib(num_bytes: int) -> str:
    return (
        f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 100 else f"{num_bytes / 2**20:.2f} MiB"
    )
