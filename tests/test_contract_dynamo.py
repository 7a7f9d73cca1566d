"""Contracts with private PyTorch: Dynamo and its operators on graphs, and older tracers."""

import inspect
import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from contracts import contract, fake_mode, resolve
from models import Made
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lazyinline.frontend.tracing.torch_patches import patch_control_flow

pytestmark = pytest.mark.smoke


def graphs_of(function: Callable[..., Any], *calls: tuple[Any, ...]) -> list[Any]:
    """Returns the graphs that Dynamo hands to a backend, with what it was given for each."""
    given = []

    def backend(module: Any, examples: Any) -> Any:
        given.append((module, list(examples)))
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend)
    for inputs in calls:
        compiled(*inputs)
    torch._dynamo.reset()
    return given


def graph_of(function: Callable[..., Any], *inputs: Any) -> Any:
    ((module, _),) = graphs_of(function, inputs)
    return module


def operators_in(module: Any) -> list[torch.fx.Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


@contract("torch._guards.tracing", "torch._dynamo.lookup_backend")
def test_a_compile_inside_dynamos_sees_no_trace_of_it() -> None:
    from torch._guards import TracingContext, tracing

    assert callable(torch._dynamo.lookup_backend("inductor"))
    with tracing(TracingContext(fake_mode())):
        with tracing(None):
            assert TracingContext.try_get() is None
        assert TracingContext.try_get() is not None


def test_dynamo_hands_over_the_tensors_themselves_and_notes_on_them_begin_with_its_name() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    ((_, examples),) = graphs_of(model, (x,))
    assert not any(isinstance(example, FakeTensor) for example in examples)
    assert any(example is model.weight for example in examples)
    assert all(name.startswith("_dynamo_") for name in vars(model.weight))


def test_operators_say_in_which_modules_they_were_called() -> None:
    parts = {"first": nn.Sequential(nn.GELU()), "second": nn.ReLU()}
    module = graph_of(Made(lambda self, x: self.second(self.first(x)), **parts), torch.ones(2))
    stacks = [list(n.meta["nn_module_stack"].values()) for n in operators_in(module)]
    paths = [[path for path, _ in stack] for stack in stacks]
    assert paths == [["L['self'].first", "L['self'].first.0"], ["L['self'].second"]]
    assert [stack[-1][1] for stack in stacks] == [nn.GELU, nn.ReLU]
    placeholders = module.graph.find_nodes(op="placeholder")
    assert all("example_value" in node.meta for node in placeholders)


@contract(
    "torch.amp.autocast_mode: _enter_autocast _exit_autocast",
    "torch.autograd.grad_mode: _enter_inference_mode _exit_inference_mode",
    "torch._C._set_grad_enabled",
)
def test_dynamo_writes_modes_as_pairs_of_operators() -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x
        with torch.inference_mode():
            z = x + 1
        with torch.no_grad():
            return y * z

    cast, grad = torch.amp.autocast_mode, torch.autograd.grad_mode
    pairs = [
        (cast._enter_autocast, cast._exit_autocast),
        (grad._enter_inference_mode, grad._exit_inference_mode),
    ]
    module = graph_of(forward, torch.ones(2, 2))
    for pair in pairs:
        (begin,), (end,) = (module.graph.find_nodes(op="call_function", target=t) for t in pair)
        assert end.args[0] is begin
    (begin,) = module.graph.find_nodes(op="call_function", target=cast._enter_autocast)
    assert tuple(begin.args[:3]) == ("cpu", torch.bfloat16, True)
    assert torch._C._set_grad_enabled in [node.target for node in operators_in(module)]


@contract(
    "torch._higher_order_ops.wrap.tag_activation_checkpoint", "torch._ops.HigherOrderOperator"
)
def test_dynamo_writes_a_checkpoint_as_an_operator_on_a_graph() -> None:
    def forward(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)

    module = graph_of(forward, torch.ones(2, requires_grad=True))
    tag = torch._higher_order_ops.wrap.tag_activation_checkpoint
    (node,) = [n for n in operators_in(module) if n.target is tag]
    assert isinstance(tag, torch._ops.HigherOrderOperator)
    assert isinstance(getattr(module, node.args[0].target), torch.fx.GraphModule)
    parameters = inspect.signature(torch.utils.checkpoint.checkpoint).parameters
    assert set(node.kwargs) <= {*parameters, "preserve_rng_state"}


@contract(
    "torch._higher_order_ops.wrap: wrap_with_set_grad_enabled wrap_with_autocast", "._codegen"
)
def test_an_export_writes_modes_as_operators_on_graphs_and_notes_modules() -> None:
    def modes(_: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x + 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ y

    x = torch.ones(2, 2)
    module = torch.export.export(torch.nn.Sequential(Made(modes)), (x,)).module()
    wrap = torch._higher_order_ops.wrap
    operators = {wrap.wrap_with_set_grad_enabled: 1, wrap.wrap_with_autocast: 4}
    for target, place in operators.items():
        (node,) = module.graph.find_nodes(op="call_function", target=target)
        assert isinstance(getattr(module, node.args[place].target), torch.fx.GraphModule)
        assert [path for path, _ in node.meta["nn_module_stack"].values()] == ["", "0"]
        assert node.args[: min(place, 3)] in ((False,), ("cpu", torch.bfloat16, True))
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.set_codegen(module.graph._codegen)
    assert torch.equal(torch.fx.GraphModule(module, graph)(x), module(x))


@contract("torch._higher_order_ops.invoke_subgraph.invoke_subgraph")
def test_dynamo_writes_equal_regions_as_calls_of_one_graph() -> None:
    region = torch.compiler.nested_compile_region(lambda x: x.sin())
    module = graph_of(lambda x: region(region(x)), torch.ones(2))
    invoke = resolve("torch._higher_order_ops.invoke_subgraph.invoke_subgraph")
    first, second = module.graph.find_nodes(op="call_function", target=invoke)
    bodies = {getattr(module, node.args[0].target) for node in (first, second)}
    assert len(bodies) == 1 and isinstance(*bodies, torch.fx.GraphModule)
    assert first.args[1] == second.args[1] and isinstance(first.args[1], str)
    assert [n.target for n in second.users] == [operator.getitem]
    with_options = inspect.signature(torch.compiler.nested_compile_region).parameters
    assert "options" not in with_options or bodies.pop().meta.get("nested_region_config") is None


def test_a_size_that_varies_is_an_input_beside_the_tensor_that_has_it() -> None:
    _, (module, _) = graphs_of(lambda x: x * x.shape[0], (torch.ones(3),), (torch.ones(4),))
    values = [n.meta["example_value"] for n in module.graph.find_nodes(op="placeholder")]
    (size,) = [value for value in values if isinstance(value, torch.SymInt)]
    (tensor,) = [value for value in values if isinstance(value, Tensor)]
    assert tensor.shape[0].node.expr == size.node.expr


@contract("torch: _functorch _C._functorch")
def test_a_transform_of_torch_func_shows_in_the_homes_of_operators() -> None:
    module = graph_of(lambda x: torch.func.vmap(torch.sin)(x), torch.ones(2))
    homes = [str(getattr(n.target, "__module__", "")) for n in module.graph.nodes]
    assert any(home.startswith(("torch._functorch", "torch._C._functorch")) for home in homes)


@contract(
    "torch._higher_order_ops: cond.cond_op map.map_impl scan.scan_op while_loop.while_loop_op"
)
def test_control_flow_compiles_the_function_that_calls_its_operator() -> None:
    from torch._higher_order_ops import scan, while_loop
    from torch._higher_order_ops.map import map as torch_map

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


@contract("torch._C._get_tracing_state", "torch.fx._symbolic_trace.is_fx_symbolic_tracing")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracers_of_python_say_that_they_run() -> None:
    class Asking(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            is_tracing = torch.fx._symbolic_trace.is_fx_symbolic_tracing()
            seen.append((torch._C._get_tracing_state() is not None, is_tracing))
            return x + 1

    seen: list[tuple[bool, bool]] = []
    Asking()(torch.ones(2))
    torch.jit.trace(Asking(), (torch.ones(2),), check_trace=False)
    torch.fx.symbolic_trace(Asking())
    assert seen == [(False, False), (True, False), (False, True)]


def doubled(x: Tensor) -> Tensor:
    return x * 2


@contract("torch.jit._state._try_get_jit_cached_function", "._torchdynamo_inline")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_function_of_torch_jit_keeps_its_python_and_says_if_it_was_scripted() -> None:
    known = torch.jit._state._try_get_jit_cached_function
    scripted, traced = torch.jit.script(doubled), torch.jit.trace(doubled, torch.ones(2))
    for function in (scripted, traced):
        assert isinstance(function, torch.jit.ScriptFunction)
        assert function._torchdynamo_inline is doubled
        assert "__call__" in vars(type(function))
    assert known(doubled).qualified_name == scripted.qualified_name != traced.qualified_name


@contract("._guards_fn")
def test_what_checks_the_inputs_of_an_exported_module_has_a_name() -> None:
    exported = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(3, 2),))
    assert isinstance(exported.module()._guards_fn, torch.nn.Module)
    exported.example_inputs = None  # type: ignore[assignment]
    assert not hasattr(exported.module(), "_guards_fn")
