"""Adapter: a generated function, the binding of its names to memory, and its use of PyTorch.

It uses PyTorch for a profiler's ranges and to check the layouts of results. The layout of a result
that a launch allocates cannot be planned: it is predicted by the operator's fake kernel, which may
be wrong for a custom operator.
"""

from __future__ import annotations

import ctypes
import re
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import CodeType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch

from ...reuse.errors import PlanError
from ...reuse.ir.size_tape import Numbers, Size
from ...reuse.ir.types import TensorType, reach
from ...reuse.torch_names import new_cpu_tensor
from ..arena import IntArray
from ..gpu.torch_cuda import TritonKernel
from ..launches import kernel_list
from ..launches.kernel_list import View
from ..launches.torch_native import no_address
from .layout import Layout, Placed, PlacedLaunch
from .placement import Place, Tools

ARENA_SLOT = 0

Runner: TypeAlias = Callable[[list[Any]], list[Any]]
"""Runs a part on a list of tensors, and empties the list."""


@dataclass
class GeneratedCode:
    """Source of one part, and what must be bound before it runs."""

    source: str = ""
    # Which of the part's inputs a run takes, in order; foreign buffers follow.
    inputs: list[int] = field(default_factory=list)
    # Name -> kernel or constant, the same for every binding.
    constants: dict[str, Any] = field(default_factory=dict)
    arena_views: dict[str, Placed] = field(default_factory=dict)  # name -> place in the arena
    model_views: dict[str, Placed] = field(default_factory=dict)  # name -> view of a model tensor
    num_made_per_run: int = 0
    # The operations of the native loop.
    words: array[int] = field(default_factory=lambda: array("q"))
    # Positions of words that depend on sizes, each with its size.
    sizes: list[tuple[int, Size]] = field(default_factory=list)
    # Instance -> slot of the native address table, for tensors that are bound beforehand.
    slots: dict[int, int] = field(default_factory=dict)
    # Region of the arena -> slot, for a program that is bound region by region.
    regions: dict[int, int] = field(default_factory=dict)
    # Further device -> slot of its arena.
    arenas: dict[torch.device, int] = field(default_factory=dict)
    # Size of the table; slots of addresses that are known only in a run come last.
    num_slots: int = 1

    @cached_property
    def _views(self) -> list[dict[str, Placed]]:
        """The views that depend on sizes."""
        both = (self.arena_views, self.model_views)
        return [{n: one for n, one in views.items() if one.has_size} for views in both]

    @cached_property
    def _places(self) -> tuple[IntArray, IntArray]:
        """The positions of the words that are sizes, and the numbers of these sizes."""
        places = np.array([(place, size.place) for place, size in self.sizes])
        return places[:, 0], places[:, 1]

    @cached_property
    def _names(self) -> dict[str, int]:
        """The names of sizes in the source, and their places."""
        return {f"n{n}": int(n) for n in re.findall(r"\bn(\d+)\b", self.source)}

    def at(self, numbers: Numbers) -> GeneratedCode:
        """Returns the same code at other sizes."""
        part = self.part_at(numbers)
        arena, model = {**self.arena_views, **part.arena_views}, self.model_views
        return replace(
            self,
            words=part.words,
            arena_views=arena,
            model_views={**model, **part.model_views},
            constants={**self.constants, **part.constants},
        )

    def part_at(self, numbers: Numbers, moved: Collection[int] = ()) -> GeneratedCode:
        """Returns the part of the code that differs at other sizes, or where tensors have moved."""
        words = array("q", self.words)
        if self.sizes:
            places, which = self._places
            np.frombuffer(words, np.int64)[places] = np.take(numbers.column, which)
        arena, model = ({n: views[n].at(numbers) for n in views} for views in self._views)
        if moved:
            views = self.model_views.items()
            model.update((n, p.at(numbers)) for n, p in views if p.instance in moved)
        return GeneratedCode(
            constants={name: numbers.computed[place] for name, place in self._names.items()},
            arena_views=arena,
            model_views=model,
            words=words,
            slots={instance: self.slots[instance] for instance in moved if instance in self.slots},
        )


@dataclass(frozen=True)
class Memory:
    """Binds generated functions to an arena and to the model's tensors."""

    arena: torch.Tensor  # the bytes of the arena
    # The offset of each instance that a function has a view of.
    offsets: Sequence[int] | Mapping[int, int]
    tensors: Mapping[int, torch.Tensor]  # the model's, by instance
    tools: Tools  # load kernels and the native loop
    # Where regions of the arena start, for a program that is bound by regions.
    region_starts: Mapping[int, int] = field(default_factory=dict)
    # Arenas on further devices.
    others: Mapping[torch.device, torch.Tensor] = field(default_factory=dict)
    # The further device of each instance that is on one.
    device_of: Mapping[int, torch.device] = field(default_factory=dict)

    def runner(self, code: GeneratedCode, compiled: CodeType, **names: Any) -> Runner:
        """Returns a part's function bound to this memory, with ``names`` as further globals."""
        load = self.tools.place.load
        scope: dict[str, Any] = {
            name: load(value) if isinstance(value, TritonKernel) else value
            for name, value in code.constants.items()
        }
        scope.update(_bind_device(self.arena.device))
        scope.update(self._bind_arenas(code.arena_views))
        scope.update(_bind_model(code.model_views, self.tensors))
        if code.words:
            scope.update(self.native_names(code))
        return _defined(compiled, scope, {**names, "profiler": PROFILER})

    def runner_like(
        self, like: Runner, part: GeneratedCode, compiled: CodeType, **names: Any
    ) -> Runner:
        """Returns a part's function ``like`` another on the same arena, with names rebound.

        ``part`` has the names to rebind; see :meth:`GeneratedCode.part_at`.
        """
        scope = {**like.__globals__, **part.constants}
        scope.update(self._bind_arenas(part.arena_views))
        scope.update(_bind_model(part.model_views, self.tensors))
        if part.words:
            # Functions on one arena run in turn, but each needs the addresses of its own inputs.
            addresses = type(scope["addresses"]).from_buffer_copy(scope["addresses"])
            for instance, slot in part.slots.items():
                addresses[slot] = self.tensors[instance].data_ptr()
            scope["owned"] = (part.words, self.arena, self.others, self.tensors)
            scope["words"] = part.words.buffer_info()[0]
            scope["addresses"], scope["table"] = addresses, ctypes.addressof(addresses)
        return _defined(compiled, scope, names)

    def native_names(self, code: GeneratedCode) -> dict[str, Any]:
        """Makes the address table of one lease, or of one run with its own regions."""
        library, start = self.tools.native(), self.arena.data_ptr()
        addresses = (ctypes.c_int64 * code.num_slots)()
        addresses[ARENA_SLOT] = start
        for region, slot in code.regions.items():
            addresses[slot] = start + self.region_starts[region]
        for device, slot in code.arenas.items():
            addresses[slot] = self.others[device].data_ptr()
        for instance, slot in code.slots.items():
            addresses[slot] = self.tensors[instance].data_ptr()
        # Memory that is used by address must be kept alive: after ``parameter.data = ...`` the
        # parameter no longer does that.
        tensors = [self.tensors[instance].detach() for instance in code.slots]
        return {
            "run_native": library.run,
            "words": code.words.buffer_info()[0],
            "owned": (code.words, self.arena, self.others, tensors),
            "addresses": addresses,
            "table": ctypes.addressof(addresses),
            "no_address": no_address,
            "fail": kernel_list.fail,
        }

    def _bind_arenas(self, views: Mapping[str, Placed]) -> dict[str, torch.Tensor]:
        """Makes all views of arenas."""
        typed: dict[tuple[torch.device | None, torch.dtype], torch.Tensor] = {}
        bound = {}
        for name, placed in views.items():
            device = self.device_of.get(placed.instance)
            if (device, placed.dtype) not in typed:
                arena = self.arena if device is None else self.others[device]
                typed[device, placed.dtype] = arena.view(placed.dtype)
            start = (self.offsets[placed.instance] + placed.offset_bytes) // placed.dtype.itemsize
            whole = typed[device, placed.dtype]
            bound[name] = whole.as_strided(placed.shape, placed.stride, start)
        return bound


def _defined(compiled: CodeType, scope: dict[str, Any], names: Mapping[str, Any]) -> Runner:
    """Returns the function that code defines, with a scope and further names as its globals."""
    scope.update(names)
    exec(compiled, scope)
    # Popped: a reference cycle would keep the arena alive until a garbage collection.
    program: Runner = scope.pop("program")
    return program


def launch_apart(
    layout: Layout, place: Place, numbers: Numbers, launched: set[TritonKernel]
) -> None:
    """Launches each GPU kernel that is not in ``launched`` once, on memory of its own."""

    def operand(value: Any, placed: PlacedLaunch) -> Any:
        if not isinstance(value, View):
            return numbers.of(value)
        at = placed.place(value).at(numbers)
        device = layout.instances[at.instance].device or place.device
        # Zeros, which are in range if the tensor holds indices.
        zeros = torch.zeros(max(reach(at.shape, at.stride), 1), dtype=at.dtype, device=device)
        return zeros.as_strided(at.shape, at.stride)

    for placed in (one for part in layout.parts for one in part.launches):
        kernel = placed.launch.function
        if isinstance(kernel, TritonKernel) and kernel not in launched:
            place.load(kernel)(*(operand(value, placed) for value in placed.launch.args))
            launched.add(kernel)


def _bind_device(device: torch.device) -> dict[str, Any]:
    """Returns the functions that allocate tensors in a run, for its device."""

    def new(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    made = new_cpu_tensor if device.type == "cpu" else new
    return {"new_tensor": made, "as_predicted": partial(as_predicted, device=device)}


def _bind_model(
    views: Mapping[str, Placed], tensors: Mapping[int, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Makes all views of model tensors, which alias the tensors."""
    bound = {}
    for name, placed in views.items():
        tensor = tensors[placed.instance].detach()
        offset = placed.offset_bytes // placed.dtype.itemsize
        same = tuple(tensor.shape) == placed.shape and tensor.stride() == placed.stride
        if same and not offset and tensor.dtype == placed.dtype:
            bound[name] = tensor
        else:
            bound[name] = view_of(tensor, placed.shape, placed.stride, offset, placed.dtype)
    return bound


def view_of(
    base: torch.Tensor,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Makes a view of a tensor that is known only at run time; ``offset`` counts from its start."""
    start = base.storage_offset()
    if base.dtype != dtype:  # `view(dtype)` takes neither 0-d nor transposed tensors
        start = start * base.element_size() // dtype.itemsize
        base = torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage())  # type: ignore[call-overload]
    return torch.as_strided(base, shape, stride, start + offset)


PROFILER: ModuleType = torch.autograd.profiler
IF_IT_RUNS = "profiler._is_profiler_enabled"
"""The check for a running profiler in generated code, where ``profiler`` is :data:`PROFILER`."""
check_layout = torch._C._dynamo.guards.assert_size_stride
"""Raises AssertionError if a tensor has another shape, or other strides in dimensions above 1."""


def as_predicted(
    result: Any,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    operator: str,
    *,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Copies a result into the layout that later launches read; PlanError for another type."""
    device = device or (result.device if isinstance(result, torch.Tensor) else torch.device("cpu"))
    predicted = TensorType(dtype, tuple(shape), tuple(stride), device)
    if not isinstance(result, torch.Tensor):
        found = f"a {type(result).__name__}"
    elif (
        (tuple(result.shape), result.device) != (tuple(shape), device)
        # For an empty tensor some kernels return another dtype: native_dropout a float mask.
        or (result.dtype != dtype and result.numel())
    ):
        found = f"{TensorType.of(result)} on {result.device}"
    else:
        with torch.no_grad():
            return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(result)
    raise PlanError(
        f"The operator {operator} returned {found}, and its fake kernel says {predicted} on "
        f"{device}. "
        "Programs are laid out by the fake kernel: mend it (torch.library.register_fake)."
    )


def begin_range(name: str) -> Any:
    """Begins a named profiler range; returns it."""
    shown = torch.profiler.record_function(name)
    shown.__enter__()
    return shown


def end_range(shown: Any) -> None:
    """Ends a profiler range. One that is dropped, after an error, ends as well."""
    shown.__exit__(None, None, None)


def profiled(
    writer: Callable[..., Any], memory: Memory, names: Mapping[str, Any], numbers: Numbers
) -> Runner:
    """Returns a part's function with a profiler range for each call of a block and each launch."""
    made: list[Runner] = []

    def run(inputs: list[Any]) -> list[Any]:
        if not made:  # a profiler runs for the first time
            shown = begin_range("lazyinline: a program is bound for the profiler")
            code = writer(ranges="shown").write().at(numbers)
            compiled = compile(code.source, "<lazyinline program, profiled>", "exec")
            named = {"begin": begin_range, "end": end_range, **names}
            made.append(memory.runner(code, compiled, **named))
            end_range(shown)
        return made[0](inputs)

    return run
