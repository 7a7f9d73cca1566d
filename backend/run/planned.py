"""A planned program: every buffer has an address, and a run is one launch after the other.

There is one :class:`PlannedProgram` per linked program. Each run in flight has a :class:`Lease` on
an arena of its own, in which all views are bound. Arenas return to a pool when their leases are
released or dropped, so a training loop binds once, and two forwards before a backward get two
arenas. If memory is not planned, each closure is one launch that allocates its results.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType
from typing import Any, Literal, TypeAlias

import torch

from ...reuse.ir.leaf import without_autocast
from ...reuse.ir.program import Leaf
from ...reuse.ir.size_tape import PLAIN, Numbers, Size
from ...reuse.ir.types import HOST
from ...reuse.torch_names import version_of
from ..arena import ALIGNMENT, ArenaPlan
from ..gpu.torch_cuda import Capture, TritonKernel, capture_graph, captured_once
from ..launches import torch_native
from ..launches.kernel_list import KernelList
from ..launches.torch_native import check_addresses, check_memory
from ..link import layout
from ..link.link import FlatProgram
from ..link.placement import (
    TOOLS,
    Tools,
    check_aligned,
    check_tensors_aligned,
    copy_of_host,
    gradients_of,
    planned,
    planned_overlaid,
)
from ..link.program_writer import CodeWriter, host_base
from ..link.torch_generated import Memory, Runner, as_predicted, launch_apart, profiled
from .leases import Arena, Arenas, Lease, address_of, new_memory


class PlannedProgram:
    """One or two flat programs (a forward, and its backward) over one planned arena.

    On a GPU a program with pinned results is one CUDA graph; ``why_no_graph`` is the reason if not.
    """

    def __init__(
        self,
        flats: Sequence[FlatProgram],  # in the order they run
        kernel_lists: Mapping[Leaf, KernelList],
        model_inputs: Sequence[int],  # of the first program: the model's own tensors
        num_results: Sequence[int],  # per program, of its outputs: the first go to the user
        # For a backward, where each input comes from: ("output", i) or ("input", i) of the forward,
        # or ("new", type).
        backward_inputs: Sequence[tuple[str, Any]] = (),
        # "owned" allocates results in each run, for the user to keep; "pinned" leaves every output
        # at one place in the arena until the next run. If all launches allocate their results, so
        # that the arena is empty: "allocated" returns them, "copied" returns copies at the same
        # addresses in every run.
        results: layout.Results = "owned",
        tools: Tools = TOOLS,
        # "apart" allocates them when the backward begins; "overlaid" when the forward begins, and
        # their memory holds activations until they are written.
        gradients: Literal["apart", "overlaid"] = "apart",
        names: Sequence[str] = (),  # the user's, of the first of ``model_inputs``
        roots: Sequence[object] = (),  # what each result is a view of; equal ones share memory
    ) -> None:
        self._names = names
        target = tools.place.target
        self.layout = layout.layout_of(
            flats,
            kernel_lists,
            num_results,
            backward_inputs,
            results,
            tools.place.launches,
            roots,
            tools.place.others,
        )
        check_aligned(self.layout, kernel_lists)
        if target is not None:
            layout.add_workspaces(self.layout, target)
        given = self.layout.parts[0].inputs
        self.model_instances = {i: given[i].instance for i in model_inputs}
        self.plans: list[ArenaPlan] = []  # the memory plans that the tools returned, in order
        noting = replace(tools, plan=partial(self._noted, tools.plan))
        found = planned_overlaid(self.layout, noting) if gradients == "overlaid" else None
        found = found or planned(self.layout, noting)
        self.offsets, self.plan, self.arena_bytes, self.overlay, self.other_bytes = found
        self._tools = tools
        self._results = results
        self._capture: Capture = capture_graph
        types_ = (t for flat in flats for t in flat.slot_types)
        is_on_gpu = target is not None or any(t.device.type == "cuda" for t in types_)
        self.why_no_graph = self._hindrance() if is_on_gpu else ""
        self._writers = self._writers_of(num_results)
        self._codes = [writer(ranges="offered").write() for writer in self._writers]
        # Compiled once; each arena executes the code in a namespace with its own views.
        self._compiled: list[CodeType] = [
            compile(code.source, "<lazyinline program>", "exec") for code in self._codes
        ]
        self._arenas, self._key = Arenas(), object()
        self._numbers = PLAIN
        self._launched: set[TritonKernel] = set()

    def _hindrance(self) -> str:
        if self.allocates_all:
            return "memory is not planned"
        if self.layout.others:
            return "it works on several devices"
        owned = "results and gradients are the user's, in new memory; those of compile_step are not"
        return "" if self._results == "pinned" else owned

    def _noted(self, plan: Callable[..., ArenaPlan], *asked: Any) -> ArenaPlan:
        self.plans.append(plan(*asked))
        return self.plans[-1]

    def at(self, numbers: Numbers) -> PlannedProgram:
        """Returns the same program at other sizes, for which its buffers have room."""
        for name in ("_device_of", "_made_bytes", "_outside", "is_native"):
            getattr(self, name)  # cached before the copy
        made = copy.copy(self)
        made._numbers, made._key = numbers, object()
        return made

    @property
    def rooms(self) -> list[tuple[int, int]]:
        """The bytes of each buffer of symbolic size, and the bytes reserved for it."""
        placed = [b.num_bytes for b in self.layout.instances if b.kind == "arena"]
        found = {repr(size): size for size in placed if type(size) is Size}
        return [(size, -(-int(size) // ALIGNMENT) * ALIGNMENT) for size in found.values()]

    def _writers_of(self, num_results: Sequence[int]) -> list[partial[CodeWriter]]:
        """Returns the writer of each part's function."""
        handed = (*layout.handed_on(self.layout), *self.overlay.hosts)
        return [
            partial(
                CodeWriter,
                self.layout,
                self.offsets,
                part,
                set(self.model_instances.values()),
                num_results[index],
                handed if index else (),
                () if index else handed,
                overlay=self.overlay,
            )
            for index, part in enumerate(self.layout.parts)
        ]

    @property
    def native(self) -> torch_native.NativeLibrary | None:
        """The native library, if this program needs it anyway."""
        return self._tools.native() if any(code.words for code in self._codes) else None

    def inputs_of(self, part: int) -> list[int]:
        """Returns which inputs of a part its runner gets (others are bound, or in the arena)."""
        return self._codes[part].inputs

    @property
    def num_hosts(self) -> int:
        """Number of gradients that a forward allocates; they come after its foreign buffers."""
        return len(self.overlay.hosts)

    @property
    def num_launches(self) -> int:
        """Kernel launches in one run of all parts."""
        return sum(len(part.launches) for part in self.layout.parts)

    @functools.cached_property
    def is_native(self) -> bool:
        """Whether no launch runs from Python, where the caller's modes would reach it."""
        return all(p.launch.native is not None for part in self.layout.parts for p in part.launches)

    @property
    def allocates_all(self) -> bool:
        """Whether each launch is a closure that allocates its results."""
        return self._results in ("allocated", "copied")

    @property
    def outside_bytes(self) -> int:
        """Most bytes at one time that launches allocate: results, scratch, cuBLAS's workspace."""
        return layout.most_bytes(self._outside, self._numbers)

    @functools.cached_property
    def _outside(self) -> list[tuple[int, int]]:
        return layout.changes(layout.outside(self.layout))

    @property
    def workspace_bytes(self) -> int:
        """Bytes of cuBLAS's workspace, which is among them all the time."""
        return sum(b.num_bytes for b in self.layout.workspaces)

    @property
    def held_bytes(self) -> int:
        """Most bytes that a run holds: in the arena, and outside of it."""
        return self.plan.peak_bytes + self.outside_bytes

    @property
    def result_bytes(self) -> int:
        """Bytes of the user's results, without gradients that the plan places."""
        return sum(map(self._numbers.of, self._made_bytes))

    @functools.cached_property
    def _made_bytes(self) -> list[int]:
        """Bytes of results: one sum for all of fixed size, then each of symbolic size."""
        planned = set(gradients_of(self.layout)) if self.overlay.hosts else set()
        instances = enumerate(self.layout.instances)
        made = [b.num_bytes for i, b in instances if b.kind == "result" and i not in planned]
        sized = [n for n in made if type(n) is Size]
        return [sum(n for n in made if type(n) is not Size), *sized]

    @property
    def num_made_per_run(self) -> int:
        """Number of tensors that one run allocates: the user's results, and foreign ones."""
        return sum(code.num_made_per_run for code in self._codes)

    def foreign_launches(self) -> list[str]:
        """Returns the names of the launches that allocate their own results, outside the plan."""
        launches = (p.launch for part in self.layout.parts for p in part.launches)
        return [launch.name for launch in launches if launch.results]

    def check_is_here(self) -> None:
        """Raises PlanError if the program was compiled for a device that is not here."""
        self._tools.place.check_is_here()

    def lease(self, tensors: list[torch.Tensor], before: Lease | None = None) -> Lease:
        """Returns a lease on an arena, with the model's present tensors bound.

        Most bindings are taken from ``before``, the lease of another shape, if there is one.
        """
        self.check_is_here()
        # A lease keeps the memory alive that it is bound to, so equal addresses are the same
        # memory. Equal tensor objects are not: `parameter.data = ...` changes their memory.
        addresses = list(map(address_of, tensors))
        arenas = self._arenas
        with arenas.lock:
            if addresses != arenas.addresses:
                # Where shapes take turns, tensors that another lease has checked are not new.
                seen = {*arenas.addresses, *(before.addresses if before is not None else ())}
                moved = [i for i, address in enumerate(addresses) if address not in seen]
                names = [self._names[i] if i < len(self._names) else "" for i in moved]
                check_memory([tensors[i] for i in moved], names)
                if self._tools.place.device.type == "cuda":
                    check_tensors_aligned(tensors, self._names)
                arenas.addresses = addresses
                arenas.idle.clear()
            arena = arenas.taken(self._key)
            arenas.use.begin()
        known = arena.bound.get(self._key) if arena is not None else None
        if known is None or known.addresses != addresses:
            known = self._bound(tensors, addresses, arena, before)
        return known.owned_by(self.release, arena)

    def followed(self, lease: Lease) -> Lease:
        """Returns a lease bound to its tensors' present addresses; RuntimeError if one is freed."""
        if lease.is_bound_to(lease.tensors):
            return lease
        check_memory(lease.tensors, self._names)
        addresses = list(map(address_of, lease.tensors))
        bound = self._bind(lease.tensors, addresses, lease.arena, lease.others)
        lease.take_back = None  # the other one will give the arena back
        return bound.owned_by(self.release, lease.home)

    def release(self, lease: Lease) -> None:
        """Takes an arena back."""
        arenas = self._arenas
        with arenas.lock:
            arenas.use.end()
            # An arena that is bound to other tensors than the present ones cannot be used again.
            if lease.addresses == arenas.addresses and lease.has_its_arena():
                home = lease.home or Arena(lease.arena, lease.others)
                home.bound[self._key] = lease.owned_by(None)
                arenas.idle.append(home)
            del arenas.idle[arenas.use.num_idle_kept :]

    def _bound(
        self,
        tensors: list[torch.Tensor],
        addresses: list[int],
        known: Arena | None,
        before: Lease | None,
    ) -> Lease:
        device = self._tools.place.device
        try:
            if known is not None:
                other = next(reversed(known.bound.values()), None)
                return self._bind(tensors, addresses, known.memory, known.others, other)
            if self._results == "pinned" and (pinned := self._arenas.pinned_by_others(self._key)):
                return self._bind(tensors, addresses, pinned[0], {}, before)
            if self._tools.place.first_launches == "apart":
                launch_apart(self.layout, self._tools.place, self._numbers, self._launched)
            arena = new_memory(self.arena_bytes, device)
            others = {
                other: new_memory(n, other, pinned=other == HOST and device.type == "cuda")
                for other, n in self.other_bytes.items()
            }
            if self._results == "pinned" and not others:
                self._arenas.pin(arena, self._key)
            return self._bind(tensors, addresses, arena, others)
        except BaseException:
            with self._arenas.lock:
                self._arenas.use.end()
            raise

    def rest(self) -> None:
        """Frees the idle arenas, and drops the model's tensors that are bound in them."""
        with self._arenas.lock:
            self._arenas.forget(self._key)

    def copy_of(
        self, lease: Lease, handed: Sequence[torch.Tensor]
    ) -> tuple[Lease, list[torch.Tensor]]:
        """Returns a lease on a copy of an arena, and copies of the tensors that were handed on."""
        twin = self.lease(lease.tensors)
        twin.arena.copy_(lease.arena)
        for device, arena in twin.others.items():
            arena.copy_(lease.others[device])
        foreign = len(handed) - self.num_hosts
        # Foreign tensors are only read, so both share them; hosts are written, so they are copied.
        return twin, [*handed[:foreign], *map(copy_of_host, handed[foreign:])]

    def taken_over(
        self, other: PlannedProgram, lease: Lease, handed: Sequence[torch.Tensor]
    ) -> tuple[Lease, list[torch.Tensor]]:
        """Copies what another program of the same forward saved into an arena of this one.

        Returns the lease on the arena, and the tensors to hand on to this program's backward.
        """
        # The two backwards differ, so their saved tensors are at different offsets.
        twin = self.lease(lease.tensors)
        foreign = list(handed[: len(handed) - other.num_hosts])
        bases = [host_base(self.layout, instance) for instance in self.overlay.hosts]
        hosts = [torch.empty_strided(b.shape, b.stride, dtype=b.dtype, device="cpu") for b in bases]
        for instance in dict.fromkeys(p.instance for p in self.layout.parts[1].inputs):
            if self.layout.instances[instance].kind == "arena":
                saved = other.memory_of(instance, lease, handed[len(foreign) :])
                self.memory_of(instance, twin, hosts).copy_(saved)
        return twin, [*foreign, *hosts]

    def memory_of(self, instance: int, lease: Lease, hosts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the bytes of a buffer, in an arena or in the gradient that hosts it."""
        host, start = self.overlay.guests.get(instance, (-1, self.offsets[instance]))
        device = self.layout.instances[instance].device
        memory = lease.arena if device is None else lease.others[device]
        if host >= 0:
            storage = hosts[self.overlay.hosts.index(host)].untyped_storage()
            memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)  # type: ignore[call-overload]
        num_bytes = self._numbers.of(self.layout.instances[instance].num_bytes)
        return memory[start : start + num_bytes]

    def _bind(
        self,
        tensors: list[torch.Tensor],
        addresses: list[int],
        arena: torch.Tensor,
        others: Mapping[torch.device, torch.Tensor],
        other: Lease | None = None,
    ) -> Lease:
        """Binds an arena; takes most bindings from another shape's lease on it, if there is one."""
        is_alike = other is not None and other.arena is arena and other.code is self._compiled
        other = other if is_alike and self._numbers is not PLAIN else None
        there = other.addresses if other is not None else [-1] * len(addresses)
        elsewhere = [i for i, (a, b) in enumerate(zip(addresses, there, strict=True)) if a != b]
        held = list(tensors if other is None else other.tensors)
        for index in elsewhere:
            # Detached: `parameter.data = ...` must not change the memory of the lease's tensor.
            held[index] = tensors[index].detach()
        instances = list(self.model_instances.values())
        tensor_of = dict(zip(instances, held, strict=True))
        moved = {instances[index] for index in elsewhere}
        memory = Memory(
            arena, self.offsets, tensor_of, self._tools, others=others, device_of=self._device_of
        )
        # Such closures may return tensors on any device, not only on that of an arena.
        names: dict[str, Any] = {"as_predicted": as_predicted} if self.allocates_all else {}
        runners = []
        for index, (writer, code, compiled) in enumerate(
            zip(self._writers, self._codes, self._compiled, strict=True)
        ):
            names["profiled"] = profiled(writer, memory, dict(names), self._numbers)
            if other is None:
                code = code if self._numbers is PLAIN else code.at(self._numbers)
                runners.append(memory.runner(code, compiled, **names))
            else:
                part = code.part_at(self._numbers, moved)
                runners.append(memory.runner_like(other.runners[index], part, compiled, **names))
        # A CUDA graph replays fixed addresses, so results must be at the same ones in each run.
        if self._tools.place.graphs == "captured" and self._results == "pinned":
            runners = [self._as_graph(runner) for runner in runners]
        if self._results == "copied":
            runners = [_at_one_place(runner, held) for runner in runners]
        return Lease(self._compiled, arena, tuple(runners), held, addresses, None, others)

    @functools.cached_property
    def _device_of(self) -> dict[int, torch.device]:
        """The devices of the buffers that are not on the planned device."""
        instances = enumerate(self.layout.instances)
        return {i: b.device for i, b in instances if b.device is not None}

    def _as_graph(self, runner: Runner) -> Runner:
        device, note = self._tools.place.device, partial(setattr, self, "why_no_graph")
        run = captured_once(lambda: runner([]), lambda *args: self._capture(*args), device, note)
        return lambda inputs: run()


def _at_one_place(runner: Runner, bound: Sequence[torch.Tensor]) -> Runner:
    """Wraps a runner to copy the results of each run into those of the first."""
    kept: list[torch.Tensor] = []

    def run(inputs: list[Any]) -> list[torch.Tensor]:
        check_addresses(bound)
        made = runner(inputs)
        if not kept:
            # Clones: users write to some results, and one may be an input or a kernel's constant.
            kept.extend(result.clone() for result in made)
        else:
            for result, new in zip(kept, made, strict=True):
                result.copy_(new)
        return kept

    return run


Graph: TypeAlias = Literal["keep", "free"]
"""Whether a backward keeps the saved tensors, so that it can run again, or frees them."""


@dataclass
class _Flight:
    lease: Lease
    foreign: list[torch.Tensor]  # results of launches, and gradients to be
    borrowed: list[tuple[torch.Tensor, int]]  # user inputs that were saved, and their versions


def closures_run(flat: FlatProgram, kernel_lists: Mapping[Leaf, KernelList]) -> Runner:
    """Returns a function that runs a flat program whose closures allocate their results."""
    program = PlannedProgram([flat], kernel_lists, [], [len(flat.outputs)], results="allocated")
    return program.lease([]).runners[0]


class Runtime:
    """Runs a forward, and the backward of a *flight*: what a forward keeps for its backward.

    Of the forward's outputs the user receives the leading ``num_results``, and the arena keeps
    ``num_saved`` for the backward.
    """

    def __init__(self, program: PlannedProgram, num_results: int, num_saved: int) -> None:
        self.program = program
        self.num_launches = program.num_launches
        self._num_results = num_results
        self._model = list(program.model_instances)
        self._given = program.inputs_of(0)
        self._has_backward = len(program.layout.parts) > 1
        needed = program.inputs_of(1) if self._has_backward else []
        self._operands = [i - num_saved for i in needed if i >= num_saved]
        self._borrowed = [_forward_input(program, i) for i in needed if i < num_saved]

    def at(self, numbers: Numbers) -> Runtime:
        """Returns the same runtime at other sizes, for which its buffers have room."""
        made = copy.copy(self)
        made.program = self.program.at(numbers)
        return made

    @property
    def hold(self) -> torch_native.Hold | None:
        """The native comparison of a guard, if it is at hand."""
        native = self.program.native
        return native.hold if native else None

    @without_autocast()
    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Runs the forward; returns the user's results, and the flight."""
        if self.program.allocates_all:
            check_addresses(inputs)
        lease = self.program.lease([inputs[i] for i in self._model])
        outputs = lease.runners[0]([inputs[i] for i in self._given])
        flight = None
        if self._has_backward:
            borrowed = [(inputs[i], version_of(inputs[i])) for i in self._borrowed]
            flight = _Flight(lease, outputs[self._num_results :], borrowed)
        else:
            lease.release()
        return outputs[: self._num_results], flight

    @without_autocast()
    def backward(
        self, flight: Any, operands: Sequence[torch.Tensor], graph: Graph
    ) -> list[torch.Tensor]:
        """Runs a backward on kept inputs, kept outputs and cotangents; returns the gradients."""
        lease, foreign = self.program.followed(flight.lease), flight.foreign
        flight.lease = lease
        given = [unchanged(tensor, version) for tensor, version in flight.borrowed]
        given += [operands[i] for i in self._operands]
        if graph == "keep":  # the backward works in the arena, so it gets one of its own
            lease, foreign = self.program.copy_of(lease, foreign)
        else:
            flight.foreign = []  # drops gradients, too, which belong to the user from here on
        given += foreign
        if self.program.allocates_all:
            check_addresses(given)
        del foreign  # so that each saved tensor is freed after its last use
        gradients = lease.runners[1](given)
        lease.release()
        return gradients

    def rest(self) -> None:
        """Frees the memory that is held while nothing runs."""
        self.program.rest()

    def taken_over(self, other: Any, flight: Any) -> Any:
        """Returns a flight of this runtime from one of another runtime with the same forward.

        The other flight stays valid.
        """
        flight.lease = other.program.followed(flight.lease)
        lease, handed = self.program.taken_over(other.program, flight.lease, flight.foreign)
        return _Flight(lease, handed, flight.borrowed)


def _forward_input(program: PlannedProgram, position: int) -> int:
    """Returns which forward input a saved value is, or is a view of."""
    forward, backward = program.layout.parts
    instance = backward.inputs[position].instance
    return [p.instance for p in forward.inputs].index(instance)


def unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """Returns a tensor; raises RuntimeError if it was changed in place since this version."""
    found = version_of(tensor)
    if found != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: an input of shape {tuple(tensor.shape)} is at version {found}; "
            f"expected version {version} instead."
        )
    return tensor
