"""Adapter: temporary patches of PyTorch that let capture watch a model run.

While :func:`intercepted` is open, the watcher gets, in the capturing thread only: module calls;
reads of module attributes, where it replaces real tensors by fakes; writes of module attributes;
calls of custom ``autograd.Function``s and of ``torch.utils.checkpoint``; reads and changes of a
tensor's state that are no operators (:mod:`.torch_tensor_answers`). Methods that return the values
of a real tensor get its fake, which has none. All patches are undone on exit.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
import torch.utils.checkpoint
from torch import nn
from torch._functorch import eager_transforms
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.map import map_impl
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch.autograd.function import _SingleLevelFunction
from torch.distributions import constraints, distribution
from torch.jit._state import _try_get_jit_cached_function
from torch.nn.modules import transformer

from ...reuse.errors import INVALID
from ...reuse.evidence.module_state import module_state
from ...reuse.evidence.slots import reveal
from ...reuse.torch_names import CALL_SLOT
from .frames import (
    acts_on_modules,
    frames_from,
    is_library_frame,
    is_torch_frame,
    is_user_frame,
    may_catch,
)
from .gradients import Argnums, Function, gradient_and_result
from .torch_tensor_answers import is_answer, watched_names

_LOCK = threading.RLock()
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
_VALUE_READERS = ("tolist", "numpy", "__array__", "__dlpack__")
_TEXTS = ("__repr__", "__format__")
_PRINTER_FILE = torch._tensor_str.__file__  # it reads values only to print them
# The generator behind a non-reentrant checkpoint: its name since torch 2.15, then the older one.
_CHECKPOINT_GENERATORS = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)
_TRACER_FILE = torch.fx.experimental.proxy_tensor.__file__
# nn.Module and ``cached_property`` read single attributes in ``__dict__``.
_KNOWN_FILES = (sys.modules[nn.Module.__module__].__file__, functools.__file__)
_CONTROL_FLOW: dict[str, Any] = {
    "cond": cond_op,
    "scan": scan_op,
    "map": map_impl,
    "while_loop": while_loop_op,
}
CONTROL_FLOW = frozenset(_CONTROL_FLOW.values())
"""The operators of control flow, which a capture records."""
_CONTROL_FLOW_FOLDER = str(Path(inspect.getfile(type(cond_op))).parent)


_Watcher: TypeAlias = Any
"""Receives the calls of the patches: a :class:`..capture.watcher.ModelWatcher`."""


@contextmanager
def intercepted(watcher: _Watcher) -> Iterator[None]:
    """Reports what this thread does with modules and tensors to ``watcher``."""
    thread = threading.get_ident()
    with _LOCK, ExitStack() as undo:
        for patch in _PATCHES:
            undo.callback(patch(watcher, thread))
        yield


def _patch_calls(watcher: _Watcher, thread: int) -> Callable[[], None]:
    original = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(self, *args, **kwargs)
        return watcher.call(self, args, kwargs, original)

    return replace_attributes(nn.Module, {"__call__": call})


def _patch_reads(watcher: _Watcher, thread: int) -> Callable[[], None]:
    lookup, fallback = object.__getattribute__, nn.Module.__getattr__

    def getattribute(self: nn.Module, name: str) -> Any:
        if threading.get_ident() != thread:
            return lookup(self, name)
        if name[:2] == "__":
            if name == "__dict__" and sys._getframe(1).f_code.co_filename not in _KNOWN_FILES:
                return watcher.own_names(self)
            return lookup(self, name)
        if name == CALL_SLOT:
            return None  # run the module's own Python even if it was compiled
        watcher.read(self, name)
        value = lookup(self, name)
        if type(value) is int:
            return watcher.number(self, name, value)
        return watcher.substitute(value) if isinstance(value, torch.Tensor) else value

    def getattr_(self: nn.Module, name: str) -> Any:
        value = fallback(self, name)
        if isinstance(value, torch.Tensor) and threading.get_ident() == thread:
            return watcher.substitute(value)
        return value

    patches = {"__getattribute__": getattribute, "__getattr__": getattr_}
    return replace_attributes(nn.Module, patches)


def _patch_writes(watcher: _Watcher, thread: int) -> Callable[[], None]:
    store, delete = nn.Module.__setattr__, nn.Module.__delattr__

    def setattr_(self: nn.Module, name: str, value: Any) -> None:
        # Other code may read the attribute, so a proxy of an index is replaced by its number.
        value = reveal(value)
        if threading.get_ident() == thread and watcher.write(self, name, value):
            return
        store(self, name, value)

    def delattr_(self: nn.Module, name: str) -> None:
        if threading.get_ident() == thread:
            watcher.write(self, name, None)
        delete(self, name)

    return replace_attributes(nn.Module, {"__setattr__": setattr_, "__delattr__": delattr_})


def _patch_functions(watcher: _Watcher, thread: int) -> Callable[[], None]:
    """Patches the method that every ``Function.apply`` calls."""
    is_of_c = isinstance(vars(torch.autograd.Function)["apply"], types.ClassMethodDescriptorType)
    # Since torch 2.15 ``apply`` is implemented in C. In older versions, the patch also catches an
    # ``apply`` that was kept (``act = Act.apply``); since then, :func:`is_context` detects those.
    base: Any = torch.autograd.Function if is_of_c else _SingleLevelFunction

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        bound = super(base, cls).apply
        if threading.get_ident() != thread or kwargs:
            return bound(*args, **kwargs)
        return watcher.custom_function(cls, args, bound)

    return replace_attributes(base, {"apply": classmethod(apply)})


def _patch_scripted(watcher: _Watcher, thread: int) -> Callable[[], None]:
    """Patches functions of ``torch.jit``, whose graph has a derivative of its own."""
    kind: Any = torch.jit.ScriptFunction
    run = kind.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return run(self, *args, **kwargs)
        original = getattr(self, "_torchdynamo_inline", None)  # as Dynamo does
        # None, or another one, of a function that was traced.
        known = original and _try_get_jit_cached_function(original)
        is_scripted = known is not None and known.qualified_name == self.qualified_name
        return watcher.scripted(original if is_scripted else None)(*args, **kwargs)

    return replace_attributes(kind, {"__call__": call})


def _patch_checkpoint(watcher: _Watcher, thread: int) -> Callable[[], None]:
    """Patches the generator inside which a non-reentrant checkpoint runs its function."""
    module: Any = torch.utils.checkpoint
    name = next(name for name in _CHECKPOINT_GENERATORS if hasattr(module, name))
    original = getattr(module, name)
    plain = module.noop_context_fn
    signature = inspect.signature(original)

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        if threading.get_ident() != thread:
            yield from original(*args, **kwargs)
            return
        context_fn = signature.bind(*args, **kwargs).arguments.get("context_fn", plain)
        with watcher.checkpoint("full" if context_fn is plain else "selective"):
            yield

    return replace_attributes(module, {name: generator})


def _patch_values(watcher: _Watcher, thread: int) -> Callable[[], None]:
    """Patches methods that read a tensor's memory without an operator that a trace could see."""

    def reading(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if (
                threading.get_ident() == thread
                and type(self) in _PLAIN_TENSORS
                and sys._getframe(1).f_code.co_filename != _PRINTER_FILE
            ):
                self = watcher.substitute(self)
            return original(self, *args, **kwargs)

        return read

    readers = {name: reading(getattr(torch.Tensor, name)) for name in _VALUE_READERS}
    return replace_attributes(torch.Tensor, readers)


def _patch_answers(watcher: _Watcher, thread: int) -> Callable[[], None]:
    """Patches tensor attributes that are no operators and that a fake cannot answer itself."""

    def reporting(name: str, do: Callable[..., Any], is_change: bool) -> Callable[..., Any]:
        def asked(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return do(self, *args, **kwargs)
            frame = _asking_frame()
            # PyTorch's own code may read what it needs. A change of the model's tensors is reported
            # even so, and anything that ``torch.nn`` does to them for the user (``zero_grad``).
            if is_library_frame(frame):
                is_act = is_change or acts_on_modules(frame)
                if not (is_act and watcher.owns(self)):
                    return do(self, *args, **kwargs)
            return watcher.asks(self, name, lambda tensor: do(tensor, *args, **kwargs))

        return asked

    def watched(name: str, original: Any) -> Any:
        if callable(original):
            is_change = name.endswith("_") and not name.startswith("__")
            return reporting(name, original, is_change)
        if not hasattr(original, "__set__"):
            return property(reporting(name, original.__get__, is_change=False))
        get = original.__get__
        return property(
            get if is_answer(name) else reporting(name, get, is_change=False),
            reporting(name, original.__set__, is_change=True),
            original.__delete__,
        )

    names = {name: watched(name, value) for name, value in watched_names().items()}
    return replace_attributes(torch.Tensor, names)


def _asking_frame() -> types.FrameType:
    frame: Any = sys._getframe(2)
    # A method that was kept from before the patch (``f = Tensor.name``) comes through the tracer.
    while frame.f_code.co_filename == _TRACER_FILE:
        frame = frame.f_back
    return frame  # type: ignore[no-any-return]


def _patch_texts(watcher: _Watcher, thread: int) -> Callable[[], None]:
    """Patches methods that format a tensor, because the text contains its values."""

    def writing(original: Any) -> Callable[..., str]:
        def text(self: torch.Tensor, *args: Any, **kwargs: Any) -> str:
            if threading.get_ident() == thread and not is_torch_frame(_asking_frame()):
                watcher.text(self)
            return str(original(self, *args, **kwargs))

        return text

    texts = {name: writing(getattr(torch.Tensor, name)) for name in _TEXTS}
    return replace_attributes(torch.Tensor, texts)


def _keeps_all_results(frame: Any) -> bool:
    """Whether a logging function caches all its results, so that an equal call logs nothing.

    ``warning_once`` of Transformers does.
    """
    while frame.f_code.co_filename == logging.__file__:
        frame = frame.f_back
    function = frame.f_globals.get(frame.f_code.co_name)
    asked = getattr(function, "cache_parameters", None)  # of functools.lru_cache
    keeps_all = asked is not None and asked()["maxsize"] is None
    return keeps_all and function.__wrapped__.__code__ is frame.f_code


def _patch_output(watcher: _Watcher, thread: int) -> Callable[[], None]:
    """Patches ``print``, ``torch.save``, and the handling of log records that would be written."""
    show, handle, save = builtins.print, logging.Logger.handle, torch.save

    def print_(*values: Any, **kwargs: Any) -> None:
        if threading.get_ident() == thread and is_user_frame(sys._getframe(1)):
            watcher.acts("prints or logs something")
        show(*values, **kwargs)

    def handle_(self: logging.Logger, record: logging.LogRecord) -> None:
        own = record.name.partition(".")[0] in ("torch", "lazyinline")
        if threading.get_ident() == thread and not own:
            if _keeps_all_results(sys._getframe(1)):
                record.getMessage()  # raises now if it formats a tensor
                if watcher.says_once(lambda: handle(self, record)):
                    return
            watcher.acts("prints or logs something")
        handle(self, record)

    def save_(*args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == thread:
            watcher.acts("writes a file (torch.save)")
        save(*args, **kwargs)

    with ExitStack() as undo:
        undo.callback(replace_attributes(builtins, {"print": print_}))
        undo.callback(replace_attributes(logging.Logger, {"handle": handle_}))
        undo.callback(replace_attributes(torch, {"save": save_}))
        return undo.pop_all().close


def _patch_backward(watcher: _Watcher, thread: int) -> Callable[[], None]:
    """Patches the function that ``torch.autograd.grad`` and every ``backward`` call."""
    engine: Any = torch.autograd._engine_run_backward

    def run(
        outputs: Sequence[torch.Tensor],
        seeds: Sequence[torch.Tensor | None],
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[torch.Tensor] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = True,
    ) -> Any:
        found = None
        if threading.get_ident() == thread and accumulate_grad:
            watcher.backward()
        elif threading.get_ident() == thread:
            found = watcher.gradient(outputs, inputs, seeds, allow_unused=allow_unreachable)
        if found is None:
            more = (inputs, allow_unreachable, accumulate_grad)
            return engine(outputs, seeds, retain_graph, create_graph, *more)
        if create_graph:
            return found
        return tuple(None if g is None else g.detach() for g in found)

    return replace_attributes(torch.autograd, {"_engine_run_backward": run})


def _patch_transforms(watcher: _Watcher, thread: int) -> Callable[[], None]:
    """Patches the function that ``torch.func.grad`` and ``grad_and_value`` call.

    The tracer cannot record operators on their wrapped tensors, so the gradient is computed by
    ``torch.autograd.grad`` instead. Inside another transform, such as ``vmap``, nothing changes.
    """
    original: Any = eager_transforms.grad_and_value_impl

    def run(
        func: Function,
        argnums: Argnums,
        has_aux: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Any]:
        is_inside = torch._C._functorch.peek_interpreter_stack() is not None
        if threading.get_ident() != thread or is_inside or not watcher.follows_gradients():
            return cast("tuple[Any, Any]", original(func, argnums, has_aux, args, kwargs))

        def value_of(result: Any) -> torch.Tensor:
            value = result[0] if has_aux and isinstance(result, tuple) and result else result
            # If the result is not a scalar, the original raises PyTorch's own error.
            if not isinstance(value, torch.Tensor) or value.dim():
                original(lambda *_, **__: result, argnums, has_aux, args, kwargs)
            return cast("torch.Tensor", value)

        return gradient_and_result(func, argnums, args, kwargs, value_of=value_of)

    return replace_attributes(eager_transforms, {"grad_and_value_impl": run})


def replace_attributes(owner: Any, attributes: Mapping[str, Any]) -> Callable[[], None]:
    """Sets attributes of an object; returns a function that restores the old ones."""
    own = {name: vars(owner)[name] for name in attributes if name in vars(owner)}

    def restore() -> None:
        for name in attributes:
            if name in own:
                setattr(owner, name, own[name])
            elif name in vars(owner):
                delattr(owner, name)

    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
    except BaseException:  # an interrupt may come between two of them
        restore()
        raise
    return restore


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Sets attributes of an object inside."""
    restore = replace_attributes(owner, attributes)
    try:
        yield
    finally:
        restore()


def _patch_hooks(watcher: _Watcher, thread: int) -> Callable[[], None]:
    saving = torch.autograd.graph.saved_tensors_hooks
    enter = saving.__enter__

    def entered(self: Any) -> None:
        # PyTorch's checkpoint enters such hooks itself, and ``save_on_cpu`` changes no values.
        by_user = threading.get_ident() == thread and not is_library_frame(sys._getframe(1))
        if by_user and not isinstance(self, torch.autograd.graph.save_on_cpu):
            watcher.saving_hook()
        return enter(self)

    return replace_attributes(saving, {"__enter__": entered})


def patch_control_flow(watcher: _Watcher, thread: int) -> Callable[[], None]:
    """Patches the control-flow operators: instead of tracing their bodies, they report them.

    Outside of a compile, ``torch.cond`` and the others would call Dynamo to compile the function
    that calls the operator; here that function is called as it is.
    """
    compile_ = torch.compile

    def compiled(*args: Any, **kwargs: Any) -> Any:
        is_theirs = sys._getframe(1).f_code.co_filename.startswith(_CONTROL_FLOW_FOLDER)
        if threading.get_ident() == thread and is_theirs:
            return args[0]
        return compile_(*args, **kwargs)

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(self, *args, **kwargs)
            return watcher.control_flow(name, args)

        return call

    with ExitStack() as undo:
        undo.callback(replace_attributes(torch, {"compile": compiled}))
        for name, operator in _CONTROL_FLOW.items():
            kind = type(operator)
            undo.callback(replace_attributes(kind, {"__call__": watched(name, kind.__call__)}))
        return undo.pop_all().close


def _patch_hints(watcher: _Watcher, thread: int) -> Callable[[], None]:
    original = transformer._detect_is_causal_mask

    def detect(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        # It looks at the mask's numbers for a hint, without which PyTorch's layers use the mask: a
        # causal one is found in the program. Eager drops that one, so it would get no gradient.
        stack = sys._getframe(1).f_locals.get("self")
        is_asked = is_causal is None and mask is not None and threading.get_ident() == thread
        if is_asked and not mask.requires_grad and _takes_hints(stack):
            return False
        return original(mask, is_causal, size)

    return replace_attributes(transformer, {"_detect_is_causal_mask": detect})


def _takes_hints(stack: Any) -> bool:
    """Whether all layers are PyTorch's own, which are right without a hint; a user's may not be."""
    if type(stack) not in (nn.TransformerEncoder, nn.TransformerDecoder):
        return False
    layers = module_state(module_state(stack)["_modules"]["layers"])["_modules"].values()
    return all(
        type(layer) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        and type(module_state(layer)["_modules"]["self_attn"]) is nn.MultiheadAttention
        for layer in layers
    )


def _patch_validations(watcher: _Watcher, thread: int) -> Callable[[], None]:
    original, outside = torch._is_all_true, set(map(id, frames_from(sys._getframe())))

    def is_all_true(valid: torch.Tensor) -> Any:
        # A distribution asks this to raise an error, which a program does by an assertion. One that
        # fails on a GPU would end the use of the GPU, so there the question stays one to Python, as
        # where the forward may catch the error.
        frame = sys._getframe(1)
        is_check = frame.f_code.co_filename == distribution.__file__ and valid.device.type == "cpu"
        if not is_check or threading.get_ident() != thread:
            return original(valid)
        if any(map(may_catch, takewhile(lambda one: id(one) not in outside, frames_from(frame)))):
            return original(valid)
        told, argument = frame.f_locals, frame.f_locals.get("param", "value")
        constraint = type(told.get("constraint", told.get("support"))).__name__.strip("_")
        which = f"{argument} of {type(told['self']).__name__}"
        torch._assert_async(valid.all(), f"Expected {which} to satisfy {constraint}{INVALID}")
        return True

    check = constraints.positive_definite.check

    def is_positive_definite(matrix: torch.Tensor) -> torch.Tensor:
        # PyTorch's asks by an `if` whether all are symmetric, and only then factors them.
        if matrix.shape[-2] != matrix.shape[-1] or threading.get_ident() != thread:
            return check(matrix)  # type: ignore[no-any-return]
        symmetric = torch.isclose(matrix, matrix.mT, atol=1e-6).all(-2).all(-1)
        factored = torch.linalg.cholesky_ex(matrix).info.eq(0)
        return torch.where(symmetric.all(), factored, symmetric)

    with ExitStack() as undo:
        undo.callback(replace_attributes(torch, {"_is_all_true": is_all_true}))
        kept = {"check": is_positive_definite}
        undo.callback(replace_attributes(constraints.positive_definite, kept))
        return undo.pop_all().close


_PATCHES = (
    patch_control_flow,
    _patch_calls,
    _patch_reads,
    _patch_writes,
    _patch_functions,
    _patch_scripted,
    _patch_hooks,
    _patch_backward,
    _patch_transforms,
    _patch_checkpoint,
    _patch_values,
    _patch_answers,
    _patch_texts,
    _patch_output,
    _patch_hints,
    _patch_validations,
)
