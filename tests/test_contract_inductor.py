"""Contracts with private PyTorch: Inductor, its kernels on CPU and GPU, and torch.onnx."""

import ctypes
import functools
import importlib
import inspect
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar
from unittest import mock

import decoders
import pytest
import sympy
import torch
import torch.fx
from contracts import (
    contract,
    fake_mode,
    resolve,
    targets,
    traced,
    traced_on_fakes,
    values_compared,
)
from torch import Tensor
from torch.nn import functional as F
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.symbol import SymT, make_symbol

import lazyinline
from lazyinline.backend.gpu.targets import TARGETS
from lazyinline.backend.gpu.torch_gpu import _answers, _device_properties, gpu_described
from lazyinline.backend.kernels import torch_inductor
from lazyinline.backend.kernels.torch_corrections import (
    _FOR_ONE_SIZE,
    casts_rounded,
    dtype_rules_made_once,
    home_of_strides,
    indices_printed_once,
    kernels_for_any_size,
    offsets_added_once,
    pads_realized,
    polynomials_expanded,
    quicker_writing,
    quotients_checked,
    quotients_of_sizes_named,
    sums_scaled,
    sums_tiled_beside,
    values_as_traced,
    values_kept_apart,
)
from lazyinline.backend.kernels.torch_decompositions import NOT_FROM_THE_END, decompositions
from lazyinline.backend.kernels.torch_inductor import (
    NotCompiled,
    compile_leaves,
    rewrite_joint,
    settings,
)
from lazyinline.backend.launches.torch_native import native_file
from lazyinline.backend.onnx import torch_onnx
from lazyinline.reuse.ir.operators import may_draw
from lazyinline.reuse.process import package_digest

pytestmark = pytest.mark.smoke

INDUCTOR = "torch._inductor"
EXPORTER = "torch.onnx._internal.exporter"
aten = torch.ops.aten


def parameters_of(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@contextmanager
def commands_noted() -> Iterator[list[str]]:
    """Yields the commands by which Inductor builds C++."""
    builder = resolve(f"{INDUCTOR}.cpp_builder.CppBuilder")
    command, commands = builder.get_command_line, list[str]()

    def noted(self: Any) -> str:
        commands.append(command(self))
        return commands[-1]

    with mock.patch.object(builder, "get_command_line", noted):
        yield commands


@contract(
    f"{INDUCTOR}.graph.GraphLowering.run_node",
    f"{INDUCTOR}.ir.FallbackKernel",
    f"{INDUCTOR}.fx_passes.post_grad: _chain_random_ops_for_ordering?",
)
def test_inductor_draws_in_the_order_of_the_graph() -> None:
    def draw(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = torch.rand(4, 8)
        h = x.tanh().exp()
        b = torch.rand(4, 8)
        dropped = aten.native_dropout(h, 0.5, True)[0]  # b has no reason to come before
        torch.rand_like(h + b)  # nor has this one, which nobody reads
        again = aten.native_dropout(torch.empty(4, 8), 0.5, True)[1]
        return (h * b).exp().sum(0) + (a * 2).exp(), dropped * b, again * h

    x, lowering = torch.linspace(0, 1, 32).view(4, 8), torch._inductor.graph.GraphLowering
    run_node = lowering.run_node
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


@contract(f"{INDUCTOR}.config: patch get_config_copy", "torch._functorch.config.get_config_copy")
def test_settings_are_plain_values_that_can_be_listed_and_are_put_back() -> None:
    from torch._functorch import config as functorch
    from torch._inductor import config
    from torch._inductor.codecache import FxGraphHashDetails

    tag, before = torch.compiler.config.cache_key_tag, config.get_config_copy()
    names = dict.fromkeys(
        ("size_asserts", "alignment_asserts", "fx_graph_cache", "fx_graph_remote_cache"), False
    )
    assert {**names, "fallback_random": True}.keys() <= before.keys()
    with config.patch({"cpp.simdlen": 4, **names}):
        assert {name: getattr(config, name) for name in names} == names
        found = config.get_config_copy()
        changed = {name for name, value in found.items() if value != before[name]}
        assert "cpp.simdlen" in changed and changed <= {"cpp.simdlen", *names}
    assert config.get_config_copy() == before
    with settings():
        assert config.fallback_random is True
        assert torch.compiler.config.cache_key_tag == f"{tag} lazyinline {package_digest()}"
    assert "cache_key_tag" in inspect.getsource(FxGraphHashDetails)
    assert torch.compiler.config.cache_key_tag == tag
    hooks = ("post_grad_custom_pre_pass", "post_grad_custom_post_pass", "joint_custom_pre_pass")
    assert all(before[name] is None for name in hooks)
    budget = functorch.get_config_copy()["activation_memory_budget"]
    assert budget == functorch.activation_memory_budget


@contract("torch.ops.aten._unsafe_index_put.default")
def test_elements_are_put_into_a_copy_of_what_has_one_place_for_several() -> None:
    x, index, row = torch.zeros(1, 3).expand(4, 3), torch.tensor([2]), torch.ones(1, 3)
    copied = decompositions()[aten._unsafe_index_put.default]
    assert copied(x.clone(), (index,), row) is NotImplemented
    assert torch.equal(copied(x, (index,), row), x.clone().index_put((index,), row))


@pytest.mark.parametrize(
    "how", [([3], [2], [1]), ([4], [], [0]), ([3, 4], [2, 3], [1, 0])], ids=str
)
def test_gradients_of_averages_take_one_number_for_all_dimensions(how: Any) -> None:
    """Of windows of which ``ceil_mode`` cuts some off."""
    x = torch.randn(1, 2, 9, 8)
    gradient = torch.randn_like(F.avg_pool2d(x, *map(tuple, how), ceil_mode=True))
    backward = aten.avg_pool2d_backward.default
    found = decompositions()[backward](gradient, x, *how, True, True)
    torch.testing.assert_close(found, backward(gradient, x, *how, True, True, None))


@contract(f"{INDUCTOR}.decomposition.select_decomp_table")
def test_inductors_decompositions_leave_random_numbers_to_pytorch() -> None:
    table, selected = decompositions(), torch._inductor.decomposition.select_decomp_table()
    assert len(table) > 100
    assert aten.native_batch_norm.default in selected and set(NOT_FROM_THE_END) <= selected.keys()
    assert aten.native_dropout.default not in table
    torch.manual_seed(0)
    mask = table[aten.bernoulli.p](torch.empty(50), 0.3)
    torch.manual_seed(0)
    assert torch.equal(mask, torch.empty(50).bernoulli_(0.3))


@contract(f"{INDUCTOR}.exc.InductorError")
def test_what_inductor_fails_at_is_told_from_other_errors() -> None:
    def failing(self: Any, node: torch.fx.Node) -> Any:
        raise ZeroDivisionError(node.name)

    module = traced_on_fakes(lambda x: (x.tanh() * 2,), torch.randn(4))
    lowering = resolve(f"{INDUCTOR}.graph.GraphLowering")
    with mock.patch.object(lowering, "run_node", failing):
        (made,) = compile_leaves([module], lambda: None)
    assert isinstance(made, NotCompiled) and "ZeroDivisionError: " in made.reason
    assert issubclass(torch._inductor.exc.InductorError, Exception)


@contract(f"{INDUCTOR}.compile_fx._recursive_joint_graph_passes")
def test_joint_graph_passes_take_a_graph_and_give_one_that_computes_the_same() -> None:
    module = traced_on_fakes(lambda x: ((x * 1 + 0).view(4).view(2, 2),), torch.ones(2, 2))
    passes = torch._inductor.compile_fx._recursive_joint_graph_passes
    result, x = passes(module, input_device=torch.device("cpu")), torch.randn(2, 2)
    assert isinstance(result, torch.fx.GraphModule)
    assert torch.equal(result(x)[0], x)


@contract("torch._guards: TracingContext")
def test_joint_graph_passes_put_in_values_of_the_graphs_fake_mode() -> None:
    def one_hot(x: Tensor) -> tuple[Tensor]:  # a pass makes it a comparison with an arange
        return (aten.scatter.value(torch.full((3, 5), 0.0), 1, x, 1.0),)

    module = traced_on_fakes(one_hot, torch.tensor([[1], [4], [0]]))
    (given,) = module.graph.find_nodes(op="placeholder")
    rewritten = rewrite_joint(module)
    assert torch.__version__ < "2.13" or aten.scatter.value not in targets(rewritten)
    values = [n.meta["val"] for n in rewritten.graph.nodes if "val" in n.meta]
    assert all(v.fake_mode is given.meta["val"].fake_mode for v in values)


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
    module = traced_on_fakes(lambda x: (use(x.expand(4, 3)),), torch.tensor(3.0))
    (expected,) = module(torch.tensor(3.0))
    (found,) = rewrite_joint(module)(torch.tensor(3.0))
    assert found.stride() == expected.stride()
    assert torch.equal(found, expected)


@functools.cache
def compiled_leaf() -> Any:
    """One small graph, compiled as the backend does."""
    inputs, table = (torch.randn(4, 8), torch.randn(8, 3)), decompositions()
    module = traced_on_fakes(lambda x, w: (torch.tanh(x @ w).t(), x.exp()), *inputs, table=table)
    return compile_leaves([module], lambda: None)[0]


@contract(f"{INDUCTOR}.compile_fx.compile_fx_inner")
def test_inductor_compiles_an_aten_graph_into_a_boxed_callable() -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 3)
    boxed = [x, w]
    first, second = compiled_leaf()(boxed)
    assert not boxed, "the list is emptied, so that inputs are freed early"
    assert torch.allclose(first, torch.tanh(x @ w).t(), atol=1e-6)
    assert torch.allclose(second, x.exp())
    assert first.stride() == (1, 3), "results keep the layout of the graph"


def test_inductors_wrapper_is_a_function_whose_globals_hold_kernels_and_allocators() -> None:
    wrapper = compiled_leaf()
    function = getattr(wrapper, "__func__", wrapper)
    assert isinstance(function, types.FunctionType), f"{type(function)}: it cannot be recorded"
    scope = function.__globals__
    for name in ("empty_strided_cpu", "reinterpret_tensor", "extern_kernels"):
        assert name in scope, f"the generated code has no {name} any more"
    kernels = [name for name in scope if name.startswith("cpp_fused")]
    assert kernels and all(callable(scope[name]) for name in kernels)


@contract(
    f"{INDUCTOR}.async_compile: AsyncCompile.wait AsyncCompile.cpp_pybinding",
    f"{INDUCTOR}.async_compile.get_compile_threads",
    f"{INDUCTOR}.utils.parallel_num_threads",
)
def test_building_waits_in_one_method_that_takes_the_scope() -> None:
    module = torch._inductor.async_compile
    wait = module.AsyncCompile.wait
    assert parameters_of(wait) == ["self", "scope"]
    assert parameters_of(module.AsyncCompile.cpp_pybinding) == ["self", "argtypes", "source_code"]
    assert module.get_compile_threads() >= 1
    assert torch._inductor.utils.parallel_num_threads() == torch.get_num_threads()
    leaf = traced_on_fakes(lambda x: (torch.tanh(x) * 3.25,), torch.randn(7))
    with mock.patch.object(module.AsyncCompile, "wait", autospec=True, side_effect=wait) as watched:
        compile_leaves([leaf], lambda: None)
    assert watched.called, "the module of the generated code no longer waits there"


@contract(
    f"{INDUCTOR}.codegen.cpp: CppVecKernel.store CppTile2DKernel.store",
    f"{INDUCTOR}.config.cpp.dynamic_threads",
)
def test_a_kernel_of_tiles_stores_through_one_of_vectors() -> None:
    from torch._inductor.codegen import cpp

    tile, told = cpp.CppTile2DKernel, list[Any]()
    before = tile.store
    assert callable(tile.need_vec_transpose)

    without = {"__init__": lambda _: None, "need_vec_transpose": lambda _, index: False}
    kernel = type("Kernel", (tile,), {"num_threads": 2, **without})
    with pytest.MonkeyPatch.context() as patch, offsets_added_once():
        patch.setattr(cpp.CppVecKernel, "store", lambda *args: told.append(args[1:]))
        kernel().store("buf0", "index", "value", "atomic_add")
    assert told == [("buf0", "index", "value", "atomic_add")]
    assert tile.store is before


@contract(f"{INDUCTOR}.codegen.cpp: TilingSelect._select_tiling_indices", "._select_tiling_indices")
@pytest.mark.parametrize(
    ("chosen", "sizes", "kept"),
    [
        ([0, 2], ((4, 5), (6,)), [2]),
        ([1, 2], ((4, 5), (6,)), [1, 2]),
        ([0, 2], ((4, 5, 6), ()), [0, 2]),
        ([0], ((4, 5), (6,)), [0]),
    ],
)
def test_a_sum_has_no_tile_with_a_loop_between(
    chosen: list[int], sizes: Any, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.codegen.cpp import TilingSelect

    monkeypatch.setattr(TilingSelect, "_select_tiling_indices", lambda *_: chosen)
    with sums_tiled_beside():
        assert TilingSelect()._select_tiling_indices([], [sizes], 16) == kept


@contract(f"{INDUCTOR}.lowering.lowerings", f"{INDUCTOR}.codegen.cpp.CppKernel.cache_dtype_convert")
def test_a_cast_is_lowered_where_a_setting_makes_it_round() -> None:
    from torch._inductor import config
    from torch._inductor.lowering import lowerings

    def is_rounding(*args: Any) -> bool:
        return bool(config.emulate_precision_casts)

    cast = torch.ops.prims.convert_element_type.default
    with mock.patch.dict(lowerings, {cast: is_rounding}), casts_rounded():
        assert lowerings[cast]()
        assert not config.emulate_precision_casts
    assert lowerings[cast] is not is_rounding


@contract(f"{INDUCTOR}.lowering.fallback_handler", "torch.ops.aten._adaptive_avg_pool2d.default")
def test_what_is_lowered_for_one_size_is_pytorchs_kernel_where_sizes_are_open() -> None:
    from torch._inductor.lowering import lowerings

    before = [lowerings[one] for one in _FOR_ONE_SIZE]
    clone = lowerings[aten.clone.default]
    with kernels_for_any_size():
        inside = [lowerings[one] for one in _FOR_ONE_SIZE]
        assert lowerings[aten.clone.default] is not clone
    assert lowerings[aten.clone.default] is clone
    assert not any(a is b for a, b in zip(inside, before, strict=True))
    assert all("fallback_handler" in one.__qualname__ for one in inside)
    assert [lowerings[one] for one in _FOR_ONE_SIZE] == before


@contract(
    f"{INDUCTOR}.codegen.common: Kernel.rename_indexing",
    f"{INDUCTOR}.virtualized.V.graph",
    "torch.utils._sympy: functions.FloorDiv symbol.symbol_is_type",
)
def test_a_kernel_takes_a_quotient_of_sizes_as_an_operand() -> None:
    from torch._inductor.codegen.common import Kernel, KernelArgs
    from torch._inductor.sizevars import SizeVarAllocator
    from torch._inductor.virtualized import V

    size, x = (make_symbol(k, 0, positive=True, integer=True) for k in (SymT.SIZE, SymT.INDEX))
    graph, kernel = (
        types.SimpleNamespace(sizevars=SizeVarAllocator()),
        types.SimpleNamespace(args=KernelArgs()),
    )
    with V.set_graph_handler(graph), quotients_of_sizes_named():
        found = Kernel.rename_indexing(kernel, FloorDiv(size, 2) * x + FloorDiv(x, size))
    quotient = graph.sizevars.lookup_precomputed_size(FloorDiv(size, 2))
    first, second = (sympy.Symbol(kernel.args.sizevars[s]) for s in (quotient, size))
    assert str(found) == str(first * x + FloorDiv(x, second)), found


@contract(f"{INDUCTOR}.sizevars: stride_at_vec_range?", f"{INDUCTOR}.codegen.cpp")
def test_inductor_expands_the_indices_that_it_would_simplify() -> None:
    home = home_of_strides()
    x, y = sympy.symbols("x y", integer=True)
    size = sympy.Symbol("s", integer=True, positive=True)
    floor, mod = home.FloorDiv, home.ModularIndexing
    indices = [
        *(32 * x + y, 32 * (x + 4 * y) - y, size * x + y * (size + 1), x * y, sympy.Integer(7)),
        *(32 * floor(x, 16) + mod(x, 1, 16), mod(x, 4, 8) + y, (x + y) ** 2),
        *(home.sympy.Max(1, size) * x + y, sympy.Mod(x + y, 4) * 32 + size * x),
    ]
    asked = [(index, var, width) for index in indices for var in (x, y) for width in (None, 16)]

    def answers() -> list[Any]:
        for name in ("stride_at", "stride_at_vec_range", "simplify_index_in_vec_range"):
            getattr(home, name).cache_clear()
        return [strides(*question) for question in asked]

    strides = home.stride_at_vec_range
    before, original = answers(), home.sympy
    with polynomials_expanded():
        assert home.sympy is not original
        assert [sympy.expand(a - b) for a, b in zip(answers(), before, strict=True)] == [0] * 40
    assert home.sympy is original


@contract(f"{INDUCTOR}.dtype_propagation.DtypePropagationOpsHandler.__init__")
def test_inductors_rules_of_dtypes_are_one_object_that_is_filled_once() -> None:
    resolve(f"{INDUCTOR}.lowering.lowerings")  # which rules are made for
    rules = resolve(f"{INDUCTOR}.dtype_propagation.DtypePropagationOpsHandler")
    with dtype_rules_made_once():
        add = rules().add
        assert rules().add is add and add(torch.zeros(1, device="cpu"), 2) == torch.float32
    assert rules() is rules() and rules().add is not add, "it is filled once without us"


@contract(f"{INDUCTOR}.runtime.triton_compat.triton_key", f"{INDUCTOR}.codecache.triton_key?")
def test_without_a_gpu_inductor_describes_a_machine_alike_without_tritons_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codecache = resolve(f"{INDUCTOR}.codecache")
    has_own = hasattr(codecache, "triton_key")
    place = codecache if has_own else resolve(f"{INDUCTOR}.runtime.triton_compat")
    describe = codecache.CacheBase.get_system.__wrapped__  # past the memory of what it said
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", mock.Mock(side_effect=RuntimeError))
    monkeypatch.setattr(place, "triton_key", lambda: "a digest of files")
    expected = describe()
    monkeypatch.setattr(place, "triton_key", lambda: pytest.fail("files are read"))
    with quicker_writing():
        assert describe() == expected


def loops(x: Tensor, y: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    """Computes along each axis, across both, and from places that are read."""
    added = torch.zeros_like(x).index_add(0, index, y)
    across = (x.t() * y.t().clone().cos()).sum(1)
    turned = (x.t() + y.t().cos()).clone()
    return x.exp() * y[index], x.sum(0), x.softmax(1), turned, added, across


@contract(f"{INDUCTOR}.codegen.cpp_utils: CppPrinter CppPrinter._print", "._print")
@pytest.mark.parametrize("shape", [(64, 32), (64, 7), (5, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.sweep(keep="float32-(64, 7)")
def test_kernels_are_written_as_they_are_without_what_is_quicker(shape: Any, dtype: Any) -> None:
    x, index = torch.ones(shape, dtype=dtype), torch.zeros(shape[0], dtype=torch.int64)
    module = traced_on_fakes(loops, x, x, index, table=decompositions())

    def written(quicker: Any) -> list[str]:
        texts, known = list[str](), torch_inductor.kernel_source

        def noted(types: Any, text: str) -> Any:
            texts.append(text)
            return known(types, text)

        with (
            mock.patch.object(torch_inductor, "kernel_source", noted),
            mock.patch.object(torch_inductor, "quicker_writing", quicker),
            torch_inductor.graph_cache_off(),
        ):
            (made,) = compile_leaves([module], lambda: None)
        assert not isinstance(made, NotCompiled), made
        return texts

    in_full = written(nullcontext)
    assert in_full
    for quicker in (quicker_writing, indices_printed_once):
        assert written(quicker) == in_full


def test_values_of_a_trace_are_those_that_inductor_finds() -> None:  # more: test_families
    lazyinline.lazy_inline(decoders.GptBlock)
    model, args = decoders.gpt(1, hidden=16, num_heads=2, vocab=20, seq=6, batch=2)
    with values_compared() as taken:
        lazyinline.compile(model)(*args).backward()
    assert taken.count(True) >= len(taken) - 1 and len(taken) > 3
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@contract(f"{INDUCTOR}.compile_fx.fake_tensor_prop", "torch._guards.detect_fake_mode")
def test_inductor_finds_values_that_are_unknown_or_may_lie_elsewhere() -> None:
    from torch._inductor import compile_fx

    find = compile_fx.fake_tensor_prop
    module = traced_on_fakes(lambda x: (aten.copy(x, x.sin()) * 2,), torch.ones(3))
    given, node = next(iter(module.graph.nodes)), module.graph.output_node().args[0][0]
    value, inputs = node.meta["val"], [given.meta["val"]]
    with values_as_traced():
        assert compile_fx.fake_tensor_prop(module, inputs) is value.fake_mode
        assert node.meta["val"] is not value, "the offset of a copy was taken as it was noted"
        for copy in module.graph.find_nodes(op="call_function", target=aten.copy.default):
            copy.replace_all_uses_with(copy.args[1])
            module.graph.erase_node(copy)
        value = node.meta["val"]
        assert compile_fx.fake_tensor_prop(module, inputs) is value.fake_mode
        assert node.meta["val"] is value
        given.meta["unaligned"] = True
        compile_fx.fake_tensor_prop(module, inputs)
        assert node.meta["val"] is not value
        del given.meta["unaligned"], node.meta["val"]
        compile_fx.fake_tensor_prop(module, inputs)
        assert node.meta["val"].shape == (3,)
    assert compile_fx.fake_tensor_prop is find


@contract(f"{INDUCTOR}.codegen.cpp: CppOverrides.truncdiv CppVecOverrides.truncdiv")
def test_a_quotient_of_integers_is_written_as_a_division() -> None:
    cpp = torch._inductor.codegen.cpp
    kinds = (cpp.CppOverrides, cpp.CppVecOverrides)
    before = [kind.__dict__["truncdiv"] for kind in kinds]
    assert cpp.CppOverrides.truncdiv("a", "b") == "a / b"
    with quotients_checked():
        assert cpp.CppOverrides.truncdiv("a", "b").startswith("a / [](auto divisor)")
    assert [kind.__dict__["truncdiv"] for kind in kinds] == before


@pytest.mark.sweep
@contract(f"{INDUCTOR}.lowering")
def test_pooling_is_taken_apart_before_inductor_has_compiled_anything() -> None:
    code = (
        "import torch\n"
        "from lazyinline.backend.kernels.torch_decompositions import decompositions\n"
        "operator = torch.ops.aten.max_pool2d_with_indices.default\n"
        "x = torch.randn(1, 1, 4, 4)\n"
        "found = decompositions()[operator](x, [2, 2])\n"
        "if found is not NotImplemented:\n"
        "    assert all(map(torch.equal, found, operator(x, [2, 2])))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@contract(
    f"{INDUCTOR}.exc.InvalidCxxCompiler",
    f"{INDUCTOR}.config.cpp.cxx",
    f"{INDUCTOR}.cpp_builder: get_cpp_compiler get_compiler_version_info",
)
def test_a_compiler_that_is_not_there_is_an_error_of_its_own() -> None:
    from torch._inductor import config, cpp_builder, exc

    names = config.cpp.cxx if isinstance(config.cpp.cxx, (list, tuple)) else [config.cpp.cxx]
    assert all(name is None or isinstance(name, str) for name in names)
    assert isinstance(cpp_builder.get_compiler_version_info(cpp_builder.get_cpp_compiler()), str)
    cpp_builder.cpp_compiler_search.cache_clear()
    try:
        missing = config.patch({"cpp.cxx": (None, "no-such-compiler")})
        with missing, pytest.raises(exc.InvalidCxxCompiler):
            cpp_builder.get_cpp_compiler()
    finally:
        cpp_builder.cpp_compiler_search.cache_clear()


@contract(f"{INDUCTOR}.codecache.CppCodeCache.load_async")
def test_a_cpp_library_is_built_and_its_functions_can_be_called() -> None:
    loaded = []

    class Noting(torch._inductor.codecache.CppCodeCache):  # type: ignore[misc]
        cache: ClassVar[dict[str, Any]] = {}

        @staticmethod
        def _load_library_inner(path: str, key: str) -> Any:
            loaded.append(path)
            return ctypes.CDLL(path)

    library = Noting.load('extern "C" int twice(int x) { return 2 * x; }')
    assert library.twice(21) == 42
    assert loaded == [library._name], "what is loaded is no longer asked for first"


@contract(
    f"{INDUCTOR}.codecache.CppPythonBindingsCodeCache: load_pybinding cpp_compile_command_flags",
    f"{INDUCTOR}.cpp_builder: CppBuilder CppTorchDeviceOptions",
    f"{INDUCTOR}.cpu_vec_isa.pick_vec_isa",
    f"{INDUCTOR}.config.is_fbcode",
    f"{INDUCTOR}.runtime.cache_dir_utils.default_cache_dir",
)
def test_kernels_built_together_have_the_flags_of_kernels_built_alone() -> None:
    cache = torch._inductor.codecache.CppPythonBindingsCodeCache
    header = "#include <torch/csrc/inductor/cpp_prefix.h>"
    entry = 'extern "C" void kernel(float* x) { x[0] = 3.0f; }'
    with commands_noted() as commands:
        alone = cache.load_pybinding(["float*"], f"{header}\n{entry}")
        wanted = {line for line in commands if " i " in line}  # names stand for those of files
        commands.clear()
        together = torch_inductor.build_file(f"{header}\n// not built alone\n{entry}")
    assert wanted and wanted <= set(commands), "a file of kernels is built with other flags"
    assert any(line in torch_inductor.build_setting() for line in wanted), (
        "the key names other flags"
    )
    x = torch.zeros(1)
    alone(x)
    assert x == 3 and together.suffix == ".so" and cache.entry_function == "kernel"


@contract(
    f"{INDUCTOR}.cpu_vec_isa: valid_vec_isa_list supported_vec_isa_list x86_isa_checker",
    f"{INDUCTOR}.config.cpp.simdlen",
)
def test_unasked_inductor_takes_the_first_good_instruction_set() -> None:
    module, bits = torch._inductor.cpu_vec_isa, torch._inductor.config.cpp.simdlen
    listed = module.valid_vec_isa_list
    assert bits is None
    assert isinstance(module.supported_vec_isa_list, list)
    assert isinstance(module.x86_isa_checker(), list)
    taken = module.pick_vec_isa()
    if torch_inductor.takes_the_first(bits):
        assert [taken] == torch_inductor.best_vector_units() and taken == listed()[0]
    with torch_inductor.vector_units_probed_here():
        assert module.pick_vec_isa() == taken
    assert module.valid_vec_isa_list is listed


@contract(
    f"{INDUCTOR}.codecache.pick_vec_isa",
    f"{INDUCTOR}.cpu_vec_isa.VecISA._probe_load?",
    f"{INDUCTOR}.config.cpp_cache_precompile_headers",
    "torch.cpu: _is_avx512_bf16_supported _is_amx_fp16_supported _is_vnni_supported",
)
def test_vector_units_are_probed_with_the_flags_and_the_header_of_kernels() -> None:
    from torch._inductor import codecache, config
    from torch._inductor.cpu_vec_isa import VecISA

    pick = codecache.pick_vec_isa
    isa = pick()
    if not (hasattr(VecISA, "_probe_load") and isa and config.cpp_cache_precompile_headers):
        return
    code = isa._avx_code
    assert "at::vec::" in code, "the probe is built for no instruction set"
    never_built = f"{code}\n// {os.urandom(8).hex()}"
    with commands_noted() as commands, torch_inductor.vector_units_probed_here():
        assert isa.check_build(never_built)
        num_built = len(commands)
        assert all(map(isa.check_build, torch_inductor._asked_next(isa)))
        assert len(commands) == num_built, "what is asked next is not in that file"
        assert not isa.check_build(f'#include "no_such_vectors.h"\n{never_built}')
    assert any(line in torch_inductor.build_setting() for line in commands), (
        "the flags are not those of kernels"
    )
    assert any("-include " in line for line in commands), "the header was read again"
    assert codecache.pick_vec_isa is pick


@contract(f"{INDUCTOR}.cpu_vec_isa.VecISA.check_build", "._probe_load")
def test_vector_units_are_asked_for_by_loading_an_object() -> None:
    isa_class = torch._inductor.cpu_vec_isa.VecISA
    probe = getattr(isa_class, "_probe_load", None)
    assert parameters_of(isa_class.check_build) == ["self", "code"]
    if probe is None:
        assert torch.__version__ < "2.13", "_probe_load moved: the adapter no longer answers here"
        return
    assert parameters_of(probe) == ["self", "output_path"]
    for path, loads in ((__file__, False), (str(native_file()), True)):
        assert probe(isa_class(), path) is loads
        assert torch_inductor._loads_here(isa_class(), path) is loads


PROPERTIES = f"{INDUCTOR}.runtime.hints.DeviceProperties"


@contract("torch._C: _cuda_clearCublasWorkspaces? _cuda_endAllocateToPool? _cuda_releasePool?")
def test_a_capture_lets_go_of_what_libraries_and_its_pool_hold() -> None:
    has_cuda = torch.version.cuda is not None
    for name in ("clearCublasWorkspaces", "endAllocateToPool", "releasePool"):
        assert hasattr(torch._C, f"_cuda_{name}") or not has_cuda
    public = "capture_begin capture_end pool replay"
    assert all(hasattr(torch.cuda.CUDAGraph, name) for name in public.split())
    assert all(hasattr(torch.Generator, f"{n}_state") for n in ("clone", "graphsafe_set"))


@contract(
    f"{INDUCTOR}.utils",
    f"{INDUCTOR}.inductor_prims",
    "torch.utils._triton: has_triton_package triton_hash_with_backend",
    f"{PROPERTIES}: _fields create",
    "torch._C: _cuda_getCurrentRawStream?",
)
def test_inductor_asks_these_facts_of_a_gpu() -> None:
    triton, properties = torch.utils._triton, resolve(PROPERTIES)
    assert callable(triton.triton_hash_with_backend) and callable(properties.create)
    assert callable(getattr(torch._C, "_cuda_getCurrentRawStream", print))
    assert str(torch.ops.prims.inductor_seeds.default) == "prims.inductor_seeds.default"
    assert any(hasattr(value, "cache_clear") for value in vars(torch._inductor.utils).values())
    assert isinstance(triton.has_triton_package(), bool)
    for target in TARGETS:
        facts = _device_properties(target)
        assert facts._fields == properties._fields
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
    f"{INDUCTOR}.async_compile.AsyncCompile.triton",
    f"{INDUCTOR}.codecache.PyCodeCache.load",
    f"{INDUCTOR}.runtime.triton_helpers.set_driver_to_gpu",
    f"{INDUCTOR}.runtime.triton_heuristics.StaticTritonCompileResult",
    "._precompile_config",
)
def test_inductor_hands_over_kernels_as_text_and_compiles_them_one_by_one() -> None:
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    assert parameters_of(AsyncCompile.triton)[:3] == ["self", "kernel_name", "source_code"]
    assert inspect.ismethod(PyCodeCache.load) and PyCodeCache.load.__self__ is PyCodeCache
    assert callable(triton_helpers.set_driver_to_gpu)
    assert callable(triton_heuristics.StaticTritonCompileResult.can_statically_launch)
    one = triton_heuristics.CachingAutotuner._precompile_config
    assert parameters_of(one)[:2] == ["self", "cfg"]


@contract("._scaled_dot_product_flash_attention", "._scaled_dot_product_efficient_attention")
def test_attention_of_a_gpu_can_be_differentiated_on_fake_tensors_of_a_cpu() -> None:
    with fake_mode():
        operands = [torch.empty(2, 3, 16, 8, requires_grad=True) for _ in range(3)]
        for attention, options in (
            (aten._scaled_dot_product_flash_attention.default, (0.1, True, False)),
            (aten._scaled_dot_product_efficient_attention.default, (None, True, 0.1)),
            (aten._scaled_dot_product_attention_math.default, ()),
        ):
            result, *_ = attention(*operands, *options)
            assert result.shape == (2, 3, 16, 8)
            gradients = torch.autograd.grad(result.sum(), operands)
            assert [g.shape for g in gradients] == [t.shape for t in operands]


def exporter(part: str) -> Any:
    return importlib.import_module(f"{EXPORTER}.{part}")


@contract(
    f"{EXPORTER}._constants: ONNX_IR_VERSION",
    f"{EXPORTER}._registration: ONNXRegistry.from_torchlib",
    f"{EXPORTER}._decomp: get_onnx_implemented_overloads create_onnx_friendly_decomposition_table",
)
def test_the_registry_knows_operators_and_the_table_takes_the_others_apart() -> None:
    registry = exporter("_registration").ONNXRegistry.from_torchlib(opset_version=18)
    rules = exporter("_decomp")
    known = set(rules.get_onnx_implemented_overloads(registry))
    table = rules.create_onnx_friendly_decomposition_table(known)
    assert {aten.linear.default, aten.mm.default, aten.layer_norm.default} <= known
    assert aten.square.default in table
    assert not known & set(table)
    assert exporter("_constants").ONNX_IR_VERSION >= 10


@contract(
    f"{EXPORTER}._dispatching: dispatch",
    f"{EXPORTER}._fx_passes: insert_type_promotion_nodes remove_assertion_nodes",
    f"{EXPORTER}._ir_passes: add_opset_imports",
    f"{EXPORTER}._core: _translate_fx_graph",
    "._translate_fx_graph",
)
def test_a_graph_of_aten_operators_is_translated_into_an_ir_graph() -> None:
    inputs = [torch.empty(2, 3), torch.empty(2, 3, dtype=torch.long)]
    functions: list[Callable[..., Any]] = [
        lambda x, i: (torch.mm(x, (x + i).t()), torch.erfinv(x)),
        lambda x, i: (torch.mm(x, (x + i).t()),),
    ]
    without, whole = (traced_on_fakes(function, *inputs) for function in functions)
    (node,) = torch_onnx.untranslatable(without, 18)
    assert node.target is aten.erfinv.default
    torch_onnx.prepare(whole)
    model = torch_onnx.translate(whole, 18)
    assert [node.op_type for node in model.graph] == ["Cast", "Add", "Transpose", "MatMul"]
    assert model.graph.opset_imports[""] == 18
    assert [tuple(v.shape) for v in model.graph.outputs] == [(2, 2)]


@contract(f"{EXPORTER}._errors: ConversionError")
def test_a_translation_of_ours_goes_before_torchlibs() -> None:
    registry = exporter("_registration").ONNXRegistry.from_torchlib(opset_version=18)
    own = lambda x: x  # noqa: E731
    registry.register_op(aten.relu.default, own)
    graph = torch.fx.Graph()
    node = graph.call_function(aten.relu.default, (graph.placeholder("x"),))
    for each in graph.nodes:
        each.meta["val"] = torch.ones(2)
    function, *_ = exporter("_dispatching").dispatch(node, registry)
    assert getattr(function, "func", function) is own
    assert issubclass(exporter("_errors").ConversionError, Exception)


@contract(f"{EXPORTER}._core: TorchTensor torch_dtype_to_onnx_dtype")
def test_tensors_are_wrapped_without_a_copy() -> None:
    tensor, core = torch.tensor([1.0, 2.0]), exporter("_core")
    wrapped = core.TorchTensor(tensor, name="w")
    tensor[0] = 5.0
    assert wrapped.numpy().tolist() == [5.0, 2.0]
    assert core.torch_dtype_to_onnx_dtype(torch.bfloat16).name == "BFLOAT16"


@contract(
    "torch._decomp: decomposition_table.items get_decompositions",
    "torch._C: _dispatch_get_registrations_for_dispatch_key",
)
def test_operators_that_are_made_of_others_can_be_listed_and_rules_take_them_apart() -> None:
    table, named = torch._decomp.decomposition_table, torch._decomp.get_decompositions
    assert dict(table.items()) == table and aten.nll_loss_forward.default in table
    composite = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    assert "aten::to.dtype" in composite and "aten::mm" not in composite
    x, default = torch.randn(3, 4), torch.export.default_decompositions()
    for rules, operator, args in (
        (table, aten.native_layer_norm.default, (x, [4], None, None, 1e-5)),
        (table, aten._softmax.default, (x, 1, False)),
        (default, aten.gelu_backward.default, (x, x)),
        (named([aten.addmv]), aten.addmv.default, (x[:, 0], x, x[0])),
    ):
        torch.testing.assert_close(rules[operator](*args), operator(*args))


@contract("torch.ops._inductor_test: realize.default", f"{INDUCTOR}.test_operators")
def test_a_pad_of_a_reshaped_pad_reads_memory() -> None:
    def padded_twice(reshapes: bool, x: Tensor) -> tuple[Tensor]:
        once = aten.constant_pad_nd.default(x, [0, 15])
        once = once.view(31, 16) if reshapes else once * 2
        return (aten.constant_pad_nd.default(once, [0, 0, 1, 0]).sin(),)

    given = torch.randn(16, 16)
    functions = [functools.partial(padded_twice, reshapes) for reshapes in (False, True)]
    modules = [traced_on_fakes(function, given) for function in functions]
    made = compile_leaves(modules, lambda: None)
    for realized, function, module, compiled in zip((0, 1), functions, modules, made, strict=True):
        assert not isinstance(compiled, NotCompiled)
        torch.testing.assert_close(compiled([given]), function(given))
        found = targets(pads_realized(module))
        assert found.count(torch.ops._inductor_test.realize.default) == realized


@contract(f"{INDUCTOR}.fx_passes.post_grad.noop_registry")
def test_what_index_put_reads_of_its_own_operand_is_copied() -> None:
    from torch._inductor.fx_passes.post_grad import noop_registry

    def put(x: Tensor) -> tuple[Tensor]:
        y, index = x.sin(), torch.arange(4).flip(0)
        return (aten.index_put.default(y, [index], aten.clone.default(y)),)

    assert aten.clone.default in noop_registry and aten.sin.default not in noop_registry
    module = traced_on_fakes(put, torch.randn(4, 8))
    (realize,) = (n for n in values_kept_apart(module).graph.nodes if "realize" in str(n.target))
    assert [user.target for user in realize.users] == [aten.index_put.default]


@pytest.mark.parametrize("autotune", [False, True])
def test_a_scaled_sum_with_a_product_is_not_one_product(autotune: bool) -> None:
    from torch._inductor import config

    def scaled(alpha: float, x: Tensor) -> tuple[Tensor, ...]:
        product = aten.clone.default(aten.mm.default(x.cos(), x))  # Inductor takes the clone out
        first = aten.mm.default(x, x) if autotune else x.sin()
        return (aten.add.Tensor(first, product, alpha=alpha),)

    given = torch.randn(8, 8)
    half, whole = (traced_on_fakes(functools.partial(scaled, alpha), given) for alpha in (0.5, 1))
    with config.patch(max_autotune_gemm=autotune):
        (compiled,) = compile_leaves([half], lambda: None)
    assert not isinstance(compiled, NotCompiled)
    torch.testing.assert_close(compiled([given]), list(scaled(0.5, given)))
    assert targets(sums_scaled(whole)) == targets(whole)
