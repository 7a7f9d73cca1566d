"""Contracts with private PyTorch: one test per name that the adapters use, with what they rely on.

When a new torch breaks one of these, its test says which name moved or changed; the adapter that
uses it is the one file to look at.
"""

import ast
import copy
import ctypes
import functools
import importlib
import inspect
import itertools
import logging
import operator
import os
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar
from unittest import mock

import pytest
import sympy
import torch
import torch.fx
from test_architecture import (
    ROOT,
    foreign_private_attributes,
    is_adapter,
    own_names,
    private_torch_names,
    sources,
    tree_of,
)
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as torch_map
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from lazyinline.autodiff.traces.torch_user_rules import (
    arguments_in_full,
    casts_under_autocast,
    has_own_derivative,
)
from lazyinline.backend.gpu.targets import TARGETS
from lazyinline.backend.gpu.torch_gpu import _answers, _device_properties, gpu_described
from lazyinline.backend.kernels.torch_builds import (
    _loads_here as loads_here,
)
from lazyinline.backend.kernels.torch_builds import (
    best_vector_units,
    build_file,
    build_setting,
    takes_the_first,
    vector_units_probed_here,
)
from lazyinline.backend.kernels.torch_corrections import (
    NOT_FROM_THE_END,
    decompositions,
    home_of_strides,
    offsets_added_once,
    polynomials_expanded,
    quotients_checked,
)
from lazyinline.backend.kernels.torch_inductor import (
    NotCompiled,
    compile_leaves,
    rewrite_joint,
    settings,
)
from lazyinline.backend.launches.torch_native import native_file
from lazyinline.backend.link import torch_generated
from lazyinline.backend.onnx import torch_onnx
from lazyinline.frontend.torch_optimizer import StepOptimizer, _make_state, _settings_of
from lazyinline.frontend.tracing import torch_settings, torch_tracing
from lazyinline.frontend.tracing.torch_operators import kernels_own_rules, pure_forms
from lazyinline.frontend.tracing.torch_patches import patch_control_flow
from lazyinline.reuse import torch_names
from lazyinline.reuse.ir.operators import may_draw
from lazyinline.reuse.ir.torch_updates import ADAM_STATE, SGD_STATE, adam_, sgd_
from lazyinline.reuse.process import package_digest
from lazyinline.reuse.torch_names import operators_tagged

pytestmark = pytest.mark.smoke

CONTRACTS: dict[str, str] = {}
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


def resolve_optional(name: str) -> Any:
    """Returns what a name stands for; None for an ``optional`` attribute that is not there."""
    if not name.startswith("optional "):
        return resolve(name)
    owner, _, attribute = name.removeprefix("optional ").rpartition(".")
    return getattr(resolve(owner), attribute, None)


def contract(*names: str) -> Callable[[Test], Test]:
    """Registers a test for private names; passes it what they stand for, attributes left out.

    An ``optional`` name is one that not every supported version has; the test is passed None then.
    """
    dotted = [name for name in names if not name.startswith("attribute ")]

    def register(test: Test) -> Test:
        for name in names:
            CONTRACTS[name.removeprefix("optional ")] = test.__name__

        def checked() -> None:
            test(*(resolve_optional(name) for name in dotted))

        checked.__name__ = test.__name__
        checked.__doc__ = test.__doc__
        return checked

    return register


def traced(
    function: Callable[..., Any],
    *inputs: Any,
    table: Mapping[Any, Any] | None = None,
    pre_dispatch: bool = False,
) -> Any:
    make_fx = resolve("torch.fx.experimental.proxy_tensor.make_fx")
    return make_fx(function, table, pre_dispatch=pre_dispatch)(*inputs)


class Watch(TorchDispatchMode):
    """Notes each operator with its keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, kwargs or {}))
        return func(*args, **(kwargs or {}))


def parameters_of(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def targets(module: torch.fx.GraphModule) -> list[Any]:
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


def fake_mode() -> Any:
    mode = resolve("torch._subclasses.fake_tensor.FakeTensorMode")
    return mode(allow_non_fake_inputs=True)


# ---- every name is here -----------------------------------------------------------------------


def test_every_private_name_of_an_adapter_has_a_contract() -> None:
    used = {
        name: path.relative_to(ROOT)
        for path in filter(is_adapter, sources())
        for _, name in private_torch_names(path)
    }
    missing = {n: a for n, a in used.items() if n not in CONTRACTS}
    assert not missing, f"write a contract test for {missing}"
    unused = [n for n in CONTRACTS if n.startswith("torch.") and n not in used]
    assert not unused, f"no adapter uses {unused} any more: take its contract out"


def test_every_private_attribute_of_an_adapter_has_a_contract() -> None:
    trees = {path: tree_of(path) for path in sources()}
    own = own_names(trees.values())
    used = set()
    for path, tree in trees.items():
        if is_adapter(path):
            for _, text in foreign_private_attributes(tree, own):
                node: Any = ast.parse(text, mode="eval").body
                used.add(node.attr if isinstance(node, ast.Attribute) else node.args[1].value)
    assert used == {n.removeprefix("attribute ") for n in CONTRACTS if n.startswith("attribute ")}


# ---- what is asked by its signature or its value alone ----------------------------------------

INDUCTOR = "torch._inductor"
EXPORTER = "torch.onnx._internal.exporter"
PLAIN: dict[str, Callable[[Any], bool]] = {
    f"{INDUCTOR}.async_compile.AsyncCompile.cpp_pybinding": lambda ask: (
        parameters_of(ask) == ["self", "argtypes", "source_code"]
    ),
    f"{INDUCTOR}.async_compile.get_compile_threads": lambda count: count() >= 1,
    f"{INDUCTOR}.utils.parallel_num_threads": lambda count: count() == torch.get_num_threads(),
    f"{INDUCTOR}.inductor_prims": lambda module: (
        str(torch.ops.prims.inductor_seeds.default) == "prims.inductor_seeds.default"
    ),
    f"{INDUCTOR}.codecache.CppPythonBindingsCodeCache": lambda kind: (
        kind.entry_function == "kernel"
    ),
    f"{EXPORTER}": inspect.ismodule,
    f"{EXPORTER}._constants": inspect.ismodule,
    f"{EXPORTER}._constants.ONNX_IR_VERSION": lambda version: version >= 10,
    "optional torch._C._cuda_getCurrentRawStream": lambda stream: (
        stream is None or callable(stream)
    ),
    "torch._dynamo.lookup_backend": lambda lookup: callable(lookup("inductor")),
}
CONTRACTS.update({name.removeprefix("optional "): "test_plain_names" for name in PLAIN})


@pytest.mark.parametrize("name", PLAIN)
def test_plain_names_are_what_the_adapters_take_them_for(name: str) -> None:
    assert PLAIN[name](resolve_optional(name)), name


# ---- fake tensors -----------------------------------------------------------------------------


@contract(
    "torch._dispatch.python.enable_python_dispatcher",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv",
    "torch.fx.experimental.symbolic_shapes.DimDynamic",
    "torch._dynamo.source.ConstantSource",
)
def test_sizes_stay_open_without_the_cache_of_results(
    dispatcher: Any, environment_class: Any, dynamic: Any, source: Any
) -> None:
    environment = environment_class()
    symbol = environment.create_symbol(12, source("n"), dynamic_dim=dynamic.DYNAMIC)
    size = environment.create_symintnode(symbol, hint=12)
    mode = resolve("torch._subclasses.fake_tensor.FakeTensorMode")(
        shape_env=environment, static_shapes=True
    )
    assert mode.cache_enabled is True, "cache_enabled moved: results are cached again"
    mode.cache_enabled = False
    with mode, dispatcher():
        padded = torch.ops.aten.constant_pad_nd.default(torch.empty(2, size), [0, 1], 0.0)
    assert not environment.guards and str(padded.shape[1]) == f"{symbol} + 1"


@contract("attribute _dispatch_cache")
def test_dropout_in_python_is_looked_up_again_once_its_cache_is_empty() -> None:
    dropout: Any = torch.ops.aten.dropout.default
    key, seen = torch.DispatchKey.CompositeImplicitAutograd, []
    before = dropout.py_kernels[key]
    assert torch.DispatchKey.Autograd in dropout.py_kernels
    dropout.py_kernels[key] = lambda *args: seen.append(args) or before(*args)
    try:
        dropout._dispatch_cache.clear()
        with resolve("torch._dispatch.python.enable_python_dispatcher")(), torch.inference_mode():
            torch.dropout(torch.ones(2), 1.0, True)
    finally:
        dropout.py_kernels[key] = before
        dropout._dispatch_cache.clear()
    assert len(seen) == 1


def test_a_kernel_list_sees_one_memory_through_views() -> None:

    mode = fake_mode()
    with torch._C._DisableTorchDispatch():
        memory = torch.empty_strided((4, 6), (6, 1), device="meta")
        whole = FakeTensor(mode, memory, torch.device("cpu"))
        part = torch.as_strided(whole, (3, 2), (2, 1), 5)
    view = FakeTensor(mode, part, whole.device)
    assert view.untyped_storage()._cdata == whole.untyped_storage()._cdata
    assert (view.shape, view.stride(), view.storage_offset()) == ((3, 2), (2, 1), 5)
    assert view.device.type == "cpu" and view.untyped_storage().nbytes() == 96


def test_a_fake_mode_of_ours_runs_every_operator() -> None:
    seen = []

    class Noting(resolve("torch._subclasses.fake_tensor.FakeTensorMode")):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func.namespace)
            return super().__torch_dispatch__(func, types, args, kwargs)

    with Noting(allow_non_fake_inputs=True):
        torch.ones(3).add(1)
    assert "aten" in seen


@contract(
    "torch._subclasses.fake_tensor.FakeTensorMode", "torch._subclasses.fake_tensor.FakeTensor"
)
def test_fake_tensors_keep_layouts_and_compute_nothing(mode_class: Any, tensor_class: Any) -> None:
    mode = mode_class(allow_non_fake_inputs=True)
    real = torch.randn(4, 3).t().requires_grad_()
    fake = mode.from_tensor(real)
    assert isinstance(fake, tensor_class) and not isinstance(real, tensor_class)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    assert fake.device == real.device
    assert fake.requires_grad
    assert mode.from_tensor(real) is fake, "one fake for one tensor"
    generator = torch.get_rng_state()
    with mode:
        made = torch.empty_strided((2, 3), (1, 2), dtype=torch.float64)
        mixed = made.float() + torch.ones(3)
        drawn = torch.rand(2, 3) + real.detach()[:2, :3]  # a real tensor is let in
    assert all(isinstance(t, tensor_class) for t in (made, mixed, drawn))
    assert made.stride() == (1, 2)
    assert torch.equal(torch.get_rng_state(), generator), "a fake draw moved the generator"


@contract("torch._subclasses.fake_impls.op_implementations_dict", "torch.ops.aten._grouped_mm")
def test_rules_for_fake_tensors_can_be_added_and_state_the_kernels_layout(
    rules: Any, grouped: Any
) -> None:
    before = dict(rules)
    offsets = torch.tensor([2, 5, 10], dtype=torch.int32)
    pairs = [
        (torch.randn(10, 8), torch.randn(3, 6, 8).transpose(1, 2), offsets),
        (torch.randn(10, 8).t(), torch.randn(10, 16), offsets),
        (torch.randn(3, 4, 8), torch.randn(3, 6, 8).transpose(1, 2), None),
        (torch.randn(3, 4, 8), torch.randn(10, 8).t(), offsets),
    ]
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    for (a, b, groups), kind in itertools.product(pairs, kinds):
        a, b = a.to(kind), b.to(kind)
        real = grouped(a, b, offs=groups)
        with kernels_own_rules(), FakeTensorMode() as mode:
            tensors = [None if x is None else mode.from_tensor(x) for x in (a, b, groups)]
            fake = grouped(*tensors[:2], offs=tensors[2])
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    assert rules == before


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(2, 8, 6, 6),
    "channels last": lambda: torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last),
    "swapped": lambda: torch.randn(2, 6, 8, 6).transpose(1, 2),
    "backwards": lambda: torch.randn(6, 6, 8, 2).permute(3, 2, 1, 0),
    "with gaps": lambda: torch.randn(2, 8, 6, 12)[..., ::2],
    "five": lambda: torch.randn(2, 8, 6, 6, 6),
    "five, channels last": lambda: torch.randn(2, 8, 6, 6, 6).to(
        memory_format=torch.channels_last_3d
    ),
    "three": lambda: torch.randn(2, 6, 8).transpose(1, 2),
}


@contract(
    "torch._prims_common.suggest_memory_format",
    "torch.ops.aten._native_batch_norm_legit.default",
    "torch.ops.aten._native_batch_norm_legit.no_stats",
)
def test_fakes_of_a_trace_are_laid_out_as_kernels_do(
    suggested: Any, with_statistics: Any, without: Any
) -> None:
    channels_last = LAYOUTS["channels last"]()
    assert suggested(channels_last) is torch.channels_last
    assert suggested(channels_last.contiguous()) is torch.contiguous_format
    ones = torch.ones(8)
    operators: list[Callable[[Tensor], Tensor]] = [
        lambda x: nn.functional.group_norm(x, 4),
        lambda x: nn.functional.group_norm(x, 4, ones, ones),
        lambda x: nn.functional.batch_norm(x, None, None, training=True),
        lambda x: nn.functional.batch_norm(x, ones.clone(), ones.clone(), training=True),
        lambda x: nn.functional.batch_norm(x, ones, ones),
        lambda x: with_statistics(x, ones, ones, ones.clone(), ones.clone(), True, 0.1, 1e-5)[0],
        lambda x: without(x, ones, ones, True, 0.1, 1e-5)[0],
        lambda x: x.roll(1, 1),
        lambda x: nn.functional.channel_shuffle(x, 2),
    ]
    for (name, made), function in itertools.product(LAYOUTS.items(), operators):
        x, mode = made(), torch_tracing.new_fake_mode()
        real = function(x)
        with mode:
            fake = function(mode.from_tensor(x))
        assert fake.stride() == real.stride(), name


@contract("torch._subclasses.fake_tensor.DataDependentOutputException")
def test_asking_a_fake_for_its_value_raises(error: Any) -> None:
    with fake_mode(), pytest.raises(error):
        bool(torch.ones(3).sum() > 0)
    with fake_mode(), pytest.raises(error):
        torch.ones(3).max().item()


@contract("torch._subclasses.fake_tensor.log")
def test_what_fake_tensors_fail_at_is_an_error_of_one_logger(log: Any) -> None:
    seen: list[int] = []
    filter_ = lambda record: seen.append(record.levelno)  # noqa: E731
    log.addFilter(filter_)
    try:
        with fake_mode(), pytest.raises(RuntimeError, match="same reduction dim"):
            torch.empty(2, 3) @ torch.empty(2, 3)
    finally:
        log.removeFilter(filter_)
    assert set(seen) == {logging.ERROR}


@contract("torch._subclasses.fake_tensor.DynamicOutputShapeException")
def test_a_shape_that_depends_on_data_raises(error: Any) -> None:
    with fake_mode(), pytest.raises(error):
        torch.ones(3).nonzero()


# ---- tracing ----------------------------------------------------------------------------------


@contract("torch.fx.experimental.proxy_tensor.make_fx")
def test_a_trace_before_dispatch_keeps_composite_operators_whole(make_fx: Any) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.dropout(nn.functional.linear(x, weight), 0.5)

    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    whole = targets(make_fx(function, tracing_mode="real", pre_dispatch=True)(x, weight))
    assert whole == [torch.ops.aten.linear.default, torch.ops.aten.dropout.default]
    apart = targets(make_fx(function)(x, weight))
    assert torch.ops.aten.linear.default not in apart and torch.ops.aten.mm.default in apart


@contract("torch.fx.experimental.proxy_tensor.__file__")
def test_what_was_kept_of_a_tensors_class_is_asked_anew_by_a_running_trace(file: str) -> None:
    """By name, and in that file: so it meets what stands there since, and who asks is known."""
    kept, asked = (Tensor.storage_offset, Tensor.data.__get__), []  # type: ignore[attr-defined]

    def note(_: Tensor) -> int:
        asked.append(sys._getframe(1).f_code.co_filename)
        return 7

    def asks(x: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "storage_offset", note)
            patch.setattr(Tensor, "data", property(note))
            assert [keep(x) for keep in kept] == [7, 7]
        return x

    traced(asks, torch.ones(1), pre_dispatch=True)
    assert asked == [file, file]


@contract("torch._tensor_str.__file__")
def test_a_tensor_is_printed_by_the_file_of_that_name(file: str) -> None:
    callers: set[str] = set()

    class Watched(Tensor):
        def tolist(self) -> Any:
            callers.add(sys._getframe(1).f_code.co_filename)
            return super().tolist()

    assert "1.5" in str(torch.tensor([1.5]).as_subclass(Watched))
    assert callers == {file}


def c_calls_of(function: Callable[[], Any]) -> list[str]:
    called = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call" and os.path.dirname(torch.__file__) in frame.f_code.co_filename:
            called.append(argument.__name__)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return called


def test_functions_that_set_something_end_in_c_functions_of_known_names() -> None:
    state = torch.get_rng_state()
    for names, function in (
        (["_set_default_dtype"], lambda: torch.set_default_dtype(torch.float32)),
        (["_set_cudnn_benchmark"], lambda: setattr(torch.backends.cudnn, "benchmark", False)),
        (["_set_deterministic_algorithms"], lambda: torch.use_deterministic_algorithms(False)),
        (["set_state"], lambda: torch.set_rng_state(state)),
        (["get_state"], torch.get_rng_state),
        (["initial_seed"], torch.initial_seed),
    ):
        called = c_calls_of(function)
        assert set(names) <= set(called), called
        assert set(names) <= torch_settings.settings().names


def test_settings_of_pytorch_are_found_by_their_names() -> None:
    found = torch_settings.settings()
    asked = {"get_num_threads", "_get_cudnn_benchmark", "_get_mkldnn_enabled"}
    assert asked | {"_get_flash_sdp_enabled", "_get_warnAlways"} <= found.getters
    assert {"set_num_threads", "_set_mkldnn_enabled", "_set_default_dtype"} <= found.setters
    assert not {"_set_grad_enabled", "set_autocast_enabled", "_set_sdp_use_math"} & found.setters
    assert {"torch.backends.mha.get_fastpath_enabled"} <= {name for name, *_ in found.all}


@contract("torch.ops.aten._local_scalar_dense.default")
def test_the_number_in_a_tensor_passes_the_table_of_decompositions_before_dispatch(
    read: Any,
) -> None:
    seen: list[Any] = []

    def note(tensor: Tensor) -> Any:
        seen.append(tensor)
        return NotImplemented

    real, table = torch.tensor(3.0), {read: note, torch.ops.aten.item.default: note}
    traced(lambda x: x * real.item(), torch.ones(2), table=table, pre_dispatch=True)
    assert seen and all(tensor is real for tensor in seen)


def test_a_trace_takes_a_table_of_decompositions_and_flattens_lists() -> None:
    make_fx = resolve("torch.fx.experimental.proxy_tensor.make_fx")
    table = {torch.ops.aten.silu.default: lambda x: x * torch.sigmoid(x)}
    module = make_fx(lambda flat: (flat[0] + torch.ops.aten.silu(flat[1]),), table)(
        [torch.randn(2), torch.randn(2)]
    )
    assert torch.ops.aten.silu.default not in targets(module)
    assert torch.ops.aten.sigmoid.default in targets(module)
    assert sum(n.op == "placeholder" for n in module.graph.nodes) == 2
    assert all("val" in n.meta for n in module.graph.nodes if n.op == "call_function")


@contract(
    "torch.fx.experimental.proxy_tensor.get_proxy_mode",
    "torch.fx.experimental.proxy_tensor.track_tensor_tree",
    "torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing",
)
def test_a_running_trace_can_be_asked_and_told_which_node_a_tensor_is(
    get_proxy_mode: Any, track_tensor_tree: Any, disable_proxy_modes_tracing: Any
) -> None:
    make_fx = resolve("torch.fx.experimental.proxy_tensor.make_fx")
    assert get_proxy_mode() is None
    mode, seen, real = fake_mode(), [], torch.ones(3)

    def function(x: Tensor) -> tuple[()]:
        tracer = get_proxy_mode().tracer
        graph, create = tracer.graph, tracer.graph.create_node

        def create_node(*args: Any, **kwargs: Any) -> torch.fx.Node:
            node = create(*args, **kwargs)
            seen.append(node)
            return node

        graph.create_node = create_node  # each operator passes here, also of the fast paths
        node = tracer.unwrap_proxy(x).node
        assert node.op == "placeholder"
        with disable_proxy_modes_tracing():
            hidden = x * 2  # no node
        assert not isinstance(tracer.unwrap_proxy(hidden), torch.fx.Proxy)
        object.__setattr__(tracer.root, "outside", real)
        outside = graph.create_node("get_attr", "outside", (), {})
        call = graph.create_node("call_function", operator.add, (node, outside), {})
        track_tensor_tree(hidden, torch.fx.Proxy(call, tracer), constant=None, tracer=tracer)
        result = hidden + 1
        assert tracer.unwrap_proxy(result).node.args[0] is call
        assert tracer.unwrap_proxy(x).node is node
        table = dict(tracer.tensor_tracker.items())
        assert table[x].proxy.node is node, "which node stands for a tensor is kept here"
        del graph.create_node
        return ()

    with mode:
        x = mode.from_tensor(torch.randn(3))
        make_fx(function, tracing_mode="real", pre_dispatch=True)(x)
    assert [n.target for n in seen] == ["outside", operator.add, torch.ops.aten.add.Tensor]


@contract(
    "torch.fx.experimental.proxy_tensor.get_proxy_mode",
    "torch.utils._python_dispatch._get_current_dispatch_mode",
)
def test_each_operator_of_a_trace_goes_through_an_attribute_of_its_mode(
    get_proxy_mode: Any, get_current_mode: Any
) -> None:
    make_fx = resolve("torch.fx.experimental.proxy_tensor.make_fx")
    mode, seen = fake_mode(), list[Any]()

    def function(x: Tensor) -> Tensor:
        tracing = get_proxy_mode()
        dispatch = tracing.__torch_dispatch__

        def noting(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func, set(types), get_current_mode()))
            return dispatch(func, types, args, kwargs)

        tracing.__torch_dispatch__ = noting
        return torch.nn.functional.linear(x, x)

    with mode:
        make_fx(function, tracing_mode="real", pre_dispatch=True)(
            mode.from_tensor(torch.ones(3, 3))
        )
    fake_class = resolve("torch._subclasses.fake_tensor.FakeTensor")
    assert seen == [(torch.ops.aten.linear.default, {fake_class}, mode)]


@contract(
    "torch._C._DisableTorchDispatch",
    "torch.fx.experimental.proxy_tensor.track_tensor",
)
def test_a_fake_can_be_made_of_memory_without_an_operator(disable: Any, track: Any) -> None:
    get_proxy_mode = resolve("torch.fx.experimental.proxy_tensor.get_proxy_mode")
    make_fx = resolve("torch.fx.experimental.proxy_tensor.make_fx")
    fake_class = resolve("torch._subclasses.fake_tensor.FakeTensor")
    mode = fake_mode()

    class Leave(BaseException):
        pass

    def function(x: Tensor) -> tuple[()]:
        tracer = get_proxy_mode().tracer
        with disable():
            memory = torch.empty_strided((2, 3), (1, 2), device="meta")
        assert type(memory) is Tensor
        first, second = (fake_class(mode, memory, torch.device("cpu")) for _ in range(2))
        assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
        assert first.device.type == "cpu" and first.stride() == (1, 2)
        node = torch.fx.Node(tracer.graph, "outside", "get_attr", "outside", (), {})
        track(first, torch.fx.Proxy(node, tracer), constant=None, tracer=tracer)
        result = first + 1
        assert tracer.unwrap_proxy(result).node.args[0] is node
        first.unsqueeze_(0)
        assert tuple(second.shape) == (2, 3)
        raise Leave  # a trace can be left when the graph is there

    with mode:
        x = mode.from_tensor(torch.randn(3))
        with pytest.raises(Leave):
            make_fx(function, tracing_mode="real", pre_dispatch=True)(x)
    assert get_proxy_mode() is None


@contract("torch.fx._lazy_graph_module._use_lazy_graph_module")
def test_a_lazy_graph_module_is_asked_for_by_a_context(use_lazy: Any) -> None:
    with use_lazy(True):
        module = traced(lambda x: x + 1, torch.ones(2))
    assert torch.equal(module(torch.ones(2)), torch.full((2,), 2.0))


@contract("torch.fx._symbolic_trace._wrapped_fns_to_patch")
def test_a_tracer_exchanges_the_wrapped_globals_in_a_table(table: Any) -> None:
    scope: dict[str, Any] = {"marked": torch.relu}
    code = "def function(x): found.append(marked); return marked(x)"
    scope["found"] = found = []
    exec(code, scope)
    key = (id(scope), "marked")
    table[key] = scope
    try:
        traced(scope["function"], torch.ones(2))
        del table[key]
        traced(scope["function"], torch.ones(2))
    finally:
        table.pop(key, None)
    assert [function is torch.relu for function in found] == [False, True]


@contract("torch.fx.node._side_effectful_need_to_be_preserved_pre_dispatch")
def test_mode_switches_in_a_trace_are_known_by_their_targets(switches: Any) -> None:
    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 2
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return y @ x

    with torch.enable_grad():
        module = traced(function, torch.randn(2, 2), pre_dispatch=True)
    found = [t for t in targets(module) if t in switches]
    assert len(found) == 4, "grad mode off and on, autocast in and out"
    assert torch.ops.aten.mul.Tensor not in switches


@contract("torch._C.DisableTorchFunction")
def test_torch_function_modes_can_be_passed_by(disable: Any) -> None:
    from torch.overrides import TorchFunctionMode

    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Watch():
        _ = x.shape
        before = len(seen)
        with disable():
            _ = x.shape
            _ = x.requires_grad
    assert before == len(seen) == 1


# ---- modules, and how capture watches them ----------------------------------------------------


def test_module_calls_can_be_replaced_on_the_class() -> None:
    original, seen = nn.Module.__call__, []

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(type(self))
        return original(self, *args, **kwargs)

    with mock.patch.object(nn.Module, "__call__", call):
        nn.Sequential(nn.Linear(2, 2), nn.Tanh())(torch.ones(2))
    assert seen == [nn.Sequential, nn.Linear, nn.Tanh]


def test_parameters_are_found_by_getattr_and_plain_attributes_are_not() -> None:
    original, seen = nn.Module.__getattr__, []

    def getattr_(self: nn.Module, name: str) -> Any:
        seen.append(name)
        return original(self, name)

    with mock.patch.object(nn.Module, "__getattr__", getattr_):
        linear = nn.Linear(2, 2)
        seen.clear()
        _ = linear.weight, linear.in_features, linear.training
    assert seen == ["weight"]
    assert "__getattribute__" not in vars(nn.Module), "reads are watched by adding one"
    assert nn.Module.__module__ == "torch.nn.modules.module"


def test_a_module_keeps_its_state_in_known_tables() -> None:
    state = vars(nn.Module())
    for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        assert table in state, f"nn.Module has no {table} any more"
    assert state["training"] is True
    hooks = {name for name in state if name.endswith("hooks")}
    assert {
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_load_state_dict_post_hooks",
    } <= hooks
    assert callable(nn.Module._load_from_state_dict)


@contract("torch.autograd.function._SingleLevelFunction")
def test_apply_of_custom_functions_is_a_class_method_that_can_be_replaced(single: Any) -> None:
    """Where it is Python's, all of them end in the class above, also one that was kept."""
    function: Any = torch.autograd.Function
    assert issubclass(function, single) and "apply" not in vars(single)
    is_of_c = isinstance(vars(function)["apply"], types.ClassMethodDescriptorType)
    assert is_of_c or isinstance(vars(function)["apply"], classmethod)
    base = function if is_of_c else single
    before = vars(base).get("apply")
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * 2

    def apply(cls: type, *args: Any) -> Any:
        seen.append(cls)
        return super(base, cls).apply(*args)  # type: ignore[misc]

    kept = Double.apply
    base.apply = classmethod(apply)
    try:
        Double.apply(torch.ones(2))
        kept(torch.ones(2))
    finally:
        if before is None:
            del base.apply
        else:
            base.apply = before
    assert seen == ([Double] if is_of_c else [Double, Double])


def test_reentrant_checkpoints_pass_the_function_first_and_the_inputs_third() -> None:
    found, seen = torch.utils.checkpoint.CheckpointFunction, []
    original = found.__dict__.get("apply")

    def apply(*args: Any) -> Any:
        seen.append(args)
        return args[0](*args[2:])

    found.apply = staticmethod(apply)
    try:
        x = torch.ones(2, requires_grad=True)
        torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=True)
    finally:
        del found.apply
    assert original is None
    assert len(seen) == 1 and seen[0][0] is torch.exp and seen[0][2] is x
    assert (found.__module__, found.__name__) == ("torch.utils.checkpoint", "CheckpointFunction")


def test_checkpoint_runs_the_function_between_two_steps_of_a_generator() -> None:
    module: Any = torch.utils.checkpoint
    older = module._checkpoint_without_reentrant_generator
    original = getattr(module, "_checkpoint_without_reentrant_generator_impl", older)
    signature = inspect.signature(original)
    seen: list[Any] = []

    def generator(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        seen.append(bound.arguments.get("context_fn"))
        yield
        seen.append("after")

    with mock.patch.object(module, original.__name__, generator):
        x = torch.ones(2, requires_grad=True)
        module.checkpoint(lambda x, y: seen.append("run"), x, y=2, use_reentrant=False)
    assert seen == [module.noop_context_fn, "run", "after"]


# ---- trees ------------------------------------------------------------------------------------


@contract(
    "torch.utils._pytree",
    "torch.utils._pytree.TreeSpec",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_flatten_with_path",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_structure",
)
def test_trees_go_apart_and_together(
    module: types.ModuleType,
    spec_class: Any,
    flatten: Any,
    with_path: Any,
    tree_map: Any,
    structure: Any,
) -> None:
    tree = {"b": [1, (2, None)], "a": 3}
    assert structure(tree) == flatten(tree)[1]
    assert structure(((0, 0), {})) == flatten(((1, 2), {}))[1]
    leaves, spec = flatten(tree)
    assert leaves == [1, 2, None, 3] or leaves == [1, 2, 3], "None is a leaf, or structure"
    assert isinstance(spec, spec_class)
    assert flatten({"b": [5, (6, None)], "a": 7})[1] == spec
    assert flatten({"b": [5, 6], "a": 7})[1] != spec
    pairs, _ = with_path(tree)
    first = pairs[0][0]
    assert [getattr(k, "key", getattr(k, "idx", None)) for k in first] == ["b", 0]
    assert tree_map(lambda x: x, tree) == tree


@contract("torch.utils._pytree.SUPPORTED_NODES")
def test_a_tree_is_put_together_by_the_entry_of_its_class(nodes: Any) -> None:
    spec = resolve("torch.utils._pytree.tree_structure")({"a": 0, "b": 0})
    assert nodes[spec.type].unflatten_fn([1, 2], spec.context) == {"a": 1, "b": 2}


def test_hugging_face_outputs_are_registered_trees() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    flatten = resolve("torch.utils._pytree.tree_flatten")
    unflatten = resolve("torch.utils._pytree.tree_unflatten")
    output = BaseModelOutput(last_hidden_state=torch.ones(2))
    leaves, spec = flatten(output)
    assert len(leaves) == 1
    assert type(unflatten(leaves, spec)) is BaseModelOutput


# ---- operators and memory ---------------------------------------------------------------------


@contract("torch._ops.OpOverload", "torch._ops.OpOverloadPacket", "attribute _schema")
def test_operators_have_classes_and_schemas_that_say_what_is_written(
    overload: Any, packet: Any
) -> None:
    add, copy = torch.ops.aten.add.Tensor, torch.ops.aten.copy_.default
    assert isinstance(add, overload) and isinstance(torch.ops.aten.add, packet)
    assert not add._schema.is_mutable and copy._schema.is_mutable
    written = [a.name for a in copy._schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["self"]
    view = torch.ops.aten.view.default._schema
    assert view.arguments[0].alias_info is not None and not view.is_mutable
    # Why reuse/ir/leaf.py keeps a list of its own: these write, and their schemas do not say so.
    for hidden in (torch.ops.aten.batch_norm.default, torch.ops.aten.native_batch_norm.default):
        assert not hidden._schema.is_mutable
        assert [a.name for a in hidden._schema.arguments][3:6] == [
            "running_mean",
            "running_var",
            "training",
        ]


@contract("attribute _call_impl")
def test_calls_of_a_module_look_into_a_slot_that_copies_leave_behind() -> None:
    module, slot = nn.Linear(2, 2), torch_names.CALL_SLOT
    module.register_forward_hook(lambda m, args, output: output * 0)
    assert slot not in vars(module), "a fresh module has it in its own table now"
    vars(module)[slot] = lambda *args, **kwargs: (args, kwargs)
    assert module(1, a=2) == ((1,), {"a": 2})
    assert not module._call_impl(torch.ones(2)).any(), "_call_impl runs no hooks any more"
    assert slot not in vars(copy.deepcopy(module))
    assert slot not in vars(copy.copy(module))
    module.compile(backend="eager")
    assert callable(vars(module)[slot]), "nn.Module.compile fills another slot"


@contract("torch.autograd.profiler._is_profiler_enabled")
def test_a_flag_of_pytorch_says_whether_a_profiler_runs(flag: bool) -> None:
    asked = compile(torch_generated.IF_IT_RUNS, "<contract>", "eval")
    scope = {"profiler": torch_generated.PROFILER}
    assert eval(asked, scope) is flag is False
    with torch.profiler.profile() as seen:
        assert eval(asked, scope) is torch_generated.profiler_runs() is True
        torch_generated.end_range(torch_generated.begin_range("a range"))
    assert eval(asked, scope) is False
    with torch.autograd.profiler.profile():
        assert eval(asked, scope) is True
    assert "a range" in [event.name for event in seen.events()]


@contract("attribute _cdata")
def test_storages_have_an_identity_that_views_share() -> None:
    x = torch.ones(4)
    identity = x.untyped_storage()._cdata
    assert isinstance(identity, int)
    assert x[1:].view(-1).untyped_storage()._cdata == identity
    assert x.clone().untyped_storage()._cdata != identity
    with fake_mode():
        fake = torch.ones(4)
        assert fake[1:].untyped_storage()._cdata == fake.untyped_storage()._cdata


@contract("torch._C._dynamo.guards.GlobalStateGuard")
def test_modes_are_compared_at_once(guard_class: Any) -> None:
    state = guard_class()
    contexts = [
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cuda", torch.bfloat16) if torch.cuda.is_available() else torch.no_grad(),
    ]
    for context in contexts:
        with context:
            assert not state.check()
        assert state.check()
    with torch.autocast("cpu", torch.bfloat16):
        state_in_autocast = guard_class()
    with torch.autocast("cpu", torch.float16):
        assert not state_in_autocast.check()
    for change, back in (
        (
            lambda: torch.set_default_dtype(torch.float64),
            lambda: torch.set_default_dtype(torch.float32),
        ),
        (
            lambda: torch.use_deterministic_algorithms(mode=True),
            lambda: torch.use_deterministic_algorithms(mode=False),
        ),
    ):
        change()
        try:
            assert not state.check()
        finally:
            back()
        assert state.check()


@contract("torch._C._dynamo.guards.TensorGuards")
def test_layouts_of_many_tensors_are_checked_at_once(guards_class: Any) -> None:
    def tensors() -> list[Tensor]:
        return [torch.ones(3, 3, requires_grad=True), torch.ones(2, dtype=torch.int64)]

    seen = tensors()
    guards = guards_class(*seen, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    assert guards.check(*seen)
    assert guards.check(*tensors()), "other tensors of the same layout"
    seen[0].data = seen[0].data.t()
    for first in (
        torch.ones(4, 3, requires_grad=True),
        torch.ones(3, 3, dtype=torch.float64, requires_grad=True),
        torch.ones(3, 3),
        torch.ones(3, 3, requires_grad=True, device="meta"),
        seen[0],
    ):
        assert not guards.check(first, seen[1])


@contract("torch._C._dispatch_keys", "torch._C.DispatchKey", "torch._C.DispatchKeySet")
def test_the_keys_of_a_tensor_say_where_its_numbers_lie(keys: Any, key: Any, key_set: Any) -> None:
    x = torch.ones(4, 4)
    plain = keys(x).raw_repr()
    for name in ("CPU", "ADInplaceOrView", "AutogradCPU", "AutocastCPU"):
        plain &= ~key_set(getattr(key, name)).raw_repr()
    assert not plain
    jagged = torch.nested.nested_tensor([x, x], layout=torch.jagged)
    others = [x.to("meta"), x.to_sparse(), x.to_mkldnn(), jagged]
    known = keys(x).raw_repr()
    assert all(keys(other).raw_repr() & ~known for other in others)
    with torch.inference_mode():
        assert not keys(torch.ones(4)).raw_repr() & ~known


@contract(
    "torch.ops.aten._conj.default",
    "torch.ops.aten._conj_physical.default",
    "torch.ops.aten._neg_view.default",
    "torch.ops.aten._efficientzerotensor.default",
    "attribute _is_zerotensor",
)
def test_what_is_a_mark_on_memory(conj: Any, written: Any, negated: Any, zeros: Any) -> None:
    x = torch.randn(2, 3, dtype=torch.complex64)
    marked = conj(x)
    assert marked.is_conj() and marked.data_ptr() == x.data_ptr()
    assert not written(x).is_conj() and torch.equal(written(x), marked)
    assert negated(x).is_neg() and torch.equal(negated(x), -x)
    assert zeros((2, 3), dtype=torch.float64)._is_zerotensor() and not x._is_zerotensor()


@contract(
    "torch._C._disabled_torch_function_impl",
    "torch._C._disabled_torch_dispatch_impl",
    "torch._C.DisableTorchFunctionSubclass",
)
def test_which_classes_of_tensors_see_operators(function: Any, dispatch: Any, off: Any) -> None:
    own = type("Own", (torch.Tensor,), {})
    assert nn.Parameter.__torch_function__ is function
    assert own.__torch_function__ is not function and own.__torch_dispatch__ is dispatch
    with off():
        assert type(torch.ones(2).as_subclass(own) * 2) is torch.Tensor


def test_hooks_on_all_modules_are_in_known_tables() -> None:
    module = nn.modules.module
    registered = {
        "_global_forward_pre_hooks": module.register_module_forward_pre_hook,
        "_global_forward_hooks": module.register_module_forward_hook,
        "_global_backward_pre_hooks": module.register_module_full_backward_pre_hook,
        "_global_backward_hooks": module.register_module_full_backward_hook,
    }
    for name, register in registered.items():
        assert not getattr(module, name)
        handle = register(lambda *args: None)
        assert len(getattr(module, name)) == 1
        handle.remove()


@contract("attribute _version")
def test_tensors_count_changes_in_place() -> None:
    x = torch.ones(4)
    view, version = x[1:], x._version
    view.mul_(2)
    assert x._version == view._version == version + 1
    assert "_version" not in vars(torch.Tensor), "capture puts a property there for a while"
    assert type(torch.Tensor._version) is type(torch.Tensor.grad)


def test_operators_that_change_a_layout_in_place_carry_a_tag() -> None:
    tag = torch.Tag.inplace_view
    for name in ("transpose_", "unsqueeze_", "resize_", "set_", "detach_"):
        packet = getattr(torch.ops.aten, name)
        assert any(tag in getattr(packet, overload).tags for overload in packet.overloads())
    assert tag not in torch.ops.aten.add_.Tensor.tags
    assert torch.ops.aten.transpose.int._schema.returns[0].alias_info is not None
    assert torch.ops.aten.resize.default._schema.returns[0].alias_info is None
    assert not hasattr(torch.ops.aten, "requires_grad"), "a change in place that is no operator"


def test_hooks_on_a_gradient_are_none_until_there_is_one() -> None:
    held: Any = torch.ones(2, requires_grad=True)
    assert held._backward_hooks is None
    assert held._post_accumulate_grad_hooks is None
    held.register_hook(lambda gradient: None)
    held.register_post_accumulate_grad_hook(lambda tensor: None)
    assert held._backward_hooks is not None
    assert held._post_accumulate_grad_hooks is not None


def test_random_operators_carry_a_tag() -> None:
    tag = torch.Tag.nondeterministic_seeded
    aten = torch.ops.aten
    for drawing in (aten.rand.default, aten.native_dropout.default, aten.bernoulli.p):
        assert tag in drawing.tags
    assert tag not in aten.add.Tensor.tags


@contract(
    "torch.ops.aten._softmax.default",
    "torch.ops.aten._softmax.out",
    "torch.ops.aten._log_softmax.default",
    "torch.ops.aten._log_softmax.out",
)
def test_out_forms_write_what_the_operator_returns(*forms: Any) -> None:
    x = torch.randn(2, 3)
    for plain, out in (forms[:2], forms[2:]):
        target = torch.empty(2, 3)
        result = out(x, 1, False, out=target)
        assert result is target
        assert torch.equal(target, plain(x, 1, False))


# ---- dispatch modes ---------------------------------------------------------------------------


@contract("torch.utils._python_dispatch.TorchDispatchMode")
def test_a_dispatch_mode_sees_each_operator_and_can_be_left_out(_: Any) -> None:
    with Watch() as watch:
        torch.ones(2).exp_()
        with torch._C._DisableTorchDispatch():
            torch.zeros(2)
    seen = [operator_ for operator_, _ in watch.seen]
    assert seen == [torch.ops.aten.ones.default, torch.ops.aten.exp_.default]


# ---- autograd and partitioners ----------------------------------------------------------------


@contract("torch._C._autograd._get_current_graph_task_keep_graph")
def test_a_running_backward_knows_whether_the_graph_is_kept(is_kept: Any) -> None:
    seen = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            seen.append(is_kept())
            return gradient

    loss = Ask.apply(torch.ones(2, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert seen == [True, False]


@contract("torch.autograd.forward_ad._current_level")
def test_forward_mode_is_known_by_its_level(level: int) -> None:
    import torch.autograd.forward_ad as forward_ad

    assert level == -1
    with forward_ad.dual_level():
        assert forward_ad._current_level == 0
    inside = []
    torch.func.jvp(
        lambda x: inside.append(forward_ad._current_level) or x, (torch.ones(1),), (torch.ones(1),)
    )
    assert inside == [0]


def test_forward_mode_that_is_wrong_nested_is_still_so() -> None:
    """One that is right by now can have forward mode again: take its name off the list."""
    from lazyinline.autodiff.forward_mode.torch_rules import _WRONG_NESTED

    torch.manual_seed(0)
    lower = torch.eye(3).double() * 2 + torch.rand(3, 3).double().tril()
    reflections, scales = torch.geqrf(torch.randn(3, 3).double())
    direction = torch.randn(3, 3).double().tril()
    cases: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
        "cholesky_inverse": (torch.cholesky_inverse, lower),
        "linalg_householder_product": (
            lambda x: torch.linalg.householder_product(x, scales),
            reflections,
        ),
    }
    assert set(_WRONG_NESTED) == set(cases)
    for name, (function, point) in cases.items():

        def along(t: Tensor, function: Any = function, point: Tensor = point) -> Tensor:
            found: Tensor = function(point + t * direction).sin().sum()
            return found

        def slope(t: Tensor, along: Any = along) -> Tensor:
            found: Tensor = torch.func.jvp(along, (t,), (torch.ones_like(t),))[1]
            return found

        start = torch.zeros((), dtype=torch.double)
        nested = torch.func.jvp(slope, (start,), (torch.ones_like(start),))[1]
        reversed_twice = torch.func.grad(torch.func.grad(along))(start)
        assert not torch.allclose(nested, reversed_twice), name


@contract("torch.ops.aten._linalg_det.default", "torch.ops.aten._linalg_slogdet.default")
def test_the_traced_derivative_of_a_determinant_is_by_singular_values(
    det: Any, logarithm: Any
) -> None:
    """Once it is not, no other operators need stand for it where gradients are differentiated.

    Before 2.15 the second one is then no number where singular values are equal to the bit.
    """

    def second(operator: Callable[[Tensor], Tensor]) -> Any:
        def run(x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            (first,) = torch.autograd.grad(operator(x), x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), x)[0]

        return traced(run, torch.eye(3))

    by_singular_values = torch.ops.aten._linalg_svd.default
    assert by_singular_values in {node.target for node in second(lambda x: det(x)[0]).graph.nodes}
    by_logarithm = second(lambda x: logarithm(x)[1])
    assert by_singular_values not in {node.target for node in by_logarithm.graph.nodes}
    assert by_logarithm(torch.eye(3)).isfinite().all()
    x = torch.randn(2, 3, 3)
    (value, *factors), (sign, log, *others) = det(x), logarithm(x)
    torch.testing.assert_close((value, *factors), (sign * log.exp(), *others))


def test_the_functional_random_relu_has_a_derivative_of_the_wrong_slopes() -> None:
    """Once it has that of the slopes that it drew, no product needs to stand for it."""
    functional = torch.ops.aten.rrelu_with_noise_functional.default
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    result, slopes = functional(x, torch.full_like(x, 7.0), 0.1, 0.3, True)
    (found,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(result, x * slopes)
    assert not slopes.requires_grad and not torch.allclose(found, slopes)


@contract("torch.ops.aten._unsafe_view.default")
def test_a_view_of_what_nobody_else_holds_is_a_reshape(unsafe_view: Any) -> None:
    x = torch.randn(2, 3, 4)
    flat = unsafe_view(x, [6, 4])
    assert torch.equal(flat, torch.ops.aten.reshape.default(x, [6, 4]))


@contract("torch.autograd._engine_run_backward")
def test_every_backward_passes_one_function_of_autograd(engine: Any) -> None:
    module: Any = torch.autograd
    x, seen = torch.ones(2, requires_grad=True), []
    with mock.patch.object(
        module,
        "_engine_run_backward",
        lambda *args, **kwargs: seen.append((len(args), *kwargs)) or engine(*args, **kwargs),
    ):
        (x * 2).sum().backward()
        torch.autograd.backward((x * 2).sum())
        torch.autograd.grad((x * 2).sum(), x)
    of_backward = (5, "allow_unreachable", "accumulate_grad")
    assert seen == [of_backward, of_backward, (6, "accumulate_grad")]


def test_pytorch_says_which_argument_no_gradient_can_be_asked_for() -> None:
    from lazyinline.autodiff.traces.detach_points import NOT_DIFFERENTIABLE

    x, statistics = torch.randn(3, 2), torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match=NOT_DIFFERENTIABLE):
        torch.batch_norm(x, None, None, statistics, statistics, False, 0.1, 1e-5, False)


@contract("torch._functorch.predispatch")
def test_what_torch_func_does_is_functions_of_one_module(predispatch: Any) -> None:
    """Where they are traced at all: torch 2.11 puts them into the graph, 2.13 does not."""
    name = predispatch.__name__
    assert name == torch_tracing._TRANSFORMS
    functions = predispatch._add_batch_dim, predispatch._remove_batch_dim
    assert {function.__module__ for function in functions} == {name}


@contract("torch._C._get_fp32_precision_getter")
def test_precision_of_products_is_told_however_it_was_set(getter: Any) -> None:
    def told() -> tuple[str, str]:
        return getter("cuda", "matmul"), getter("mkldnn", "matmul")

    exact = told()
    assert set(exact) <= {"none", "ieee"}
    try:
        torch.set_float32_matmul_precision("high")
        assert told() == ("tf32", "tf32")
    finally:
        torch.set_float32_matmul_precision("highest")
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        assert told()[1] == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert set(told()) <= {"none", "ieee"}


@contract("torch._C._dynamo.guards._empty_strided_cpu")
def test_tensors_are_made_past_the_dispatcher(empty: Any) -> None:
    with fake_mode():
        made = empty((2, 3), (1, 2), torch.float64)
    assert type(made) is torch.Tensor and made.device.type == "cpu" and made.data_ptr()
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (1, 2), torch.float64)
    assert not made.requires_grad and made.untyped_storage().nbytes() == 48


@contract("torch._C._len_torch_dispatch_stack")
def test_dispatch_modes_are_counted(count: Any) -> None:
    assert count() == 0
    with fake_mode():
        assert count() == 1


@contract(
    "torch._C._len_torch_function_stack",
    "torch._C._get_function_stack_at",
    "torch.utils._device.DeviceContext",
)
def test_function_modes_are_counted_and_the_default_device_is_one(
    count: Any, mode_at: Any, device_context: type
) -> None:
    assert count() == 0
    with torch.device("meta"):
        assert count() == 1
        assert type(mode_at(0)) is device_context
        assert mode_at(0).device == torch.device("meta")


@contract("torch._C._functorch.peek_interpreter_stack")
def test_transforms_are_on_a_stack(peek: Any) -> None:
    assert peek() is None
    seen: list[Any] = []
    torch.func.vmap(lambda x: seen.append(peek()) or x)(torch.ones(2))
    assert seen != [None]


@contract("torch._C._dynamo.guards.assert_size_stride")
def test_a_layout_is_checked_by_size_and_stride(check: Any) -> None:
    tensor = torch.empty(3, 1, 4)
    check(tensor, (3, 1, 4), (4, 17, 1))  # one element has no stride
    for shape, stride in (((3, 1, 4), (1, 1, 3)), ((3, 4), (4, 1))):
        with pytest.raises(AssertionError):
            check(tensor, shape, stride)
    with pytest.raises(TypeError):
        check(None, (3,), (1,))


@contract("torch._C._dispatch_get_all_op_names")
def test_operators_are_listed_by_name(names: Any) -> None:
    @torch.library.custom_op("lazyinline_tests::listed", mutates_args=("x",))
    def listed(x: Tensor) -> None:
        x.add_(1)

    assert {"aten::add_.Tensor", "lazyinline_tests::listed"} <= set(names())
    assert listed._opoverload._schema.arguments[0].alias_info.is_write
    assert listed._opoverload in pure_forms()
    assert torch.ops.aten.add_.Tensor not in pure_forms()


@contract(
    "torch._library.custom_ops.OPDEFS",
    "torch._library.custom_ops.OPDEFS.get",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "attribute _opoverload",
    "attribute _backward_fn",
)
def test_an_operator_tells_whether_it_has_a_derivative(
    known: Any, get: Any, has_kernel: Any
) -> None:
    @torch.library.custom_op("lazyinline_tests::told", mutates_args=())
    def told(x: Tensor, scale: float = 2.0) -> Tensor:
        return x * scale

    operator = torch.ops.lazyinline_tests.told.default
    assert told._opoverload is operator
    assert known["lazyinline_tests::told"] is get("lazyinline_tests::told") is told
    assert told._backward_fn is None
    assert not has_own_derivative(operator)
    assert has_kernel("lazyinline_tests::told", "Autograd")  # of each: it raises in a backward
    told.register_autograd(lambda context, gradient: (gradient, None))
    assert has_own_derivative(operator)
    with torch.library._scoped_library("lazyinline_tests", "FRAGMENT") as library:
        library.define("plain(Tensor x) -> Tensor")
        plain = torch.ops.lazyinline_tests.plain.default
        assert not has_own_derivative(plain)
        assert not casts_under_autocast(plain)
        library.impl("plain", torch.clone, "AutogradCPU")
        library.impl("plain", torch.clone, "AutocastCPU")
        assert has_own_derivative(plain)
        assert casts_under_autocast(plain)


@contract()
def test_the_dispatcher_leaves_out_arguments_that_are_as_the_schema_says() -> None:
    seen = []

    def rule(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((len(args), kwargs))
        return args[0] * 2

    @torch.library.custom_op("lazyinline_tests::full", mutates_args=())
    def full(x: Tensor, scale: float = 2.0, *, shift: float = 0.0) -> Tensor:
        return x * scale + shift

    operator = torch.ops.lazyinline_tests.full.default
    x = torch.ones(2)
    traced(lambda x: operator(x, scale=2.0, shift=1.0), x, table={operator: rule})
    assert seen == [(1, {"shift": 1.0})]
    given, named = arguments_in_full(operator, (x,), {"shift": 1.0})
    assert given[1:] == [2.0]
    assert named == {"shift": 1.0}
    assert arguments_in_full(operator, (), {"x": x, "scale": 3.0}) == ([x, 3.0], {"shift": 0.0})


@contract("torch._C._dispatch_get_all_op_names")
def test_pytorch_names_all_its_operators_and_has_rules_to_core(names: Any) -> None:
    assert {"aten::add.Tensor", "aten::relu"} <= set(names())
    assert torch.ops.aten.relu.default in operators_tagged(torch.Tag.core)


@contract("torch._decomp.get_decompositions", "torch._decomp.decomposition_table")
def test_rules_take_operators_apart(named: Any, table: Any) -> None:
    aten = torch.ops.aten
    x = torch.randn(3, 4)
    default = torch.export.default_decompositions()
    for rules, operator_, args in (
        (table, aten.native_layer_norm.default, (x, [4], None, None, 1e-5)),
        (table, aten._softmax.default, (x, 1, False)),
        (default, aten.gelu_backward.default, (x, x)),
        (named([aten.addmv]), aten.addmv.default, (x[:, 0], x, x[0])),
    ):
        torch.testing.assert_close(rules[operator_](*args), operator_(*args))


@contract("torch._C._get_tracing_state", "torch.fx._symbolic_trace.is_fx_symbolic_tracing")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracers_of_python_say_that_they_run(state: Any, is_tracing: Any) -> None:
    class Asking(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            seen.append((state() is not None, is_tracing()))
            return x + 1

    seen: list[tuple[bool, bool]] = []
    Asking()(torch.ones(2))
    torch.jit.trace(Asking(), (torch.ones(2),), check_trace=False)
    torch.fx.symbolic_trace(Asking())
    assert seen == [(False, False), (True, False), (False, True)]


def test_a_saved_value_that_was_changed_in_place_is_refused_in_known_words() -> None:
    from lazyinline.autodiff.traces.joint_trace import CHANGED_IN_PLACE

    x = torch.ones(2, requires_grad=True) * 1
    y = x.sin()
    x.mul_(2)
    with pytest.raises(RuntimeError, match=CHANGED_IN_PLACE):
        y.sum().backward()


@contract("torch._C._autograd._top_saved_tensors_default_hooks")
def test_hooks_on_saved_tensors_are_known_and_the_innermost_count(top: Any) -> None:
    assert top(True) is None
    seen = []
    outer = torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t)
    with outer:
        assert top(True) is not None
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            torch.ones(2, requires_grad=True).exp()
        assert not seen
        torch.ones(2, requires_grad=True).exp()
    assert len(seen) == 1


def test_a_tensor_without_data_becomes_a_fake_on_the_cpu() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    base = torch.empty(4, 3, device="meta", requires_grad=True)
    fake = mode.fake_tensor_converter.from_meta_and_device(mode, base, torch.device("cpu"))
    assert (fake.device.type, fake.shape, fake.stride()) == ("cpu", base.shape, base.stride())
    with mode:
        assert (fake @ fake.t()).device.type == "cpu"
    again = mode.fake_tensor_converter.from_meta_and_device(mode, base, torch.device("cpu"))
    assert again is fake


def test_a_fake_mode_lets_go_of_the_tensors_that_its_fakes_were_made_of() -> None:
    mode, tensor = FakeTensorMode(), torch.ones(2)
    fake = mode.from_tensor(tensor)
    assert weakref.getweakrefs(tensor)
    describer = mode.fake_tensor_converter.meta_converter.describer
    describer.lookup_tensor.clear()
    describer.lookup_storage.clear()
    assert not weakref.getweakrefs(tensor)
    assert fake.shape == tensor.shape


@contract("torch._inductor.codecache.CppCodeCache")
def test_a_cpp_library_is_built_and_its_functions_can_be_called(code_cache: Any) -> None:
    loaded = []

    class Noting(code_cache):  # type: ignore[misc]
        cache: ClassVar[dict[str, Any]] = {}

        @staticmethod
        def _load_library_inner(path: str, key: str) -> Any:
            loaded.append(path)
            return ctypes.CDLL(path)

    library = Noting.load('extern "C" int twice(int x) { return 2 * x; }')
    assert library.twice(21) == 42
    assert loaded == [library._name], "what is loaded is no longer asked for first"


@contract("torch.ops.aten._scaled_dot_product_attention_math.default")
def test_plain_attention_gives_the_result_and_the_scores(plain: Any) -> None:
    q, k, v = (torch.randn(2, 3, 5, 4) for _ in range(3))
    result, _ = plain(q, k, v, None, 0.0, True, scale=0.5, enable_gqa=False)
    fused = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)
    torch.testing.assert_close(result, fused)


def joint_graph() -> tuple[torch.fx.GraphModule, Sequence[Tensor]]:
    """A forward ``sin(x * rand) @ w`` and its backward in one graph, named as partitioners ask."""

    def joint(flat: list[Tensor]) -> list[Tensor]:
        x, w, tangent = flat
        noise = torch.rand(2, 2)
        h = torch.sin(x * noise)
        grad_h = tangent @ w.t()
        return [h @ w, grad_h * torch.cos(x * noise) * noise, h.t() @ tangent]

    generator = torch.Generator().manual_seed(0)
    x, tangent = (torch.rand(2, 2, generator=generator) + 0.2 for _ in range(2))
    inputs = [x, torch.tensor([[2.0, 1.0], [0.0, 1.0]]), tangent]
    module = traced(joint, inputs)
    module.graph.set_codegen(torch.fx.graph.CodeGen())
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    for node, name in zip(placeholders, ("primals_1", "primals_2", "tangents_1"), strict=True):
        node.name = node.target = name
    forward_part = True
    for node in module.graph.nodes:
        forward_part = forward_part and "tangents_1" not in [n.name for n in node.all_input_nodes]
        if forward_part:
            node.meta["partitioner_tag"] = "is_forward"
    module.recompile()
    return module, inputs


@pytest.mark.parametrize("name", ["default_partition", "min_cut_rematerialization_partition"])
def test_partitioners_split_a_joint_graph_and_draw_once(name: str) -> None:
    split = resolve(f"torch._functorch.partitioners.{name}")
    module, (x, w, tangent) = joint_graph()
    forward, backward = split(module, (), num_fwd_outputs=1)
    results = forward(x, w)
    saved = [n.name for n in forward.graph.output_node().args[0]][1:]
    assert len(results) == 1 + len(saved)
    known = {"primals_1": x, "primals_2": w, "tangents_1": tangent}
    known.update(zip(saved, results[1:], strict=True))
    needed = [n.name for n in backward.graph.nodes if n.op == "placeholder"]
    assert "tangents_1" in needed and set(needed) <= set(known)
    assert all("val" in n.meta for n in backward.graph.nodes if n.op == "placeholder")
    backward.graph.eliminate_dead_code()
    draws = [n for n in backward.graph.nodes if n.target is torch.ops.aten.rand.default]
    assert not any(node.users for node in draws), "the backward would draw other numbers"
    grad_x, grad_w = backward(*(known[n] for n in needed))
    # What the forward drew shows in its result: h = sin(x * noise), and out = h @ w.
    h = torch.linalg.solve(w.t().double(), results[0].t().double()).t()
    assert torch.allclose(grad_w.double(), h.t() @ tangent.double(), atol=1e-4)
    noise = torch.asin(h) / x.double()
    want = tangent.double() @ w.t().double() * torch.cos(torch.asin(h)) * noise
    assert torch.allclose(grad_x.double(), want, atol=1e-3)


CONTRACTS["torch._functorch.partitioners.default_partition"] = "test_partitioners"
CONTRACTS["torch._functorch.partitioners.min_cut_rematerialization_partition"] = "test_partitioners"


def test_functionalizing_a_trace_takes_in_place_operators_out() -> None:
    def function(flat: list[Tensor]) -> tuple[Tensor]:
        h = flat[0].clone()
        h[0].add_(flat[1])
        return (h,)

    make_fx = resolve("torch.fx.experimental.proxy_tensor.make_fx")
    inputs = [torch.ones(2, 2), torch.ones(2)]
    module = make_fx(torch.func.functionalize(function, remove="mutations"))(inputs)
    assert not any(t._schema.is_mutable for t in targets(module) if hasattr(t, "_schema"))
    assert torch.equal(module(inputs)[0], torch.tensor([[2.0, 2.0], [1.0, 1.0]]))


@contract("torch._C._dispatch_has_kernel_for_dispatch_key", "torch.ops.aten._to_copy.default")
def test_a_gpus_autocast_is_known_without_a_gpu(has_kernel: Any, cast: Any) -> None:
    assert has_kernel("aten::mm", "AutocastCUDA") and not has_kernel("aten::sin", "AutocastCUDA")
    assert has_kernel("aten::cross_entropy_loss", "CompositeImplicitAutograd")
    mode = fake_mode()
    with mode:
        x = FakeTensor(mode, torch.empty(4, 4, device="meta"), torch.device("cuda", 0))
    dtype = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with torch.no_grad(), mode, Watch() as watch:
            assert torch.mm(x, x).dtype == dtype
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert any(seen is cast and given.get("dtype") is dtype for seen, given in watch.seen)


# ---- Inductor ---------------------------------------------------------------------------------


@contract(
    f"{INDUCTOR}.codegen.cpp.CppVecKernel",
    f"{INDUCTOR}.codegen.cpp.CppVecKernel.store",
    f"{INDUCTOR}.codegen.cpp.CppTile2DKernel",
    f"{INDUCTOR}.codegen.cpp.CppTile2DKernel.store",
    f"{INDUCTOR}.config.cpp.dynamic_threads",
)
def test_a_kernel_of_tiles_stores_through_one_of_vectors(
    vector: Any, _: Any, tile: Any, before: Any, *rest: Any
) -> None:
    assert callable(tile.need_vec_transpose)
    told: list[Any] = []

    class Kernel(tile):  # type: ignore[misc]
        num_threads = 2

        def __init__(self) -> None:
            pass

        def need_vec_transpose(self, index: Any) -> bool:
            return False

    with pytest.MonkeyPatch.context() as patch, offsets_added_once():
        patch.setattr(vector, "store", lambda *args: told.append(args))
        Kernel().store("buf0", "index", "value", "atomic_add")
    assert [args[1:] for args in told] == [("buf0", "index", "value", "atomic_add")]
    assert tile.store is before


@contract(
    "torch._inductor.sizevars",
    "optional torch._inductor.sizevars.stride_at_vec_range",
    "torch._inductor.codegen.cpp",
)
def test_inductor_expands_the_indices_that_it_would_simplify(*_: Any) -> None:
    home = home_of_strides()
    x, y = sympy.symbols("x y", integer=True)
    size = sympy.Symbol("s", integer=True, positive=True)
    floor, mod = home.FloorDiv, home.ModularIndexing
    indices = [
        32 * x + y,
        32 * (x + 4 * y) - y,
        size * x + y * (size + 1),
        x * y,
        sympy.Integer(7),
        32 * floor(x, 16) + mod(x, 1, 16),
        mod(x, 4, 8) + y,
        (x + y) ** 2,
    ]
    strides = home.stride_at_vec_range
    asked = [(index, var, width) for index in indices for var in (x, y) for width in (None, 16)]

    def answers() -> list[Any]:
        for cached in (home.stride_at, home.stride_at_vec_range):
            cached.cache_clear()
        home.simplify_index_in_vec_range.cache_clear()
        return [strides(*question) for question in asked]

    before, original = answers(), home.sympy
    with polynomials_expanded():
        assert home.sympy is not original
        assert [sympy.expand(a - b) for a, b in zip(answers(), before, strict=True)] == [0] * 32
    assert home.sympy is original


@contract(
    "torch._inductor.graph.GraphLowering",
    "torch._inductor.graph.GraphLowering.run_node",
    "torch._inductor.ir.FallbackKernel",
    "torch._inductor.fx_passes.post_grad",
    "optional torch._inductor.fx_passes.post_grad._chain_random_ops_for_ordering",
)
def test_inductor_draws_in_the_order_of_the_graph(lowering: Any, run_node: Any, *_: Any) -> None:
    def draw(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = torch.rand(4, 8)
        h = x.tanh().exp()
        b = torch.rand(4, 8)
        dropped = torch.ops.aten.native_dropout(h, 0.5, True)[0]  # b has no reason to come before
        torch.rand_like(h + b)  # nor has this one, which nobody reads
        again = torch.ops.aten.native_dropout(torch.empty(4, 8), 0.5, True)[1]
        return (h * b).exp().sum(0) + (a * 2).exp(), dropped * b, again * h

    x = torch.linspace(0, 1, 32).view(4, 8)
    with fake_mode() as mode, settings():
        graph = traced(draw, mode.from_tensor(x), table=decompositions())
    assert sum(may_draw(n.target) for n in graph.graph.nodes) == 5
    (compiled,) = compile_leaves([graph], lambda: None)
    assert not isinstance(compiled, NotCompiled)
    assert lowering.run_node is run_node
    torch.manual_seed(0)
    found = compiled([x])
    torch.manual_seed(0)
    for ours, theirs in zip(found, draw(x), strict=True):
        torch.testing.assert_close(ours, theirs)


@contract(
    "torch._inductor.config",
    "torch._inductor.config.patch",
)
def test_inductor_settings_exist_and_are_put_back(config: Any, patch: Any) -> None:
    from torch._inductor.codecache import FxGraphHashDetails

    tag = torch.compiler.config.cache_key_tag
    names = {
        "fallback_random": True,
        "size_asserts": False,
        "alignment_asserts": False,
        "fx_graph_cache": False,
        "fx_graph_remote_cache": False,
    }
    before = {name: getattr(config, name) for name in names}
    with patch(**names):
        assert {name: getattr(config, name) for name in names} == names
    assert {name: getattr(config, name) for name in names} == before
    with settings():
        assert config.fallback_random is True
        assert torch.compiler.config.cache_key_tag == f"{tag} lazyinline {package_digest()}"
    assert "cache_key_tag" in inspect.getsource(FxGraphHashDetails)
    assert torch.compiler.config.cache_key_tag == tag


@contract("torch.ops.aten._unsafe_index_put.default")
def test_elements_are_put_into_a_copy_of_what_has_one_place_for_several(put: Any) -> None:
    x, index, row = torch.zeros(1, 3).expand(4, 3), torch.tensor([2]), torch.ones(1, 3)
    copied = decompositions()[put]
    assert copied(x.clone(), (index,), row) is NotImplemented
    assert torch.equal(copied(x, (index,), row), x.clone().index_put((index,), row))


@contract("torch._inductor.decomposition.select_decomp_table")
def test_inductors_decompositions_leave_random_numbers_to_pytorch(select: Any) -> None:
    table = decompositions()
    assert len(table) > 100
    assert torch.ops.aten.native_batch_norm.default in select()
    assert torch.ops.aten.native_dropout.default not in table
    assert set(NOT_FROM_THE_END) <= select().keys()
    torch.manual_seed(0)
    mask = table[torch.ops.aten.bernoulli.p](torch.empty(50), 0.3)
    torch.manual_seed(0)
    assert torch.equal(mask, torch.empty(50).bernoulli_(0.3))


@contract("torch._inductor.exc.InductorError")
def test_what_inductor_fails_at_is_told_from_other_errors(error: Any) -> None:
    def failing(self: Any, node: torch.fx.Node) -> Any:
        raise ZeroDivisionError(node.name)

    with fake_mode() as mode:
        module = traced(lambda x: (x.tanh() * 2,), mode.from_tensor(torch.randn(4)))
    lowering = resolve("torch._inductor.graph.GraphLowering")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "run_node", failing)
        (made,) = compile_leaves([module], lambda: None)
    assert isinstance(made, NotCompiled) and "ZeroDivisionError: " in made.reason
    assert issubclass(error, Exception)


@contract("torch._inductor.compile_fx._recursive_joint_graph_passes")
def test_joint_graph_passes_take_a_graph_and_give_one_that_computes_the_same(passes: Any) -> None:
    def function(x: Tensor) -> tuple[Tensor]:
        return ((x * 1 + 0).view(4).view(2, 2),)

    with fake_mode() as mode:
        module = traced(function, mode.from_tensor(torch.ones(2, 2)))
    result = passes(module, input_device=torch.device("cpu"))
    assert isinstance(result, torch.fx.GraphModule)
    x = torch.randn(2, 2)
    assert torch.equal(result(x)[0], x)


@contract("torch._guards.TracingContext", "torch._guards.tracing")
def test_joint_graph_passes_put_in_values_of_the_graphs_fake_mode(*_: Any) -> None:
    def one_hot(x: Tensor) -> tuple[Tensor]:  # a pass makes it a comparison with an arange
        zeros = torch.full((3, 5), 0.0)
        return (torch.ops.aten.scatter.value(zeros, 1, x, 1.0),)

    with fake_mode() as mode:
        module = traced(one_hot, mode.from_tensor(torch.tensor([[1], [4], [0]])))
    module.graph.set_codegen(torch.fx.graph.CodeGen())
    module.recompile()
    rewritten = rewrite_joint(module)
    assert torch.ops.aten.scatter.value not in targets(rewritten)
    values = [n.meta["val"] for n in rewritten.graph.nodes if "val" in n.meta]
    assert all(v.fake_mode is mode for v in values)


@pytest.mark.parametrize(
    "use",
    [
        lambda spread: spread * torch.full((4, 3), 1.0),
        lambda spread: spread + torch.full((3, 4), 0.0).t(),
        lambda spread: torch.as_strided(spread * torch.full((4, 3), 1.0), (12,), (1,), 0) * 2,
    ],
    ids=["contiguous", "transposed", "read by strides"],
)
def test_joint_graph_passes_keep_the_layouts_that_were_traced(use: Any) -> None:
    with fake_mode() as mode:
        module = traced(lambda x: (use(x.expand(4, 3)),), mode.from_tensor(torch.tensor(3.0)))
    module.graph.set_codegen(torch.fx.graph.CodeGen())
    module.recompile()
    (expected,) = module(torch.tensor(3.0))
    (found,) = rewrite_joint(module)(torch.tensor(3.0))
    assert found.stride() == expected.stride()
    assert torch.equal(found, expected)


@functools.cache
def compiled_leaf() -> tuple[torch.fx.GraphModule, Any]:
    """One small graph, compiled as the backend does."""
    with fake_mode() as mode:
        inputs = [mode.from_tensor(torch.randn(4, 8)), mode.from_tensor(torch.randn(8, 3))]
        table = decompositions()
        module = traced(lambda x, w: (torch.tanh(x @ w).t(), x.exp()), *inputs, table=table)
    return module, compile_leaves([module], lambda: None)[0]


@contract("torch._inductor.compile_fx.compile_fx_inner")
def test_inductor_compiles_an_aten_graph_into_a_boxed_callable(_: Any) -> None:
    _, function = compiled_leaf()
    x, w = torch.randn(4, 8), torch.randn(8, 3)
    boxed = [x, w]
    first, second = function(boxed)
    assert not boxed, "the list is emptied, so that inputs are freed early"
    assert torch.allclose(first, torch.tanh(x @ w).t(), atol=1e-6)
    assert torch.allclose(second, x.exp())
    assert first.stride() == (1, 3), "results keep the layout of the graph"


def test_inductors_wrapper_is_a_function_whose_globals_hold_kernels_and_allocators() -> None:
    _, wrapper = compiled_leaf()
    function = getattr(wrapper, "__func__", wrapper)
    assert isinstance(function, types.FunctionType), f"{type(function)}: it cannot be recorded"
    scope = function.__globals__
    for name in ("empty_strided_cpu", "reinterpret_tensor", "extern_kernels"):
        assert name in scope, f"the generated code has no {name} any more"
    kernels = [name for name in scope if name.startswith("cpp_fused")]
    assert kernels and all(callable(scope[name]) for name in kernels)


@contract(
    "torch._inductor.async_compile.AsyncCompile",
    "torch._inductor.async_compile.AsyncCompile.wait",
)
def test_building_waits_in_one_method_that_takes_the_scope(async_compile: Any, wait: Any) -> None:
    assert parameters_of(wait) == ["self", "scope"]
    with fake_mode() as mode:
        module = traced(lambda x: (torch.tanh(x) * 3.25,), mode.from_tensor(torch.randn(7)))
    with mock.patch.object(async_compile, "wait", autospec=True, side_effect=wait) as watched:
        compile_leaves([module], lambda: None)
    assert watched.called, "the module of the generated code no longer waits there"


@contract(
    f"{INDUCTOR}.codegen.cpp.CppOverrides",
    f"{INDUCTOR}.codegen.cpp.CppVecOverrides",
    f"{INDUCTOR}.codegen.cpp.CppOverrides.truncdiv",
    f"{INDUCTOR}.codegen.cpp.CppVecOverrides.truncdiv",
)
def test_a_quotient_of_integers_is_written_as_a_division(
    scalar: Any, vector: Any, *quotients: Any
) -> None:
    assert all(map(callable, quotients))
    assert scalar.truncdiv("a", "b") == "a / b"
    before = [kind.__dict__["truncdiv"] for kind in (scalar, vector)]
    with quotients_checked():
        assert scalar.truncdiv("a", "b").startswith("a / [](auto divisor)")
    assert [kind.__dict__["truncdiv"] for kind in (scalar, vector)] == before


@pytest.mark.sweep
@contract(f"{INDUCTOR}.lowering")
def test_pooling_is_taken_apart_before_inductor_has_compiled_anything(lowering: Any) -> None:
    code = (
        "import torch\n"
        "from lazyinline.backend.kernels.torch_corrections import decompositions\n"
        "operator = torch.ops.aten.max_pool2d_with_indices.default\n"
        "x = torch.randn(1, 1, 4, 4)\n"
        "found = decompositions()[operator](x, [2, 2])\n"
        "if found is not NotImplemented:\n"
        "    assert all(map(torch.equal, found, operator(x, [2, 2])))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@contract(f"{INDUCTOR}.exc.InvalidCxxCompiler", f"{INDUCTOR}.config.cpp.cxx")
def test_a_compiler_that_is_not_there_is_an_error_of_its_own(error: Any, searched: Any) -> None:
    from torch._inductor import config, cpp_builder

    names = searched if isinstance(searched, (list, tuple)) else [searched]
    assert all(name is None or isinstance(name, str) for name in names)
    cpp_builder.cpp_compiler_search.cache_clear()
    try:
        with config.patch({"cpp.cxx": (None, "no-such-compiler")}), pytest.raises(error):
            cpp_builder.get_cpp_compiler()
    finally:
        cpp_builder.cpp_compiler_search.cache_clear()


@contract(
    f"{INDUCTOR}.codecache.CppPythonBindingsCodeCache",
    f"{INDUCTOR}.codecache.CppPythonBindingsCodeCache.load_pybinding",
    f"{INDUCTOR}.codecache.CppPythonBindingsCodeCache.cpp_compile_command_flags",
    f"{INDUCTOR}.cpp_builder.CppBuilder",
    f"{INDUCTOR}.cpp_builder.CppTorchDeviceOptions",
    f"{INDUCTOR}.cpp_builder.get_compiler_version_info",
    f"{INDUCTOR}.cpp_builder.get_cpp_compiler",
    f"{INDUCTOR}.cpu_vec_isa.pick_vec_isa",
    f"{INDUCTOR}.config.is_fbcode",
    f"{INDUCTOR}.runtime.cache_dir_utils.default_cache_dir",
)
def test_kernels_built_together_have_the_flags_of_kernels_built_alone(
    cache: Any, load: Any, flags: Any, builder: Any, *_: Any
) -> None:
    commands: list[str] = []
    command = builder.get_command_line

    def noted(self: Any) -> str:
        line: str = command(self)
        commands.append(line)
        return line

    header = "#include <torch/csrc/inductor/cpp_prefix.h>"
    entry = 'extern "C" void kernel(float* x) { x[0] = 3.0f; }'
    with mock.patch.object(builder, "get_command_line", noted):
        alone = load(["float*"], f"{header}\n{entry}")
        wanted = {line for line in commands if " i " in line}  # names stand for those of files
        commands.clear()
        together = build_file(f"{header}\n// not built alone\n{entry}")
    assert wanted and wanted <= set(commands), "a file of kernels is built with other flags"
    assert any(line in build_setting() for line in wanted), "the key names other flags"
    x = torch.zeros(1)
    alone(x)
    assert x == 3 and together.suffix == ".so"


@contract(
    f"{INDUCTOR}.cpu_vec_isa",
    f"{INDUCTOR}.cpu_vec_isa.valid_vec_isa_list",
    f"{INDUCTOR}.cpu_vec_isa.supported_vec_isa_list",
    f"{INDUCTOR}.cpu_vec_isa.x86_isa_checker",
    f"{INDUCTOR}.config.cpp.simdlen",
)
def test_unasked_inductor_takes_the_first_good_instruction_set(
    module: Any, listed: Any, supported: Any, checker: Any, vector_bits: Any
) -> None:
    assert vector_bits is None and isinstance(supported, list) and isinstance(checker(), list)
    taken = module.pick_vec_isa()
    if takes_the_first(vector_bits):
        assert [taken] == best_vector_units() and taken == listed()[0]
    with vector_units_probed_here():
        assert module.pick_vec_isa() == taken
    assert module.valid_vec_isa_list is listed


@contract(
    f"{INDUCTOR}.codecache",
    f"{INDUCTOR}.codecache.pick_vec_isa",
    f"{INDUCTOR}.cpp_builder.CppBuilder",
    "optional torch._inductor.cpu_vec_isa.VecISA._probe_load",
    f"{INDUCTOR}.config.cpp_cache_precompile_headers",
)
def test_vector_units_are_probed_with_the_flags_and_the_header_of_kernels(
    cache: Any, pick: Any, builder: Any, probe: Any, precompiles: Any
) -> None:
    isa = pick()
    if probe is None or not (isa and precompiles):
        return
    code = isa._avx_code
    assert "at::vec::" in code, "the probe is built for no instruction set"
    commands: list[str] = []
    command = builder.get_command_line

    def noted(self: Any) -> str:
        commands.append(command(self))
        return commands[-1]

    never_built = f"{code}\n// {os.urandom(8).hex()}"
    with mock.patch.object(builder, "get_command_line", noted), vector_units_probed_here():
        assert isa.check_build(never_built)
        assert not isa.check_build(f"{never_built}\n#error no such vectors")
    assert any(line in build_setting() for line in commands), "the flags are not those of kernels"
    assert any("-include " in line for line in commands), "the header was read again"
    assert cache.pick_vec_isa is pick


@contract(
    "torch._inductor.cpu_vec_isa.VecISA",
    "torch._inductor.cpu_vec_isa.VecISA.check_build",
    "optional torch._inductor.cpu_vec_isa.VecISA._probe_load",
    "attribute _probe_load",
)
def test_vector_units_are_asked_for_by_loading_an_object(
    isa_class: Any, check: Any, probe: Any
) -> None:
    assert list(inspect.signature(check).parameters) == ["self", "code"]
    if probe is None:
        assert torch.__version__ < "2.13", "_probe_load moved: the adapter no longer answers here"
        return
    assert list(inspect.signature(probe).parameters) == ["self", "output_path"]
    for path, loads in ((__file__, False), (str(native_file()), True)):
        assert probe(isa_class(), path) is loads
        assert loads_here(isa_class(), path) is loads


# ---- torch.onnx -------------------------------------------------------------------------------


@contract(
    f"{EXPORTER}._registration",
    f"{EXPORTER}._registration.ONNXRegistry.from_torchlib",
    f"{EXPORTER}._decomp",
    f"{EXPORTER}._decomp.get_onnx_implemented_overloads",
    f"{EXPORTER}._decomp.create_onnx_friendly_decomposition_table",
)
def test_the_registry_knows_operators_and_the_table_takes_the_others_apart(
    _registration: Any, from_torchlib: Any, _decomp: Any, implemented: Any, create: Any
) -> None:
    known = set(implemented(from_torchlib(opset_version=18)))
    table = create(known)
    aten = torch.ops.aten
    assert {aten.linear.default, aten.mm.default, aten.layer_norm.default} <= known
    assert aten.square.default in table
    assert not known & set(table)


@contract(
    f"{EXPORTER}._dispatching",
    f"{EXPORTER}._dispatching.dispatch",
    f"{EXPORTER}._fx_passes",
    f"{EXPORTER}._fx_passes.insert_type_promotion_nodes",
    f"{EXPORTER}._fx_passes.remove_assertion_nodes",
    f"{EXPORTER}._ir_passes",
    f"{EXPORTER}._ir_passes.add_opset_imports",
    f"{EXPORTER}._core",
    f"{EXPORTER}._core._translate_fx_graph",
    "attribute _translate_fx_graph",
)
def test_a_graph_of_aten_operators_is_translated_into_an_ir_graph(*_: Any) -> None:
    mode = fake_mode()
    with mode:
        inputs = [torch.empty(2, 3), torch.empty(2, 3, dtype=torch.long)]
        module = traced(lambda x, i: (torch.mm(x, (x + i).t()), torch.erfinv(x)), *inputs)
    (node, message), *rest = torch_onnx.untranslatable(module, 18)
    assert node.target is torch.ops.aten.erfinv.default and message and not rest
    with mode:
        module = traced(lambda x, i: (torch.mm(x, (x + i).t()),), *inputs)
    torch_onnx.prepare(module)
    model = torch_onnx.translate(module, 18)
    assert [node.op_type for node in model.graph] == ["Cast", "Add", "Transpose", "MatMul"]
    assert model.graph.opset_imports[""] == 18
    assert [tuple(v.shape) for v in model.graph.outputs] == [(2, 2)]


@contract(
    f"{EXPORTER}._registration.ONNXRegistry.from_torchlib",
    f"{EXPORTER}._dispatching.dispatch",
    f"{EXPORTER}._errors",
    f"{EXPORTER}._errors.ConversionError",
)
def test_a_translation_of_ours_goes_before_torchlibs(
    from_torchlib: Any, dispatch: Any, _: Any, error: Any
) -> None:
    registry = from_torchlib(opset_version=18)
    relu = torch.ops.aten.relu.default

    def own(x: Any) -> Any:
        return x

    registry.register_op(relu, own)
    graph = torch.fx.Graph()
    node = graph.call_function(relu, (graph.placeholder("x"),))
    for each in graph.nodes:
        each.meta["val"] = torch.ones(2)
    function, *_ = dispatch(node, registry)
    assert getattr(function, "func", function) is own
    assert issubclass(error, Exception)


@contract(f"{EXPORTER}._core.TorchTensor", f"{EXPORTER}._core.torch_dtype_to_onnx_dtype")
def test_tensors_are_wrapped_without_a_copy(wrap: Any, to_onnx: Any) -> None:
    tensor = torch.tensor([1.0, 2.0])
    wrapped = wrap(tensor, name="w")
    tensor[0] = 5.0
    assert wrapped.numpy().tolist() == [5.0, 2.0]
    assert to_onnx(torch.bfloat16).name == "BFLOAT16"


@contract(
    "torch._decomp.decomposition_table",
    "torch._decomp.decomposition_table.items",
    "torch._C._dispatch_get_registrations_for_dispatch_key",
)
def test_operators_that_are_made_of_others_can_be_listed(
    table: Any, items: Any, registrations: Any
) -> None:
    assert torch.ops.aten.nll_loss_forward.default in table
    assert dict(items()) == table
    assert "aten::to.dtype" in registrations("CompositeImplicitAutograd")
    assert "aten::mm" not in registrations("CompositeImplicitAutograd")


# ---- symbolic sizes ---------------------------------------------------------------------------

SYMBOLS = "torch.fx.experimental.symbolic_shapes"


@contract(
    f"{SYMBOLS}.ShapeEnv",
    f"{SYMBOLS}.DimDynamic",
    f"{SYMBOLS}.DimDynamic.DYNAMIC",
    "torch._dynamo.source.ConstantSource",
    "torch.fx.experimental._config",
    "torch.utils._sympy.interp.sympy_interp",
    "torch.utils._sympy.reference.PythonReferenceAnalysis",
)
def test_symbols_of_equal_hints_stay_apart_and_their_questions_are_kept(
    env_class: Any, _: Any, dynamic: Any, source: Any, config: Any, interpret: Any, analysis: Any
) -> None:
    env = env_class()
    symbols = [env.create_symbol(8, source(name), dynamic_dim=dynamic) for name in "ab"]
    a, b = (env.create_symintnode(s, hint=8, source=source(str(s))) for s in symbols)
    assert symbols[0] != symbols[1] and (a * b + 2).node.expr == symbols[0] * symbols[1] + 2
    assert env.replace(symbols[1]) == symbols[1] and not env.guards
    assert env.var_to_range[symbols[0]].lower == 2
    assert a == b  # a question, which merges the two
    assert env.replace(symbols[0]) == env.replace(symbols[1]) and len(env.guards) == 1
    assert env.simplify(env.guards[0].expr).is_Boolean
    assert interpret(analysis, {symbols[0]: 3}, symbols[0] * 2 + 1) == 7
    with config.patch(backed_size_oblivious=True):
        assert config.backed_size_oblivious


@contract(
    f"{SYMBOLS}.ShapeEnv",
    f"{SYMBOLS}.DimDynamic.DYNAMIC",
    "torch._dynamo.source.ConstantSource",
    "torch.utils._sympy.functions",
)
def test_a_symbol_has_the_number_that_an_environment_gives_it(
    env_class: Any, dynamic: Any, source: Any, functions: Any
) -> None:
    class Named(env_class):  # type: ignore[misc]
        def _generate_unique_id(self, source_name: str) -> int:
            return int(source_name[1:])

    symbol = Named().create_symbol(8, source("s412"), dynamic_dim=dynamic)
    assert str(symbol) == "s412"
    assert functions.FloorDiv.is_Function and str(functions.FloorDiv(symbol, 2)) == "(s412//2)"


@contract(
    f"{SYMBOLS}.ShapeEnv",
    f"{SYMBOLS}.DimDynamic.DYNAMIC",
    "torch._dynamo.source.ConstantSource",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch.fx.experimental.proxy_tensor.make_fx",
)
def test_sizes_are_made_of_expressions_and_traced_as_inputs(
    env_class: Any, dynamic: Any, source: Any, mode_class: Any, trace: Any
) -> None:
    env = env_class(allow_dynamic_output_shape_ops=False, allow_scalar_outputs=False)
    symbol = env.create_symbol(8, source("n"), dynamic_dim=dynamic)
    size = env.create_symintnode(symbol, hint=None)
    assert size.node.expr == symbol and size.node.shape_env is env
    root = size**0.5
    mode = mode_class(allow_non_fake_inputs=True, shape_env=env, static_shapes=True)
    with mode:
        x = torch.empty([size, 4])
    with mode, torch.no_grad():
        graph = trace(lambda flat, sizes: (flat[0] * root,))([x], [size, root]).graph
    values = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
    assert [type(v) for v in values[1:]] == [torch.SymInt, torch.SymFloat]
    assert not env.guards


@contract(
    "torch.export.dynamic_shapes._combine_args",
    "torch.export.dynamic_shapes._tree_map_with_path",
    "torch.export.dynamic_shapes._DimHint",
)
def test_dynamic_shapes_are_matched_with_inputs(combine: Any, tree_map: Any, hint: Any) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, rest: list[Tensor]) -> None:
            pass

    x, y = torch.ones(1), torch.ones(2)
    combined = combine(Model(), (x,), {"rest": [y]})
    assert list(combined) == ["x", "rest"]
    found: list[Any] = []
    shapes = {"x": {0: torch.export.Dim.AUTO}, "rest": [None]}
    tree_map(lambda *row: found.append(row[1:]), dict(combined), shapes, tree_name="inputs")
    assert found == [(x, {0: torch.export.Dim.AUTO}), (y, None)]
    assert isinstance(torch.export.Dim.AUTO, hint) and torch.export.Dim.AUTO.type.name == "AUTO"
    dim = 2 * torch.export.Dim("n") + 1
    assert (dim.root.__name__, dim.fn(3)) == ("n", 7)


# ---- what the cache stores and loads ----------------------------------------------------------


@contract(
    "torch._inductor.config",
    "torch._inductor.config.get_config_copy",
    "torch._functorch.config",
    "torch._functorch.config.get_config_copy",
)
def test_settings_are_plain_values_that_can_be_listed(
    inductor: Any, all_of_inductor: Any, functorch: Any, all_of_functorch: Any
) -> None:
    found = all_of_inductor()
    with inductor.patch({"cpp.simdlen": 4}):
        assert {k for k, v in all_of_inductor().items() if v != found[k]} == {"cpp.simdlen"}
    hooks = ("post_grad_custom_pre_pass", "post_grad_custom_post_pass", "joint_custom_pre_pass")
    assert all(found[name] is None for name in hooks)
    assert all_of_functorch()["activation_memory_budget"] == functorch.activation_memory_budget


@contract("torch.fx._lazy_graph_module._LazyGraphModule")
def test_a_lazy_graph_module_runs(lazy: Any) -> None:
    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.neg, (graph.placeholder("x"),)),))
    module = lazy(nn.Module(), graph)
    assert isinstance(module, torch.fx.GraphModule)
    assert module(torch.ones(2))[0].tolist() == [-1, -1]


@contract(
    "torch._subclasses.fake_tensor.FakeTensorMode", "torch._subclasses.fake_tensor.FakeTensor"
)
def test_fake_tensors_share_the_memory_of_their_meta_tensors(mode: Any, fake: Any) -> None:
    base = torch.empty(6, device="meta")
    view = torch.empty(0, device="meta").set_(base.untyped_storage(), 2, (2,), (1,))
    first, second = (fake(mode(), t, torch.device("cpu")) for t in (base, view))
    assert first.device == torch.device("cpu")
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    assert second.storage_offset() == 2


@contract("attribute _use_count")
def test_a_node_that_adds_to_a_gradient_owns_the_tensor() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    other_names = [parameter, parameter.detach(), parameter.data]
    assert parameter._use_count() == 1
    node = parameter.expand(2, 2).grad_fn.next_functions[0][0]
    assert parameter._use_count() == 2
    handle = node.register_hook(lambda *_: None)
    del node
    assert parameter._use_count() == 1, "nobody holds the node, so its hooks are gone with it"
    parameter.sum().backward()
    parameter.grad.add_(1)
    assert parameter._use_count() == 1
    del handle, other_names


@contract("attribute _backward_hooks", "attribute _post_accumulate_grad_hooks")
def test_tables_of_hooks_on_a_tensor() -> None:
    """There is none before the first hook; one that was emptied stays, and is used again."""
    tensor = torch.zeros(2, requires_grad=True)
    for name, put in (
        ("_backward_hooks", tensor.register_hook),
        ("_post_accumulate_grad_hooks", tensor.register_post_accumulate_grad_hook),
    ):
        assert getattr(tensor, name) is None
        handle = put(lambda _: None)
        table = getattr(tensor, name)
        assert len(table) == 1
        handle.remove()
        assert not table and getattr(tensor, name) is table


# ---- Dynamo's backends ------------------------------------------------------------------------


def graphs_of(function: Callable[..., Any], *inputs: Any) -> list[Any]:
    """Returns the graphs that Dynamo hands to a backend, with what it was given for each."""
    given = []

    def backend(module: Any, examples: Any) -> Any:
        given.append((module, list(examples)))
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    torch._dynamo.reset()
    return given


@contract("torch._guards.tracing")
def test_a_compile_inside_dynamos_sees_no_trace_of_it(tracing: Any) -> None:
    from torch._guards import TracingContext

    with tracing(TracingContext(fake_mode())):
        with tracing(None):
            assert TracingContext.try_get() is None
        assert TracingContext.try_get() is not None


@contract("torch._subclasses.fake_tensor.FakeTensor")
def test_dynamo_hands_over_the_tensors_themselves(fake: Any) -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    ((_, examples),) = graphs_of(model, x)
    assert not any(isinstance(example, fake) for example in examples)
    assert any(example is model.weight for example in examples)


def test_operators_say_in_which_modules_they_were_called() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Sequential(nn.GELU()), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    ((module, _),) = graphs_of(Model(), torch.ones(2))
    stacks = [n.meta["nn_module_stack"] for n in module.graph.nodes if n.op == "call_function"]
    paths = [[path for path, _ in stack.values()] for stack in stacks]
    assert paths == [["L['self'].first", "L['self'].first.0"], ["L['self'].second"]]
    assert [list(stack.values())[-1][1] for stack in stacks] == [nn.GELU, nn.ReLU]
    placeholders = module.graph.find_nodes(op="placeholder")
    assert all("example_value" in node.meta for node in placeholders)


@contract(
    "torch.amp.autocast_mode._enter_autocast",
    "torch.amp.autocast_mode._exit_autocast",
    "torch.autograd.grad_mode._enter_inference_mode",
    "torch.autograd.grad_mode._exit_inference_mode",
    "torch._C._set_grad_enabled",
)
def test_dynamo_writes_modes_as_pairs_of_operators(*switches: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x
        with torch.inference_mode():
            z = x + 1
        with torch.no_grad():
            return y * z

    ((module, _),) = graphs_of(forward, torch.ones(2, 2))
    nodes = [n for n in module.graph.nodes if n.op == "call_function" and n.target in switches]
    enter, leave, begin, end, _ = switches
    seen = [n.target for n in nodes]
    assert seen.count(enter) == seen.count(leave) == 1
    assert seen.count(begin) == seen.count(end) == 1
    assert next(n for n in nodes if n.target is leave).args[0].target is enter
    assert tuple(next(n for n in nodes if n.target is enter).args[:3]) == (
        "cpu",
        torch.bfloat16,
        True,
    )


@contract(
    "torch._higher_order_ops.wrap.tag_activation_checkpoint",
    "torch._ops.HigherOrderOperator",
)
def test_dynamo_writes_a_checkpoint_as_an_operator_on_a_graph(operator: Any, kind: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)

    ((module, _),) = graphs_of(forward, torch.ones(2, requires_grad=True))
    (node,) = [n for n in module.graph.nodes if n.target is operator]
    assert isinstance(operator, kind)
    assert isinstance(getattr(module, node.args[0].target), torch.fx.GraphModule)
    parameters = inspect.signature(torch.utils.checkpoint.checkpoint).parameters
    assert set(node.kwargs) <= {*parameters, "preserve_rng_state"}


@contract("torch._higher_order_ops.invoke_subgraph.invoke_subgraph")
def test_dynamo_writes_equal_regions_as_calls_of_one_graph(invoke: Any) -> None:
    region = torch.compiler.nested_compile_region(lambda x: x.sin())
    ((module, _),) = graphs_of(lambda x: region(region(x)), torch.ones(2))
    first, second = module.graph.find_nodes(op="call_function", target=invoke)
    bodies = {getattr(module, node.args[0].target) for node in (first, second)}
    assert len(bodies) == 1 and isinstance(*bodies, torch.fx.GraphModule)
    assert first.args[1] == second.args[1] and isinstance(first.args[1], str)
    assert [n.target for n in second.users] == [operator.getitem]
    with_options = inspect.signature(torch.compiler.nested_compile_region).parameters
    assert "options" not in with_options or bodies.pop().meta.get("nested_region_config") is None


def test_a_size_that_varies_is_an_input_beside_the_tensor_that_has_it() -> None:
    given: list[Any] = []

    def backend(module: Any, examples: Any) -> Any:
        given.append(module.graph.find_nodes(op="placeholder"))
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * x.shape[0], backend=backend)
    compiled(torch.ones(3))
    compiled(torch.ones(4))
    torch._dynamo.reset()
    values = [node.meta["example_value"] for node in given[1]]
    (size,) = [value for value in values if isinstance(value, torch.SymInt)]
    (tensor,) = [value for value in values if isinstance(value, Tensor)]
    assert tensor.shape[0].node.expr == size.node.expr


def test_dynamos_notes_on_tensors_begin_with_its_name() -> None:
    model = nn.Linear(2, 2)
    graphs_of(model, torch.ones(1, 2))
    assert all(name.startswith("_dynamo_") for name in vars(model.weight))


@contract("torch._functorch", "torch._C._functorch")
def test_a_transform_of_torch_func_shows_in_the_homes_of_operators(*_: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        return torch.func.vmap(torch.sin)(x)

    ((module, _),) = graphs_of(forward, torch.ones(2))
    homes = [str(getattr(n.target, "__module__", "")) for n in module.graph.nodes]
    assert any(home.startswith(("torch._functorch", "torch._C._functorch")) for home in homes)


# ---- a GPU that is not here -------------------------------------------------------------------


@contract(
    "torch._inductor.utils",
    "torch.utils._triton",
    "torch.utils._triton.has_triton_package",
    "torch._inductor.runtime.hints.DeviceProperties",
    "torch._inductor.runtime.hints.DeviceProperties._fields",
    "torch._C",
    "torch._inductor.runtime.hints.DeviceProperties.create",
    "torch.utils._triton.triton_hash_with_backend",
)
def test_inductor_asks_these_facts_of_a_gpu(
    utilities: Any, triton: Any, has_package: Any, properties: Any, fields: Any, *_: Any
) -> None:
    assert callable(triton.triton_hash_with_backend)
    assert any(hasattr(value, "cache_clear") for value in vars(utilities).values())
    assert isinstance(has_package(), bool)
    assert callable(properties.create)
    for target in TARGETS:
        facts = _device_properties(target)
        assert facts._fields == fields
        assert facts.cc == int(target.name.removeprefix("cuda:sm_"))
    for name in _answers(TARGETS[0]):
        assert callable(getattr(torch.cuda, name)), name


def test_answers_for_a_gpu_end_with_their_context() -> None:
    if not resolve("torch.utils._triton.has_triton_package")():
        return
    has_triton = resolve("torch.utils._triton.has_triton")
    before = torch.cuda.is_available(), torch.cuda.device_count(), has_triton()
    with gpu_described(TARGETS[0]):
        assert has_triton(), "it remembers its answer"
        assert torch.cuda.get_device_properties(0).total_memory == TARGETS[0].memory_bytes
    assert (torch.cuda.is_available(), torch.cuda.device_count(), has_triton()) == before


@contract(
    "torch._inductor.async_compile.AsyncCompile",
    "torch._inductor.codecache.PyCodeCache",
    "torch._inductor.codecache.PyCodeCache.load",
    "torch._inductor.runtime.triton_helpers",
    "torch._inductor.runtime.triton_heuristics",
    "torch._inductor.runtime.triton_heuristics.StaticTritonCompileResult",
    "attribute _precompile_config",
    "torch._inductor.async_compile.AsyncCompile.triton",
    "torch._inductor.runtime.triton_helpers.set_driver_to_gpu",
)
def test_inductor_hands_over_kernels_as_text_and_compiles_them_one_by_one(
    compiler: Any, modules: Any, load: Any, helpers: Any, heuristics: Any, static: Any, *_: Any
) -> None:
    assert list(inspect.signature(compiler.triton).parameters)[:3] == [
        "self",
        "kernel_name",
        "source_code",
    ]
    assert inspect.ismethod(load) and load.__self__ is modules
    assert callable(helpers.set_driver_to_gpu)
    assert callable(static.can_statically_launch)
    one = inspect.signature(heuristics.CachingAutotuner._precompile_config)
    assert list(one.parameters)[:2] == ["self", "cfg"]


@contract(
    "attribute _scaled_dot_product_flash_attention",
    "attribute _scaled_dot_product_efficient_attention",
)
def test_attention_of_a_gpu_can_be_differentiated_on_fake_tensors_of_a_cpu() -> None:
    with fake_mode():
        operands = [torch.empty(2, 3, 16, 8, requires_grad=True) for _ in range(3)]
        for attention, options in (
            (torch.ops.aten._scaled_dot_product_flash_attention.default, (0.1, True, False)),
            (torch.ops.aten._scaled_dot_product_efficient_attention.default, (None, True, 0.1)),
            (torch.ops.aten._scaled_dot_product_attention_math.default, ()),
        ):
            result, *_ = attention(*operands, *options)
            assert result.shape == (2, 3, 16, 8)
            gradients = torch.autograd.grad(result.sum(), operands)
            assert [g.shape for g in gradients] == [t.shape for t in operands]


def _doubled(x: Tensor) -> Tensor:
    return x * 2


@contract("torch.jit._state._try_get_jit_cached_function", "attribute _torchdynamo_inline")
def test_a_function_of_torch_jit_keeps_its_python_and_says_if_it_was_scripted(
    known: Any,
) -> None:
    scripted, traced = torch.jit.script(_doubled), torch.jit.trace(_doubled, torch.ones(2))
    for function in (scripted, traced):
        assert isinstance(function, torch.jit.ScriptFunction)
        assert function._torchdynamo_inline is _doubled
        assert "__call__" in vars(type(function))
    assert known(_doubled).qualified_name == scripted.qualified_name != traced.qualified_name


@contract(
    "torch._C._functorch.is_legacy_batchedtensor",
    "torch._C._vmapmode_increment_nesting",
    "torch._C._vmapmode_decrement_nesting",
    "torch._add_batch_dim",
    "torch._remove_batch_dim",
)
def test_cotangents_in_a_batch_are_told_and_taken_apart(
    is_batched: Any, enter: Any, leave: Any, add: Any, remove: Any
) -> None:
    seen: list[Any] = []

    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            level = leave() + 1
            whole = remove(gradient, level, 1, 0)
            enter()
            seen.append((is_batched(gradient), level, whole))
            return add(whole * 2, 0, level)

    x, rows = torch.randn(3, requires_grad=True), torch.randn(2, 3)
    (found,) = torch.autograd.grad(Passing.apply(x), x, rows, is_grads_batched=True)
    torch.testing.assert_close(found, rows * 2)
    ((batched, level, whole),) = seen
    assert batched and level == 1 and not is_batched(rows)
    torch.testing.assert_close(whole, rows)


# ---- optimizers ---------------------------------------------------------------------------------


@contract(
    "torch._higher_order_ops.cond.cond_op",
    "torch._higher_order_ops.map.map_impl",
    "torch._higher_order_ops.scan.scan_op",
    "torch._higher_order_ops.while_loop.while_loop_op",
)
def test_control_flow_compiles_the_function_that_calls_its_operator(*_: Any) -> None:
    seen: list[tuple[str, int]] = []

    class Watcher:
        def control_flow(self, name: str, args: tuple[Any, ...]) -> Any:
            seen.append((name, len(args)))
            raise ArithmeticError

    row = torch.ones(2)
    calls = [
        lambda: torch.cond(row.sum() > 0, torch.sin, torch.cos, (row,)),
        lambda: scan(lambda h, x: (h + x, h * x), row, torch.ones(3, 2)),
        lambda: torch_map(torch.sin, torch.ones(3, 2)),
        lambda: while_loop(lambda x: x.sum() < 9, lambda x: (x + 1,), (row,)),
    ]
    undo = patch_control_flow(Watcher(), threading.get_ident())
    try:
        for call in calls:
            with pytest.raises(ArithmeticError):
                call()
    finally:
        undo()
    assert [name for name, _ in seen] == ["cond", "scan", "map", "while_loop"]
    assert min(number for _, number in seen) >= 3
    assert torch.equal(calls[0](), row.sin())


@contract("torch._fused_adam_", "torch._fused_adamw_", "torch._fused_sgd_", "torch._foreach_add_")
def test_our_updates_in_place_have_the_bits_of_fused_optimizers(*_: Any) -> None:
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {"maximize": True}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ]
    for kind, options in kinds:
        theirs = nn.Parameter(torch.randn(7, 33))
        ours = theirs.detach().clone()
        optimizer = kind([theirs], lr=1e-2, fused=True, **options)
        state: dict[str, Any] = {}
        (group,) = optimizer.param_groups
        is_adam = "betas" in group
        names = ADAM_STATE if is_adam else SGD_STATE
        for name in names:
            _make_state(state, name, ours)
        numbers = torch.tensor(_settings_of(group), dtype=torch.float64)
        for _ in range(3):
            theirs.grad = torch.randn(7, 33)
            rows = [[ours], [theirs.grad], *([state[name]] for name in names)]
            flags = (kind is torch.optim.AdamW if is_adam else group["nesterov"], group["maximize"])
            (adam_ if is_adam else sgd_)(*rows, numbers, *flags)
            optimizer.step()
        assert torch.equal(theirs, ours)
        found = optimizer.state[theirs]
        assert found.keys() == state.keys()
        for name in names:
            assert torch.equal(found[name], state[name]) and found[name].dtype == state[name].dtype


@contract("attribute _wrapped_by_lr_sched")
def test_a_scheduler_marks_its_wrapper_of_step_and_asks_whether_that_was_called() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    assert hasattr(vars(optimizer)["step"], "_wrapped_by_lr_sched")
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        schedule.step()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer._opt_called = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()


def test_hooks_of_an_optimizer_are_in_two_tables_and_those_of_all_in_two() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert not StepOptimizer(optimizer)._have_hooks()
    registers: list[Any] = [
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ]
    for register in registers:
        handle = register(lambda *_: None)
        assert StepOptimizer(optimizer)._have_hooks()
        handle.remove()
