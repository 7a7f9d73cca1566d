"""Adapter: a generated function, how its names are bound to memory, and what it asks of PyTorch.

It asks for a profiler's ranges and for the layouts of results. A launch that allocates its result
is the one thing that no plan can prove: its layout is what the operator's fake kernel said, which
for an operator of somebody else may be wrong.
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
from ..arena.live_ranges import IntArray
from ..gpu.torch_triton import TritonKernel
from ..launches import kernel_list
from ..launches.kernel_list import View
from ..launches.torch_native import no_address
from .layout import Layout, Placed, PlacedLaunch
from .placement import Place, Tools

ARENA_SLOT = 0

Runner: TypeAlias = Callable[[list[Any]], list[Any]]
"""Runs a part on what it is given, and empties that list."""


@dataclass
class GeneratedCode:
    """Source of one part, and what must be bound before it runs.

    Attributes:
        inputs: which of the part's inputs a run is given, in order; foreign buffers follow.
        constants: name -> kernel or constant, the same for every binding.
        arena_views: name -> place in the arena.
        model_views: name -> view of a model tensor.
        words: what the native loop runs.
        sizes: words that are to be computed again for other sizes, by their places.
        slots: instance -> slot of the native address table, for what is bound beforehand.
        regions: region of the arena -> slot, where a program works in several places at once.
        arenas: further device -> slot of the arena that is there.
        num_slots: size of that table; what is known only in a run comes last.
    """

    source: str = ""
    inputs: list[int] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    arena_views: dict[str, Placed] = field(default_factory=dict)
    model_views: dict[str, Placed] = field(default_factory=dict)
    num_made_per_run: int = 0
    words: array[int] = field(default_factory=lambda: array("q"))
    sizes: list[tuple[int, Size]] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)
    regions: dict[int, int] = field(default_factory=dict)
    arenas: dict[torch.device, int] = field(default_factory=dict)
    num_slots: int = 1

    @cached_property
    def _views(self) -> list[dict[str, Placed]]:
        """The views that sizes are in."""
        both = (self.arena_views, self.model_views)
        return [{n: one for n, one in views.items() if one.has_size} for views in both]

    @cached_property
    def _places(self) -> IntArray:
        """Which words are sizes."""
        return np.array([place for place, _ in self.sizes])

    @cached_property
    def _which(self) -> IntArray:
        """Which sizes these are."""
        return np.array([size.place for _, size in self.sizes])

    @cached_property
    def _names(self) -> list[str]:
        """The sizes that stand in the source."""
        return sorted(set(re.findall(r"\bn\d+\b", self.source)))

    def at(self, numbers: Numbers) -> GeneratedCode:
        """Returns the same with the numbers of other sizes."""
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
        """Returns what differs with the numbers of other sizes, and where tensors have moved."""
        words = array("q", self.words)
        if self.sizes:
            np.frombuffer(words, np.int64)[self._places] = np.take(numbers.column, self._which)
        arena, model = ({n: views[n].at(numbers) for n in views} for views in self._views)
        if moved:
            views = self.model_views.items()
            model.update((n, p.at(numbers)) for n, p in views if p.instance in moved)
        return GeneratedCode(
            constants={name: numbers.computed[int(name[1:])] for name in self._names},
            arena_views=arena,
            model_views=model,
            words=words,
            slots={instance: self.slots[instance] for instance in moved if instance in self.slots},
        )


@dataclass(frozen=True)
class Memory:
    """Binds generated functions to an arena and to the model's tensors.

    Attributes:
        arena: the bytes.
        offsets: start in it of each instance that a function has a view of.
        tensors: the model's, by instance.
        tools: what loads kernels and the native loop.
        region_starts: where regions of the arena start, for a program that works in several.
        others: arenas on further devices.
        device_of: for each instance, which of them it lies in, if in one.
    """

    arena: torch.Tensor
    offsets: Sequence[int] | Mapping[int, int]
    tensors: Mapping[int, torch.Tensor]
    tools: Tools
    region_starts: Mapping[int, int] = field(default_factory=dict)
    others: Mapping[torch.device, torch.Tensor] = field(default_factory=dict)
    device_of: Mapping[int, torch.device] = field(default_factory=dict)

    def runner(self, code: GeneratedCode, compiled: CodeType, **names: Any) -> Runner:
        """Returns a part's function over this memory; it sees ``names``, too."""
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
        """Returns a part's function like one over the same arena, where only some is bound anew.

        Args:
            like: the other function.
            part: what is bound anew; see :meth:`GeneratedCode.part_at`.
            compiled: the function's code.
            names: what it sees besides.
        """
        scope = {**like.__globals__, **part.constants}
        scope.update(self._bind_arenas(part.arena_views))
        scope.update(_bind_model(part.model_views, self.tensors))
        if part.words:
            # Runs in one arena take turns, but each has the addresses of its own inputs.
            addresses = type(scope["addresses"]).from_buffer_copy(scope["addresses"])
            for instance, slot in part.slots.items():
                addresses[slot] = self.tensors[instance].data_ptr()
            scope["owned"] = (part.words, self.arena, self.others, self.tensors)
            scope["words"] = part.words.buffer_info()[0]
            scope["addresses"], scope["table"] = addresses, ctypes.addressof(addresses)
        return _defined(compiled, scope, names)

    def native_names(self, code: GeneratedCode) -> dict[str, Any]:
        """Makes the address table of one lease, or of one run in regions of its own."""
        library, start = self.tools.native(), self.arena.data_ptr()
        addresses = (ctypes.c_int64 * code.num_slots)()
        addresses[ARENA_SLOT] = start
        for region, slot in code.regions.items():
            addresses[slot] = start + self.region_starts[region]
        for device, slot in code.arenas.items():
            addresses[slot] = self.others[device].data_ptr()
        for instance, slot in code.slots.items():
            addresses[slot] = self.tensors[instance].data_ptr()
        # What is given by address must be owned: ``parameter.data = ...`` may take the memory of
        # the model's tensors from them.
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
        """Makes every arena view once."""
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
    """Returns the function that code defines, which sees a scope and further names."""
    scope.update(names)
    exec(compiled, scope)
    # Popped: a cycle would keep the arena until garbage is collected.
    program: Runner = scope.pop("program")
    return program


def launch_apart(
    layout: Layout, place: Place, numbers: Numbers, launched: set[TritonKernel]
) -> None:
    """Launches each kernel of a GPU once, on memory of its own, if it is not among ``launched``."""

    def operand(value: Any, placed: PlacedLaunch) -> Any:
        if not isinstance(value, View):
            return numbers.of(value)
        at = placed.place(value).at(numbers)
        device = layout.instances[at.instance].device or place.device
        # Zeros: those that are indices stay within.
        zeros = torch.zeros(max(reach(at.shape, at.stride), 1), dtype=at.dtype, device=device)
        return zeros.as_strided(at.shape, at.stride)

    for placed in (one for part in layout.parts for one in part.launches):
        kernel = placed.launch.function
        if isinstance(kernel, TritonKernel) and kernel not in launched:
            place.load(kernel)(*(operand(value, placed) for value in placed.launch.args))
            launched.add(kernel)


def _bind_device(device: torch.device) -> dict[str, Any]:
    """Returns what makes tensors in a run, on the device that it runs on."""
    new = new_cpu_tensor if device.type == "cpu" else partial(_new_tensor, device)
    return {"new_tensor": new, "as_predicted": partial(as_predicted, device=device)}


def _new_tensor(
    device: torch.device, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _bind_model(
    views: Mapping[str, Placed], tensors: Mapping[int, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Makes every view of a model tensor, by reference to the tensor's memory."""
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
    if base.dtype != dtype:  # `view` knows dense ones only: no single number, no transposed ones
        start = start * base.element_size() // dtype.itemsize
        base = torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage())  # type: ignore[call-overload]
    return torch.as_strided(base, shape, stride, start + offset)


PROFILER: ModuleType = torch.autograd.profiler
IF_IT_RUNS = "profiler._is_profiler_enabled"
"""Asks, in a generated function where ``profiler`` is :data:`PROFILER`, whether one runs."""
check_layout = torch._C._dynamo.guards.assert_size_stride
"""Raises AssertionError if a tensor has another shape, or other strides that matter."""


def as_predicted(
    result: Any,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    operator: str,
    *,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Returns a result in the layout in which later launches read it; on any device, or on one.

    Raises:
        PlanError: if it holds something else than was predicted.
    """
    device = device or (result.device if isinstance(result, torch.Tensor) else torch.device("cpu"))
    predicted = TensorType(dtype, tuple(shape), tuple(stride), device)
    if not isinstance(result, torch.Tensor):
        found = f"a {type(result).__name__}"
    elif (
        (tuple(result.shape), result.device) != (tuple(shape), device)
        # Without elements some kernels return another type: native_dropout a mask of floats.
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
    """Begins a range that a profiler shows under a name; returns it."""
    shown = torch.profiler.record_function(name)
    shown.__enter__()
    return shown


def end_range(shown: Any) -> None:
    """Ends a range. One that is dropped, after an error, ends as well."""
    shown.__exit__(None, None, None)


def profiled(
    writer: Callable[..., Any], memory: Memory, names: Mapping[str, Any], numbers: Numbers
) -> Runner:
    """Returns a part that shows a profiler each call of a block, and each launch, as a range."""
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
