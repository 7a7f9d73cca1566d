"""Contracts with private PyTorch: fake tensors, traces and symbolic sizes."""

import itertools
import logging
import operator
import os
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import Any

import pytest
import torch
import torch.fx
from contracts import Watch, contract, fake_mode, resolve, targets, traced, within
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from lazyinline.frontend.tracing import torch_state, torch_tracing
from lazyinline.reuse.ir.torch_fake_rules import kernels_own_rules
from lazyinline.reuse.torch_names import modules_left

pytestmark = pytest.mark.smoke

FAKES = "torch._subclasses.fake_tensor"
PROXIES = "torch.fx.experimental.proxy_tensor"
SYMBOLS = "torch.fx.experimental.symbolic_shapes"
CPU = torch.device("cpu")
aten = torch.ops.aten


@contract("._dispatch_cache", "torch._dispatch.python.enable_python_dispatcher")
def test_dropout_in_python_is_looked_up_again_once_its_cache_is_empty() -> None:
    dropout: Any = aten.dropout.default
    key, seen = torch.DispatchKey.CompositeImplicitAutograd, []
    before = dropout.py_kernels[key]
    assert torch.DispatchKey.Autograd in dropout.py_kernels
    dropout.py_kernels[key] = lambda *args: seen.append(args) or before(*args)
    try:
        dropout._dispatch_cache.clear()
        with torch._dispatch.python.enable_python_dispatcher(), torch.inference_mode():
            torch.dropout(torch.ones(2), 1.0, True)
    finally:
        dropout.py_kernels[key] = before
        dropout._dispatch_cache.clear()
    assert len(seen) == 1


@contract("torch._C._AutoDispatchBelowAutograd")
def test_a_kernel_in_python_stands_for_a_derivative_in_cpp() -> None:
    overload: Any = aten.embedding_dense_backward.default

    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *operands: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return overload(*operands)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return torch.full((3, 2), 7.0), None, None, None, None

    before = dict(overload.py_kernels)
    overload.py_kernels[torch.DispatchKey.Autograd] = Rows.apply
    rows = torch.ones(3, 2, requires_grad=True)
    try:
        overload._dispatch_cache.clear()
        with torch._dispatch.python.enable_python_dispatcher():
            made = overload(rows, torch.tensor([0, 1, 1]), 4, -1, False)
    finally:
        overload.py_kernels.clear()
        overload.py_kernels.update(before)
        overload._dispatch_cache.clear()
    assert made.detach().sum(1).tolist() == [2, 4, 0, 0]
    assert torch.autograd.grad(made.sum(), rows)[0].unique().tolist() == [7]


def test_what_was_asked_of_sizes_can_be_undone() -> None:
    env = new_environment()
    symbol = symbol_of(env)
    before = {n: copy(v) for n, v in vars(env).items() if isinstance(v, (dict, list, set))}
    assert env.create_symintnode(symbol, hint=8) == 8  # settles it
    assert env.replace(symbol) == 8
    vars(env).update(before)
    for counter in ("_version_counter", "_replacements_version_counter"):
        setattr(env, counter, getattr(env, counter, 0) + 1)
    assert env.replace(symbol) == symbol
    assert not env.guards
    size = env.create_symintnode(symbol, hint=8)
    assert (size + 1).node.expr == symbol + 1
    assert size > 4
    assert len(env.guards) == 1


@contract("._cdata", "torch._C._DisableTorchDispatch")
def test_storages_have_an_identity_that_views_share_and_fakes_have_those_of_their_memory() -> None:
    mode, real = fake_mode(), torch.ones(4)
    with torch._C._DisableTorchDispatch():
        memory = torch.empty_strided((4, 6), (6, 1), device="meta")
        whole = FakeTensor(mode, memory, CPU)
        part = torch.as_strided(whole, (3, 2), (2, 1), 5)
    view, other = FakeTensor(mode, part, CPU), FakeTensor(FakeTensorMode(), memory, CPU)
    assert type(memory) is Tensor and (view.device, view.untyped_storage().nbytes()) == (CPU, 96)
    assert (view.shape, view.stride(), view.storage_offset()) == ((3, 2), (2, 1), 5)
    whole.unsqueeze_(0)
    assert tuple(other.shape) == (4, 6)
    of_fakes, of_reals = (
        {tensor.untyped_storage()._cdata for tensor in tensors}
        for tensors in ((whole, view, other), (real, real[1:].view(-1)))
    )
    assert len(of_fakes) == len(of_reals) == 1
    assert real.clone().untyped_storage()._cdata not in of_reals
    with mode:
        made = torch.ones(4)
        assert made[1:].untyped_storage()._cdata == made.untyped_storage()._cdata


@contract("._is_param", f"{FAKES}.FakeTensor.__bases__")
def test_a_class_may_stand_below_that_of_tensors_and_name_another_class_for_fakes() -> None:
    bases, tensor = FakeTensor.__bases__, torch.ones(2)
    assert bases == (Tensor,)
    kind: Any = FakeTensor
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(tensor)
        kind.__bases__ = (*bases, type("Shown", (), {"__class__": property(lambda self: nn.RNN)}))
        try:
            assert fake.__class__ is nn.RNN and type(fake + 1) is FakeTensor
            assert isinstance(fake, FakeTensor) and isinstance(fake, nn.RNN)
            assert not isinstance(fake, nn.Parameter)
            vars(fake)["_is_param"] = True
            assert isinstance(fake, nn.Parameter)
        finally:
            kind.__bases__ = bases
    assert fake.__class__ is FakeTensor and tensor.__class__ is Tensor


@contract(f"{FAKES}: FakeTensorMode FakeTensor")
def test_fake_tensors_keep_layouts_and_compute_nothing() -> None:
    seen = []

    class Noting(FakeTensorMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func.namespace)
            return super().__torch_dispatch__(func, types, args, kwargs)

    mode, real = Noting(allow_non_fake_inputs=True), torch.randn(4, 3).t().requires_grad_()
    fake = mode.from_tensor(real)
    assert isinstance(fake, FakeTensor) and not isinstance(real, FakeTensor)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    assert fake.device == real.device and fake.requires_grad
    assert mode.from_tensor(real) is fake, "one fake for one tensor"
    generator = torch.get_rng_state()
    seen.clear()
    with mode:
        made = torch.empty_strided((2, 3), (1, 2), dtype=torch.float64)
        mixed = made.float() + torch.ones(3)
        drawn = torch.rand(2, 3) + real.detach()[:2, :3]  # a real tensor is let in
    assert all(isinstance(t, FakeTensor) for t in (made, mixed, drawn))
    assert made.stride() == (1, 2) and "aten" in seen
    assert torch.equal(torch.get_rng_state(), generator), "a fake draw moved the generator"


def same_layout(fake: Tensor, real: Tensor) -> bool:
    return (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@contract("torch._subclasses.fake_impls.op_implementations_dict")
def test_rules_for_fake_tensors_can_be_added_and_state_the_kernels_layout() -> None:
    assert isinstance(resolve("torch._subclasses.fake_impls.op_implementations_dict"), dict)
    offsets = torch.tensor([2, 5, 10], dtype=torch.int32)
    pairs = [
        (torch.randn(10, 8), torch.randn(3, 6, 8).transpose(1, 2), offsets),
        (torch.randn(10, 8).t(), torch.randn(10, 16), offsets),
        (torch.randn(3, 4, 8), torch.randn(3, 6, 8).transpose(1, 2), None),
        (torch.randn(3, 4, 8), torch.randn(10, 8).t(), offsets),
    ]
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    for (a, b, groups), kind in itertools.product(pairs, kinds):
        given = (a.to(kind), b.to(kind), groups)
        with kernels_own_rules(), FakeTensorMode() as mode:
            a, b, groups = (None if x is None else mode.from_tensor(x) for x in given)
            fake = aten._grouped_mm(a, b, offs=groups)
        assert same_layout(fake, aten._grouped_mm(*given[:2], offs=given[2]))


def test_a_rule_for_fake_tensors_serves_only_the_traces_that_ask_for_it() -> None:
    def kind_of_product(num_rows: int) -> torch.dtype:
        with FakeTensorMode():  # which remembers what it gave for the same sizes
            a, b = torch.empty(num_rows, 8), torch.empty(3, 8, 6)
            return aten._grouped_mm(a, b, offs=torch.empty(3, dtype=torch.int32)).dtype

    def in_a_thread(function: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(function).result()

    def enter_and_leave() -> None:
        with kernels_own_rules():
            pass

    with kernels_own_rules():
        in_a_thread(enter_and_leave)
        assert kind_of_product(10) == torch.float32
        with pytest.raises(RuntimeError, match=r"BF(loat)?16"):  # PyTorch's own rule
            in_a_thread(lambda: kind_of_product(11))
    with pytest.raises(RuntimeError, match=r"BF(loat)?16"):
        kind_of_product(12)


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
NORM = "_native_batch_norm_legit"


@contract("torch._prims_common.suggest_memory_format", f"torch.ops.aten.{NORM}: default no_stats")
def test_fakes_of_a_trace_are_laid_out_as_kernels_do() -> None:
    suggested, norm = torch._prims_common.suggest_memory_format, getattr(aten, NORM)
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
        lambda x: norm.default(x, ones, ones, ones.clone(), ones.clone(), True, 0.1, 1e-5)[0],
        lambda x: norm.no_stats(x, ones, ones, True, 0.1, 1e-5)[0],
        lambda x: x.roll(1, 1),
        lambda x: nn.functional.channel_shuffle(x, 2),
    ]
    for (name, made), function in itertools.product(LAYOUTS.items(), operators):
        x, mode = made(), torch_tracing.new_fake_mode()
        with mode:
            fake = function(mode.from_tensor(x))
        assert fake.stride() == function(x).stride(), name


@contract(f"{FAKES}: DataDependentOutputException DynamicOutputShapeException log")
def test_what_fake_tensors_cannot_do_raises_or_is_an_error_of_one_logger() -> None:
    fakes, seen = sys.modules[FAKES], set()
    for error, asks in (
        (fakes.DataDependentOutputException, lambda: bool(torch.ones(3).sum() > 0)),
        (fakes.DataDependentOutputException, lambda: torch.ones(3).max().item()),
        (fakes.DynamicOutputShapeException, lambda: torch.ones(3).nonzero()),
    ):
        with fake_mode(), pytest.raises(error):
            asks()
    filter_ = lambda record: seen.add(record.levelno)  # noqa: E731
    fakes.log.addFilter(filter_)
    try:
        with fake_mode(), pytest.raises(RuntimeError, match="same reduction dim"):
            torch.empty(2, 3) @ torch.empty(2, 3)
    finally:
        fakes.log.removeFilter(filter_)
    assert seen == {logging.ERROR}


def test_a_tensor_without_data_becomes_a_fake_on_the_cpu() -> None:
    mode = FakeTensorMode()
    base = torch.empty(4, 3, device="meta", requires_grad=True)
    fake, again = (
        mode.fake_tensor_converter.from_meta_and_device(mode, base, CPU) for _ in range(2)
    )
    assert again is fake and same_layout(fake, base) and fake.device == CPU
    assert within(mode, lambda: fake @ fake.t()).device == CPU


def test_a_fake_mode_lets_go_of_the_tensors_that_its_fakes_were_made_of() -> None:
    mode, tensor = FakeTensorMode(), torch.ones(2)
    fake = mode.from_tensor(tensor)
    assert weakref.getweakrefs(tensor)
    describer = mode.fake_tensor_converter.meta_converter.describer
    describer.lookup_tensor.clear()
    describer.lookup_storage.clear()
    assert not weakref.getweakrefs(tensor)
    assert fake.shape == tensor.shape


def traced_from_here(function: Callable[[Tensor], Any], x: Tensor, mode: Any) -> Any:
    """Traces as capture does: on a fake, with composite operators whole."""
    make_fx = resolve(f"{PROXIES}.make_fx")
    with mode:
        return make_fx(function, tracing_mode="real", pre_dispatch=True)(mode.from_tensor(x))


@contract(f"{PROXIES}.make_fx")
def test_a_trace_before_dispatch_keeps_composite_operators_whole() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.dropout(nn.functional.linear(x, weight), 0.5)

    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    whole = targets(traced(function, x, weight, pre_dispatch=True))
    assert whole == [aten.linear.default, aten.dropout.default]
    apart = targets(traced(function, x, weight))
    assert aten.linear.default not in apart and aten.mm.default in apart


@contract(f"{PROXIES}.__file__")
def test_what_was_kept_of_a_tensors_class_is_asked_anew_by_a_running_trace() -> None:
    """By name, and in that file: so it meets what stands there since, and who asks is known."""
    kept, asked = (Tensor.storage_offset, Tensor.data.__get__), set()  # type: ignore[attr-defined]

    def note(_: Tensor) -> int:
        asked.add(sys._getframe(1).f_code.co_filename)
        return 7

    def asks(x: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "storage_offset", note)
            patch.setattr(Tensor, "data", property(note))
            assert [keep(x) for keep in kept] == [7, 7]
        return x

    traced(asks, torch.ones(1), pre_dispatch=True)
    assert asked == {sys.modules[PROXIES].__file__}


@contract("torch._tensor_str.__file__")
def test_a_tensor_is_printed_by_the_file_of_that_name() -> None:
    callers: set[str] = set()

    class Watched(Tensor):
        def tolist(self) -> Any:
            callers.add(sys._getframe(1).f_code.co_filename)
            return super().tolist()

    assert "1.5" in str(torch.tensor([1.5]).as_subclass(Watched))
    assert callers == {torch._tensor_str.__file__}


def c_calls_of(function: Callable[[], Any]) -> set[str]:
    called = set()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call" and os.path.dirname(torch.__file__) in frame.f_code.co_filename:
            called.add(argument.__name__)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return called


def test_functions_that_set_something_end_in_c_functions_of_known_names() -> None:
    state = torch.get_rng_state()
    for name, function in {
        "_set_default_dtype": lambda: torch.set_default_dtype(torch.float32),
        "_set_cudnn_benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", False),
        "_set_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(False),
        "set_state": lambda: torch.set_rng_state(state),
        "get_state": torch.get_rng_state,
        "initial_seed": torch.initial_seed,
    }.items():
        assert name in c_calls_of(function) & set(torch_state.settings().names)


def test_settings_of_pytorch_are_found_by_their_names() -> None:
    found = torch_state.settings()
    asked = {"get_num_threads", "_get_cudnn_benchmark", "_get_mkldnn_enabled"}
    assert asked | {"_get_flash_sdp_enabled", "_get_warnAlways"} <= found.getters
    assert {"set_num_threads", "_set_mkldnn_enabled", "_set_default_dtype"} <= found.setters
    assert not {"_set_grad_enabled", "set_autocast_enabled", "_set_sdp_use_math"} & found.setters
    assert "torch.backends.mha.get_fastpath_enabled" in {name for name, *_ in found.all}


@contract("torch.ops.aten._local_scalar_dense.default")
def test_the_number_in_a_tensor_passes_the_table_of_decompositions_before_dispatch() -> None:
    seen: list[Any] = []

    def note(tensor: Tensor) -> Any:
        seen.append(tensor)
        return NotImplemented

    table = dict.fromkeys((aten._local_scalar_dense.default, aten.item.default), note)
    real = torch.tensor(3.0)
    traced(lambda x: x * real.item(), torch.ones(2), table=table, pre_dispatch=True)
    assert seen and all(tensor is real for tensor in seen)


def test_a_trace_takes_a_table_of_decompositions_and_flattens_lists() -> None:
    table = {aten.silu.default: lambda x: x * torch.sigmoid(x)}
    inputs = [torch.randn(2), torch.randn(2)]
    module = traced(lambda flat: (flat[0] + aten.silu(flat[1]),), inputs, table=table)
    assert aten.silu.default not in targets(module)
    assert aten.sigmoid.default in targets(module)
    assert len(module.graph.find_nodes(op="placeholder")) == 2
    assert all("val" in n.meta for n in module.graph.nodes if n.op == "call_function")


@contract(f"{PROXIES}: get_proxy_mode track_tensor_tree disable_proxy_modes_tracing")
def test_a_running_trace_can_be_asked_and_told_which_node_a_tensor_is() -> None:
    proxies = sys.modules[PROXIES]
    assert proxies.get_proxy_mode() is None
    seen, real = [], torch.ones(3)

    def function(x: Tensor) -> tuple[()]:
        tracer = proxies.get_proxy_mode().tracer
        graph, create = tracer.graph, tracer.graph.create_node

        def create_node(*args: Any, **kwargs: Any) -> torch.fx.Node:
            node = create(*args, **kwargs)
            seen.append(node)
            return node

        graph.create_node = create_node  # each operator passes here, also of the fast paths
        node = tracer.unwrap_proxy(x).node
        assert node.op == "placeholder"
        hidden = within(proxies.disable_proxy_modes_tracing(), lambda: x * 2)  # no node
        assert not isinstance(tracer.unwrap_proxy(hidden), torch.fx.Proxy)
        object.__setattr__(tracer.root, "outside", real)
        outside = graph.create_node("get_attr", "outside", (), {})
        call = graph.create_node("call_function", operator.add, (node, outside), {})
        proxy = torch.fx.Proxy(call, tracer)
        proxies.track_tensor_tree(hidden, proxy, constant=None, tracer=tracer)
        result = hidden + 1
        assert tracer.unwrap_proxy(result).node.args[0] is call
        assert tracer.unwrap_proxy(x).node is node
        table = dict(tracer.tensor_tracker.items())
        assert table[x].proxy.node is node, "which node stands for a tensor is kept here"
        del graph.create_node
        return ()

    traced_from_here(function, torch.randn(3), fake_mode())
    assert [n.target for n in seen] == ["outside", operator.add, aten.add.Tensor]


@contract("torch.utils._python_dispatch._get_current_dispatch_mode")
def test_each_operator_of_a_trace_goes_through_an_attribute_of_its_mode() -> None:
    mode, seen = fake_mode(), list[Any]()
    current_mode = torch.utils._python_dispatch._get_current_dispatch_mode

    def function(x: Tensor) -> Tensor:
        tracing = resolve(f"{PROXIES}.get_proxy_mode")()
        dispatch = tracing.__torch_dispatch__

        def noting(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func, set(types), current_mode()))
            return dispatch(func, types, args, kwargs)

        tracing.__torch_dispatch__ = noting
        return torch.nn.functional.linear(x, x)

    traced_from_here(function, torch.ones(3, 3), mode)
    assert seen == [(aten.linear.default, {FakeTensor}, mode)]


@contract(f"{PROXIES}.track_tensor")
def test_a_trace_is_told_of_a_fake_and_can_be_left_when_the_graph_is_there() -> None:
    proxies, mode = sys.modules[PROXIES], fake_mode()

    class Leave(BaseException):
        pass

    def function(x: Tensor) -> tuple[()]:
        tracer = proxies.get_proxy_mode().tracer
        with torch._C._DisableTorchDispatch():
            memory = torch.empty_strided((2, 3), (1, 2), device="meta")
        fake = FakeTensor(mode, memory, CPU)
        node = torch.fx.Node(tracer.graph, "outside", "get_attr", "outside", (), {})
        proxies.track_tensor(fake, torch.fx.Proxy(node, tracer), constant=None, tracer=tracer)
        assert tracer.unwrap_proxy(fake + 1).node.args[0] is node
        raise Leave

    with pytest.raises(Leave):
        traced_from_here(function, torch.randn(3), mode)
    assert proxies.get_proxy_mode() is None


@contract("torch.fx._lazy_graph_module: _use_lazy_graph_module _LazyGraphModule")
def test_a_lazy_graph_module_is_asked_for_by_a_context_and_runs() -> None:
    lazy, x = torch.fx._lazy_graph_module, torch.ones(2)
    module = within(lazy._use_lazy_graph_module(True), lambda: traced(lambda x: x + 1, x))
    assert torch.equal(module(x), x + 1)
    own = lazy._LazyGraphModule(nn.Module(), module.graph)
    assert isinstance(own, torch.fx.GraphModule) and torch.equal(own(x), x + 1)


@contract("torch.fx._symbolic_trace._wrapped_fns_to_patch")
def test_a_tracer_exchanges_the_wrapped_globals_in_a_table() -> None:
    table = torch.fx._symbolic_trace._wrapped_fns_to_patch
    scope: dict[str, Any] = {"marked": torch.relu, "found": []}
    exec("def function(x): found.append(marked); return marked(x)", scope)
    key = (id(scope), "marked")
    table[key] = scope
    try:
        traced(scope["function"], torch.ones(2))
        del table[key]
        traced(scope["function"], torch.ones(2))
    finally:
        table.pop(key, None)
    assert [function is torch.relu for function in scope["found"]] == [False, True]


@contract("torch.fx._symbolic_trace._new_patcher")
def test_a_tracer_exchanges_the_call_of_modules_by_a_patcher_unless_told_to_leave_it() -> None:
    call, found = nn.Module.__call__, []

    def function(x: Tensor) -> Tensor:
        found.append(nn.Module.__call__ is call)
        return x + 1

    def nesting(x: Tensor) -> Tensor:
        traced(function, x)
        return function(x)

    traced(function, torch.ones(2))
    assert within(modules_left(), lambda: targets(traced(nesting, torch.ones(2)))) == [
        aten.add.Tensor
    ]
    traced(function, torch.ones(2))
    assert found == [False, False, True, False]


@contract("torch.fx.node._side_effectful_need_to_be_preserved_pre_dispatch")
def test_mode_switches_in_a_trace_are_known_by_their_targets() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 2
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return y @ x

    switches = torch.fx.node._side_effectful_need_to_be_preserved_pre_dispatch
    with torch.enable_grad():
        module = traced(function, torch.randn(2, 2), pre_dispatch=True)
    found = [t for t in targets(module) if t in switches]
    assert len(found) == 4, "grad mode off and on, autocast in and out"
    assert aten.mul.Tensor not in switches


@contract("torch._C.DisableTorchFunction")
def test_torch_function_modes_can_be_passed_by() -> None:
    class Counting(TorchFunctionMode):
        num_seen = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.num_seen += 1
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Counting() as mode:
        _ = x.shape
        with torch._C.DisableTorchFunction():
            _ = x.shape, x.requires_grad
    assert mode.num_seen == 1


def test_functionalizing_a_trace_takes_in_place_operators_out() -> None:
    def function(flat: list[Tensor]) -> tuple[Tensor]:
        h = flat[0].clone()
        h[0].add_(flat[1])
        return (h,)

    inputs = [torch.ones(2, 2), torch.ones(2)]
    module = traced(torch.func.functionalize(function, remove="mutations"), inputs)
    assert not any(t._schema.is_mutable for t in targets(module) if hasattr(t, "_schema"))
    assert torch.equal(module(inputs)[0], torch.tensor([[2.0, 2.0], [1.0, 1.0]]))


@contract("torch._C._dispatch_has_kernel_for_dispatch_key", "torch.ops.aten._to_copy.default")
def test_a_gpus_autocast_is_known_without_a_gpu() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel("aten::mm", "AutocastCUDA") and not has_kernel("aten::sin", "AutocastCUDA")
    assert has_kernel("aten::cross_entropy_loss", "CompositeImplicitAutograd")
    mode, dtype = fake_mode(), torch.get_autocast_dtype("cuda")
    with mode:
        x = FakeTensor(mode, torch.empty(4, 4, device="meta"), torch.device("cuda", 0))
    torch.set_autocast_enabled("cuda", True)
    try:
        with torch.no_grad(), mode, Watch() as watch:
            assert torch.mm(x, x).dtype == dtype
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert any(
        seen is aten._to_copy.default and given.get("dtype") is dtype for seen, given in watch.seen
    )


@contract("torch.utils._python_dispatch.TorchDispatchMode")
def test_a_dispatch_mode_sees_each_operator_and_can_be_left_out() -> None:
    with Watch() as watch:
        torch.ones(2).exp_()
        with torch._C._DisableTorchDispatch():
            torch.zeros(2)
    assert [seen for seen, _ in watch.seen] == [aten.ones.default, aten.exp_.default]


def symbol_of(environment: Any, name: str = "n", value: int = 8) -> Any:
    """Returns a symbol whose size stays open."""
    source = resolve("torch._dynamo.source.ConstantSource")(name)
    dynamic = resolve(f"{SYMBOLS}.DimDynamic.DYNAMIC")
    return environment.create_symbol(value, source, dynamic_dim=dynamic)


def new_environment(**options: Any) -> Any:
    return resolve(f"{SYMBOLS}.ShapeEnv")(**options)


@contract(f"{SYMBOLS}: ShapeEnv DimDynamic.DYNAMIC")
def test_sizes_stay_open_without_the_cache_of_results() -> None:
    environment = new_environment()
    symbol = symbol_of(environment, value=12)
    size = environment.create_symintnode(symbol, hint=12)
    mode = FakeTensorMode(shape_env=environment, static_shapes=True)
    assert mode.cache_enabled is True, "cache_enabled moved: results are cached again"
    mode.cache_enabled = False
    with mode, torch._dispatch.python.enable_python_dispatcher():
        padded = aten.constant_pad_nd.default(torch.empty(2, size), [0, 1], 0.0)
    assert not environment.guards and str(padded.shape[1]) == f"{symbol} + 1"


@contract(
    "torch._dynamo.source.ConstantSource",
    "torch.fx.experimental._config",
    "torch.utils._sympy: interp.sympy_interp reference.PythonReferenceAnalysis",
)
def test_symbols_of_equal_hints_stay_apart_and_their_questions_are_kept() -> None:
    env = new_environment()
    symbols = [symbol_of(env, name) for name in "ab"]
    source = resolve("torch._dynamo.source.ConstantSource")
    a, b = (env.create_symintnode(s, hint=8, source=source(str(s))) for s in symbols)
    assert symbols[0] != symbols[1] and (a * b + 2).node.expr == symbols[0] * symbols[1] + 2
    assert env.replace(symbols[1]) == symbols[1] and not env.guards
    assert env.var_to_range[symbols[0]].lower == 2
    assert a == b  # a question, which merges the two
    assert env.replace(symbols[0]) == env.replace(symbols[1]) and len(env.guards) == 1
    assert env.simplify(env.guards[0].expr).is_Boolean
    sympy, config = torch.utils._sympy, torch.fx.experimental._config
    analysis = sympy.reference.PythonReferenceAnalysis
    assert sympy.interp.sympy_interp(analysis, {symbols[0]: 3}, symbols[0] * 2 + 1) == 7
    with config.patch(backed_size_oblivious=True):
        assert config.backed_size_oblivious


@contract("torch.utils._sympy.functions")
def test_a_symbol_has_the_number_that_an_environment_gives_it() -> None:
    class Named(resolve(f"{SYMBOLS}.ShapeEnv")):  # type: ignore[misc]
        def _generate_unique_id(self, source_name: str) -> int:
            return int(source_name[1:])

    symbol, floor = symbol_of(Named(), "s412"), torch.utils._sympy.functions.FloorDiv
    assert str(symbol) == "s412"
    assert floor.is_Function and str(floor(symbol, 2)) == "(s412//2)"


def test_an_environment_is_told_where_a_symbol_becomes_a_number() -> None:
    told: list[tuple[Any, Any]] = []

    class Told(resolve(f"{SYMBOLS}.ShapeEnv")):  # type: ignore[misc]
        def _set_replacement(self, a: Any, tgt: Any, msg: str) -> None:
            told.append((a, tgt))
            super()._set_replacement(a, tgt, msg)

    env = Told()
    symbol, other = symbol_of(env, "a"), symbol_of(env, "b")
    source = resolve("torch._dynamo.source.ConstantSource")
    first, second = (
        env.create_symintnode(s, hint=8, source=source(str(s))) for s in (symbol, other)
    )
    assert first + 1 > 3 and not told  # a question that leaves it open
    assert int(first) == 8
    assert {*told} == {(symbol, 8)} and told[0][1].is_number
    assert second == first and (other, 8) in told


def test_sizes_are_made_of_expressions_and_traced_as_inputs() -> None:
    env = new_environment(allow_dynamic_output_shape_ops=False, allow_scalar_outputs=False)
    symbol = symbol_of(env)
    size = env.create_symintnode(symbol, hint=None)
    assert size.node.expr == symbol and size.node.shape_env is env
    root = size**0.5
    with fake_mode(shape_env=env, static_shapes=True), torch.no_grad():
        x = torch.empty([size, 4])
        graph = traced(lambda flat, sizes: (flat[0] * root,), [x], [size, root]).graph
    values = [n.meta["val"] for n in graph.find_nodes(op="placeholder")]
    assert [type(v) for v in values[1:]] == [torch.SymInt, torch.SymFloat]
    assert not env.guards


@contract("torch.export.dynamic_shapes: _combine_args _tree_map_with_path _DimHint")
def test_dynamic_shapes_are_matched_with_inputs() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, rest: list[Tensor]) -> None:
            pass

    shapes, auto = torch.export.dynamic_shapes, torch.export.Dim.AUTO
    x, y, found = torch.ones(1), torch.ones(2), list[Any]()
    combined = shapes._combine_args(Model(), (x,), {"rest": [y]})
    assert list(combined) == ["x", "rest"]
    asked = {"x": {0: auto}, "rest": [None]}
    note = lambda *row: found.append(row[1:])  # noqa: E731
    shapes._tree_map_with_path(note, dict(combined), asked, tree_name="inputs")
    assert found == [(x, {0: auto}), (y, None)]
    assert isinstance(auto, shapes._DimHint) and auto.type.name == "AUTO"
    dim = 2 * torch.export.Dim("n") + 1
    assert (dim.root.__name__, dim.fn(3)) == ("n", 7)
