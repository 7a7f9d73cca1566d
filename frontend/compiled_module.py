"""``compile(model)``: a drop-in module that runs the compiled program.

``compiled.generate(...)`` is the model's own method, and calls the model once per token. While it
runs, the model's slot is filled (``dispatch/torch_slot.py``), so that these calls are compiled.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch import nn

from ..backend.kernels.lower import BackendName
from ..recompute.planner import Policy
from ..reuse.errors import PlanError, without_torchs
from ..reuse.evidence.module_state import has_own_hooks, module_state, walk_modules
from ..reuse.ir.printer import folded
from ..reuse.ir.program import Program
from ..reuse.torch_names import global_hook_tables
from . import refusals
from .capture.blocks import Reuse
from .dispatch import torch_slot
from .dispatch.dispatcher import DISPATCHER_ATTRIBUTE, dispatcher_of
from .dispatch.model_dispatcher import ModelDispatcher
from .options import Boundaries, Fallback, Options
from .report import CompileReport
from .training_step import TrainingStep

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_HOOKS_ON_ALL = (*global_hook_tables("forward"), *global_hook_tables("backward"))

Model = TypeVar("Model", bound=nn.Module)


# For type checkers: the result is a CompiledModule or, in place, of the model's own class.
@overload
def compile(
    model: nn.Module | Program | ExportedProgram,
    *,
    reuse: Reuse = ...,
    backend: BackendName = ...,
    recompute: Policy = ...,
    dynamic: bool | None = ...,
    in_place: Literal[False] = ...,
    fallback: Fallback = ...,
    target: str | None = ...,
    boundaries: Boundaries = ...,
) -> CompiledModule: ...
@overload
def compile(
    model: Model,
    *,
    reuse: Reuse = ...,
    backend: BackendName = ...,
    recompute: Policy = ...,
    dynamic: bool | None = ...,
    in_place: Literal[True],
    fallback: Fallback = ...,
    target: str | None = ...,
    boundaries: Boundaries = ...,
) -> Model: ...


@without_torchs
def compile(
    model: nn.Module | Program | ExportedProgram,
    *,
    reuse: Reuse = "auto",
    backend: BackendName = "inductor",
    recompute: Policy = None,
    dynamic: bool | None = None,
    in_place: bool = False,
    fallback: Fallback = "eager",
    target: str | None = None,
    boundaries: Boundaries = "kept",
) -> nn.Module:
    """Returns a drop-in replacement for a model that runs a compiled program.

    Compilation happens at the first call with inputs of a new layout. Parameters, buffers, train
    and eval modes stay the model's own: ``state_dict``, optimizers and
    ``DistributedDataParallel`` work as before.

    Args:
        model: any ``nn.Module``; its layer class may be marked with :func:`lazy_inline`. Also a
            :class:`Program`, or an ``ExportedProgram``, whose repeated regions become blocks.
        reuse: ``"auto"`` compiles each different block once, both marked and repeated ones;
            ``"marked"`` only marked ones; ``"off"`` inlines early.
        backend: ``"inductor"`` (TorchInductor kernels) or ``"eager"`` (PyTorch's own kernels).
        recompute: None saves what autograd needs; ``"full"`` computes each block again in the
            backward; ``"selective"`` computes again all but matrix products, convolutions and
            attention; a :class:`Budget` computes as little again as fits into so many bytes.
        dynamic: sizes that are symbols: with None those of inputs that came in several sizes, with
            True all, with False none. A further shape then costs a link only.
        in_place: compile the given model itself, and return it. Its calls run the program; all else
            (class, signature, hooks, ``state_dict``, saving) does not change. A second compile
            replaces the options. Copies and saved models are not compiled.
        fallback: ``"eager"`` runs modules that cannot be captured in eager mode (their Python needs
            the value of a tensor, say), and compiles the modules inside that can be; the report
            has the line and the reason. ``"error"`` raises CaptureError, as does any ``recompute``,
            because it would not apply to a module that runs eagerly.
        target: ``"cuda:sm_90"`` and the like compile for a GPU that need not be here, for the
            shapes of each call: the report has the plan, and the call itself raises PlanError.
        boundaries: ``"fused"`` lets kernels fuse the end of a block with the start of the next, if
            equal blocks follow each other: one or two launches fewer per block. Reports and
            profiles then show block bodies, and seams between blocks.

    Calls run eagerly, and the report says why, where a forward does more than compute (``print``),
    where a module has a backward hook and gradients are wanted, and under ``torch.func``
    transforms, forward-mode differentiation, or modes and tensor classes that see each operator.

    Returns:
        A module, or in place the model; :func:`last_report` returns the report of either.

    Raises:
        ReuseError, PlanError: for options that do not exist.

    Example:
        >>> compiled = lazyinline.compile(model)
        >>> compiled(ids).loss.backward()
        >>> trainer = Trainer(lazyinline.compile(model, in_place=True), arguments)
    """
    module = model if isinstance(model, nn.Module) else _as_module(model)
    _check_model(module, fallback)
    if target is not None:  # on a GPU that is not here nothing can run eagerly, nor a second time
        fallback, dynamic = "error", False
    options = Options(reuse, backend, recompute, "disk", fallback, target, boundaries)
    if in_place:
        return _compiled_in_place(module, options, dynamic)
    for _, part in refusals.wrapped_parts(module):
        torch_slot.check_asks_slot(part)
    return CompiledModule(module, options, dynamic)


def _as_module(given: Any) -> Any:
    """Returns a program as a module; anything else unchanged, to be refused later."""
    if isinstance(given, Program):
        return given.to_fx()
    if "torch.export" in sys.modules and isinstance(given, torch.export.ExportedProgram):
        from .dynamo.torch_dynamo_backend import module_of_exported  # it imports Dynamo

        return module_of_exported(given)
    return given


def _check_model(model: nn.Module, fallback: Fallback) -> None:
    """Raises an error if ``model`` is not a module, or has modules that cannot be compiled."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"compile takes an nn.Module, not {type(model).__name__}.")
    places = walk_modules(model)
    for path, part in places:
        if refusals.way_of(part) == "none":
            refusals.refuse_wrapper(part, path)
    refusals.refuse_compiled(places)
    refusals.refuse_scripted(places if fallback == "error" else [("", model)])


def _compiled_in_place(model: nn.Module, options: Options, dynamic: bool | None) -> nn.Module:
    """Fills the slots of a model, and of models inside that code may call without it."""
    torch_slot.check_asks_slot(model)
    dispatcher = ModelDispatcher(model, options, dynamic)
    torch_slot.fill_slot(model, dispatcher)
    for inside in dispatcher.called_past():
        torch_slot.fill_slot(inside.model, inside)
    dispatcher.warn_if_generate_is_eager()
    return model


def last_report(compiled: nn.Module | TrainingStep) -> CompileReport | None:
    """Returns the report of the newest compile of a model.

    Use this for a model that was compiled in place, which gets no attribute ``last_report``.

    Args:
        compiled: the result of ``compile`` or ``compile_step``.

    Returns:
        The report; None before the first call.

    Raises:
        PlanError: if this is not a compiled model.

    Example:
        >>> lazyinline.compile(model, in_place=True)
        >>> model(ids)
        >>> print(lazyinline.last_report(model))
    """
    if isinstance(compiled, TrainingStep):
        return compiled.last_report
    calls = dispatcher_of(compiled)
    if calls is not None:
        return calls.last_report
    raise _not_compiled(compiled)


def restore(compiled: nn.Module) -> nn.Module:
    """Returns the plain model of a compiled one: calls run its own Python again.

    A model that was compiled in place becomes plain itself, and its programs are freed.

    Args:
        compiled: the result of ``compile``.

    Raises:
        PlanError: if this is not a compiled model.

    Example:
        >>> lazyinline.compile(model, in_place=True)
        >>> assert lazyinline.restore(model) is model
    """
    calls = dispatcher_of(compiled)
    if not isinstance(calls, ModelDispatcher):
        raise _not_compiled(compiled)
    if torch_slot.in_slot(calls.model) is calls:
        for each in (calls, *calls.called_past()):
            torch_slot.empty_slot(each.model)
    return calls.model


def _not_compiled(what: Any) -> PlanError:
    return PlanError(
        f"This {type(what).__name__} was not compiled by lazyinline. Pass what compile "
        "returned (with in_place=True the model itself; a copy of it is a plain model)."
    )


class CompiledModule(nn.Module):
    """A model and the programs compiled for it. Made by :func:`compile`.

    Its parameter, buffer and sub-module tables are the model's, and so are names, optimizers and
    ``state_dict``.
    """

    _lazyinline_calls: ModelDispatcher

    def __init__(self, model: nn.Module, options: Options, dynamic: bool | None = None) -> None:
        super().__init__()
        state, calls = self.__dict__, ModelDispatcher(model, options, dynamic)
        state[DISPATCHER_ATTRIBUTE] = calls
        state["forward"] = calls  # it has the signature of the model's forward
        tables = ("_parameters", "_buffers", "_non_persistent_buffers_set")
        for table in (*tables, "_load_state_dict_post_hooks"):
            state[table] = model.__dict__[table]
        # Both are asked of the model: ``del model[-1]`` gives a Sequential another table.
        del state["_modules"], state["training"]

    @property
    def training(self) -> bool:  # type: ignore[override]
        """The model's own mode."""
        return bool(self._lazyinline_calls.model.training)

    @training.setter
    def training(self, mode: bool) -> None:
        calls = self.__dict__.get(DISPATCHER_ATTRIBUTE)
        if calls is None:
            self.__dict__["training"] = mode
        else:
            calls.model.training = mode

    @property
    def last_report(self) -> CompileReport | None:
        """Returns the report of the newest compile; None before the first call."""
        return self._lazyinline_calls.last_report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs hooks and the program."""
        if type(self) is not CompiledModule:
            refusals.refuse_wrapper(self, "The compiled module")
        # Global hooks run when the model itself is called; here they would run a second time.
        if any(_HOOKS_ON_ALL) and not has_own_hooks(self, "forward"):
            return self.forward(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled program, compiling first if the inputs' layout is new."""
        return self._lazyinline_calls(*args, **kwargs)

    def __repr__(self) -> str:
        """Returns a line about the compiled module, and the model's ``repr``."""
        calls = self._lazyinline_calls
        return f"{folded(f'CompiledModule({calls.summary()})')}\n{calls.model!r}"

    # ---- the model's own state -----------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name == "__signature__":  # inspect.signature(compiled)
            return self._lazyinline_calls.__signature__
        try:
            return super().__getattr__(name)
        except AttributeError:
            calls = self._lazyinline_calls
            return calling(self, calls, getattr(calls.model, name))

    # Python looks for these on the class alone. With a length, truth has to be asked for as well.
    def __len__(self) -> int:
        return len(self._lazyinline_calls.model)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        return self._lazyinline_calls.model[index]  # type: ignore[index]

    def __bool__(self) -> bool:
        return bool(self._lazyinline_calls.model)

    def __setattr__(self, name: str, value: Any) -> None:
        calls = self.__dict__.get(DISPATCHER_ATTRIBUTE)
        if calls is None or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(calls.model, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self._lazyinline_calls.model, name)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model's own tensors, not its children's; called by a module around this."""
        self._lazyinline_calls.model._load_from_state_dict(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's own ``state_dict``."""
        return self._lazyinline_calls.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads into the model."""
        return self._lazyinline_calls.model.load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> CompiledModule:
        """Switches the model's mode."""
        self._lazyinline_calls.model.train(mode)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        calls = self._lazyinline_calls
        return CompiledModule, (calls.model, calls.options, calls.dynamic)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        calls = self._lazyinline_calls
        return CompiledModule(copy.deepcopy(calls.model, memo), calls.options, calls.dynamic)


_OWN_COMPILER = "get_compiled_call"  # by which transformers' generate compiles the decoding step


def calling(compiled: nn.Module, calls: ModelDispatcher, found: Any) -> Any:
    """Returns an attribute of a model; within a method, calls of the model are compiled ones."""
    model = calls.model
    if not isinstance(found, types.MethodType) or found.__self__ is not model:
        return found
    is_generate = found.__name__ == "generate"
    if not torch_slot.asks_slot(model) and not is_generate:
        return found

    @functools.wraps(found)
    def method(*args: Any, **kwargs: Any) -> Any:
        if is_generate:
            calls.note_generate()
        generating = calls.look_for_generating()
        with ExitStack() as routes:
            if torch_slot.asks_slot(model):
                routes.enter_context(_routed(model, compiled))
            if generating is not None:
                routes.enter_context(_routed(generating.model, generating))
            return found(*args, **kwargs)

    return method


@contextmanager
def _routed(model: nn.Module, compiled: Callable[..., Any]) -> Iterator[None]:
    """Routes calls of the model inside to the compiled one."""
    state = module_state(model)
    # Replaced, because the decoding step is compiled already.
    asked = hasattr(model, _OWN_COMPILER) and _OWN_COMPILER not in state
    if asked:
        state[_OWN_COMPILER] = lambda *_: model.__call__
    try:
        with torch_slot.slot_filled(model, compiled):
            yield
    finally:
        if asked:
            state.pop(_OWN_COMPILER, None)
