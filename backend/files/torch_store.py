"""Adapter: the on-disk store, and the folder in which Inductor builds; checked before every use.

    entries/<key>              one JSON document; its first line holds its format and its digest
    entries/.new-<key>.lock    held by the process that makes what the entry will name
    objects/<digest>.so        one shared object, named by its own bytes
    key                        signs the files that are saved here

Nothing in it is trusted: an entry is read as data (never unpickled), only from a directory and a
file that are the user's own and that nobody else can write to, and only if its digest and its key
are right. Whatever is wrong is a warning and a miss. A file appears under its name complete or not
at all, so any number of processes may read, write and clear at once.

A store keeps the results of compiles in the user's cache, another one the C++ kernels that are
built, in Inductor's folder (:mod:`..kernels.bundles`).

Files in Inductor's folder are loaded, too, so they must be the user's own. Inductor takes any
folder; the default one has a known name, in a place where anybody may create it first.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import logging
import os
import pathlib
import secrets
import stat
import struct
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from filelock import FileLock, Timeout

from ...reuse.errors import CacheError, CacheWarning

DIRECTORY_VARIABLE = "LAZYINLINE_CACHE_DIR"
SWITCH_VARIABLE = "LAZYINLINE_CACHE"
SIZE_VARIABLE = "LAZYINLINE_CACHE_MAX_BYTES"
DEFAULT_MAX_BYTES = 2 << 30
# The share of the limit that a trim leaves, so that not every write has to make room.
_KEPT_SHARE = 0.8
_STALE_S = 3600.0
_MAGIC = b"lazyinline cache 1 "
_OFF = ("0", "off", "no", "false")
# A link leads out of the directory, and opening a pipe would wait for its writer.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_ENTRIES, _OBJECTS, _KEY = "entries", "objects", "key"
# The errors of decoding a malformed entry, which is data from a disk: it may not end a compile.
_BAD_ENTRY = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, AssertionError)
_TEMPORARY = ".new-"  # how the name of a file that is being written begins

T = TypeVar("T")
_LOG = logging.getLogger("lazyinline")


@dataclass(frozen=True)
class CacheInfo:
    """Counts the contents of a cache directory."""

    directory: pathlib.Path  # where it is
    num_entries: int  # results of passes: derivatives, kernel lists, memory plans
    num_objects: int  # compiled shared objects
    num_bytes: int  # size of all files
    max_bytes: int  # size at which the least recently used ones go

    def __str__(self) -> str:
        return (
            f"{self.directory}\n"
            f"  {self.num_entries} entries, {self.num_objects} compiled objects, "
            f"{self.num_bytes / 2**20:.1f} of {self.max_bytes / 2**20:.0f} MiB"
        )


def default_directory() -> pathlib.Path:
    """Returns the cache directory: ``LAZYINLINE_CACHE_DIR``, or one in the user's cache home."""
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if chosen:
        return pathlib.Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(home) if home else pathlib.Path.home() / ".cache") / "lazyinline"


def open_cache() -> DiskCache | None:
    """Returns the user's cache, or None where it is turned off or cannot be used (a warning)."""
    is_off = os.environ.get(SWITCH_VARIABLE, "").strip().lower() in _OFF
    return None if is_off else open_store(default_directory())


def open_store(directory: pathlib.Path) -> DiskCache | None:
    """Returns the store in a directory, or None where it cannot be used (a warning)."""
    try:
        return DiskCache(directory, max_bytes())
    except (CacheError, OSError, RuntimeError) as error:
        warnings.warn(f"The cache is not used: {error}", CacheWarning, stacklevel=2)
        return None


def max_bytes() -> int:
    """Returns the limit: ``LAZYINLINE_CACHE_MAX_BYTES`` (CacheError if no number), or 2 GiB."""
    text = os.environ.get(SIZE_VARIABLE, "")
    if text and not text.isdigit():
        raise CacheError(f"{SIZE_VARIABLE}={text!r} is not a number of bytes.")
    return int(text) if text else DEFAULT_MAX_BYTES


class DiskCache:
    """A cache directory, made if it is not there; :meth:`trim` makes room beyond its limit.

    Raises CacheError if others may write to it, or it is not the user's own; OSError if it cannot
    be made.
    """

    def __init__(self, directory: pathlib.Path, limit_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.directory = directory.absolute()
        self._max_bytes = limit_bytes
        self._is_writable = True
        self._sound: set[str] = set()  # digests of objects that were found to be right
        for folder in (self.directory, self.directory / _ENTRIES, self.directory / _OBJECTS):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(folder)

    # ---- entries -------------------------------------------------------------------------

    def read(self, key: str) -> Any:
        """Returns what was stored under a key, or None if there is nothing that can be used."""
        path = self.directory / _ENTRIES / key
        try:
            content = _read_own(path)
            return None if content is None else _opened(content, key)
        except (_UnusableError, OSError, ValueError, RecursionError) as error:
            self.reject(key, str(error))
            return None

    def decoded(self, key: str, decode: Callable[[Any], T]) -> tuple[T] | None:
        """Returns what ``decode`` makes of an entry, in a tuple; None if there is none to use."""
        data = self.read(key)
        if data is None:
            return None
        try:
            return (decode(data),)
        except MissingObjectError:
            return None
        except _BAD_ENTRY as error:
            self.reject(key, f"it cannot be read ({type(error).__name__}: {error})")
            return None

    def write(self, key: str, value: Any) -> None:
        """Stores a value that JSON can hold."""
        body = json.dumps({"key": key, "value": value}, separators=(",", ":")).encode()
        self._put(self.directory / _ENTRIES / key, _MAGIC + _digest(body).encode() + b"\n" + body)

    def reject(self, key: str, reason: str) -> None:
        """Takes an entry out that cannot be used, and warns."""
        self._reject(self.directory / _ENTRIES / key, "cache entry", reason)

    @contextlib.contextmanager
    def claimed(self, keys: Iterable[str], wait_s: float = 0.0) -> Iterator[list[str]]:
        """Yields those keys that nobody else is making, after a wait for each of the others."""
        with contextlib.ExitStack() as held:
            mine = []
            for key in keys:
                lock = self.directory / _ENTRIES / f"{_TEMPORARY}{key}.lock"
                try:
                    held.enter_context(FileLock(lock).acquire(timeout=wait_s))
                except Timeout:
                    continue
                except (OSError, NotImplementedError) as error:
                    # Some network file systems have no locks. Nothing wrong can come of that: what
                    # two processes make is the same, and each file appears complete or not at all.
                    _LOG.info("%s may be made by several processes at once: %s", key, error)
                mine.append(key)
            yield mine

    # ---- files that were made here -------------------------------------------------------

    def signature(self, content: bytes) -> str:
        """Returns what shows that this user, here, has written something; "" if nothing can.

        The key is made once, and stays where only the user can read or change it.
        """
        path = self.directory / _KEY
        with contextlib.suppress(_UnusableError, OSError):
            if not path.exists() and self._is_writable:
                with whole_file(path) as file:
                    file.write(secrets.token_bytes(32))
            if key := _read_own(path):
                return hmac.new(key, content, hashlib.sha256).hexdigest()
        return ""

    def put_object(self, digest: str, content: bytes) -> None:
        """Stores a shared object that came in a file, if its bytes have that digest."""
        is_it = digest.isalnum() and _digest(content) == digest
        if is_it and self.object_path(digest) is None:
            self._put(self.directory / _OBJECTS / f"{digest}.so", content)

    # ---- objects -------------------------------------------------------------------------

    def loaded(self, digest: str, load: Callable[[pathlib.Path], T]) -> T:
        """Returns what ``load`` makes of an object; MissingObjectError if there is no sound one."""
        if not isinstance(digest, str) or not digest.isalnum():
            raise ValueError("the name of an object")
        path = self.object_path(digest)
        if path is None:
            raise MissingObjectError
        try:
            return load(path)
        except OSError as error:
            if path.exists():  # else another process has just made room
                self._reject(path, "compiled object", str(error))
            raise MissingObjectError from error

    def object_path(self, digest: str) -> pathlib.Path | None:
        """Returns the path of a shared object, if its bytes have the digest in its name."""
        path = self.directory / _OBJECTS / f"{digest}.so"
        if digest in self._sound:
            return path
        try:
            content = _read_own(path)
            if content is None:
                return None
            if _digest(content) != digest:
                raise _UnusableError("its content is not what it was stored with")
        except (_UnusableError, OSError) as error:
            self._reject(path, "compiled object", str(error))
            return None
        self._sound.add(digest)
        return path

    def write_object(self, source: pathlib.Path) -> str | None:
        """Copies a shared object in; returns its digest, or None if it cannot be read or kept."""
        try:
            content = source.read_bytes()
        except OSError:
            return None
        digest = _digest(content)
        path = self.directory / _OBJECTS / f"{digest}.so"
        if self.object_path(digest) is None and not self._put(path, content):
            return None
        return digest

    def _reject(self, path: pathlib.Path, what: str, reason: str) -> None:
        warnings.warn(
            f"The {what} {path} is not used and will be made anew: {reason}.",
            CacheWarning,
            stacklevel=5,
        )
        with contextlib.suppress(OSError):
            path.unlink()

    # ---- the whole directory -------------------------------------------------------------

    def info(self) -> CacheInfo:
        """Counts files and bytes."""
        files = list(self._files())
        sizes = {path: status.st_size for path, status in files}
        entries = sum(path.parent.name == _ENTRIES for path in sizes)
        total = sum(sizes.values())
        return CacheInfo(self.directory, entries, len(sizes) - entries, total, self._max_bytes)

    def clear(self) -> CacheInfo:
        """Deletes every file; returns what there was. Processes that run keep what they loaded."""
        info = self.info()
        for path, _ in self._files(with_temporary=True):
            with contextlib.suppress(OSError):
                path.unlink()
        return info

    def trim(self) -> None:
        """Deletes the least recently used files if there are too many bytes, and old leftovers."""
        files, now = [], time.time()
        for path, status in self._files(with_temporary=True):
            if path.name.startswith(_TEMPORARY):
                if abs(now - status.st_mtime) > _STALE_S:  # of a killed writer, or a lock
                    with contextlib.suppress(OSError):
                        path.unlink()
                continue
            # Used later than now: the clock was set back, and it has not been used since.
            used = status.st_mtime if status.st_mtime <= now + _STALE_S else 0.0
            files.append((used, status.st_size, path))
        total = sum(size for _, size, _ in files)
        if total <= self._max_bytes:
            return
        for _, size, path in sorted(files):
            if total <= self._max_bytes * _KEPT_SHARE:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size

    def _files(self, *, with_temporary: bool = False) -> Iterator[tuple[pathlib.Path, Any]]:
        for folder in (self.directory / _ENTRIES, self.directory / _OBJECTS):
            with contextlib.suppress(OSError), os.scandir(folder) as found:
                for item in found:
                    if item.name.startswith(_TEMPORARY) and not with_temporary:
                        continue
                    with contextlib.suppress(OSError):  # another process may take it away
                        status = item.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                            yield pathlib.Path(item.path), status

    def _put(self, path: pathlib.Path, content: bytes) -> bool:
        """Makes a file appear complete under its name; says whether it did."""
        if not self._is_writable:
            return False
        try:
            with whole_file(path) as file:
                file.write(content)
        except FileNotFoundError:
            return False  # another process cleared the cache before it was complete
        except OSError as error:
            self._is_writable = False  # one warning, not one per entry
            warnings.warn(
                f"The cache {self.directory} cannot be written to, so nothing more is stored: "
                f"{error}.",
                CacheWarning,
                stacklevel=4,
            )
            return False
        return True


class MissingObjectError(Exception):
    """A compiled object is gone or was not trusted: the entry that needs it is made anew."""


class _UnusableError(Exception):
    """Says why a file is not trusted."""


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yields a file to write, which appears only when it is complete; an OSError leaves nothing."""
    handle, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=Path(path).absolute().parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _read_own(path: pathlib.Path) -> bytes | None:
    """Reads a regular file that only this user can write, and notes its use; None if missing."""
    try:
        handle = os.open(path, _READ_FLAGS)
    except FileNotFoundError:
        return None
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise _UnusableError("it is not a plain file")
        if reason := not_private(status):
            raise _UnusableError(reason)
        content = file.read()
    with contextlib.suppress(OSError):
        os.utime(path)  # the least recently used go first
    return content


def _opened(content: bytes, key: str) -> Any:
    """Checks and parses the bytes of an entry."""
    head, _, body = content.partition(b"\n")
    if not head.startswith(_MAGIC):
        raise _UnusableError("it is in another format")
    if head != _MAGIC + _digest(body).encode():
        raise _UnusableError("its digest is wrong: it is damaged")
    document = json.loads(body)
    if not isinstance(document, dict) or document.get("key") != key:
        raise _UnusableError("it was stored under another key")
    return document.get("value")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _check_private(folder: pathlib.Path) -> None:
    reason = not_private(folder.stat())
    problem = f"{folder} cannot be trusted, since {reason}" if reason else why_exchangeable(folder)
    if problem:
        raise CacheError(
            f"{problem}. Make it your own (chmod 700), or choose another directory with "
            f"{DIRECTORY_VARIABLE}."
        )


_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def not_private(status: os.stat_result) -> str:
    """Says why somebody else may have written this; empty if nobody else can."""
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS:
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def why_not_trusted(path: Path) -> str:
    """Says why a file or folder may not be the user's own work; empty if it is."""
    path = path.absolute()
    try:
        reason = _not_own(path.stat())
        # Whoever can write to a folder above can put another one in its place, unless the folder is
        # sticky, as ``/tmp`` is.
        return f"{path} cannot be trusted, since {reason}" if reason else why_exchangeable(path)
    except OSError as error:
        return str(error)


def is_own(path: Path) -> bool:
    """Whether nobody but the user can have written a file, whatever lies above it."""
    try:
        return not _not_own(path.stat())
    except OSError:
        return False


def _not_own(status: os.stat_result) -> str:
    reason = not_private(status)
    return reason if reason and not _is_of_own_group(status) else ""


def why_exchangeable(path: Path) -> str:
    """Says which folder above a path lets somebody else put another one in its place."""
    for folder in path.resolve().parents:
        status = folder.stat()
        if status.st_uid not in (0, os.geteuid()):
            return f"{path} cannot be trusted: {folder} belongs to user {status.st_uid}"
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            return f"{path} cannot be trusted: everybody may rename what is in {folder}"
    return ""


def _is_of_own_group(status: os.stat_result) -> bool:
    """Whether only the user and the user's own group, which many systems create, may write."""
    if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH or os.geteuid() == 0:
        return False
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(status.st_gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}


# ---- the folder in which Inductor builds ---------------------------------------------------------


_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_ELF_64 = b"\x7fELF\x02\x01"  # little-endian; an object in another format is not looked into
_ELF_HEADER = struct.Struct("<40xQ10xHH")  # where the table of sections is, their size and number
_ELF_HEADER_BYTES = 64


def own_folder() -> Path:
    """Returns Inductor's folder, or another one for this process if others can write to it."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = Path(os.environ.get(_VARIABLE) or default_cache_dir()).absolute()
    reason = _why_refused(folder)
    if reason:
        private = _private_folder()
        warnings.warn(
            f"{reason}. Kernels are built in {private} instead. Make the folder your own "
            f"(chmod 700) after a look at what is in it, or name another one in {_VARIABLE}.",
            CacheWarning,
            stacklevel=2,
        )
        # Inductor itself writes the folder it chose there, and looks there next time.
        os.environ[_VARIABLE] = str(private)
        return private
    return folder


class DamagedObjectError(OSError):
    """A shared object that is not whole, or somebody else's. Inductor finds it no more."""


def sound_object(path: Path) -> Path:
    """Returns the path of an object that may be loaded, else raises DamagedObjectError.

    A part may be missing, which would end the process, or others can have written it.
    """
    if is_own(path) and is_whole_object(path):
        return path
    # Only in Inductor's own folder is it ours to delete; then Inductor builds it again.
    if path.resolve().is_relative_to(own_folder().resolve()):
        with contextlib.suppress(OSError):
            path.unlink()
    raise DamagedObjectError(f"{path} is damaged or not the user's own, and was not loaded")


def is_whole_object(path: Path) -> bool:
    """Whether a shared object reaches to its end: the table of sections, which is written last."""
    with path.open("rb") as file:
        head = file.read(_ELF_HEADER_BYTES)
        if not head.startswith(_ELF_64):
            return len(head) == _ELF_HEADER_BYTES
        if len(head) < _ELF_HEADER_BYTES:
            return False
        start, size, count = _ELF_HEADER.unpack_from(head)
        return bool(start) and start + size * count <= os.fstat(file.fileno()).st_size


def sound_code(cache: type, load: Callable[[str], Any]) -> Any:
    """Returns one of Inductor's code caches that loads what is whole and the user's own."""

    def checked(path: str, key: str) -> Any:
        return load(str(sound_object(Path(path))))

    # A new class each time: a class does not load again what it has loaded.
    return type("Sound", (cache,), {"cache": {}, "_load_library_inner": staticmethod(checked)})


def _why_refused(folder: Path) -> str:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return why_not_trusted(folder)


@functools.cache
def _private_folder() -> Path:
    """Returns a folder next to the cache that is kept, or one for this process."""
    chosen = default_directory() / "inductor"
    if not _why_refused(chosen):
        return chosen
    return Path(tempfile.mkdtemp(prefix="lazyinline_"))
