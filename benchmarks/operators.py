"""Operators of PyTorch in every layout of memory, compiled and compared with eager.

    python benchmarks/operators.py                              # all, minutes
    python benchmarks/operators.py --backend inductor --dtype complex --layout conjugate

One model holds all operators, each on parameters of its own that lie in memory in one way; a
training step of it must have eager's loss and gradients. Real numbers are between 0.2 and 0.8,
where all of these operators are smooth.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lazyinline

SIZE = 4
Operator = Callable[[Tensor, Tensor], Any]
Layout = Callable[[Tensor], Tensor]


def regular(x: Tensor) -> Tensor:
    """Returns a matrix that has an inverse, whatever ``x`` is."""
    return x + 3 * torch.eye(SIZE, dtype=x.dtype)


def definite(x: Tensor) -> Tensor:
    """Returns a positive definite matrix with eigenvalues of their own."""
    return x @ x.mH + torch.diag(torch.arange(1, SIZE + 1).to(x.dtype))


def _elementwise(names: str) -> dict[str, Operator]:
    def operator(name: str) -> Operator:
        function = getattr(torch, name)
        return lambda x, y: function(x)

    return {name: operator(name) for name in names.split()}


ROWS = torch.tensor([2, 0, 1, 1])

# Of real and of complex numbers.
ANY: Mapping[str, Operator] = {
    **_elementwise(
        "exp log log2 log10 sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh atanh"
        " sigmoid reciprocal square neg abs sgn log1p expm1 sinc positive conj conj_physical"
        " resolve_conj resolve_neg adjoint t sum mean prod trace flatten ravel"
    ),
    "acosh": lambda x, y: torch.acosh(x + 1),
    "add": lambda x, y: x + y,
    "add scaled": lambda x, y: torch.add(x, y, alpha=0.5),
    "sub": lambda x, y: x - y,
    "rsub": lambda x, y: torch.rsub(x, y),
    "mul": lambda x, y: x * y,
    "mul number": lambda x, y: x * 1.5,
    "div": lambda x, y: x / y,
    "pow": lambda x, y: x**y,
    "pow number": lambda x, y: x**3,
    "number pow": lambda x, y: 1.5**x,
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "where": lambda x, y: torch.where(torch.eye(SIZE) > 0, x, y),
    "masked_fill": lambda x, y: x.masked_fill(torch.eye(SIZE) > 0, 2.0),
    "index of two": lambda x, y: x[torch.arange(SIZE), ROWS],
    "mm": lambda x, y: x @ y,
    "mm of adjoints": lambda x, y: x.mH @ y.mH,
    "bmm": lambda x, y: torch.bmm(x.reshape(2, 2, SIZE), y.reshape(2, SIZE, 2)),
    "matmul batched": lambda x, y: torch.stack((x, y)) @ y,
    "mv": lambda x, y: x @ y[0],
    "dot": lambda x, y: torch.dot(x[0], y[:, 1]),
    "vdot": lambda x, y: torch.vdot(x[0], y[:, 1]),
    "inner": lambda x, y: torch.inner(x, y),
    "outer": lambda x, y: torch.outer(x[0], y[1]),
    "addmm": lambda x, y: torch.addmm(x, x, y, alpha=0.5),
    "addmv": lambda x, y: torch.addmv(x[0], x, y[0]),
    "addr": lambda x, y: torch.addr(x, x[0], y[0]),
    "baddbmm": lambda x, y: torch.baddbmm(x[None], x[None], y[None]),
    "linear": lambda x, y: F.linear(x, y, y[0]),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y.conj()),
    "tensordot": lambda x, y: torch.tensordot(x, y, dims=([0], [1])),
    "kron": lambda x, y: torch.kron(x[:2], y[:, :2]),
    "cross": lambda x, y: torch.linalg.cross(x[:, :3], y[:, :3]),
    "sum of rows": lambda x, y: x.sum(0),
    "mean of columns": lambda x, y: x.mean(1, keepdim=True),
    "prod of rows": lambda x, y: x.prod(0),
    "var": lambda x, y: x.var(0),
    "std": lambda x, y: (x * torch.arange(1, SIZE + 1)).std(1),
    "cumsum": lambda x, y: x.cumsum(1),
    "cumprod": lambda x, y: x.cumprod(0),
    "diff": lambda x, y: torch.diff(x * y),
    "norm": lambda x, y: torch.linalg.vector_norm(x),
    "matrix norm": lambda x, y: torch.linalg.matrix_norm(x),
    "logsumexp": lambda x, y: torch.logsumexp(x, 0),
    "diagonal": lambda x, y: x.diagonal(1),
    "diag": lambda x, y: torch.diag(x[0]),
    "diag_embed": lambda x, y: torch.diag_embed(x),
    "tril": lambda x, y: x.tril(),
    "triu": lambda x, y: x.triu(1),
    "cat": lambda x, y: torch.cat((x, y), 1),
    "stack": lambda x, y: torch.stack((x, y), 1),
    "hstack": lambda x, y: torch.hstack((x, y[:, :1])),
    "split": lambda x, y: x.split(2, 1)[1] * y.chunk(2, 1)[0],
    "flip": lambda x, y: x.flip(0),
    "roll": lambda x, y: x.roll(1, 1),
    "rot90": lambda x, y: torch.rot90(x),
    "reshape": lambda x, y: x.reshape(2, 8),
    "unflatten": lambda x, y: x.unflatten(0, (2, 2)),
    "permute": lambda x, y: x.reshape(2, 2, SIZE).permute(2, 0, 1),
    "movedim": lambda x, y: x[None].movedim(0, 2),
    "expand": lambda x, y: x[:, :1].expand(SIZE, SIZE) * y,
    "repeat": lambda x, y: x.repeat(2, 1),
    "repeat_interleave": lambda x, y: x.repeat_interleave(2, 0),
    "tile": lambda x, y: torch.tile(x, (1, 2)),
    "unfold": lambda x, y: x.unfold(1, 2, 1) * 2,
    "squeeze": lambda x, y: x[:1].squeeze(0),
    "select": lambda x, y: x.select(1, 2),
    "slice": lambda x, y: x[1:, ::2],
    "index": lambda x, y: x[ROWS],
    "index_select": lambda x, y: x.index_select(1, ROWS),
    "gather": lambda x, y: x.gather(0, ROWS[None]),
    "take": lambda x, y: torch.take(x, ROWS),
    "index_add": lambda x, y: x.index_add(0, ROWS, y),
    "index_put": lambda x, y: torch.index_put(x, (ROWS[:2],), y[:2]),
    "scatter": lambda x, y: x.scatter(0, ROWS[None], y[:1]),
    "scatter_add": lambda x, y: x.scatter_add(0, ROWS[None], y[:1]),
    "pad": lambda x, y: F.pad(x, (1, 2)),
    "meshgrid": lambda x, y: torch.meshgrid(x[0], y[0], indexing="ij")[0],
    "clone": lambda x, y: x.clone(memory_format=torch.contiguous_format),
    "contiguous": lambda x, y: x.contiguous(),
    "in place": lambda x, y: (x * 2).mul_(y).add_(1),
    "in place through a view": lambda x, y: _written_row(x * 2, y),
    "copy_": lambda x, y: torch.zeros_like(x).copy_(y),
    "inv": lambda x, y: torch.linalg.inv(regular(x)),
    "solve": lambda x, y: torch.linalg.solve(regular(x), y),
    "solve_triangular": lambda x, y: torch.linalg.solve_triangular(regular(x), y, upper=True),
    "det": lambda x, y: torch.linalg.det(regular(x)),
    "slogdet": lambda x, y: torch.linalg.slogdet(regular(x))[1],
    "cholesky": lambda x, y: torch.linalg.cholesky(definite(x)),
    "qr": lambda x, y: torch.linalg.qr(regular(x))[0].abs(),
    "svdvals": lambda x, y: torch.linalg.svdvals(definite(x)),
    "eigvalsh": lambda x, y: torch.linalg.eigvalsh(definite(x)),
    "matrix_exp": lambda x, y: torch.linalg.matrix_exp(x),
    "matrix_power": lambda x, y: torch.linalg.matrix_power(x, 3),
    "multi_dot": lambda x, y: torch.linalg.multi_dot((x, y, x)),
    "fft": lambda x, y: torch.fft.fft(x),
    "ifft2": lambda x, y: torch.fft.ifft2(x),
    "irfft": lambda x, y: torch.fft.irfft(torch.fft.fft(x)[:, :3]),
    "fftshift": lambda x, y: torch.fft.fftshift(x),
    "conv1d": lambda x, y: F.conv1d(x[None], y[:, :, None]),
}


def _written_row(z: Tensor, y: Tensor) -> Tensor:
    z[1].mul_(y[0])
    z.t()[2].copy_(y[1])
    return z


COMPLEX: Mapping[str, Operator] = {
    "real": lambda x, y: x.real,
    "imag": lambda x, y: x.imag,
    "imag of conj": lambda x, y: x.conj().imag,
    "angle": lambda x, y: torch.angle(x),
    "view_as_real": lambda x, y: torch.view_as_real(x.resolve_conj()),
    "view_as_complex": lambda x, y: torch.view_as_complex(torch.stack((x.real, y.imag), -1)),
    "complex": lambda x, y: torch.complex(x.real, y.imag),
    "polar": lambda x, y: torch.polar(x.abs(), y.angle()),
    "mH": lambda x, y: x.mH,
    "conj of expand": lambda x, y: x[:1].expand(SIZE, SIZE).conj() * y,
    "imag in place": lambda x, y: _negated_part(x * 2),
    "hfft": lambda x, y: torch.fft.hfft(x),
    "mul by real": lambda x, y: x * y.real,
    "correlation": lambda x, y: torch.fft.ifft(torch.fft.fft(x) * torch.fft.fft(y).conj()),
}


def _negated_part(z: Tensor) -> Tensor:
    z.conj().imag.mul_(3)
    return z


REAL: Mapping[str, Operator] = {
    **_elementwise("erf erfc erfinv exp2 lgamma digamma logit relu selu celu floor ceil frac"),
    "softplus": lambda x, y: F.softplus(x),
    "gelu": lambda x, y: F.gelu(x),
    "silu": lambda x, y: F.silu(x),
    "leaky_relu": lambda x, y: F.leaky_relu(x - 0.5),
    "elu": lambda x, y: F.elu(x - 0.5),
    "hardtanh": lambda x, y: F.hardtanh(x, 0.3, 0.6),
    "hardswish": lambda x, y: F.hardswish(x),
    "mish": lambda x, y: F.mish(x),
    "softmax": lambda x, y: x.softmax(-1),
    "log_softmax": lambda x, y: x.log_softmax(0),
    "glu": lambda x, y: F.glu(x),
    "clamp": lambda x, y: x.clamp(0.3, 0.6),
    "minimum": lambda x, y: torch.minimum(x, y + 0.01),
    "maximum": lambda x, y: torch.maximum(x, y + 0.01),
    "fmod": lambda x, y: torch.fmod(x, 0.3),
    "remainder": lambda x, y: torch.remainder(x, 0.3),
    "atan2": lambda x, y: torch.atan2(x, y),
    "hypot": lambda x, y: torch.hypot(x, y),
    "logaddexp": lambda x, y: torch.logaddexp(x, y),
    "xlogy": lambda x, y: torch.xlogy(x, y),
    "amax": lambda x, y: x.amax(0),
    "max": lambda x, y: x.max(1).values,
    "median": lambda x, y: x.median(1).values,
    "sort": lambda x, y: x.sort(1).values,
    "topk": lambda x, y: x.topk(2).values,
    "cummax": lambda x, y: x.cummax(0).values,
    "logcumsumexp": lambda x, y: x.logcumsumexp(0),
    "renorm": lambda x, y: torch.renorm(x, 2, 0, 0.9),
    "dist": lambda x, y: torch.dist(x, y + 1),
    "cdist": lambda x, y: torch.cdist(x, y + 1),
    "layer_norm": lambda x, y: F.layer_norm(x, (SIZE,), y[0], y[1]),
    "rms_norm": lambda x, y: F.rms_norm(x, (SIZE,), y[0]),
    "group_norm": lambda x, y: F.group_norm(x[None], 2, y[0], y[1]),
    "batch_norm": lambda x, y: F.batch_norm(x * y, None, None, y[0], y[1], training=True),
    "normalize": lambda x, y: F.normalize(x),
    "embedding": lambda x, y: F.embedding(ROWS, x),
    "cross_entropy": lambda x, y: F.cross_entropy(x, ROWS),
    "nll_loss": lambda x, y: F.nll_loss(x, ROWS),
    "mse_loss": lambda x, y: F.mse_loss(x, y),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y),
    "kl_div": lambda x, y: F.kl_div(x, y),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x, y),
    "cosine_similarity": lambda x, y: F.cosine_similarity(x, y + 0.1),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], x[None]),
    "conv2d": lambda x, y: F.conv2d(x[None, None], y[None, None, :2, :2]),
    "conv_transpose1d": lambda x, y: F.conv_transpose1d(x[None], y[:, :, None]),
    "max_pool2d": lambda x, y: F.max_pool2d(x[None], 2),
    "avg_pool2d": lambda x, y: F.avg_pool2d(x[None], 2),
    "interpolate": lambda x, y: F.interpolate(x[None], scale_factor=2.0),
    "rfft": lambda x, y: torch.fft.rfft(x),
    "select_scatter": lambda x, y: x.select_scatter(y[0], 0, 1),
    "slice_scatter": lambda x, y: x.slice_scatter(y[:2], 0, 1, 3),
    "to complex": lambda x, y: torch.complex(x, y).conj(),
    "type": lambda x, y: x.to(torch.float32).double(),
}

# Inside a program. The numbers differ from layout to layout, as they do in eager.
LAYOUTS: Mapping[str, Layout] = {
    "plain": lambda x: x,
    "conjugate": torch.conj,
    "negative": lambda x: torch._neg_view(torch.neg(x)),
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(SIZE, SIZE),
    "unaligned": lambda x: F.pad(x.flatten(), (1, 0))[1:].view(SIZE, SIZE),
}


KINDS = ("real", "complex")
# float64 on both sides; only the order of sums may differ.
TOLERANCE = 1e-9

# What a conjugate or a negative goes through most often, and what nobody else writes in place.
CORE = (
    "mul",
    "add",
    "sub",
    "div",
    "pow",
    "addcmul",
    "where",
    "mm",
    "mm of adjoints",
    "bmm",
    "mv",
    "dot",
    "vdot",
    "addmm",
    "linear",
    "einsum",
    "sum",
    "mean",
    "norm",
    "cumprod",
    "abs",
    "sgn",
    "exp",
    "sqrt",
    "reciprocal",
    "cat",
    "index_put",
    "scatter",
    "in place",
    "in place through a view",
    "expand",
    "solve",
    "fft",
    "irfft",
)


def operators_of(kind: str) -> dict[str, Operator]:
    """Returns the operators of real or of complex numbers."""
    return {**ANY, **(COMPLEX if kind == "complex" else REAL)}


def layouts_of(kind: str) -> dict[str, Layout]:
    """Returns the layouts in which such numbers can lie."""
    return {n: f for n, f in LAYOUTS.items() if n != "conjugate" or kind == "complex"}


class Sweep(nn.Module):
    """Applies each operator to two matrices of its own, laid out in the given ways in turn."""

    def __init__(self, functions: Sequence[Operator], layouts: Sequence[Layout], kind: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def numbers() -> nn.Parameter:
            parts = torch.rand(2, SIZE, SIZE, generator=generator, dtype=torch.float64) * 0.6 + 0.2
            return nn.Parameter(torch.complex(*parts) if kind == "complex" else parts[0])

        self.first = nn.ParameterList(numbers() for _ in functions)
        self.second = nn.ParameterList(numbers() for _ in functions)
        self.functions, self.layouts = tuple(functions), tuple(layouts)

    def forward(self, scale: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        operands = zip(self.first, self.second, strict=True)
        for place, (x, y) in enumerate(operands):
            function, layout = self.functions[place], self.layouts[place % len(self.layouts)]
            result = function(layout(x * scale), layout(y * scale))
            weights = torch.linspace(0.5, 1.5, result.numel(), dtype=torch.float64)
            weights = weights.view(result.shape)
            if result.is_complex():
                result = (result * torch.polar(weights, weights)).imag
            total = total + (result * weights).sum()
        return total


def wrong_operators(
    chosen: Mapping[str, Operator], layouts: Sequence[Layout], kind: str, backend: str
) -> dict[str, float]:
    """Compiles a training step; returns the operators whose gradients differ, and by how much."""
    model = Sweep(list(chosen.values()), layouts, kind)
    expected, one = copy.deepcopy(model), torch.ones(())
    want = expected(one)
    want.backward()
    loss = lazyinline.compile_step(model, backend=backend)(one)
    errors = {"loss": float((loss - want.detach()).abs() / want.detach().abs())}
    for place, name in enumerate(chosen):
        for ours, theirs in ((model.first, expected.first), (model.second, expected.second)):
            errors[name] = max(
                errors.get(name, 0.0), gradient_error(ours[place].grad, theirs[place].grad)
            )
    return {name: error for name, error in errors.items() if not error <= TOLERANCE}


def gradient_error(have: Tensor | None, want: Tensor | None) -> float:
    """Returns the relative error of a gradient; infinite where only one side has one."""
    if have is None or want is None:
        return 0.0 if have is want else math.inf
    return float((have - want).norm() / (1 + want.norm()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--dtype", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--layout", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    options = parser.parse_args()
    for kind in options.dtype:
        chosen = operators_of(kind)
        for name, layout in layouts_of(kind).items():
            if name in options.layout:
                start = time.process_time()
                wrong = wrong_operators(chosen, [layout], kind, options.backend)
                seconds = time.process_time() - start
                verdict = f"differ: {wrong}" if wrong else "equal eager"
                print(f"{len(chosen)} {kind}, {name}: {verdict} ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
