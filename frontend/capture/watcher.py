"""Receives what the model's Python does while it is recorded: notes, replaces or refuses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ...autodiff.forward_mode.jets import Series
from ...autodiff.inner_gradients import DerivativeMark
from ...reuse.errors import CaptureError
from ...reuse.evidence.module_state import module_state, raw_attribute
from ...reuse.evidence.reads import NOT_NOTED
from ...reuse.evidence.slots import Step
from ...reuse.freeze import Freezer, Identity
from ...reuse.ir.program import RecomputeMark
from ...reuse.ir.types import TensorType
from ..effects.effects import find_fake
from ..effects.given_objects import SeenNames
from ..refusals import DIFFERENTIATES, GIVES_NONE
from ..tracing.frames import model_name, user_line
from ..tracing.torch_patches import replaced
from ..tracing.torch_tensor_answers import SWITCHES, changes_layout, may_compute, state_of
from ..tracing.torch_tracing import differentiated, is_fake, leads_to, made_of
from .block_calls import BlockCalls
from .control_flow import ControlFlow
from .recording import Recording
from .regions import DIFFERENTIATED, ModeChoice

TENSOR = object()  # in a layout, for each tensor operand


class CustomFunction:
    """A ``torch.autograd.Function`` as one operator of a graph; it keeps its own backward."""

    def __init__(self, function: type, layout: tuple[Any, ...], capture: object) -> None:
        self._function = function
        self._layout = layout
        self._capture = Identity(capture)
        self.__name__ = function.__name__

    def __call__(self, *tensors: Any) -> Any:
        """Applies the function, so that autograd uses its own backward."""
        rest = iter(tensors)
        args = [next(rest) if part is TENSOR else part for part in self._layout]
        return self._function.apply(*args)  # type: ignore[attr-defined]

    def _key(self) -> Any:
        constants = tuple(Freezer().freeze(p) for p in self._layout if p is not TENSOR)
        places = tuple(p is TENSOR for p in self._layout)
        # Its Python may read anything, so only those of one capture are equal. If a guard fails,
        # the new capture makes new closures.
        return (Identity(self._function), self._capture, places, constants)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CustomFunction) and other._key() == self._key()

    def __hash__(self) -> int:
        return hash(self._function)


def run_both_ways(apply: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Applies a function and runs its backward, so that its Python is watched as well.

    Raises:
        CaptureError: Its backward gives no gradient, perhaps only where a result is unused.
    """
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    edges = [get_gradient_edge(a) for a in wanted]  # first, as it may change arguments in-place
    result = apply(*args)
    results = result if isinstance(result, (tuple, list)) else [result]
    made = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    if not made or not edges:
        return result

    # Autograd passes a None on as no gradient up to the next function, which makes zeros of it.
    subsets = [made, *([r for r in made if r is not one] for one in made if len(made) > 1)]
    # In this thread, because the profiler that watches Python is per thread.
    with torch.autograd.set_multithreading_enabled(False):
        for used in subsets:
            seeds = [torch.zeros_like(r) for r in used]
            found = torch.autograd.grad(used, edges, seeds, retain_graph=True, allow_unused=True)
            if any(gradient is None for gradient in found):
                raise CaptureError(
                    f"A torch.autograd.Function at {user_line()} {GIVES_NONE} (or, by "
                    "set_materialize_grads(False), where a result is unused). A program would have "
                    "zeros there, by which an optimizer decays weights. Return zeros, or detach it."
                )
    return result


class _Names:
    """Treats a read of ``module.__dict__[name]`` as one of an attribute; refuses all else."""

    def __init__(self, module: nn.Module, watcher: ModelWatcher) -> None:
        self._module, self._watcher = module, watcher

    def key(self, name: Any) -> Step | None:
        """Returns the step to a name in the module's ``__dict__``, if reads of it are evidence."""
        return ("item", name) if type(name) is str and name not in NOT_NOTED else None

    def found(self, names: Any, step: Step, value: Any) -> Any:
        """Notes what was read; returns the fake of a tensor."""
        self._watcher.read(self._module, step[1])
        if type(value) is int:
            return self._watcher.number(self._module, step[1], value)
        return self._watcher.substitute(value) if isinstance(value, torch.Tensor) else value

    def writes(self, names: Any, step: Step, value: Any) -> Any:
        """Refuses to set a name."""
        self.whole(names)
        return value

    def whole(self, names: Any) -> None:
        """Refuses everything but a read of one name."""
        self._watcher.read_all(self._module)


_REENTRANT_CHECKPOINT = ("torch.utils.checkpoint", "CheckpointFunction")


class ModelWatcher:
    """Receives the calls of the patches in PyTorch (:mod:`..tracing.torch_patches`)."""

    def __init__(self, recording: Recording, calls: BlockCalls) -> None:
        self._recording = recording
        self.call = calls.call  # no method of our own: nested modules would use more stack
        self.control_flow = ControlFlow(recording).run
        self._is_in_function = False
        self._capture = object()

    # ---- modules and their attributes ----------------------------------------------------

    def read(self, module: nn.Module, name: str) -> None:
        """Notes an attribute read, in the innermost region."""
        recording = self._recording
        if recording.quiet or module is recording.tracer.root:
            return
        recording.inside.meets(module)
        reads = recording.current.reads
        if not reads.knows(module, name):
            with recording.bookkeeping():
                reads.attribute(module, name)
            self._refuse_unreadable()

    def _refuse_unreadable(self) -> None:
        contents = self._recording.inside.contents
        if contents.unreadable:
            self._recording.refuse_unreadable(user_line)

    def number(self, module: nn.Module, name: str, value: int) -> Any:
        """Returns an int attribute, as a proxy if a block may use it to index a cache."""
        recording = self._recording
        if recording.quiet or not recording.objects.was_used:
            return value
        with recording.bookkeeping():
            return recording.objects.number(module, name, value, recording.current.reads)

    def own_names(self, module: nn.Module) -> dict[str, Any]:
        """Returns the ``__dict__`` of a module, for the model's Python as a watched proxy."""
        state = module_state(module)
        if self._recording.quiet or module is self._recording.tracer.root:
            return state
        return SeenNames(state, _Names(module, self))

    def read_all(self, module: nn.Module) -> None:
        """Refuses a read of all attributes of a module, because any of them may be used unseen."""
        if not self._recording.quiet:
            contents = self._recording.inside.contents
            contents.refuse_use(f"the __dict__ of a {type(module).__name__}")
            self._refuse_unreadable()

    def write(self, module: nn.Module, name: str, value: Any) -> bool:
        """Notes a module's state before its first write; returns whether to skip the write."""
        recording = self._recording
        if recording.quiet or module is recording.tracer.root:
            return False
        if value is recording.tensors.fakes.get(id(raw_attribute(module, name)), self):
            # ``self.count += 1`` on a tensor assigns the same tensor again: nothing to write.
            return True
        with recording.bookkeeping():
            recording.inside.writes(module, name)
            if find_fake([value]) is not None:
                recording.stays_alone(f"it keeps what it computed in attribute {name!r}")
        return False

    # ---- tensors and operators -----------------------------------------------------------

    def substitute(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the fake of a model tensor."""
        return tensor if self._recording.quiet else self._recording.fake_of(tensor)

    def custom_function(self, function: type, args: Any, proceed: Callable[..., Any]) -> Any:
        """Records the application of a custom autograd function as one operator."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        is_part = self._recording.quiet or self._is_in_function or not tensors
        if is_part or _module_of(function).startswith("torch._"):
            with self._recording.applying():
                return proceed(*args)
        if (_module_of(function), function.__name__) == _REENTRANT_CHECKPOINT:
            # A checkpoint only requests recompute: trace the function that it runs.
            run_function, _, *inputs = args
            with self.checkpoint("full"):
                return run_function(*inputs)
        return self._one_operator(function, args, proceed)

    def _one_operator(self, function: type, args: Any, proceed: Callable[..., Any]) -> Any:
        tracer, tensors = self._recording.tracer, self._recording.tensors
        args = [self._recording.fake_of(a) if isinstance(a, torch.Tensor) else a for a in args]
        layout = tuple(TENSOR if isinstance(a, torch.Tensor) else a for a in args)
        operands = [tensors.node_of(a) for a in args if isinstance(a, torch.Tensor)]
        # A function that is applied inside is no operator of its own.
        inside = replaced(self, _is_in_function=True)
        with tracer.untraced(), self._recording.applying(), inside:
            result = run_both_ways(proceed, args)
        self._recording.ran_backwards |= torch.is_grad_enabled()
        node = tracer.call(CustomFunction(function, layout, self._capture), operands)
        wants = any(a.requires_grad for a in args if isinstance(a, torch.Tensor))

        def track(part: torch.Tensor, made: torch.fx.Node) -> None:
            tracer.track(part, made)
            if torch.is_grad_enabled() and wants and not part.requires_grad:
                # The function marked it as one without a gradient, which its node does not say.
                tracer.track(part, tracer.call(torch.ops.aten.detach.default, [made]))

        if isinstance(result, torch.Tensor):
            track(result, node)
        else:
            for index, part in enumerate(result):
                if isinstance(part, torch.Tensor):
                    track(part, tracer.item(node, index))
        return result

    def checkpoint(self, policy: RecomputeMark) -> AbstractContextManager[None]:
        """Marks what runs inside for recompute in the backward."""
        recording = self._recording
        # Without gradients nothing is saved, so there is nothing to recompute.
        if recording.quiet or not torch.is_grad_enabled():
            return nullcontext()
        path = f"{recording.current.path}.checkpoint".lstrip(".")
        return recording.inside_part("checkpoint", path, policy)

    # ---- side effects, which a program would not repeat at each call -----------------------

    def acts(self, doing: str) -> None:
        """Refuses a forward that prints, logs or writes files."""
        if not self._recording.quiet:
            self._recording.effects.refuse(doing)

    def says_once(self, say: Callable[[], None]) -> bool:
        """Keeps a message that is logged only once, to log it after the run, if it may be kept."""
        recording = self._recording
        is_taken = recording.may_say and not recording.quiet
        if is_taken:
            recording.said.append(say)
        return is_taken

    def text(self, tensor: torch.Tensor) -> None:
        """Refuses to format a tensor as text: a traced tensor has no values."""
        if not self._recording.quiet:
            why = " (print, an f-string, a log), whose values differ at every call"
            self._recording.effects.refuse(f"writes out a {TensorType.of(tensor)} tensor", why)

    def saving_hook(self) -> None:
        """Refuses saved-tensor hooks: a program saves other tensors."""
        if not self._recording.quiet:
            raise CaptureError(
                f"The model's forward puts hooks on what autograd saves at {user_line()}, and a "
                "compiled program cannot call them. Enter them around the model."
            )

    def scripted(self, original: Callable[..., Any] | None) -> Callable[..., Any]:
        """Returns the Python of a ``torch.jit`` function; refuses one without usable Python."""
        code = getattr(original, "__code__", None)
        if original is None or code is None or "is_scripting" in code.co_names:
            raise CaptureError(
                f"The model's forward calls a function of torch.jit at {user_line()}, whose Python "
                "cannot be run in its place. Call the original function."
            )
        return original

    def backward(self) -> None:
        """Refuses a forward that differentiates in a way that cannot be recorded."""
        if not self._recording.quiet:
            raise CaptureError(
                f"{model_name(self._recording.model)} cannot be captured: its forward "
                f"{DIFFERENTIATES} (torch.autograd.grad, torch.func, backward) at {user_line()}, "
                "which cannot be followed to operators. Run it outside the model."
            )

    def follows_gradients(self) -> bool:
        """Whether :meth:`gradient` records gradients that are taken now."""
        return not (self._recording.quiet or self._is_in_function)

    def gradient(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        seeds: Sequence[torch.Tensor | None],
        *,
        allow_unused: bool,
    ) -> tuple[torch.Tensor | None, ...] | None:
        """Records ``torch.autograd.grad`` as one node; the pass ``derive`` makes the gradients."""
        if not self.follows_gradients():
            return None
        self._recording.differentiates = True
        given = [*outputs, *(seed for seed in seeds if seed is not None)]
        if not all(map(is_fake, given)) or not all(isinstance(x, torch.Tensor) for x in inputs):
            self.backward()  # tensors wrapped by torch.func, or gradient edges
        tracer, tensors = self._recording.tracer, self._recording.tensors
        with self._recording.bookkeeping():
            fakes = [self._recording.fake_of(x) for x in inputs]
            nodes = [tensors.node_of(x) for x in outputs]
            ends = [tensors.node_of(x) for x in fakes]
        if not all(x.requires_grad for x in (*outputs, *fakes)):
            self.backward()  # eager then raises PyTorch's own error
        leading = made_of(*nodes, operands=differentiated)
        used = [(x, end) for x, end in zip(fakes, ends, strict=True) if end in leading]
        if len(used) < len(fakes):
            with self._recording.bookkeeping(), tracer.untraced():
                hidden = [x for x, end in zip(fakes, ends, strict=True) if end not in leading]
                is_hidden = any(leads_to(outputs, x) for x in hidden)
            # An input is unused only if neither an operator nor autograd's own graph leads to an
            # output.
            if is_hidden or not allow_unused:
                self.backward()
        cotangents = [tensors.node_of(seed) for seed in given[len(outputs) :]]
        for _, end in used:
            end.meta[DIFFERENTIATED] = True
        made: dict[torch.fx.Node, torch.Tensor] = {}
        # If one input is computed from another (positions from a strain), each gets its own node.
        own = {end for _, end in used}
        apart = all(own.isdisjoint({*made_of(n, operands=differentiated)} - {n}) for n in own)
        for group in [used] if apart else [[one] for one in used]:
            operands = [*nodes, *(end for _, end in group), *cotangents]
            node = tracer.call(DerivativeMark(len(nodes), len(group)), operands)
            for i, (x, end) in enumerate(group):
                type_, item = TensorType.of(x).cotangent(), tracer.item(node, i)
                made[end] = tracer.track_new(type_, given, item)
        return tuple(made.get(end) for end in ends)

    def series(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        directions: Sequence[torch.Tensor],
        series: Series,
    ) -> list[list[torch.Tensor]]:
        """Records Taylor coefficients of outputs, by order, with inputs moving along directions.

        The pass ``derive`` makes the calls that compute them.
        """
        self._recording.differentiates = True
        tracer, tensors = self._recording.tracer, self._recording.tensors
        operands = [tensors.node_of(x) for x in (*outputs, *inputs, *directions)]
        for node in operands[len(outputs) : len(outputs) + len(inputs)]:
            node.meta[DIFFERENTIATED] = True
        node = tracer.call(DerivativeMark(len(outputs), len(inputs), series), operands)
        places = [(y, order) for y in outputs for order in series.orders]
        made = [
            tracer.track_new(
                series.coefficient_type(TensorType.of(y), order),
                (y, *inputs, *directions) if y.requires_grad else (),
                tracer.item(node, index),
            )
            for index, (y, order) in enumerate(places)
        ]
        size = series.order
        return [made[i * size : (i + 1) * size] for i in range(len(outputs))]

    def open_mode(self, what: str, mode: str, why: str) -> str:
        """Chooses and notes the mode of a derivative whose mode the user left open."""
        reason = self._recording.only_reverse
        if reason and mode != "reverse":
            mode, why = "reverse", f"{mode} mode cannot be made ({reason})"
        self._recording.modes[ModeChoice(what, user_line(), mode, why)] = None
        return mode

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of the model's parameters and buffers."""
        return not self._recording.quiet and self._recording.tensors.is_named(tensor)

    def asks(self, tensor: torch.Tensor, name: str, do: Callable[[torch.Tensor], Any]) -> Any:
        """Allows a use of a tensor's attribute that records operators; refuses any other use."""
        recording = self._recording
        if recording.quiet:
            return do(tensor)
        if name in SWITCHES or may_compute(name):
            # Tried on a fake tensor: if the use is refused, no real tensor was changed.
            tensor, num_nodes = recording.fake_of(tensor), recording.num_nodes
            with recording.bookkeeping():
                before = state_of(tensor)
            result = do(tensor)
            with recording.bookkeeping():
                now, known = state_of(tensor), recording.tensors
                if self._is_in_function and (
                    now == before or recording.tracer.node_of(tensor) is None
                ):
                    # Inside a custom function operators make no nodes, and its tensors are local.
                    return result
                is_operator = recording.num_nodes > num_nodes and not (
                    changes_layout(name) and known.node_of(tensor) in known.sources
                )
                if is_operator or (name in SWITCHES and known.may_switch(tensor, before, now)):
                    return result
        raise CaptureError(
            f"The model's forward uses Tensor.{name} of a {TensorType.of(tensor)} tensor at "
            f"{user_line()}. That is no operator: it reads or changes more than the tensor's "
            "values (storage, gradient, version, hooks), and a compiled program would not do so "
            "at every call. Use .detach() for .data, a torch.autograd.Function for a hook on a "
            "gradient; pass in what it needs, or keep it in a buffer."
        )


def _module_of(cls: type) -> str:
    return getattr(cls, "__module__", "") or ""
