"""Contracts with private PyTorch: what the adapters rely on, for each name that they use.

When a new torch breaks one of these, its test says which name moved or changed; the adapter that
uses it is the one file to look at. Here are those of modules, trees, operators and modes;
test_contract_*.py have those of tracing, of autograd and optimizers, of Inductor and of Dynamo.
"""

import ast
import copy
import importlib
import inspect
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from contracts import CONTRACTS, contract, fake_mode, passing, traced, within
from test_architecture import (
    ROOT,
    foreign_private_attributes,
    is_adapter,
    own_names,
    private_torch_names,
    sources,
    tree_of,
)
from torch import Tensor, distributions, nn
from torch.autograd import forward_ad
from torch.distributions import distribution
from torch.nn.utils import parametrize

from lazyinline.autodiff.traces.torch_user_rules import (
    arguments_in_full,
    casts_under_autocast,
    has_own_derivative,
)
from lazyinline.backend.link import torch_generated
from lazyinline.frontend.tracing import torch_tracing
from lazyinline.frontend.tracing.torch_state import is_in_checkpoint
from lazyinline.reuse import torch_names
from lazyinline.reuse.ir.torch_symbols import ReadSizes, size_in
from lazyinline.reuse.torch_names import operators_tagged

pytestmark = pytest.mark.smoke

aten = torch.ops.aten


def all_contracts() -> set[str]:
    """Returns every name that a test of a contract is registered for."""
    for path in pathlib.Path(__file__).parent.glob("test_contract*.py"):
        importlib.import_module(path.stem)
    return CONTRACTS


def test_every_private_name_of_an_adapter_has_a_contract() -> None:
    used = {
        name: path.relative_to(ROOT)
        for path in filter(is_adapter, sources())
        for _, name in private_torch_names(path)
    }
    names = all_contracts()
    missing = {n: a for n, a in used.items() if not any(f"{c}.".startswith(f"{n}.") for c in names)}
    assert not missing, f"write a contract test for {missing}"
    unused = [n for n in names if n.startswith("torch.") and n not in used]
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
    assert used == {n.removeprefix(".") for n in all_contracts() if n.startswith(".")}


def test_calls_of_modules_and_reads_of_parameters_can_be_replaced_on_the_class() -> None:
    call, get, seen = nn.Module.__call__, nn.Module.__getattr__, list[Any]()

    def noting_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(type(self))
        return call(self, *args, **kwargs)

    with mock.patch.object(nn.Module, "__call__", noting_call):
        nn.Sequential(nn.Linear(2, 2), nn.Tanh())(torch.ones(2))
    assert seen == [nn.Sequential, nn.Linear, nn.Tanh]
    linear = nn.Linear(2, 2)
    seen.clear()
    noting_get = lambda self, name: seen.append(name) or get(self, name)  # noqa: E731
    with mock.patch.object(nn.Module, "__getattr__", noting_get):
        _ = linear.weight, linear.in_features, linear.training
    assert seen == ["weight"], "parameters are found by __getattr__, and plain attributes are not"
    assert "__getattribute__" not in vars(nn.Module), "reads are watched by adding one"
    assert nn.Module.__module__ == "torch.nn.modules.module"


@contract("._detect_is_causal_mask", "torch.nn.modules.transformer._detect_is_causal_mask")
@pytest.mark.parametrize("kind", [nn.TransformerEncoder, nn.TransformerDecoder])
def test_a_stack_of_layers_asks_its_mask_for_a_hint_in_its_forward(kind: Any) -> None:
    seen: list[Any] = []

    def detect(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        seen.append((sys._getframe(1).f_locals.get("self"), mask))
        return is_causal is True

    is_encoder, x, mask = kind is nn.TransformerEncoder, torch.randn(1, 3, 4), torch.zeros(3, 3)
    layer = nn.TransformerEncoderLayer if is_encoder else nn.TransformerDecoderLayer
    stack = kind(layer(4, 2, 4, batch_first=True), 1)
    with mock.patch.object(nn.modules.transformer, "_detect_is_causal_mask", detect):
        stack(x, mask) if is_encoder else stack(x, x, mask)
    assert [(owner is stack, given is mask) for owner, given in seen] == [(True, True)]
    assert type(stack.layers[0].self_attn) is nn.MultiheadAttention


@contract("torch._is_all_true", "torch._assert_async")
def test_a_distribution_asks_whether_all_is_valid_where_its_frame_tells_of_what() -> None:
    seen: list[Any] = []

    def is_all_true(valid: Tensor) -> bool:
        frame = sys._getframe(1)
        told = frame.f_locals
        constraint = told.get("constraint", told.get("support"))
        seen.append((told.get("param"), type(told["self"]), constraint))
        assert frame.f_code.co_filename == distribution.__file__ and valid.all()
        return True

    with mock.patch.object(torch, "_is_all_true", is_all_true):
        one = distributions.Normal(torch.zeros(2), torch.ones(2), validate_args=True)
        one.log_prob(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"^that is said$"):
        torch._assert_async(torch.tensor(False), "that is said")
    real, positive = distributions.constraints.real, distributions.constraints.positive
    normal = distributions.Normal
    assert seen == [("loc", normal, real), ("scale", normal, positive), (None, normal, real)]


@contract("torch.distributions.Distribution._validate_args", "._validate_args")
def test_whether_distributions_check_is_read_where_it_is_set() -> None:
    before = distributions.Distribution._validate_args
    try:
        for checks in (False, True):
            distributions.Distribution.set_default_validate_args(checks)
            assert distributions.Distribution._validate_args is checks
            assert distributions.Normal(0.0, 1.0)._validate_args is checks
    finally:
        distributions.Distribution.set_default_validate_args(before)


def test_a_module_keeps_its_state_in_known_tables() -> None:
    state = vars(nn.Module())
    tables = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
    hooks = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
    assert tables | hooks | {"_load_state_dict_post_hooks"} <= state.keys()
    assert state["training"] is True
    assert callable(nn.Module._load_from_state_dict)
    module = nn.modules.module
    for name, register in {
        "_global_forward_pre_hooks": module.register_module_forward_pre_hook,
        "_global_forward_hooks": module.register_module_forward_hook,
        "_global_backward_pre_hooks": module.register_module_full_backward_pre_hook,
        "_global_backward_hooks": module.register_module_full_backward_hook,
    }.items():
        assert not getattr(module, name)
        handle = register(lambda *args: None)
        assert len(getattr(module, name)) == 1
        handle.remove()


@contract("._call_impl")
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


def test_a_first_torch_compile_leaves_one_name_in_the_class_of_modules() -> None:
    before = vars(nn.Module).keys() - {torch_names.MARKED_BY_DYNAMO}
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(2))
    assert vars(nn.Module).keys() - before == {torch_names.MARKED_BY_DYNAMO}


@contract("torch.autograd.function._SingleLevelFunction")
def test_apply_of_custom_functions_is_a_class_method_that_can_be_replaced() -> None:
    """Where it is Python's, all of them end in the class above, also one that was kept."""
    single, function = torch.autograd.function._SingleLevelFunction, torch.autograd.Function
    assert issubclass(function, single) and "apply" not in vars(single)
    is_of_c = isinstance(vars(function)["apply"], types.ClassMethodDescriptorType)
    assert is_of_c or isinstance(vars(function)["apply"], classmethod)
    base: Any = function if is_of_c else single
    own, seen = passing(lambda gradient: gradient), []

    def apply(cls: type, *args: Any) -> Any:
        seen.append(cls)
        return super(base, cls).apply(*args)  # type: ignore[misc]

    kept = own.apply
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "apply", classmethod(apply), raising=False)
        own.apply(torch.ones(2))
        kept(torch.ones(2))
    assert seen == ([own] if is_of_c else [own, own])


def test_checkpoints_hand_their_function_to_a_class_or_run_it_between_two_steps() -> None:
    module: Any = torch.utils.checkpoint
    reentrant, x, seen = module.CheckpointFunction, torch.ones(2, requires_grad=True), list[Any]()
    assert (reentrant.__module__, reentrant.__name__) == (module.__name__, "CheckpointFunction")
    assert "apply" not in vars(reentrant)
    with mock.patch.object(reentrant, "apply", lambda *args: seen.append(args)):
        module.checkpoint(torch.exp, x, use_reentrant=True)
    ((function, _, first),) = seen
    assert function is torch.exp and first is x
    seen.clear()
    older = module._checkpoint_without_reentrant_generator
    original = getattr(module, "_checkpoint_without_reentrant_generator_impl", older)
    signature = inspect.signature(original)

    def generator(*args: Any, **kwargs: Any) -> Any:
        seen.append(signature.bind(*args, **kwargs).arguments.get("context_fn"))
        yield
        seen.append("after")

    with mock.patch.object(module, original.__name__, generator):
        module.checkpoint(lambda x, y: seen.append("run"), x, y=2, use_reentrant=False)
    assert seen == [module.noop_context_fn, "run", "after"]
    seen.clear()
    run = lambda x: seen.append(is_in_checkpoint()) or x.exp()  # noqa: E731
    module.checkpoint(run, x, use_reentrant=False).sum().backward()
    assert seen == [True, True] and not is_in_checkpoint()


@contract(
    "torch.utils._pytree: TreeSpec tree_flatten tree_flatten_with_path tree_map tree_structure",
    "torch.utils._pytree: SUPPORTED_NODES register_pytree_node",
)
def test_trees_go_apart_and_together() -> None:
    from torch.utils import _pytree as pytree
    from transformers.modeling_outputs import BaseModelOutput

    tree = {"b": [1, (2, None)], "a": 3}
    leaves, spec = pytree.tree_flatten(tree)
    assert leaves == [1, 2, None, 3] or leaves == [1, 2, 3], "None is a leaf, or structure"
    assert isinstance(spec, pytree.TreeSpec) and pytree.tree_structure(tree) == spec
    assert pytree.tree_structure(((0, 0), {})) == pytree.tree_flatten(((1, 2), {}))[1]
    assert pytree.tree_flatten({"b": [5, (6, None)], "a": 7})[1] == spec
    assert pytree.tree_flatten({"b": [5, 6], "a": 7})[1] != spec
    pairs, _ = pytree.tree_flatten_with_path(tree)
    assert [getattr(k, "key", getattr(k, "idx", None)) for k in pairs[0][0]] == ["b", 0]
    assert pytree.tree_map(lambda x: x, tree) == tree
    spec = pytree.tree_structure({"a": 0, "b": 0})
    nodes = pytree.SUPPORTED_NODES
    assert nodes[spec.type].unflatten_fn([1, 2], spec.context) == {"a": 1, "b": 2}
    leaves, spec = pytree.tree_flatten(BaseModelOutput(last_hidden_state=torch.ones(2)))
    assert len(leaves) == 1, "outputs of Hugging Face are registered"
    assert type(pytree.tree_unflatten(leaves, spec)) is BaseModelOutput
    from lazyinline.frontend.saved.saved_model import Record  # registered with it

    leaves, spec = pytree.tree_flatten(Record("Output", {"a": 1, "keys": (2,)}))
    assert leaves == [1, 2]
    assert pytree.tree_unflatten([3, 4], spec).keys == (4,)


@contract("torch._ops: OpOverload OpOverloadPacket", "._schema")
def test_operators_have_classes_and_schemas_that_say_what_is_written() -> None:
    add, copy_ = aten.add.Tensor, aten.copy_.default
    assert isinstance(add, torch._ops.OpOverload)
    assert isinstance(aten.add, torch._ops.OpOverloadPacket)
    assert not add._schema.is_mutable and copy_._schema.is_mutable
    written = [a.name for a in copy_._schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["self"]
    view = aten.view.default._schema
    assert view.arguments[0].alias_info is not None and not view.is_mutable
    # Why reuse/ir/leaf.py keeps a list of its own: these write, and their schemas do not say so.
    for hidden in (aten.batch_norm.default, aten.native_batch_norm.default):
        names = [a.name for a in hidden._schema.arguments]
        assert not hidden._schema.is_mutable
        assert names[3:6] == ["running_mean", "running_var", "training"]


def test_operators_carry_tags() -> None:
    seeded, in_place = torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view
    for drawing in (aten.rand.default, aten.native_dropout.default, aten.bernoulli.p):
        assert seeded in drawing.tags
    for name in ("transpose_", "unsqueeze_", "resize_", "set_", "detach_"):
        packet = getattr(aten, name)
        assert any(in_place in getattr(packet, overload).tags for overload in packet.overloads())
    assert not {seeded, in_place} & {*aten.add.Tensor.tags, *aten.add_.Tensor.tags}
    assert aten.relu.default in operators_tagged(torch.Tag.core)
    assert aten.transpose.int._schema.returns[0].alias_info is not None
    assert aten.resize.default._schema.returns[0].alias_info is None
    assert not hasattr(aten, "requires_grad"), "a change in place that is no operator"


@contract("._softmax", "._log_softmax")
def test_out_forms_write_what_the_operator_returns() -> None:
    x = torch.randn(2, 3)
    for packet in (aten._softmax, aten._log_softmax):
        target = torch.empty(2, 3)
        assert packet.out(x, 1, False, out=target) is target
        assert torch.equal(target, packet.default(x, 1, False))


@contract("torch.ops.aten: _unsafe_view.default _scaled_dot_product_attention_math.default")
def test_operators_that_stand_for_others_give_what_those_give() -> None:
    x = torch.randn(2, 3, 4)
    assert torch.equal(aten._unsafe_view.default(x, [6, 4]), x.reshape(6, 4))
    q, k, v = (torch.randn(2, 3, 5, 4) for _ in range(3))
    plain = aten._scaled_dot_product_attention_math.default
    result, _ = plain(q, k, v, None, 0.0, True, scale=0.5, enable_gqa=False)
    fused = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)
    torch.testing.assert_close(result, fused)


@contract(
    "torch.ops.aten: _conj.default _conj_physical.default _neg_view.default",
    "torch.ops.aten._efficientzerotensor.default",
    "._is_zerotensor",
)
def test_what_is_a_mark_on_memory() -> None:
    x = torch.randn(2, 3, dtype=torch.complex64)
    marked, written = aten._conj.default(x), aten._conj_physical.default(x)
    negated, zeros = aten._neg_view.default(x), aten._efficientzerotensor.default((2, 3))
    assert marked.is_conj() and marked.data_ptr() == x.data_ptr()
    assert not written.is_conj() and torch.equal(written, marked)
    assert negated.is_neg() and torch.equal(negated, -x)
    assert zeros._is_zerotensor() and not x._is_zerotensor()


@contract("torch._C._dispatch_get_all_op_names")
def test_operators_are_listed_by_name() -> None:
    assert {"aten::add_.Tensor", "aten::relu"} <= {*torch._C._dispatch_get_all_op_names()}


@contract("torch._library.custom_ops.OPDEFS.get", "._opoverload", "._backward_fn")
def test_an_operator_tells_whether_it_has_a_derivative() -> None:
    @torch.library.custom_op("lazyinline_tests::told", mutates_args=())
    def told(x: Tensor, scale: float = 2.0) -> Tensor:
        return x * scale

    operator, known = torch.ops.lazyinline_tests.told.default, torch._library.custom_ops.OPDEFS
    assert told._opoverload is operator
    assert known["lazyinline_tests::told"] is known.get("lazyinline_tests::told") is told
    assert told._backward_fn is None
    assert not has_own_derivative(operator)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel("lazyinline_tests::told", "Autograd")  # of each: it raises in a backward
    told.register_autograd(lambda context, gradient: (gradient, None))
    assert has_own_derivative(operator)
    with torch.library._scoped_library("lazyinline_tests", "FRAGMENT") as library:
        library.define("plain(Tensor x) -> Tensor")
        plain = torch.ops.lazyinline_tests.plain.default
        assert not has_own_derivative(plain) and not casts_under_autocast(plain)
        library.impl("plain", torch.clone, "AutogradCPU")
        library.impl("plain", torch.clone, "AutocastCPU")
        assert has_own_derivative(plain) and casts_under_autocast(plain)


@contract("._forward_cls")
def test_a_context_tells_whether_pytorch_made_its_function() -> None:
    """Of an operator whose results are a list, ``apply`` is kept, so that no patch sees it."""

    @torch.library.custom_op("lazyinline_tests::listing", mutates_args=())
    def listing(x: Tensor) -> list[Tensor]:
        return [x.sin()]

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen.append(ctx)
            return x.sin()

    seen: list[Any] = []
    listing.register_autograd(
        lambda ctx, gradients: gradients[0] * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: (
            seen.append(ctx),
            ctx.save_for_backward(*inputs),
        )[1],
    )
    x = torch.ones(2, requires_grad=True)
    Own.apply(x)
    assert torch_tracing.is_context(seen[0])
    (result,) = listing(x)
    result.sum().backward()
    assert torch.equal(x.grad, x.detach().cos()) and not torch_tracing.is_context(seen[1])


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
    assert (given[1:], named) == ([2.0], {"shift": 1.0})
    assert arguments_in_full(operator, (), {"x": x, "scale": 3.0}) == ([x, 3.0], {"shift": 0.0})


@contract("._version")
def test_tensors_count_changes_in_place() -> None:
    x = torch.ones(4)
    view, version = x[1:], x._version
    view.mul_(2)
    assert x._version == view._version == version + 1
    assert "_version" not in vars(torch.Tensor), "capture puts a property there for a while"
    assert type(torch.Tensor._version) is type(torch.Tensor.grad)


@contract("torch._C._dynamo.guards: TensorGuards assert_size_stride _empty_strided_cpu")
def test_layouts_are_checked_and_tensors_made_past_the_dispatcher() -> None:
    def tensors() -> list[Tensor]:
        return [torch.ones(3, 3, requires_grad=True), torch.ones(2, dtype=torch.int64)]

    guards, seen = torch._C._dynamo.guards, tensors()
    many = guards.TensorGuards(*seen, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    assert many.check(*seen)
    assert many.check(*tensors()), "other tensors of the same layout"
    seen[0].data = seen[0].data.t()
    for first in (
        torch.ones(4, 3, requires_grad=True),
        torch.ones(3, 3, dtype=torch.float64, requires_grad=True),
        torch.ones(3, 3),
        torch.ones(3, 3, requires_grad=True, device="meta"),
        seen[0],
    ):
        assert not many.check(first, seen[1])
    made = within(fake_mode(), lambda: guards._empty_strided_cpu((3, 1, 4), (4, 17, 1), torch.long))
    assert type(made) is torch.Tensor and made.device.type == "cpu" and made.data_ptr()
    assert (made.shape, made.stride(), made.dtype) == ((3, 1, 4), (4, 17, 1), torch.long)
    assert not made.requires_grad and made.untyped_storage().nbytes() == 96
    guards.assert_size_stride(made, (3, 1, 4), (4, 3, 1))  # one element has no stride
    for shape, stride in (((3, 1, 4), (1, 1, 3)), ((3, 4), (4, 1))):
        with pytest.raises(AssertionError):
            guards.assert_size_stride(made, shape, stride)
    with pytest.raises(TypeError):
        guards.assert_size_stride(None, (3,), (1,))


@contract("torch._C: _dispatch_keys DispatchKey DispatchKeySet")
def test_the_keys_of_a_tensor_say_where_its_numbers_lie() -> None:
    x, bits = torch.ones(4, 4), lambda tensor: torch._C._dispatch_keys(tensor).raw_repr()
    plain = bits(x)
    for name in ("CPU", "ADInplaceOrView", "AutogradCPU", "AutocastCPU"):
        plain &= ~torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    assert not plain
    jagged = torch.nested.nested_tensor([x, x], layout=torch.jagged)
    others = [x.to("meta"), x.to_sparse(), x.to_mkldnn(), jagged]
    assert all(bits(other) & ~bits(x) for other in others)
    with torch.inference_mode():
        assert not bits(torch.ones(4)) & ~bits(x)


@contract(
    "torch._C: _disabled_torch_function_impl _disabled_torch_dispatch_impl",
    "torch._C.DisableTorchFunctionSubclass",
)
def test_which_classes_of_tensors_see_operators() -> None:
    own, function = type("Own", (torch.Tensor,), {}), torch._C._disabled_torch_function_impl
    assert nn.Parameter.__torch_function__ is function is not own.__torch_function__
    assert own.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    with torch._C.DisableTorchFunctionSubclass():
        assert type(torch.ones(2).as_subclass(own) * 2) is torch.Tensor


@contract("torch._C._dynamo.guards.GlobalStateGuard")
def test_modes_are_compared_at_once() -> None:
    guard = torch._C._dynamo.guards.GlobalStateGuard
    state, low = guard(), torch.autocast("cpu", torch.bfloat16)
    for context in (torch.no_grad(), low, torch.autocast("cpu", torch.float16)):
        with context:
            assert not state.check()
        assert state.check()
    in_autocast = within(low, guard)
    with torch.autocast("cpu", torch.float16):
        assert not in_autocast.check()
    for change, other, usual in (
        (torch.set_default_dtype, torch.float64, torch.float32),
        (torch.use_deterministic_algorithms, True, False),
    ):
        change(other)
        try:
            assert not state.check()
        finally:
            change(usual)
        assert state.check()


# What is counted or told while something holds, and what it is then, outside and inside.
COUNTED: dict[str, tuple[Callable[[], Any], Callable[[], Any], tuple[Any, Any]]] = {
    "torch._C._len_torch_dispatch_stack": (
        fake_mode,
        lambda: torch._C._len_torch_dispatch_stack(),
        (0, 1),
    ),
    "torch._C._len_torch_function_stack": (
        lambda: torch.device("meta"),
        lambda: torch._C._len_torch_function_stack(),
        (0, 1),
    ),
    "torch.autograd.forward_ad._current_level": (
        forward_ad.dual_level,
        lambda: forward_ad._current_level,
        (-1, 0),
    ),
    "torch.nn.utils.parametrize._cache_enabled": (
        parametrize.cached,
        lambda: parametrize._cache_enabled,
        (0, 1),
    ),
    "torch._C._autograd._top_saved_tensors_default_hooks": (
        lambda: torch.autograd.graph.saved_tensors_hooks(abs, abs),
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(True),
        (None, (abs, abs)),
    ),
}


@contract(*COUNTED)
@pytest.mark.parametrize("name", COUNTED)
def test_what_holds_in_a_context_is_told(name: str) -> None:
    context, told, expected = COUNTED[name]
    assert (told(), within(context(), told)) == expected
    assert told() == expected[0]


@contract("torch._C._get_function_stack_at", "torch.utils._device.DeviceContext")
def test_the_default_device_is_a_function_mode() -> None:
    with torch.device("meta"):
        mode = torch._C._get_function_stack_at(0)
    assert type(mode) is torch.utils._device.DeviceContext
    assert mode.device == torch.device("meta")


@contract("torch._C._functorch.peek_interpreter_stack", "torch._functorch.predispatch")
def test_transforms_are_on_a_stack_and_what_they_do_is_functions_of_one_module() -> None:
    """Where they are traced at all: torch 2.11 puts them into the graph, 2.13 does not."""
    peek, predispatch = torch._C._functorch.peek_interpreter_stack, torch._functorch.predispatch
    seen: list[Any] = []
    assert peek() is None
    torch.func.vmap(lambda x: seen.append(peek()) or x)(torch.ones(2))
    torch.func.jvp(lambda x: seen.append(forward_ad._current_level) or x, *[(torch.ones(1),)] * 2)
    assert seen[0] is not None and seen[1] == 0
    assert predispatch.__name__ == torch_tracing._TRANSFORMS
    functions = predispatch._add_batch_dim, predispatch._remove_batch_dim
    assert {function.__module__ for function in functions} == {predispatch.__name__}


@contract("torch._C._get_fp32_precision_getter")
def test_precision_of_products_is_told_however_it_was_set() -> None:
    def told() -> tuple[str, str]:
        getter = torch._C._get_fp32_precision_getter
        return getter("cuda", "matmul"), getter("mkldnn", "matmul")

    assert set(told()) <= {"none", "ieee"}
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


def test_generated_code_asks_whether_a_profiler_runs_and_names_ranges_in_it() -> None:
    asked = compile(torch_generated.IF_IT_RUNS, "<contract>", "eval")
    scope = {"profiler": torch_generated.PROFILER}
    assert eval(asked, scope) is False
    with torch.profiler.profile() as seen:
        assert eval(asked, scope) is True
        torch_generated.end_range(torch_generated.begin_range("a range"))
    assert eval(asked, scope) is False
    assert "a range" in [event.name for event in seen.events()]


@contract("torch._C._get_privateuse1_backend_name")
def test_the_device_that_is_left_to_users_has_a_name() -> None:
    name = torch._C._get_privateuse1_backend_name()
    assert torch.device(name).type == name


@contract("torch._guards.Source", "torch.utils._sympy.symbol: SymT SymT.SIZE make_symbol")
def test_a_symbol_is_made_by_its_name_without_an_environment() -> None:
    from torch.utils._sympy.symbol import SymT, make_symbol

    sizes = ReadSizes({"s7": 5})
    symbol = sizes.symbol("s7")
    assert not sizes.has_environment
    assert symbol == make_symbol(SymT.SIZE, 7, positive=True, integer=True)
    assert sizes.environment.replace(symbol) == symbol
    assert size_in(sizes.environment, symbol).node.hint == 5
