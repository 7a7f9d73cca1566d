"""Adapter: autocast as on a GPU, for a model that is traced on the CPU.

A program for a GPU that is not here is traced with CPU tensors. PyTorch's autocast for CUDA does
not cast these, and without CUDA it turns itself off. So each operator also runs on fake CUDA
tensors, where PyTorch's own autocast rule applies; the casts that it makes there are added to the
program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from .torch_patches import replaced

_AS_ON_A_GPU = ("cpu", "cuda")
"""Device types that mean the GPU: a traced tensor says the first, a model may say the second."""

_GPU = torch.device("cuda", 0)
_LOW = (torch.float16, torch.bfloat16)


@contextmanager
def autocast_as_on_a_gpu() -> Iterator[None]:
    """Makes autocast regions inside, and one around this context, apply to the GPU."""
    original = torch.autocast.__init__

    def init(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        moved = device_type in _AS_ON_A_GPU
        device = "cuda" if moved else device_type
        # Without CUDA a region for it would warn and turn itself off, so it is enabled afterwards.
        original(self, device, dtype, enabled and not moved, cache_enabled)
        if moved:
            self._enabled = enabled

    on_cpu = torch.is_autocast_enabled("cpu")
    dtype_on_gpu = torch.get_autocast_dtype("cuda")
    try:
        with (
            replaced(torch.autocast, __init__=init),
            _switched("cpu", on=False),
            _switched("cuda", on=on_cpu or torch.is_autocast_enabled("cuda")),
        ):
            if on_cpu:
                torch.set_autocast_dtype("cuda", torch.get_autocast_dtype("cpu"))
            yield
    finally:
        torch.set_autocast_dtype("cuda", dtype_on_gpu)


@contextmanager
def _switched(device: str, *, on: bool) -> Iterator[None]:
    before = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, on)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before)


class GpuCasts:
    """Adds the casts of GPU autocast to a trace, as operators."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    def around(self, dispatch: Callable[..., Any], tracing: Any) -> Callable[..., Any]:
        """Returns a dispatch function that records an operator with its casts."""

        def traced(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            keys = "AutocastCUDA", "CompositeImplicitAutograd"
            is_on = torch.is_autocast_enabled("cuda")
            if not (is_on and any(_has_rule(func, key) for key in keys)):
                return dispatch(func, types, args, kwargs)
            rule = self._rule(func, args, kwargs)
            if rule.casts_inside and not _has_rule(func):
                with tracing:
                    return func.decompose(*args, **kwargs)

            def cast(value: Any) -> Any:
                wanted = rule.casts.get(id(value))
                if wanted is None:
                    return value
                return dispatch(torch.ops.aten.to.dtype, (FakeTensor,), (value, wanted), {})

            operands = map_aggregate((tuple(args), {**kwargs, **rule.options}), cast)
            return dispatch(func, types, *operands)  # type: ignore[misc]

        return traced

    def _rule(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Rule:
        """Finds the casts of an operator, by running it on fake CUDA tensors under autocast."""
        twins: dict[int, torch.Tensor] = {}

        def twin(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.device.type in _AS_ON_A_GPU:
                with torch._C._DisableTorchDispatch():
                    layout = value.shape, value.stride()
                    memory = torch.empty_strided(*layout, dtype=value.dtype, device="meta")
                return twins.setdefault(id(value), FakeTensor(self._mode, memory, _GPU))
            return value

        on_gpu = map_aggregate((tuple(args), dict(kwargs)), twin)
        found, result = self._watched(func, on_gpu)
        plain = self._own_casts(func, on_gpu, found) if found else {}
        if not _has_rule(func):  # operators that it decomposes into may have one
            return _Rule(casts_inside=len(found) > len(plain))
        own = {key: found.get(id(t)) for key, t in twins.items() if id(t) not in plain}
        casts = {key: dtype for key, dtype in own.items() if dtype is not None}
        low = [key for key, t in twins.items() if t.dtype in _LOW]
        if casts or not low or not isinstance(result, torch.Tensor) or result.dtype in _LOW:
            return _Rule(casts)
        if any(argument.name == "dtype" for argument in func._schema.arguments):
            return _Rule(options={"dtype": result.dtype})
        return _Rule(dict.fromkeys(low, result.dtype))

    def _own_casts(
        self, func: Any, operands: Any, found: Mapping[int, torch.dtype]
    ) -> Mapping[int, torch.dtype]:
        """Returns those casts that the operator makes without autocast as well."""
        try:
            with _switched("cuda", on=False):
                return self._watched(func, operands)[0]
        # Operands of several dtypes need autocast to be promoted to one, usually the low one.
        except RuntimeError:
            low = torch.get_autocast_dtype("cuda")
            return {k: d for k, d in found.items() if low in found.values() and d != low}

    def _watched(self, func: Any, operands: Any) -> tuple[dict[int, torch.dtype], Any]:
        """Runs an operator; returns the dtypes that tensors are cast to, by id, and the result."""
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a cached cast would not be seen
        try:
            with torch.no_grad(), self._mode, _Watch() as watch:
                result = func(*operands[0], **operands[1])
            return watch.casts, result
        finally:
            torch.set_autocast_cache_enabled(cached)


@dataclass(frozen=True)
class _Rule:
    """The effect of autocast on one call of an operator.

    ``casts`` has the dtype that each operand is cast to, by ``id``; ``options`` keyword arguments
    to set; ``casts_inside`` says whether operands are cast of what this operator decomposes into.
    """

    casts: Mapping[int, torch.dtype] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    casts_inside: bool = False


class _Watch(TorchDispatchMode):
    """Notes which tensors are cast, and to what."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: dict[int, torch.dtype] = {}
        self._cast: list[Any] = []  # kept alive, so that each id stays unique

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype"):
            self.casts.setdefault(id(args[0]), kwargs["dtype"])
            self._cast.append(args[0])
        return func(*args, **(kwargs or {}))


def _has_rule(func: Any, key: str = "AutocastCUDA") -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
