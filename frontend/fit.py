"""``fit(model, args, mesh=...)``: what one rank of a mesh would hold; no rank is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from ..backend.gpu.targets import GIB, Target, target_named
from ..pipeline_parallel.mesh.links import Links
from ..recompute.planner import PolicyName
from ..reuse import torch_pytree
from ..reuse.errors import PlanError, door
from .batch import check_splits
from .capture.blocks import Reuse
from .checks.refusals import check_example
from .compiler import PASSES
from .options import Batching, Options
from .parallel import step_on_mesh
from .passes.mesh import sharded_step
from .passes.state import Subject, run, step_goal
from .training_step import LossFunction, LossModel

if TYPE_CHECKING:
    from ..pipeline_parallel.mesh.traffic import RankMemory, ShardedStep

CONTEXT_BYTES = 500 * 2**20
"""Memory of a CUDA context, about: PyTorch counts it nowhere, ``nvidia-smi`` shows it."""
NCCL_BYTES = 2 * 32 * 4 * 2**20
"""Memory of NCCL for a group of ranks, about: 32 channels (``NCCL_MAX_NCHANNELS``), each with a
buffer of 4 MiB (``NCCL_BUFFSIZE``) to each of two neighbours. (NCCL's guide, environment variables)
"""

Plan = Mapping[str, Any] | Literal["auto"] | None


@dataclass(frozen=True)
class Fit:
    """Says whether a step fits on each rank of a mesh. ``print(fit)`` shows it.

    Attributes:
        target: the GPU.
        limit_bytes: of its memory.
        way: the plan and the recompute policy, in words.
        step: what lies where, and what is moved.
        memory: of one rank.
        compute_s: of the launches, by the roofline.
        links: rates of the mesh; None takes those of this package.
        instead: where it does not fit, the fastest of what was tried that does.
    """

    target: Target
    limit_bytes: int
    way: str
    step: ShardedStep
    memory: RankMemory
    compute_s: float
    links: Links | None = None
    instead: Fit | None = None

    @property
    def seconds(self) -> float:
        """Seconds that a step takes at the least.

        Launches with the collectives that nothing runs beside, or all collectives.
        """
        alone = replace(
            self.step, collectives=tuple(c for c in self.step.collectives if not c.num_beside)
        )
        alone_s, all_s = (collectives_s(step, self.links) for step in (alone, self.step))
        return max(self.compute_s + alone_s, all_s)

    @property
    def fits(self) -> bool:
        """Whether a rank has that much memory."""
        return self.memory.num_bytes <= self.limit_bytes

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.step.layouts.axes)
        lines = [f"{axes}, each rank a {self.target.board}; {self.way}; compiled, not run"]
        lines += [f"  {n:<12}{b / GIB:8.2f} GiB  {_WHAT[n]}" for n, b in vars(self.memory).items()]
        left = self.limit_bytes - self.memory.num_bytes
        verdict = f"fits, {left / GIB:.2f} are left" if left >= 0 else "does NOT fit"
        held = self.memory.num_bytes / GIB
        lines.append(f"  {'in all':<12}{held:8.2f} GiB  of {self.limit_bytes / GIB:.2f}: {verdict}")
        moved = self.step.num_bytes / GIB
        lines.append(f"  a step takes {self.seconds:.3g} s at least and moves {moved:.2f} GiB")
        if self.instead is not None:
            lines += ["what fits:", str(self.instead)]
        elif not self.fits:
            lines.append("nothing that was tried fits: take more ranks, or a smaller batch")
        return "\n".join(lines)


_WHAT = {
    "parameters": "parts of parameters and buffers",
    "gradients": "parts of gradients",
    "batch": "rows of the batch",
    "arena": "activations, results of collectives, scratch: planned",
    "launches": "allocated by launches: attention, cuBLAS",
    "optimizer": "the optimizer's tensors",
    "outside": "CUDA context, NCCL: not measured",
}


@door
def fit(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mapping[str, int],
    target: str,
    plan: Plan = None,
    memory_bytes_per_rank: int | None = None,
    micro_batches: int = 1,
    recompute: PolicyName | None = None,
    optimizer_tensors: int = 2,
    loss_fn: LossFunction | None = None,
    links: Links | None = None,
    reuse: Reuse = "auto",
) -> Fit:
    """Says what a rank of a mesh holds in a training step, and whether it fits; runs nothing.

    One rank's program is compiled and its memory planned as :func:`parallelize` would on that GPU.
    There need be no GPU and no other process, and the model may be on the meta device. Where it
    does not fit, further recompute and the plan that is found (``plan="auto"``) are tried.

    Args:
        model: the whole model; see :func:`parallelize`.
        args: an example of the whole batch; only layouts matter.
        kwargs: its keyword inputs.
        mesh: size of each dimension, by its name.
        target: the GPU of a rank, ``"cuda:sm_90"``.
        plan: see :func:`parallelize`.
        memory_bytes_per_rank: instead of the memory of the GPU.
        micro_batches: parts of the batch.
        recompute: ``"selective"`` or ``"full"``.
        optimizer_tensors: of a parameter's size that the optimizer holds: two of AdamW's with
            ``fused=True``, none of SGD's.
        loss_fn: computes the scalar loss from the model's output.
        links: rates of the mesh, as :func:`measure_links` returned or wrote them; without, those
            of this package.
        reuse: ``"auto"``, ``"marked"`` or ``"off"``, as in ``compile``.

    Raises:
        PlanError: if the model cannot be split so, or torch.distributed is initialized here.

    Example:
        >>> with torch.device("meta"):
        ...     model, ids = Llama(layers=32), torch.zeros(16, 8192, dtype=torch.long)
        >>> print(lazyinline.fit(model, (ids, ids), mesh={"fsdp": 8}, target="cuda:sm_90"))
    """
    check_example("fit", model, args)
    sizes = mesh.values() if isinstance(mesh, Mapping) else [0]
    if not all(type(n) is int and 0 < n <= 2**20 for n in sizes):
        raise PlanError(
            f"mesh={mesh!r} is not the number of ranks, 1 to {2**20:,}, along each dimension by "
            'its name, such as {"fsdp": 8, "tp": 2}.'
        )
    if optimizer_tensors < 0 or (memory_bytes_per_rank is not None and memory_bytes_per_rank <= 0):
        raise PlanError(
            f"optimizer_tensors={optimizer_tensors} and memory_bytes_per_rank="
            f"{memory_bytes_per_rank}: the first is at least 0, and the second more."
        )
    leaves, tree = torch_pytree.flatten((tuple(args), dict(kwargs or {})))
    parts = torch_pytree.unflatten([_part(leaf, micro_batches) for leaf in leaves], tree)
    subject = Subject(LossModel(model, loss_fn), *parts)
    offline = _Offline(
        subject,
        Batching(micro_batches),
        mesh,
        target_named(target),
        memory_bytes_per_rank,
        optimizer_tensors,
        reuse,
        links,
    )
    asked = offline.fit(plan, recompute)
    if asked.fits:
        return asked
    more = _BY_COST[_BY_COST.index(recompute) + 1 :]
    ways = (offline.fit(plan, policy) for policy in ([] if plan == "auto" else more))
    found = [*islice((one for one in ways if one.fits), 1), *offline.found()]
    return replace(asked, instead=min(found, key=lambda one: one.seconds, default=None))


def _part(leaf: Any, count: int) -> Any:
    """Returns the part of a leaf of the batch, which may be without memory, in a micro-batch."""
    if not isinstance(leaf, Tensor) or count == 1:
        return leaf
    if count < 1:
        raise PlanError(f"micro_batches={count}: there must be at least one.")
    check_splits([leaf], count)
    # A copy: a program is compiled for a micro-batch of its own memory, not for a view.
    return leaf[: leaf.shape[0] // count].clone()


@dataclass(frozen=True)
class _Offline:
    """Compiles one rank's program of a step, in one way or another."""

    subject: Subject
    batching: Batching
    mesh: Mapping[str, int]
    target: Target
    memory_bytes: int | None
    optimizer_tensors: int
    reuse: Reuse
    links: Links | None

    @property
    def limit_bytes(self) -> int:
        return self.memory_bytes or self.target.memory_bytes

    def found(self) -> Iterator[Fit]:
        """Yields a plan that is found to fit, with recompute where that is faster, if one is."""
        room_bytes = None
        for _ in range(_ATTEMPTS):
            try:
                one = self.fit("auto", None, room_bytes)
            except PlanError:  # nothing fits into that
                return
            if one.fits:
                yield one
                return
            # What a closure needs meanwhile is not planned with: less room for the rest.
            held_bytes = one.step.layouts.held_bytes
            room_bytes = held_bytes - (one.memory.num_bytes - self.limit_bytes)

    def fit(self, plan: Plan, recompute: PolicyName | None, room_bytes: int | None = None) -> Fit:
        """Compiles a plan.

        Args:
            plan: to be compiled.
            recompute: what is computed again.
            room_bytes: that a plan that is found may take.
        """
        # Imported late: DTensor takes as long to import as all of lazyinline.
        from ..pipeline_parallel.mesh.given import PIPELINE, check_mesh
        from ..pipeline_parallel.mesh.torch_collectives import absent_ranks

        if stages := set(PIPELINE) & set(self.mesh):
            raise PlanError(
                f"fit counts no stages of a pipeline yet: leave {min(stages)!r} out, and fit the "
                "layers of one stage."
            )
        options = Options(
            reuse=self.reuse, recompute=recompute, cache="disk", target=self.target.name
        )
        with absent_ranks(self.mesh) as mesh:
            # Rates are to find a plan by; one that is given takes none.
            goal, links = step_goal(self.batching), self.links if plan == "auto" else None
            check_mesh(mesh, any_names=plan == "auto")
            state = step_on_mesh(self.subject, goal, mesh, plan, room_bytes, options, links)
            with state.context.cached(state.report):
                state = run(PASSES, state)
            step = sharded_step(state)
        assert step.memory is not None
        assert state.report.gpu is not None
        memory = replace(
            step.memory,
            optimizer=self.optimizer_tensors * step.memory.gradients,
            outside=CONTEXT_BYTES + NCCL_BYTES * len(self.mesh),
        )
        way = "the plan that was found" if plan == "auto" else "the plan as given"
        if again := recompute or step.layouts.recompute:
            way += f", recompute {again}"
        compute_s = state.report.gpu.prediction.cost.seconds
        return Fit(self.target, self.limit_bytes, way, step, memory, compute_s, self.links)


_BY_COST: tuple[PolicyName | None, ...] = (None, "selective", "full")
_ATTEMPTS = 4


def collectives_s(step: ShardedStep, links: Links | None = None) -> float:
    """Returns what the collectives of a step take, one after the other."""
    from ..pipeline_parallel.mesh.layouts import Moves
    from ..pipeline_parallel.mesh.planner import axes_of_mesh

    names, sizes = zip(*step.layouts.axes, strict=True)
    moves = Moves(axes_of_mesh(names, sizes, "cuda", links))
    places = {name: axis for axis, name in enumerate(names)}
    return sum(sum(moves.taken_s(c.kind, places[c.axis], c.num_bytes)) for c in step.collectives)
