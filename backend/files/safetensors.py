"""The format of safetensors, which other programs read and write: tensors by name, and no code.

The first eight bytes are the length of a JSON header with dtype, shape and place of each tensor;
their bytes follow without a gap. https://github.com/huggingface/safetensors has the rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...reuse.errors import FileError
from .container import read_json, to_json

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # as in the library


def pieces_of(tensors: Mapping[str, torch.Tensor]) -> list[bytes | memoryview]:
    """Returns a file of tensors in pieces; raises FileError for a dtype that the format lacks."""
    header: dict[str, Any] = {}
    pieces: list[bytes | memoryview] = []
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise FileError(f"{name} is of {tensor.dtype}, which safetensors has no name for.")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        pieces.append(_bytes_of(tensor.detach().contiguous()))
    text = to_json(header)
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return [len(text).to_bytes(_LENGTH_BYTES, "little") + text, *pieces]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


@dataclass(frozen=True)
class Described:
    """Describes a tensor, as a header does."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def read_tensors(
    source: Any, size: int, check: Callable[[str, Described], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a file, by name, in their order; raises FileError if it breaks a rule.

    ``check`` raises for a tensor that is not wanted.
    """
    length = int.from_bytes(source.read(_LENGTH_BYTES), "little")
    if length > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise FileError("the header is longer than the part")
    header = read_json("the header", source.read(length))
    header.pop("__metadata__", None)
    rows = [(*_described(name, entry), name) for name, entry in header.items()]
    end = 0
    for begin, row_end, described, name in sorted(rows, key=lambda row: row[:2]):
        if begin != end:
            raise FileError(f"bytes before {name} belong to no tensor")
        end = row_end
        check(name, described)
        # Not in huge pages: a system without free ones makes some, which takes longer than reading.
        tensor = torch.empty(described.shape, dtype=described.dtype, device="cpu")
        if source.readinto(_bytes_of(tensor)) != row_end - begin:
            raise FileError(f"the part ends within {name}")
        yield name, tensor
    if end != size - _LENGTH_BYTES - length:
        raise FileError("there are bytes behind the last tensor")


def _described(name: str, entry: Any) -> tuple[int, int, Described]:
    try:
        dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        is_plain = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, ValueError, LookupError):
        is_plain = False
    if not is_plain:
        raise FileError(
            f"the header says that {name[:40]} is {str(entry)[:80]}, which is no tensor"
        )
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise FileError(f"{name} has another number of bytes than its shape says")
    return begin, end, Described(dtype, tuple(shape))
