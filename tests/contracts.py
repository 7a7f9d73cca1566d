"""What tests of contracts with private PyTorch share: which name has one, and small graphs."""

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
import torch.fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._sympy.functions import Max

from lazyinline.backend.kernels import torch_corrections

CONTRACTS: set[str] = set()
Test = Callable[..., None]


def resolve(dotted: str) -> Any:
    """Returns what a dotted name stands for; fails with the name if there is no such thing."""
    parts = dotted.split(".")
    for size in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:size]))
        except ImportError:
            continue
        for index, part in enumerate(parts[size:], size):
            if not hasattr(found, part):
                here = ".".join(parts[:index])
                pytest.fail(f"{dotted} moved: {here} has no {part} in torch {torch.__version__}")
            found = getattr(found, part)
        return found
    raise AssertionError(dotted)


def names_in(text: str) -> list[str]:
    """Returns the names in a text: ``torch._C: a b.c`` is ``torch._C.a`` and ``torch._C.b.c``."""
    owner, _, rest = text.partition(": ")
    return [f"{owner}.{name}" for name in rest.split()] or [owner]


def resolve_optional(name: str) -> Any:
    """Returns what a name stands for; None if it ends in ``?`` and is not there."""
    if not name.endswith("?"):
        return resolve(name)
    owner, _, attribute = name.removesuffix("?").rpartition(".")
    return getattr(resolve(owner), attribute, None)


def contract(*texts: str) -> Callable[[Test], Test]:
    """Registers a test for private names, which are imported, and must be there, when it runs.

    Args:
        texts: see `names_in`. Not every supported version has a name with ``?`` behind it, and
            ``._x`` is an attribute of objects.
    """
    names = [name for text in texts for name in names_in(text)]
    CONTRACTS.update(name.removesuffix("?") for name in names)

    def register(test: Test) -> Test:
        @functools.wraps(test)
        def checked(*args: Any, **kwargs: Any) -> None:
            for name in names:
                if not name.startswith("."):
                    resolve_optional(name)
            test(*args, **kwargs)

        return checked

    return register


class Watch(TorchDispatchMode):
    """Notes each operator with its keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, kwargs or {}))
        return func(*args, **(kwargs or {}))


def fake_mode(**options: Any) -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True, **options)


def traced(
    function: Callable[..., Any],
    *inputs: Any,
    table: Mapping[Any, Any] | None = None,
    pre_dispatch: bool = False,
) -> Any:
    make_fx = resolve("torch.fx.experimental.proxy_tensor.make_fx")
    return make_fx(function, table, pre_dispatch=pre_dispatch)(*inputs)


def traced_on_fakes(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Traces a function on fakes of its inputs, with code that takes one argument for each."""
    with fake_mode() as mode:
        module = traced(function, *map(mode.from_tensor, inputs), **options)
    module.graph.set_codegen(torch.fx.graph.CodeGen())
    module.recompile()
    return module


def targets(module: torch.fx.GraphModule) -> list[Any]:
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


def within(context: Any, function: Callable[[], Any]) -> Any:
    with context:
        return function()


def passing(backward: Callable[[Tensor], Tensor]) -> type[torch.autograd.Function]:
    """Returns a function that changes nothing, and whose gradient is what another makes of it."""

    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return backward(gradient)

    return Passing


@contextmanager
def values_compared() -> Iterator[list[bool]]:
    """Compares the values of graphs with those that Inductor finds; builds nothing of them.

    Yields, of each graph, whether its values would have been taken as they are.
    """
    from torch._inductor import compile_fx

    find, taken, differing = compile_fx.fake_tensor_prop, list[bool](), list[str]()

    def layouts(module: torch.fx.GraphModule) -> dict[str, Any]:
        values = {n.name: n.meta.get("val") for n in module.graph.nodes if n.op == "call_function"}
        return pytree.tree_map_only(torch.Tensor, layout, values)  # type: ignore[no-any-return]

    def layout(value: Tensor) -> str:
        stride = tuple(map(plain, value.stride()))
        strides = f"{stride} from {value.storage_offset()}"
        return f"{value.dtype} {value.device} {tuple(value.shape)} {strides}"

    def plain(stride: Any) -> Any:
        """Leaves out that a stride is at least 1, which is true where there are elements."""
        size = getattr(getattr(stride, "node", None), "expr", stride)
        return sympy.sympify(size).replace(Max, lambda *sizes: Max(*(s for s in sizes if s != 1)))

    def compared(module: torch.fx.GraphModule, inputs: Any) -> None:
        mode = compile_fx.detect_fake_mode(inputs)
        known = torch_corrections._has_its_value
        taken.append(all(known(node, mode) for node in module.graph.nodes))
        if taken[-1]:
            torch_corrections._renew_copies(module, mode)
        before = layouts(module)
        find(module, inputs)
        after = layouts(module) if taken[-1] else before
        differing.extend(f"{n}: {before[n]} is {after[n]}" for n in before if before[n] != after[n])
        raise NotImplementedError("compared")  # the leaf runs eagerly, and says so in a warning

    with (
        mock.patch.object(torch_corrections, "values_as_traced", nullcontext),
        mock.patch.object(compile_fx, "fake_tensor_prop", compared),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", UserWarning)
        yield taken
    assert not differing
