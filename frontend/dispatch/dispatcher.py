"""The programs of one module: finds the program that fits a call, compiles it, or runs eagerly.

``compile`` and ``compile_step`` both use :class:`Dispatcher`. A :class:`ModuleDispatcher` may also
run the module eagerly; it remembers the kinds of calls that could not be captured, so that they are
not captured at each call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Generic, NoReturn

import torch
from torch import nn

from ...reuse import torch_pytree
from ...reuse.errors import (
    INVALID,
    OURS,
    CaptureError,
    FinalCaptureError,
    LazyInlineError,
    ended_here,
)
from ...reuse.evidence.module_state import module_state
from ...reuse.ir.printer import counted
from ...reuse.ir.program import Program, UserInput
from .. import refusals
from ..autograd.bridge import Bridge, picker
from ..capture.assemble import OutputTree
from ..capture.surroundings import one_at_a_time, other_threads_waiting
from ..compiled import CompiledProgram
from ..compiler import Compiler, Linker
from ..effects.effects import Arguments, EffectError, refuse_traced
from ..guard import SMALL_ARENA, AnyEntry, Guard, Inputs, KeptPrograms
from ..marks import DISPATCHER_ATTRIBUTE
from ..options import Options
from ..passes.state import Compilation, Goal, Pass
from ..report import CompileReport
from ..sizes.shapes import CompileResult, ShapeCache
from ..tracing.frames import own_model
from ..tracing.torch_state import is_in_checkpoint, mode_around
from ..tracing.torch_tracing import is_traced
from .limits import CallKind, Refusals, Tries
from .torch_slot import call_past_slot, in_slot


class ModuleEntry:
    """One compiled program of a module, with its guard; finds its inputs and builds its result."""

    def __init__(self, made: CompileResult, leaves: Sequence[Any]) -> None:
        compiled = made.compiled
        assert isinstance(compiled, CompiledProgram)
        program = compiled.captured.program
        self.compiled = self._compiled = compiled
        self.guard, self.can_be_linked_again = made.guard, made.is_linked
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        order, own = [], len(leaves)  # the model's tensors follow the leaves
        self._switched: list[int] = []  # inputs whose requires_grad the forward switches on
        self._switched_back: list[int] = []  # and off again
        for source in program.sources:
            if isinstance(source, UserInput):
                order.append(places[source.index])
                self._switched += order[-1:] if source.is_switched else []
                self._switched_back += order[-1:] if source.is_switched_back else []
            else:
                order.append(own)
                own += 1
        self._pick_inputs = picker(order)
        self._writes = program.writes
        written = frozenset(target for _, target in program.writes)
        self._bridge = Bridge(compiled, written) if compiled.derivative is not None else None
        self._tree: OutputTree = program.output_tree
        self._leaves = _result_leaves(program)
        self._repeated: list[int] | None = None  # found in the first run, the same in every run

    @property
    def is_small(self) -> bool:
        """See :class:`..guard.Entry`. One with a backward may have many runs in flight."""
        arena_bytes = self._compiled.runtime.program.arena_bytes
        return self._bridge is None and arena_bytes <= SMALL_ARENA

    def rest(self) -> None:
        """See :class:`..guard.Entry`."""
        self._compiled.runtime.rest()
        if self._bridge is not None:
            self._bridge.backwards.rest()

    def why_not(self, call: Arguments) -> str:
        """Returns why the program cannot update the arguments of a call as the forward would."""
        kept = self._tree.kept
        return kept.why_not(call, self.guard.has_met) if kept.has_arguments else ""

    def run(
        self, leaves: Sequence[Any], containers: Sequence[Any] = (), call: Arguments = ((), {})
    ) -> Any:
        """Runs the program on flat inputs, and updates the containers that they came from."""
        # As the forward does to the caller's tensor before it uses it.
        for place in self._switched:
            leaves[place].requires_grad_(True)
        inputs = self._pick_inputs([*leaves, *self.guard.tensors])
        if self._bridge is None:
            with torch.no_grad():  # a program without a backward: no gradient flows
                outputs: Sequence[Any] = self._forward(inputs)
        else:
            outputs = self._bridge.run(inputs)
        for place in self._switched_back:
            leaves[place].requires_grad_(False)
        if any(map(is_traced, outputs)):
            refuse_traced(outputs)
        if self._writes:
            with torch.no_grad():
                for output, target in self._writes:
                    inputs[target].copy_(outputs[output])
        found = [
            outputs[value] if kind == "output" else inputs[value] if kind == "input" else value
            for kind, value in self._leaves
        ]
        return self._tree.built(found, containers if self._tree.updates else (), call)

    def _forward(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs the program; ``h`` and ``h.detach()``, one tensor in it, become two."""
        outputs = self._compiled.runtime.forward(inputs)[0]
        if self._repeated is None:
            known = [*map(id, inputs), *map(id, outputs)]
            first = len(inputs)
            self._repeated = [i for i, o in enumerate(outputs) if known.index(id(o)) != first + i]
        for index in self._repeated:
            outputs[index] = outputs[index].detach()
        return outputs


def _result_leaves(program: Program) -> list[tuple[str, Any]]:
    """Returns each leaf of a model's result: an output or input, by position, or a constant."""
    known = {value: i for i, value in enumerate(program.inputs)}
    # An input that the forward changed and returns is returned itself.
    known |= {program.outputs[output]: target for output, target in program.writes}
    leaves: list[tuple[str, Any]] = []
    for kind, value in program.output_tree.leaves:
        passed = known.get(program.outputs[value]) if kind == "output" else None
        leaves.append((kind, value) if passed is None else ("input", passed))
    return leaves


# ---- choosing the program of a call --------------------------------------------------------------


class Dispatcher(Generic[AnyEntry]):
    """Finds the program of a call, or compiles it and keeps it.

    For a step the model includes its loss. For ``dynamic`` and ``names`` see :class:`ShapeCache`;
    modules may share a compiler, so that equal closures compile once.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        dynamic: bool | None = None,
        names: tuple[tuple[str, ...], ...] = (),
        compiler: Compiler | None = None,
    ) -> None:
        self.subject = model  # that is compiled; for a step, the model with its loss
        self._compiler = compiler or Compiler(options)
        self._made_with = (options, dynamic, names)
        self._forget()
        self._report: CompileReport | None = None
        # Raises for calls that no program fits, if nothing is to be compiled any more.
        self.refuse: Callable[[Inputs], NoReturn] | None = None

    def _forget(self) -> None:
        """Drops all programs; the compiler keeps its results per closure."""
        self.entries: KeptPrograms[AnyEntry] = KeptPrograms()  # the programs compiled so far
        self._shapes = ShapeCache(self.subject, *self._made_with)

    @property
    def last_report(self) -> CompileReport | None:
        """The report of the newest compile; None before the first call."""
        return self._report

    @property
    def symbolic_programs(self) -> list[tuple[Guard, Linker]]:
        """The guards and linkers of symbolic programs, which are linked for the sizes of calls."""
        return self._shapes.linkers

    def adopt(self, made: CompileResult, leaves: Sequence[Any]) -> None:
        """Adds a program that was compiled before, for a call with these flat inputs."""
        self.entries.add(self._entry(made, leaves))
        self._report = made.report

    def adopt_symbolic(self, guard: Guard, linker: Linker, report: CompileReport) -> None:
        """Adds a symbolic program that was compiled before."""
        self._shapes.adopt(guard, linker)
        self._report = report

    def _compile_for(self, inputs: Inputs, goal: Goal) -> AnyEntry:
        """Compiles a program for a call, or links a symbolic one for its sizes."""
        with one_at_a_time():
            # Another thread may have compiled for the same call while this one waited.
            made_meanwhile = self.entries.fitting(inputs.given, inputs.tree)
            if made_meanwhile is not None:
                return made_meanwhile
            made = None if self.refuse else self._shapes.symbolic(inputs, goal)
            if self.refuse is not None:
                made = self._shapes.linked(inputs) or self.refuse(inputs)
            if made is None:
                compiled, report = self._compiler.compile(
                    self.subject, inputs.args, inputs.kwargs, goal, watch=self._watch
                )
                whole = Inputs.of(inputs.given, inputs.tree)
                self.entries.warn_if_many(own_model(self.subject), whole)
                made = self._shapes.note(compiled, report, inputs)
            return self._kept(made, inputs)

    def _linked_for(self, inputs: Inputs) -> AnyEntry | None:
        """Links a symbolic program for the sizes of a call; None if none fits."""
        if not self._shapes.has_symbols:
            return None
        with other_threads_waiting():
            made = self._shapes.linked(inputs)
            return None if made is None else self._kept(made, inputs)

    def _kept(self, made: CompileResult, inputs: Inputs) -> AnyEntry:
        entry = self._entry(made, inputs.leaves)
        if self.entries.add(entry):  # most results that the compiler keeps are unused by now
            self._compiler = Compiler(self._compiler.options)
        self._report = made.report
        return entry

    def _entry(self, made: CompileResult, leaves: Sequence[Any]) -> AnyEntry:
        """Makes the entry of a program, compiled for a call with these flat inputs."""
        raise NotImplementedError

    def _watch(self, one: Pass, before: Compilation, after: Compilation) -> None:
        """Called after each pass of a compile; may raise to end it."""


class TooSmallError(CaptureError):
    """A program has too few operators: to call it takes longer than it saves."""


@dataclass(frozen=True)
class RunEagerly:
    """The decision that a call runs the model eagerly, and when a capture is tried again."""

    reason: str
    refused: CallKind | None = None  # the kind of the call, if a capture has just failed for it
    tries: Tries = "once more"
    # Whether the model raised in the capture, as it may in eager: then no part of it is compiled.
    raised: bool = False


class ModuleDispatcher(Dispatcher[ModuleEntry]):
    """Runs a module's calls: by the program that fits, or eagerly.

    It has the signature of the model's ``forward``, which tools inspect.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        dynamic: bool | None = None,
        names: tuple[tuple[str, ...], ...] = (),
        compiler: Compiler | None = None,
    ) -> None:
        super().__init__(model, options, dynamic, names, compiler)
        self.model, self.options, self.dynamic = model, options, dynamic
        self._eager: CompileReport | None = None
        self._refusals = Refusals()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a call's compiled program, compiling first if the inputs' layout is new."""
        if torch.compiler.is_dynamo_compiling():
            # An outer ``torch.compile`` gets a graph break here.
            return torch.compiler.disable(self.__call__)(*args, **kwargs)
        try:
            return self._runner()(args, kwargs)
        except OURS as error:
            raise ended_here(error) from error.__cause__
        except RuntimeError as error:
            if not str(error).endswith(INVALID):
                raise
            raise ValueError(str(error)) from None

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compiles for the layouts of a call without running it."""
        leaves, tree, _ = torch_pytree.flatten_call(args, kwargs)
        if not (mode_around() or self._why_eager(leaves)):
            refusals.check_runnable(self.model, self.options.target)
            self._compile_for(Inputs.of(leaves, tree), self._goal(leaves))

    def _goal(self, leaves: Sequence[Any]) -> Goal:
        train, options = torch.is_grad_enabled(), self.options
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        may_wait = options.backend == "inductor" and not (options.target or options.recompute)
        may_wait = may_wait and all(tensor.device.type == "cpu" for tensor in tensors)
        # A leaf input that requires grad, such as atom positions, hints at training on forces.
        is_asked = any(tensor.requires_grad and tensor.is_leaf for tensor in tensors)
        return Goal(train=train, late_backward=train and may_wait and is_asked)

    @property
    def last_report(self) -> CompileReport | None:
        """The report of the newest compile, or of the newest call if it ran eagerly.

        None before the first call.
        """
        return self._eager or self._report

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the model's forward."""
        return inspect.signature(self.model.forward)

    @property
    def __code__(self) -> CodeType:
        """The code of the model's forward, whose file and line ``torch.export`` reads."""
        return self.model.forward.__code__

    def summary(self) -> str:
        """Says in one line what is compiled, and how."""
        how = f"{type(self.model).__name__}, reuse {self.options.reuse}, backend "
        how += f"{self.options.backend}, "
        report = self.last_report
        if report is None:
            return f"{how}not compiled yet"
        how += counted(len(self.entries), "program")
        if report.ran_eagerly:
            return f"{how}, not compiled last: {report.ran_eagerly}"
        return f"{how}, {counted(report.num_shared_calls, 'shared call')}"

    def __reduce__(self) -> Any:
        """Copies and pickles as None: a copy of the module that holds this is not compiled."""
        return type(None), ()

    def _runner(self) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        return self._run

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Kernels bypass PyTorch's dispatcher, so a mode would see no operators.
        mode = mode_around()
        if mode:
            reason = f"{mode} is active, which a compiled program bypasses"
            return self._run_alone(reason, args, kwargs)
        # Its backward runs the call again, which must save the tensors that the first run saved.
        if is_in_checkpoint():
            reason = "torch.utils.checkpoint is around it: compile the model that calls it there"
            return self._run_alone(reason, args, kwargs)
        leaves, tree, containers = torch_pytree.flatten_call(args, kwargs)
        entry = self.entries.fitting(leaves, tree)
        if entry is None:
            found = self._find_or_compile(leaves, tree)
            if isinstance(found, RunEagerly):
                return self._run_decided(found, args, kwargs)
            entry = found
        why_not = entry.why_not((args, kwargs))
        if why_not:
            return self._run_eagerly(why_not, args, kwargs)
        self._eager = None
        return entry.run(leaves, containers, (args, kwargs))

    def _run_decided(self, found: RunEagerly, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self._run_eagerly(found.reason, args, kwargs, raised=found.raised)
        refuse_traced(result)
        if found.refused is not None:  # only now: a call that raises in eager too is not noted
            self._refusals.note(found.refused, found.reason, found.tries)
        return result

    def _find_or_compile(
        self, leaves: list[Any], tree: torch_pytree.TreeSpec
    ) -> ModuleEntry | RunEagerly:
        """Returns a program for a call that no program fits, or why it runs eagerly."""
        if not refusals.watching_input(self.model, leaves):
            # A symbolic program's guard checks all but sizes, so no other check is needed.
            linked = self._linked_for(Inputs.of(leaves, tree))
            if linked is not None:
                return linked
        call = CallKind.of(leaves, tree, training=self.model.training)
        reason = self._why_never() or self._refusals.why_eager(call) or self._why_eager(leaves)
        if not reason:  # hooks are counted last: calls that run eagerly anyway need not pay for it
            plain, call = call, call.with_hooks(self.model)
            reason = self._refusals.why_eager(call) if call != plain else ""
        if reason:
            return RunEagerly(reason)
        try:
            refusals.check_runnable(self.model, self.options.target)
            entry = self._compile_for(Inputs.of(leaves, tree), self._goal(leaves))
        except EffectError as effect:
            return RunEagerly(str(effect), call, "doubling")
        except LazyInlineError as error:
            if not self._may_run_eagerly(error):
                raise
            tries: Tries = "never" if isinstance(error, TooSmallError) else "once more"
            raised = isinstance(error, refusals.WrongCallError)
            return RunEagerly(str(error), call, tries, raised=raised)
        self._refusals.forget(call)  # it was refused for a side effect that did not come again
        self._refusals.note_compiled(call, leaves, entry.guard, id(self))
        return entry

    # ---- running the model eagerly -------------------------------------------------------

    def _may_run_eagerly(self, error: LazyInlineError) -> bool:
        """Whether the model may run eagerly after this error of its compile."""
        is_capture = isinstance(error, CaptureError) and not isinstance(error, FinalCaptureError)
        return is_capture and self.options.fallback == "eager"

    def _why_never(self) -> str:
        """Returns why the model, as it is now, cannot be compiled for any call, or ""."""
        return ""

    def _why_eager(self, leaves: Sequence[Any]) -> str:
        """Returns why the model cannot be compiled for this call, or ""."""
        if watching := refusals.watching_tensor(self.model, leaves):
            return watching
        hooked = refusals.backward_hooked(self.model) if torch.is_grad_enabled() else ""
        return f"{hooked} has a backward hook, which no compiled program calls" if hooked else ""

    def _run_eagerly(
        self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, raised: bool = False
    ) -> Any:
        """Runs the model eagerly, around the parts of it that can be compiled.

        If the model raised an exception in its capture, no part is compiled, because eager may
        raise it too.
        """
        return self._run_alone(reason, args, kwargs)

    def _run_alone(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model eagerly, without compiled parts."""
        self._report_eager(reason)
        return call_past_slot(self.model, args, kwargs)

    def _report_eager(self, reason: str) -> None:
        if self._eager is None or self._eager.ran_eagerly != reason:
            backend, reuse = self.options.backend, self.options.reuse
            train = torch.is_grad_enabled()
            self._eager = CompileReport(train, backend, reuse, ran_eagerly=reason)

    def _entry(self, made: CompileResult, leaves: Sequence[Any]) -> ModuleEntry:
        refusals.check_writes(made.compiled.captured.program)
        return ModuleEntry(made, leaves)


def dispatcher_of(module: Any) -> ModuleDispatcher | None:
    """Returns the dispatcher of a compiled module: in place, or wrapped."""
    if not isinstance(module, nn.Module):
        return None
    held = module_state(module).get(DISPATCHER_ATTRIBUTE, in_slot(module))
    if held is None:
        inside = refusals.model_inside(module)
        return None if inside is None else dispatcher_of(inside)
    return held if isinstance(held, ModuleDispatcher) else None
