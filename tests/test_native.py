"""The native loop computes what PyTorch's kernels compute: products as exactly as any sum of
so many terms, everything else, which is the same additions in the same order, to the last bit."""

import copy
import ctypes
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comparing import assert_equals_eager, assert_same_gradients, product_tolerance
from models import Attention
from torch import Tensor, nn

import lazyinline
from lazyinline.backend.launches import torch_native
from lazyinline.backend.launches.kernel_list import Launch, NativeOp, View, native_op
from lazyinline.backend.launches.torch_native import (
    NativeLibrary,
    loaded_native,
    native_file,
    native_library,
)
from lazyinline.backend.link.placement import Tools
from lazyinline.backend.link.torch_generated import GeneratedCode, Memory

aten = torch.ops.aten
SIZES = (1, 3, 8, 17, 64, 130)


def view_of(tensor: Tensor, buffer: int) -> View:
    offset_bytes = tensor.storage_offset() * tensor.element_size()
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return View(buffer, tensor.dtype, shape, stride, offset_bytes)


def launch_of(function: Any, args: Sequence[Any], **kwargs: Any) -> tuple[NativeOp | None, list]:
    """Returns the native form of a launch, and the tensors whose addresses it wants."""
    tensors: list[Tensor] = []

    def view(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        return view_of(value, len(tensors) - 1)

    given = tuple(view(a) for a in args)
    named = tuple((k, view(v)) for k, v in kwargs.items())
    return native_op(Launch("test", function, given, named)), tensors


def run_native(
    op: NativeOp, tensors: Sequence[Tensor], loop: Callable[[], NativeLibrary] = native_library
) -> None:
    """Runs one operation, each tensor's storage in a slot of its own."""
    code = GeneratedCode()
    for operand in op.operands:
        if isinstance(operand, View):
            code.words.extend((operand.buffer + 1, operand.offset_bytes))
        else:
            code.words.append(operand)
    code.slots = {i: i + 1 for i in range(len(tensors))}
    code.num_slots = len(tensors) + 1
    bases = {
        i: torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()) for i, t in enumerate(tensors)
    }
    arena = torch.empty(64, dtype=torch.uint8)
    scope = Memory(arena, {}, bases, Tools(native=loop)).native_names(code)
    if failure := scope["run_native"](scope["words"], op.num_operations, scope["table"]):
        scope["fail"](failure)


def without_python_headers() -> NativeLibrary:
    """The loop as it is where the library could not be built as an extension module."""
    library = ctypes.CDLL(str(native_file()))
    return torch_native._native_of(SimpleNamespace(lazyinline_run=library.lazyinline_run))


EXACT = {"rtol": 0.0, "atol": 0.0}


def assert_native_equals(
    function: Any, *args: Any, out: Tensor, tolerance: dict[str, float] = EXACT
) -> None:
    op, tensors = launch_of(function, args, out=out)
    assert op is not None, "no native form"
    expected = function(*args, out=torch.full_like(out, float("nan")))
    for loop in (native_library, without_python_headers):
        out.fill_(float("nan"))
        run_native(op, tensors, loop)
        torch.testing.assert_close(out, expected, **tolerance)


def matrix(rows: int, columns: int, dtype: torch.dtype, layout: str) -> Tensor:
    if layout == "transposed":
        return torch.randn(columns, rows, dtype=dtype).t()
    if layout == "padded":
        return torch.randn(rows, columns + 3, dtype=dtype)[:, 2 : columns + 2]
    return torch.randn(rows, columns, dtype=dtype)


LAYOUTS = ("plain", "transposed", "padded")
needs_blas = pytest.mark.skipif(
    launch_of(aten.mm.out, (torch.ones(2, 2), torch.ones(2, 2)), out=torch.ones(2, 2))[0] is None,
    reason="this PyTorch's BLAS cannot be called from outside",
)


LOOPS = (native_library, without_python_headers, lambda: loaded_native(native_file()))


@pytest.mark.parametrize("loop", LOOPS)
def test_memory_is_moved(loop: Callable[[], NativeLibrary]) -> None:
    native = loop()
    numbers, copy_of = (ctypes.c_int64 * 3)(5, 6, 7), (ctypes.c_int64 * 3)()
    start, end = ctypes.addressof(numbers), ctypes.addressof(copy_of)
    native.move(end, start, 24)
    assert list(copy_of) == [5, 6, 7]


@pytest.mark.parametrize("given", [(), (1, 2), (1, 2, 3, 4), (0, 0, "8"), (0, 0, 2**64)])
def test_native_functions_refuse_what_is_no_address(given: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, OverflowError)):
        native_library().move(*given)


@needs_blas
@pytest.mark.parametrize("side", ["a row on the left", "a column on the right"])
def test_the_stride_of_one_row_or_column_says_nothing(side: str) -> None:
    torch.manual_seed(0)
    a, b, out = torch.randn(1, 8), torch.randn(8, 5), torch.empty(1, 5)
    if side == "a row on the left":
        a = a.as_strided((1, 8), (0, 1))  # as Inductor has it
    else:
        a, b, out = torch.randn(3, 8), torch.randn(8).as_strided((8, 1), (1, 0)), torch.empty(3, 1)
    bias = torch.randn(out.shape[1])
    assert_native_equals(aten.mm.out, a, b, out=out, tolerance=product_tolerance(a, b))
    tolerance = product_tolerance(a, b, bias)
    assert_native_equals(aten.addmm.out, bias, a, b, out=out, tolerance=tolerance)


@needs_blas
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, LAYOUTS)), ids="-".join)
@pytest.mark.sweep(
    keep=["plain-plain-dtype0", "transposed-padded-dtype1", "padded-transposed-dtype0"]
)
def test_matrix_products_of_any_shape(dtype: torch.dtype, layouts: tuple[str, str]) -> None:
    torch.manual_seed(0)
    for rows, inner, columns in itertools.product(SIZES, SIZES, SIZES):
        a, b = matrix(rows, inner, dtype, layouts[0]), matrix(inner, columns, dtype, layouts[1])
        out = torch.empty(rows, columns, dtype=dtype)
        if rows == columns == 1:
            assert launch_of(aten.mm.out, (a, b), out=out)[0] is None
            continue
        assert_native_equals(aten.mm.out, a, b, out=out, tolerance=product_tolerance(a, b))
        bias = torch.randn(columns, dtype=dtype)
        tolerance = product_tolerance(a, b, bias)
        assert_native_equals(aten.addmm.out, bias, a, b, out=out, tolerance=tolerance)


@needs_blas
@pytest.mark.parametrize("transposed", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("batch", [1, 3, 8, 150])
@pytest.mark.sweep(keep=["[3-", "1-transposed0", "150-transposed3"])
def test_batches_of_matrix_products(transposed: tuple[bool, bool], batch: int) -> None:
    torch.manual_seed(0)
    for rows, inner, columns in itertools.product((2, 8, 33), (7, 8, 64), (8, 16, 33)):
        a, b = torch.randn(batch, rows, inner), torch.randn(batch, inner, columns)
        a = a.mT.contiguous().mT if transposed[0] else a
        b = b.mT.contiguous().mT if transposed[1] else b
        out = torch.empty(batch, rows, columns)
        if rows * inner * columns >= 400:
            assert_native_equals(aten.bmm.out, a, b, out=out, tolerance=product_tolerance(a, b))
        else:
            assert launch_of(aten.bmm.out, (a, b), out=out)[0] is None


def chain_of_additions(a: Tensor, b: Tensor) -> Tensor:
    """A product whose sums are fused multiply-adds, one after the other.

    Exact in float64 before it is rounded, if the operands have few bits.
    """
    result = torch.zeros(a.shape[0], b.shape[1])
    for column, row in zip(a.T.double(), b.double(), strict=True):
        result = (result.double() + column[:, None] * row).float()
    return result


@needs_blas
@pytest.mark.skipif(
    not getattr(torch.cpu, "get_capabilities", dict)().get("fma3"),  # asked of the CPU itself
    reason="our own product is written for AVX2",
)
@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, LAYOUTS)), ids="-".join)
def test_small_products_have_the_same_bits_on_every_cpu(layouts: tuple[str, str]) -> None:
    """No BLAS promises an order of additions, so these bits say that the product is our own."""
    for rows, inner, columns in ((2, 256, 8), (16, 40, 24), (64, 32, 32)):
        a, b = (
            matrix(rows, inner, torch.float32, layouts[0]),
            matrix(inner, columns, torch.float32, layouts[1]),
        )
        for operand in (a, b):
            operand.copy_((operand * 1024).round() / 1024)
        a[a.abs() < 0.3] = -0.0
        op, tensors = launch_of(aten.mm.out, (a, b), out=torch.empty(rows, columns))
        assert op is not None
        run_native(op, tensors)
        assert torch.equal(tensors[-1], chain_of_additions(a, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_and_copies(dtype: torch.dtype) -> None:
    for shape in ((5,), (3, 70000), (2, 3, 4)):
        a, b = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
        assert_native_equals(aten.add.out, a, b, out=torch.empty_like(a))
        a, b = a.mT if a.dim() > 1 else a, b.mT if b.dim() > 1 else b
        assert_native_equals(aten.add.out, a, b, out=torch.empty_like(a))
        op, tensors = launch_of(aten.copy_.default, (torch.zeros_like(a), a))
        assert op is not None
        run_native(op, tensors)
        assert torch.equal(tensors[0], a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_embedding_and_its_gradient(dtype: torch.dtype) -> None:
    weight, indices = torch.randn(50, 24).to(dtype), torch.randint(0, 50, (4, 300))
    assert_native_equals(aten.embedding.out, weight, indices, out=torch.empty(4, 300, 24).to(dtype))
    gradient = torch.randn(4, 300, 24).to(dtype)
    for padding in (-1, 7):
        args = (gradient, indices, 50, padding, False)
        out = torch.empty(50, 24).to(dtype)
        if dtype is torch.bfloat16:  # PyTorch's own rounding between additions
            assert launch_of(aten.embedding_dense_backward.out, args, out=out)[0] is None
        else:
            assert_native_equals(aten.embedding_dense_backward.out, *args, out=out)


@pytest.mark.parametrize("index", [-1, 50])
def test_index_out_of_range_is_an_error(index: int) -> None:
    weight, indices = torch.randn(50, 4), torch.tensor([1, index, 3])
    op, tensors = launch_of(aten.embedding.out, (weight, indices), out=torch.empty(3, 4))
    assert op is not None
    with pytest.raises(IndexError, match="index out of range"):
        run_native(op, tensors)


def strided(*shape: int) -> Tensor:
    return torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]


ones, low = torch.ones, {"dtype": torch.bfloat16}
X = ones(4, 8)
LEFT_TO_PYTORCH: dict[str, Callable[[], Any]] = {
    "gaps in a matrix": lambda: launch_of(aten.mm.out, (strided(4, 8), ones(8, 8)), out=X),
    "half precision": lambda: launch_of(
        aten.mm.out, (ones(4, 8, **low), ones(8, 8, **low)), out=ones(4, 8, **low)
    ),
    "nothing to multiply": lambda: launch_of(aten.mm.out, (ones(4, 0), ones(0, 8)), out=X),
    "a sum that broadcasts": lambda: launch_of(aten.add.out, (X, ones(8)), out=X),
    "a sum of numbers alone": lambda: launch_of(aten.add.out, (1.0, 2), out=X),
    "a sum of other layouts": lambda: launch_of(aten.add.out, (X, ones(8, 4).t()), out=X),
    "a scaled sum": lambda: launch_of(aten.add.out, (X, X), out=X, alpha=2),
    "a scaled product": lambda: launch_of(aten.addmm.out, (X[0], X, ones(8, 8)), out=X, alpha=2),
    "a bias by rows": lambda: launch_of(aten.addmm.out, (ones(4, 1), X, ones(8, 8)), out=X),
    "32-bit indices": lambda: launch_of(
        aten.embedding.out, (ones(9, 8), ones(4, dtype=torch.int32)), out=X
    ),
}


@pytest.mark.parametrize("case", LEFT_TO_PYTORCH)
def test_what_has_no_native_form(case: str) -> None:
    assert LEFT_TO_PYTORCH[case]()[0] is None


@pytest.mark.parametrize("owner", [torch.backends, torch.backends.mkldnn.matmul, None])
def test_lower_precision_of_products_is_left_to_pytorch(owner: Any) -> None:
    """Set in the old way (None) or the new one, after which asking in the old way raises."""
    x, products = torch.ones(4, 4), torch.backends.mkldnn.matmul
    products.fp32_precision = "none"  # an exact one, of a test before, wins over a general
    before = None if owner is None else owner.fp32_precision
    try:
        if owner is None:
            torch.set_float32_matmul_precision("medium")
        else:
            owner.fp32_precision = "bf16" if owner is not torch.backends else "tf32"
        assert launch_of(aten.mm.out, (x, x), out=torch.ones(4, 4))[0] is None
        model = nn.Linear(4, 4)
        assert torch.equal(lazyinline.compile(model)(x), model(x))
    finally:
        if owner is None:
            torch.set_float32_matmul_precision("highest")
        else:
            owner.fp32_precision = before
        products.fp32_precision = "none"


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.sweep(keep="1")
def test_short_attention_is_plain_and_equals_eager(batch: int) -> None:
    torch.manual_seed(0)
    step = assert_equals_eager(
        Attention(16), [torch.randn(batch, 8, 16)], calls=1, door="step", backend="inductor"
    ).compiled
    assert step.stats.unplaced_launches == ()


@pytest.mark.parametrize("keep", [False, True], ids=["once", "retained"])
@pytest.mark.sweep(keep="once")
def test_memory_that_a_parameter_gives_up_in_flight_is_there_for_the_backward(keep: bool) -> None:
    """``parameter.data = ...`` frees what the native program has by address alone."""

    def train(model: nn.Module, run: nn.Module) -> None:
        loss = run(x).square().sum()
        for parameter in model.parameters():
            parameter.data = parameter.data * 2
        rubbish = [torch.full((32, 32), float("nan")) for _ in range(40)]
        loss.backward(retain_graph=keep)
        if keep:
            loss.backward()
        assert len(rubbish) == 40

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)), torch.randn(4, 32)
    eager = copy.deepcopy(model)
    train(model, lazyinline.compile(model))
    train(eager, eager)
    assert_same_gradients(model, eager)
