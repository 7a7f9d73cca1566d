"""A file of plain parts: one zip, stored, whose every byte is checked before it is used.

The first part, ``manifest.json``, has the digest of each other part, and a signature of the machine
that wrote them. Nothing is compressed, so that no part is larger than the file, and dates are
fixed, so that the same parts give the same bytes. No part is ever written to a disk under its name.

The digest of tensors is of sums of their words, by rows and by columns: to hash every byte takes
five times as long. It finds damage, and a forger may write any numbers anyway.

A part of tensors is in the format of safetensors, which other programs read and write: tensors by
name, and no code. The first eight bytes are the length of a JSON header with dtype, shape and place
of each; their bytes follow without a gap. https://github.com/huggingface/safetensors has the rules.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import stat
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import torch

from ...reuse.errors import FileError, LazyInlineError
from ...reuse.ir.types import TensorType, contiguous_stride
from .torch_store import DiskCache, whole_file

Content: TypeAlias = Sequence[bytes | bytearray | memoryview]
"""The bytes of a part, in pieces; what is not ``bytes`` are the numbers of one tensor."""

MANIFEST, TENSORS = "manifest.json", ".safetensors"
_FORMAT = "lazyinline file 1"
_DATE = (1980, 1, 1, 0, 0, 0)
_NAME = re.compile(r"[a-z][a-z0-9]*(?:[./][a-z0-9]+)*", re.ASCII)
_LENGTHS_AT = 26  # in a part's local header: the lengths of its name and of its extra field
_MAX_TEXT_BYTES = 1 << 28  # of a part that is read as text: far more than a program has
_ROW_BYTES, _NUM_ROWS = 1 << 12, 256  # of a tensor, of which rows and columns are summed at once


def write_parts(
    path: str | os.PathLike[str], parts: Mapping[str, Content], store: DiskCache | None
) -> None:
    """Writes parts, in order, into a file that appears whole or not at all; a store signs them."""
    listed = {name: digest_of(content) for name, content in parts.items()}
    signature = store.signature(_to_sign(listed)) if store is not None else ""
    manifest = {"format": _FORMAT, "parts": listed, "signature": signature}
    with whole_file(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, content in ((MANIFEST, [to_json(manifest)]), *parts.items()):
            entry = zipfile.ZipInfo(name, _DATE)
            entry.create_system, entry.external_attr = 3, 0o600 << 16
            entry.file_size = sum(map(len, content))
            with archive.open(entry, "w") as part:
                for piece in content:
                    part.write(piece)


class CallError(FileError):
    """A file cannot be opened in this way, or here; it is not damaged."""


class Parts:
    """The parts of an open file, by name; ``is_signed`` if this machine's own cache wrote them."""

    def __init__(
        self, file: BinaryIO, archive: zipfile.ZipFile, size: int, store: DiskCache | None
    ) -> None:
        self._file, self._archive = file, archive
        self._entries = _checked_entries(archive, size)
        self._listed: Mapping[str, str] = {}
        said = self.read(MANIFEST)
        manifest, self.digest = read_json(MANIFEST, said), digest_of([said])
        if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
            raise FileError(f"{MANIFEST} has another format than {_FORMAT!r}")
        self._listed = manifest["parts"]
        if self._listed.keys() != self._entries.keys() - {MANIFEST}:
            different = min(self._listed.keys() ^ (self._entries.keys() - {MANIFEST}))
            raise FileError(f"{MANIFEST} lists other parts than there are (see {different!a})")
        self.names = list(self._listed)
        expected = store.signature(_to_sign(self._listed)) if store is not None else ""
        self.is_signed = bool(expected) and manifest["signature"] == expected

    def json(self, name: str) -> Any:
        """Returns the value of a part that is JSON."""
        return read_json(name, self.read(name))

    def read(self, name: str) -> bytes:
        """Returns the bytes of a part that is text."""
        with self.stream(name) as part:
            if part.left > _MAX_TEXT_BYTES:
                raise FileError("it is larger than any text")
            return part.read(part.left)

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[_Stored]:
        """Yields a part to be read to its end, where its digest is checked."""
        entry = self._entry(name)
        with self._archive.open(entry):  # which checks its local header
            part = _Stored(self._file, entry)
        try:
            yield part
        except FileError as error:
            raise FileError(f"{name}: {error}") from None
        found = part.digest.hexdigest()
        if part.left or found != self._listed.get(name, found):  # the manifest has none
            raise FileError(f"{name} is damaged: its digest is not that of the manifest")

    def size_of(self, name: str) -> int:
        """Returns the number of bytes of a part."""
        return self._entry(name).file_size

    def _entry(self, name: str) -> zipfile.ZipInfo:
        if name not in self._entries:
            raise FileError(f"it has no part {name}")
        return self._entries[name]


class _Stored:
    """Reads a part from the file straight into its destination: zipfile would hold it twice."""

    def __init__(self, file: BinaryIO, entry: zipfile.ZipInfo) -> None:
        file.seek(entry.header_offset + _LENGTHS_AT)
        file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)
        self._file = file
        self.left, self.digest = entry.file_size, hashlib.sha256()  # bytes to read; of those read

    def readinto(self, memory: memoryview) -> int:
        """Fills a tensor with the next bytes of the part; returns how many there were."""
        memory = memory[: self.left]
        count = int(self._file.readinto(memory))  # type: ignore[attr-defined]
        self.left -= count
        self.digest.update(_sums(memory[:count]))
        return count

    def read(self, count: int) -> bytes:
        """Returns up to so many bytes."""
        content = self._file.read(min(count, self.left))
        self.left -= len(content)
        self.digest.update(content)
        return content


@contextlib.contextmanager
def open_parts(path: str | os.PathLike[str], store: DiskCache | None) -> Iterator[Parts]:
    """Opens a file; whatever reading it raises inside the context is one FileError."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise CallError("it is not a plain file")
            with zipfile.ZipFile(file) as archive:
                yield Parts(file, archive, status.st_size, store)
    except FileNotFoundError as error:  # of the file, or of the weights beside it
        raise FileError(f"There is no file {error.filename}.") from None
    except Exception as error:
        cause = error.__cause__ if isinstance(error, FileError) else error
        text = f"{os.fspath(path)} cannot be opened as a compiled program: {reason_of(error)}."
        raise FileError(text) from cause


def reason_of(error: Exception) -> str:
    """Returns why a file cannot be opened; what a file says may raise anything where it is read."""
    text, kind = " ".join(str(error).split()).rstrip("."), type(error).__name__
    if isinstance(error, CallError):
        return text
    if isinstance(error, zipfile.BadZipFile):
        text = f"it is not a whole zip ({text})"
    elif isinstance(error, OSError | MemoryError | LazyInlineError):
        if not isinstance(error, FileError):
            return f"{kind}: {text}"
    else:
        text = f"one of its JSON parts has not the form that save gives it ({kind}: {text})"
    return f"{text}. It is damaged or was changed: copy it again, or save it again"


def _checked_entries(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    entries = archive.infolist()
    found = {entry.filename: entry for entry in entries}
    if len(found) < len(entries) or sum(entry.file_size for entry in entries) > size:
        raise FileError("its parts lie over one another")
    for entry in entries:
        if not _NAME.fullmatch(entry.orig_filename):
            raise FileError(f"{ascii(entry.orig_filename)[:80]} is no name of a part")
        is_plain = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 0x61
        if not is_plain or entry.file_size != entry.compress_size:
            raise FileError(f"{entry.filename} is compressed or encrypted, which no part is")
    return found


def to_json(value: Any) -> bytes:
    """Returns a value as JSON, the same bytes for the same value."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode()


def read_json(part: str, content: bytes) -> Any:
    """Returns the value of a JSON text; a name may not occur twice in an object."""
    try:
        return json.loads(content.decode(), object_pairs_hook=_pairs)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{part} cannot be read as JSON: {error}") from None


def _pairs(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice in one object")
    return found


def _to_sign(listed: Mapping[str, Any]) -> bytes:
    return to_json([_FORMAT, sorted(listed.items())])


def digest_of(content: Content) -> str:
    """Returns the digest of a part."""
    found = hashlib.sha256()
    for piece in content:
        found.update(piece if isinstance(piece, bytes) else _sums(memoryview(piece)))
    return found.hexdigest()


def _sums(numbers: memoryview) -> bytes:
    """Returns sums of words of a tensor by rows and by columns, and the bytes after whole rows.

    Words that changed places in a row are found by the columns, those in a column by the rows.
    """
    end = len(numbers) // _ROW_BYTES * _ROW_BYTES
    rows = np.frombuffer(numbers[:end], "<u8").reshape(-1, _ROW_BYTES // 8)
    squares = [rows[i : i + _NUM_ROWS] for i in range(0, len(rows), _NUM_ROWS)]  # fit into a cache
    found = [square.sum(axis).tobytes() for square in squares for axis in (0, 1)]
    return b"".join([*found, numbers[end:]])


# ---- tensors by name -----------------------------------------------------------------------------


_DTYPE_NAMES = {
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
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # as in the library


def pieces_of(tensors: Mapping[str, torch.Tensor]) -> list[bytes | memoryview]:
    """Returns a file of tensors in pieces; raises FileError for a dtype that the format lacks."""
    header: dict[str, Any] = {}
    pieces: list[bytes | memoryview] = []
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPE_NAMES:
            raise FileError(f"{name} is of {tensor.dtype}, which safetensors has no name for.")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        pieces.append(_bytes_of(tensor.detach().contiguous()))
    text = to_json(header)
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return [len(text).to_bytes(_LENGTH_BYTES, "little") + text, *pieces]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_tensors(
    source: Any, size: int, check: Callable[[str, TensorType], None]
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
    for begin, row_end, type_, name in sorted(rows, key=lambda row: row[:2]):
        if begin != end:
            raise FileError(f"bytes before {name} belong to no tensor")
        end = row_end
        check(name, type_)
        # Not in huge pages: a system without free ones makes some, which takes longer than reading.
        tensor = type_.empty()
        if source.readinto(_bytes_of(tensor)) != row_end - begin:
            raise FileError(f"the part ends within {name}")
        yield name, tensor
    if end != size - _LENGTH_BYTES - length:
        raise FileError("there are bytes behind the last tensor")


def _described(name: str, entry: Any) -> tuple[int, int, TensorType]:
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
    stride = contiguous_stride(tuple(shape))
    return begin, end, TensorType(dtype, tuple(shape), stride, torch.device("cpu"))
