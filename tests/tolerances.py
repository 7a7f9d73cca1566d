"""How far two right answers may lie apart, from the operation alone.

Where a program runs the very kernel that eager runs, on operands that lie alike, both give the same
bits on every CPU, and a test may say so. A sum that is made in another order is only as close as
here: whose order it is, and whether products are rounded before they are added, depends on the CPU,
on its vectors' width, on the number of threads, and, in a BLAS, on where operands lie.
"""

import torch
from torch import Tensor


def sum_tolerance(dtype: torch.dtype, num_terms: int, size: float = 1.0) -> dict[str, float]:
    """Returns tolerances for sums of products that were made in whatever order.

    A sum of so many terms is off by no more than half a unit in the last place per term, on either
    side.

    Args:
        dtype: in which sums are kept.
        num_terms: products in one sum.
        size: the largest sum of the terms' magnitudes.
    """
    return {"rtol": 0.0, "atol": num_terms * torch.finfo(dtype).eps * size}


def product_tolerance(a: Tensor, b: Tensor, bias: Tensor | None = None) -> dict[str, float]:
    """Returns tolerances for the matrix product ``a @ b``, with or without a bias."""
    sizes = a.abs() @ b.abs()
    if bias is not None:
        sizes = sizes + bias.abs()
    num_terms = a.shape[-1] + (bias is not None)
    return sum_tolerance(a.dtype, num_terms, float(sizes.max()))
