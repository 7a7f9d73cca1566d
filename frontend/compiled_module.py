"""``compile(model)``: a drop-in module that runs the compiled program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..recompute.policy import Policy
from ..reuse import torch_pytree
from ..reuse.errors import CaptureError, LazyInlineError, PlanError
from ..reuse.evidence.module_state import has_own_hooks, own_hooks
from ..reuse.ir.program import UserInput
from ..reuse.torch_names import global_hook_tables
from .autograd.bridge import Bridge, picker
from .capture.assemble import OutputTree
from .capture.capture import backward_hooked, one_at_a_time, refuse_foreign
from .capture.effects import EffectError, EffectsSeen
from .capture.float_inputs import NumberInput, capture_open
from .capture.regions import CapturedModel
from .checks.plain_inputs import watching_tensor, written_out
from .checks.runnable import check_runnable, check_writes
from .checks.torch_modes import mode_around
from .checks.wrappers import refuse_wrapper
from .compiler import CompiledProgram, Compiler, Options
from .guards.guard import Guard
from .guards.kept_programs import Inputs, KeptPrograms
from .guards.varying_floats import VaryingFloats
from .report import CompileReport
from .sizes.shapes import Made, Shapes

_HOOKS_ON_ALL = (*global_hook_tables("forward"), *global_hook_tables("backward"))


def compile(
    model: nn.Module,
    *,
    reuse: str = "marked",
    backend: str = "inductor",
    recompute: Policy = None,
    dynamic: bool | None = None,
) -> CompiledModule:
    """Returns a drop-in replacement for a model that runs a compiled program.

    Compilation happens at the first call with inputs of a new layout. Parameters, buffers, train
    and eval modes stay the model's own: ``state_dict``, optimizers and
    ``DistributedDataParallel`` work as before.

    Args:
        model: any ``nn.Module``; mark its layer class with :func:`lazy_inline`, or use ``"auto"``.
        reuse: ``"marked"`` compiles each different marked block once; ``"auto"`` needs no mark and
            finds what repeats; ``"off"`` inlines early.
        backend: ``"inductor"`` (TorchInductor kernels) or ``"eager"`` (PyTorch's own kernels).
        recompute: None saves what autograd needs; ``"full"`` computes each block again in the
            backward; ``"selective"`` computes again all but matrix products, convolutions and
            attention; a :class:`Budget` computes as little again as fits into so many bytes.
        dynamic: sizes that are symbols: with None those of inputs that came in several sizes, with
            True all, with False none. A further shape then costs a link only.

    A forward that does more at each call than compute (a hook that collects activations, a counter
    outside, ``print``) runs itself. While a module has a backward hook, calls that want gradients
    run the model itself, hook and all; so do calls under a transform of ``torch.func``,
    forward-mode differentiation, and modes or classes of
    tensors that see each operator. The report says so.

    Returns:
        A module; ``.last_report`` tells what the newest compile did (None before the first).

    Raises:
        ReuseError, PlanError: for options that do not exist.

    Example:
        >>> compiled = lazyinline.compile(model)
        >>> compiled(ids).loss.backward()
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"compile takes an nn.Module, not {type(model).__name__}.")
    refuse_foreign(model)
    options = Options(reuse=reuse, backend=backend, recompute=recompute, cache="disk")
    return CompiledModule(model, options, dynamic)


class CompiledModule(nn.Module):
    """A model and the programs compiled for it. Made by :func:`compile`.

    It shares the model's own parameter, buffer and sub-module tables, so names, optimizers and
    ``state_dict`` are the model's.
    """

    def __init__(self, model: nn.Module, options: Options, dynamic: bool | None = None) -> None:
        super().__init__()
        state = self.__dict__
        state["_lazyinline_model"] = model
        state["_lazyinline_compiler"] = Compiler(options)
        state["_lazyinline_shapes"] = Shapes(model, options, dynamic)
        state["_lazyinline_entries"] = KeptPrograms[_Entry]()
        state["_lazyinline_effects"] = EffectsSeen()
        state["_lazyinline_floats"] = VaryingFloats()
        state["_lazyinline_report"] = None
        tables = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
        for table in (*tables, "_load_state_dict_post_hooks"):
            state[table] = model.__dict__[table]
        del state["training"]

    @property
    def training(self) -> bool:  # type: ignore[override]
        """The model's own mode."""
        return bool(self.__dict__["_lazyinline_model"].training)

    @training.setter
    def training(self, mode: bool) -> None:
        model = self.__dict__.get("_lazyinline_model")
        if model is None:
            self.__dict__["training"] = mode
        else:
            model.training = mode

    @property
    def last_report(self) -> CompileReport | None:
        """What the newest compile did; None before the first call."""
        report: CompileReport | None = self.__dict__["_lazyinline_report"]
        return report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs hooks and the program. Hooks on all modules run for the model, not once more."""
        if any(_HOOKS_ON_ALL) and not has_own_hooks(self, "forward"):
            return self.forward(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled program, compiling first if the inputs' layout is new."""
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(self._run)(*args, **kwargs)
        return self._run(*args, **kwargs)

    @property
    def _entries(self) -> KeptPrograms[_Entry]:
        entries: KeptPrograms[_Entry] = self.__dict__["_lazyinline_entries"]
        return entries

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not CompiledModule:
            refuse_wrapper(self, "The compiled module")
        mode = mode_around()
        if mode:
            reason = f"{mode} is active, which sees or changes every operator"
            return self._run_itself(reason, args, kwargs)
        leaves, tree = torch_pytree.flatten_call(args, kwargs)
        entry = self._entries.fitting(leaves, tree)
        if entry is not None:
            return entry.run(leaves)
        plain = written_out(leaves)
        if plain is not None:
            entry = self._entries.fitting(plain, tree)
        if entry is None:
            reason = self._why_itself(leaves)
            if reason:
                return self._run_itself(reason, args, kwargs)
            try:
                entry = self._compile(leaves if plain is None else plain, tree)
            except EffectError as effect:
                reason = self.__dict__["_lazyinline_effects"].note(self._state(), str(effect))
                return self._run_itself(reason, args, kwargs)
        if plain is None:
            return entry.run(leaves)
        if entry.is_tied_to_inputs:
            reason = "an input that it changes or returns is conjugated or negated only in name"
            return self._run_itself(reason, args, kwargs)
        return entry.run(plain)

    def _why_itself(self, leaves: Sequence[Any]) -> str:
        """Returns why no program can stand for a call of the model, or an empty text."""
        model = self.__dict__["_lazyinline_model"]
        watching = watching_tensor(model, leaves)
        if watching:
            return watching
        hooked = backward_hooked(model) if torch.is_grad_enabled() else ""
        if hooked:
            return f"{hooked} has a backward hook, which no compiled program calls"
        known: EffectsSeen = self.__dict__["_lazyinline_effects"]
        return known.why_itself(self._state()) if known else ""

    def _state(self) -> tuple[Any, ...]:
        """What the effects of a forward may depend on: modes, and which hooks there are."""
        model = self.__dict__["_lazyinline_model"]
        modes = [(m.training, *own_hooks(m, "forward")) for m in model.modules()]
        return (torch.is_grad_enabled(), *modes)

    def _run_itself(self, reason: str, args: Any, kwargs: Any) -> Any:
        self._report_eager(reason)
        return self.__dict__["_lazyinline_model"](*args, **kwargs)

    def _report_eager(self, reason: str) -> None:
        """Notes why the model itself runs."""
        known = self.__dict__["_lazyinline_report"]
        if known is None or known.ran_eagerly != reason:
            options = self.__dict__["_lazyinline_compiler"].options
            report = CompileReport(True, options.backend, options.reuse, ran_eagerly=reason)
            self.__dict__["_lazyinline_report"] = report

    @one_at_a_time
    def _compile(self, leaves: list[Any], tree: torch_pytree.TreeSpec) -> _Entry:
        made_meanwhile = self._entries.fitting(leaves, tree)
        if made_meanwhile is not None:
            return made_meanwhile
        model = self.__dict__["_lazyinline_model"]
        check_runnable(model)
        train = torch.is_grad_enabled()
        args, kwargs = torch_pytree.unflatten(leaves, tree)
        shapes: Shapes = self.__dict__["_lazyinline_shapes"]
        inputs = Inputs(args, kwargs, leaves, tree)
        made = shapes.made(inputs)
        if made is None:
            self._entries.warn_if_many(model, inputs)
            made = shapes.note(self._made(inputs, train=train), inputs)
        check_writes(made.compiled.captured.program)
        entry = _Entry(made, leaves)
        entry.can_be_linked_again = made.is_linked
        if self._entries.add(entry):
            compiler = self.__dict__["_lazyinline_compiler"]
            self.__dict__["_lazyinline_compiler"] = Compiler(compiler.options)
        self.__dict__["_lazyinline_report"] = made.report
        return entry

    def _made(self, inputs: Inputs, *, train: bool) -> Made:
        """Compiles for the sizes of a call; floats that varied are inputs, if they can be."""
        floats: VaryingFloats = self.__dict__["_lazyinline_floats"]
        places = floats.varied(inputs)
        if places:
            try:
                return self._made_with(inputs, places, train=train)
            except LazyInlineError:
                floats.close(inputs, places)
        return self._made_with(inputs, frozenset(), train=train)

    def _made_with(self, inputs: Inputs, places: frozenset[int], *, train: bool) -> Made:
        model, leaves, tree = self.__dict__["_lazyinline_model"], inputs.leaves, inputs.tree
        compiler: Compiler = self.__dict__["_lazyinline_compiler"]
        known: CapturedModel | None = None
        numbers: tuple[NumberInput, ...] = ()
        if places:
            reuse = compiler.options.reuse
            known, numbers = capture_open(model, leaves, tree, places, reuse=reuse, train=train)
        compiled, report = compiler.compile(
            model, inputs.args, inputs.kwargs, train=train, known=known
        )
        guard = Guard(model, compiled.captured, leaves, tree, compiled.runtime.hold, places)
        return Made(guard, compiled.without_tensors(), report, numbers=numbers)

    # ---- the model's own state -----------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_lazyinline_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        model = self.__dict__.get("_lazyinline_model")
        if model is None or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(model, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.__dict__["_lazyinline_model"], name)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads what is the model's own, not its children's; called by a module around this."""
        self.__dict__["_lazyinline_model"]._load_from_state_dict(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's own ``state_dict``."""
        return self.__dict__["_lazyinline_model"].state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads into the model."""
        return self.__dict__["_lazyinline_model"].load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> CompiledModule:
        """Switches the model's mode."""
        self.__dict__["_lazyinline_model"].train(mode)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        options = self.__dict__["_lazyinline_compiler"].options
        dynamic = self.__dict__["_lazyinline_shapes"].dynamic
        return (CompiledModule, (self.__dict__["_lazyinline_model"], options, dynamic))

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        import copy

        model = copy.deepcopy(self.__dict__["_lazyinline_model"], memo)
        dynamic = self.__dict__["_lazyinline_shapes"].dynamic
        return CompiledModule(model, self.__dict__["_lazyinline_compiler"].options, dynamic)


class _Entry:
    """One compiled program: when it applies, how its inputs are found, how its result is built."""

    can_be_linked_again = False

    def __init__(self, made: Made, leaves: Sequence[Any]) -> None:
        compiled = made.compiled
        program = compiled.captured.program
        self._compiled = compiled
        self.guard = made.guard
        self._numbers = made.numbers
        self._pick_inputs = picker(_input_order(program.sources, leaves, len(made.numbers)))
        self._writes = program.writes
        written = frozenset(target for _, target in program.writes)
        self._bridge = Bridge(compiled, written) if compiled.derivative is not None else None
        self._result = _Result(program.output_tree, compiled)
        self._repeated: list[int] | None = None  # the same in every run, so the first run tells

    @property
    def is_tied_to_inputs(self) -> bool:
        """Whether the program changes or returns what the caller passed, and not only reads it."""
        program = self._compiled.captured.program
        touched = {target for _, target in program.writes} | self._result.inputs
        return any(isinstance(program.sources[i], UserInput) for i in touched)

    def rest(self) -> None:
        """See :class:`kept_programs.Entry`."""
        self._compiled.runtime.rest()
        if self._bridge is not None:
            self._bridge.backwards.rest()

    def run(self, leaves: Sequence[Any]) -> Any:
        """Runs the program on flat inputs."""
        if self._numbers:
            leaves = [*leaves, *(number.tensor(leaves) for number in self._numbers)]
        inputs = self._pick_inputs([*leaves, *self.guard.tensors])
        if self._bridge is None:
            with torch.no_grad():  # the model's own autograd says that no gradient flows
                outputs: Sequence[Any] = self._forward(inputs)
        else:
            outputs = self._bridge.run(inputs)
        if self._writes:
            with torch.no_grad():
                for output, target in self._writes:
                    inputs[target].copy_(outputs[output])
        return self._result.build(outputs, inputs)

    def _forward(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs the program; ``h`` and ``h.detach()``, one tensor in it, are two for the user."""
        outputs = self._compiled.runtime.forward(inputs)[0]
        if self._repeated is None:
            known = [*map(id, inputs), *map(id, outputs)]
            first = len(inputs)
            self._repeated = [i for i, o in enumerate(outputs) if known.index(id(o)) != first + i]
        for index in self._repeated:
            outputs[index] = outputs[index].detach()
        return outputs


class _Result:
    """Rebuilds the model's nested result from flat outputs."""

    def __init__(self, tree: OutputTree, compiled: CompiledProgram) -> None:
        program = compiled.captured.program
        self._spec = tree.spec
        positions = {value: i for i, value in enumerate(program.inputs)}
        changed = {program.outputs[output]: target for output, target in program.writes}
        self._leaves: list[tuple[str, Any]] = []
        for kind, value in tree.leaves:
            passed = positions.get(program.outputs[value]) if kind == "output" else None
            if kind == "output":  # what the forward changed and returns is the user's own tensor
                passed = changed.get(program.outputs[value], passed)
            self._leaves.append((kind, value) if passed is None else ("input", passed))

    @property
    def inputs(self) -> set[int]:
        """Positions of inputs that are returned as they are."""
        return {value for kind, value in self._leaves if kind == "input"}

    def build(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> Any:
        leaves = [
            outputs[value] if kind == "output" else inputs[value] if kind == "input" else value
            for kind, value in self._leaves
        ]
        return torch_pytree.unflatten(leaves, self._spec)


def _input_order(sources: Sequence[Any], leaves: Sequence[Any], num_numbers: int) -> list[int]:
    """For each program input, its place in the leaves, the numbers and the model's own tensors."""
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    own = len(leaves) + num_numbers
    places += range(len(leaves), own)
    order = []
    for source in sources:
        if isinstance(source, UserInput):
            order.append(places[source.index])
        else:
            order.append(own)
            own += 1
    return order


__all__ = ["CaptureError", "CompiledModule", "compile"]
