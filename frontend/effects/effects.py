"""Side effects of a forward: results that each call writes, or what a program would not do.

Potentials fill a dictionary that they are given; models keep an intermediate result in an
attribute. Such values are results of the program, and each call writes them to their places. A
place that the forward reads before it writes is state, which this does not support.

Changes outside the model or in its arguments are found after the run. Printing and logging are
refused before they happen.

Outside state is, for example, a list that hooks fill, a counter or a cache. All that the forward
can reach is recorded before it can be changed: the contents of hooks, the globals and closure
variables of each function as it begins, classes and Python modules. After the run all changes are
undone, and the eager run makes them. A function that sets a closure variable (``nonlocal``) is
refused as it begins.

Code may set an attribute in a module's ``__dict__``, without ``nn.Module.__setattr__``. So the
dicts of all modules are copied before the run and compared after it. An attribute that the forward
sets in this way but does not read is ignored, because every run sets it again.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn

from ...reuse import torch_pytree
from ...reuse.errors import CaptureError, VerifyError
from ...reuse.evidence.functions import captured_set
from ...reuse.evidence.module_state import HOOK_TABLES, Places, module_state
from ...reuse.evidence.reads import Reads, outside_name
from ...reuse.freeze import Freezer, Snapshot
from ...reuse.ir.types import TensorType
from ...reuse.kinds import ABSENT, is_of_library, is_own_patch, put_entries, reachable
from ...reuse.torch_names import global_hook_tables
from ..tracing.frames import user_line
from ..tracing.torch_tracing import is_traced

# ---- values that a forward leaves in its arguments and in attributes of modules ----------------

OnContents = Literal["refuse", "keep", "drop"]
"""The ways to treat such values: refuse the forward, write them at each call, or drop them."""

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and keyword arguments of a call."""


@dataclass(frozen=True)
class ArgumentPlace:
    """A dictionary or list in the arguments, by the path of keys and positions to it."""

    path: tuple[Any, ...]

    def __str__(self) -> str:
        return "a dictionary or list among the arguments"

    def find(self, call: Arguments) -> Any:
        """Returns the caller's object."""
        found: Any = call
        for step in self.path:
            found = found[step]
        return found

    def put(self, call: Arguments, content: Any) -> None:
        """Gives the caller's object the content that the forward would leave, in-place."""
        found = self.find(call)
        if type(found) is list:
            found[:] = content
        else:
            put_entries(found, content)


@dataclass(frozen=True, eq=False)
class AttributePlace:
    """An attribute of a module."""

    module: nn.Module
    name: str

    def __str__(self) -> str:
        return f"attribute {self.name!r} of {type(self.module).__name__}"

    def put(self, call: Arguments, content: Any) -> None:
        """Sets the attribute."""
        # Without ``__setattr__``, which may be the module's own and have other effects.
        vars(self.module)[self.name] = content


Place: TypeAlias = ArgumentPlace | AttributePlace  # where a forward leaves a value


@dataclass(frozen=True)
class Kept:
    """The places that a call writes to; ``returned`` is the argument that it returns, if one."""

    places: tuple[Place, ...] = ()
    returned: ArgumentPlace | None = None

    def __bool__(self) -> bool:
        return bool(self.places) or self.returned is not None

    @property
    def has_arguments(self) -> bool:
        """Whether a place is in the arguments."""
        return any(isinstance(p, ArgumentPlace) for p in (*self.places, self.returned))

    def why_not(self, call: Arguments, is_held: Callable[[Any], bool]) -> str:
        """Returns why a call's arguments cannot be filled: they are shared; "" if they can."""
        parts = torch_pytree.changeable_parts(call)
        if len(set(map(id, parts))) < len(parts) or any(map(is_held, parts)):
            return "it fills a dictionary or list that is given twice, or that the model holds"
        return ""


NOTHING_KEPT = Kept()


class GivenContainers:
    """The dictionaries and lists in a call's arguments, with their content before the run."""

    def __init__(self, call: Arguments) -> None:
        self._before = [(path, held, held.copy()) for path, held in _containers(call)]

    def put_back(self) -> list[tuple[ArgumentPlace, Any]]:
        """Undoes the forward's changes; returns the changed places with their new content."""
        changed = []
        for path, held, before in self._before:
            content = held.copy()
            if not same_entries(content, before):
                changed.append((ArgumentPlace(path), content))
                ArgumentPlace(()).put(held, before)
        return changed

    def place_of(self, result: Any) -> ArgumentPlace | None:
        """Returns the place of the container that the forward returns, if it returns one."""
        found = (ArgumentPlace(path) for path, held, _ in self._before if held is result)
        return next(found, None)


def _containers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields the plain dictionaries and lists in arguments, except that of keyword arguments."""
    if type(value) not in (dict, list, tuple):
        return
    if type(value) is not tuple and path != (1,):
        yield path, value
    pairs = value.items() if type(value) is dict else enumerate(value)
    for step, inner in pairs:
        yield from _containers(inner, (*path, step))


def same_entries(now: Any, before: Any) -> bool:
    """Whether two dictionaries, or two lists, have the same objects as entries, in their order."""
    if len(now) != len(before):
        return False
    if isinstance(now, Mapping):
        return [*now] == [*before] and all(map(operator.is_, now.values(), before.values()))
    return all(map(operator.is_, now, before))


# ---- what a run changes outside and in modules ------------------------------------------------

_CACHED = type(functools.lru_cache(len))
_MAX_SEARCHED = 10_000
_FORWARD_TABLES = ("_forward_hooks", "_forward_pre_hooks")


class _Change(NamedTuple):
    """One change: its place in words, a function to set a value there, the old and new value."""

    what: str
    put: Callable[[Any], None]
    before: Any
    now: Any
    is_kept: bool = False


class _Changes:
    """Records state before one run; afterwards finds what has changed, and undoes it.

    ``what`` says what was found to be changed; it is empty if nothing was.
    """

    holder = ""  # who holds a changed object, for messages

    def __init__(self, on_holder: Callable[[Any], None]) -> None:
        self.contents = Snapshot(on_holder=on_holder)
        self.what = ""
        self._found: list[_Change] = []

    def find(self, reads: Reads) -> list[Any]:
        """Finds what a finished run has changed; returns the new values."""
        what, new = self.contents.what_changed()

        def same(now: Any, before: Any) -> bool:
            # If contents of objects changed, an equal value may have been equal by that change.
            freeze = Freezer().freeze
            return now is before or (not what and bool(freeze(now) == freeze(before)))

        self._found = list(self._changes(reads, same))
        blamed = [change for change in self._found if not change.is_kept]
        if blamed:
            self.what = blamed[0].what
        elif what:
            self.what = f"{what} that {self.holder}"
        return [*new, *(change.now for change in blamed)]

    def _changes(self, reads: Reads, same: Callable[[Any, Any], bool]) -> Iterator[_Change]:
        """Yields the names that are bound to other objects now."""
        raise NotImplementedError

    def undo(self) -> None:
        """Undoes the changes that were found."""
        self.contents.undo()
        for change in self._found:
            change.put(change.before)


class OuterChanges(_Changes):
    """Records state outside the model before the Python of one run can change it."""

    holder = "it is given or finds outside the model"

    def __init__(self, places: Places) -> None:
        super().__init__(self.meets)
        self.hooked = ""  # a module with forward hooks
        self._tables: dict[int, tuple[Any, Mapping[str, Any], dict[str, Any]]] = {}
        self._nested: set[types.CodeType] = set()  # code of functions that the run itself defines
        self._ran: set[types.CodeType] = set()
        self._caches: dict[int, tuple[Any, Any]] = {}
        for path, module in places:
            for table in _FORWARD_TABLES:
                for hook in module_state(module).get(table, {}).values():
                    self.hooked = self.hooked or f"{path or 'the model'} ({type(module).__name__})"
                    self.contents.look_into(hook)
        for hooks in global_hook_tables("forward"):
            for hook in hooks.values():
                self.contents.look_into(hook)

    def found(self, owner: Any, name: str, value: Any) -> None:
        """Records the value of a name outside the model, the first time it is looked up."""
        if not is_of_library(owner):
            self._look_into(value)
        elif type(value) in (list, dict, set):
            self.contents.look_into_library(value)
        if type(owner) is dict or isinstance(owner, (type, types.ModuleType)):
            self.meets(owner)

    def meets(self, owner: Any) -> None:
        """Records the names in a scope, class or Python module before code can write there."""
        if id(owner) not in self._tables and not is_of_library(owner):
            table: Any = owner if type(owner) is dict else vars(owner)
            known = {key: held for key, held in table.items() if not is_own_patch(held)}
            self._tables[id(owner)] = (owner, table, known)

    def began(self, frame: types.FrameType) -> str:
        """Records the contents of the closure variables of a function that begins.

        Returns the name of one that the function may set, for which it is refused.
        """
        code = frame.f_code
        if code not in self._ran:
            self._ran.add(code)
            self._nested.update(c for c in code.co_consts if isinstance(c, types.CodeType))
        if code in self._nested:
            return ""  # its closure variables belong to the run
        variables = frame.f_locals
        for name in code.co_freevars:
            if name in variables:
                self._look_into(variables[name])
        return min(captured_set(code), default="")

    def _look_into(self, value: Any) -> None:
        if is_cache(value):
            self._caches.setdefault(id(value), (value, value.cache_info()))
        self.contents.look_into(value)

    def caches_used(self) -> list[Any]:
        """Returns the function caches that were used."""
        return [cache for cache, before in self._caches.values() if cache.cache_info() != before]

    def empty_caches(self) -> torch.Tensor | None:
        """Empties function caches that hold a fake tensor of the trace; returns one of those."""
        found = None
        for cache, _ in self._caches.values():
            held = find_fake(gc.get_referents(cache))
            if held is not None:
                # A hit at the next call would return a fake tensor.
                found = held
                cache.cache_clear()
        return found

    def _changes(self, reads: Reads, same: Callable[[Any, Any], bool]) -> Iterator[_Change]:
        # Only names that are used by the code which ran: other threads may change others.
        names = reads.names()
        for owner, table, known in self._tables.values():
            for name in () if same_entries(table, known) else names:
                now, before = table.get(name, ABSENT), known.get(name, ABSENT)
                if not same(now, before):
                    yield _Change(outside_name(owner, name), _putting(owner, name), before, now)


def is_cache(value: Any) -> bool:
    """Whether a value is a function with an ``lru_cache``."""
    return type(value) is _CACHED


def find_fake(values: Iterable[Any]) -> torch.Tensor | None:
    """Returns a fake tensor of a trace that is reachable from some values, if there is one."""
    # Bounded, because an object may lead to all that a library holds.
    found = itertools.islice(reachable(values), _MAX_SEARCHED)
    return next((x for x in found if isinstance(x, torch.Tensor) and is_traced(x)), None)


def _putting(owner: Any, name: str) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        if isinstance(owner, dict):
            owner.pop(name, None) if value is ABSENT else owner.__setitem__(name, value)
        elif value is not ABSENT:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)

    return put


_TABLES = ("_parameters", "_buffers", "_modules", *HOOK_TABLES)
_NEW_STATE = nn.Module().__dict__
_PLAIN_TYPES = (bool, int, float, str, type(None))


class ModuleChanges(_Changes):
    """Records the attributes of the modules that one run uses, as they were before it.

    ``on_class`` is called with each class of a module or attribute, because code may write there.
    """

    holder = "an attribute holds"

    def __init__(self, places: Places, on_class: Callable[[Any], None]) -> None:
        super().__init__(on_class)
        self._on_class = on_class
        self.met: dict[int, nn.Module] = {}  # outside the model's tree, whose attributes were read
        self._made: dict[int, nn.Module] = {}
        self._written: dict[tuple[int, Any], str] = {}
        self._kept: set[tuple[int, Any]] = set()
        self._before: dict[int, tuple[nn.Module, list[tuple[dict[Any, Any], dict[Any, Any]]]]] = {}
        for _, module in places:
            self._note(module)

    def meets(self, module: nn.Module) -> None:
        """Records a module before it is read or changed, unless the run itself made it."""
        if id(module) in self._before or id(module) in self._made:
            return
        state = module_state(module)
        # The run makes a module that has no attributes besides those of every module: its first
        # read is in ``nn.Module.__init__``.
        if state.keys() <= _NEW_STATE.keys() and not any(map(state.get, _TABLES)):
            self._made[id(module)] = module
        else:
            self.met[id(module)] = module
            self._note(module)

    def writes(self, module: nn.Module, name: str) -> None:
        """Notes that an attribute is set; a module without attributes was made by the run."""
        self._written.setdefault((id(module), name), user_line())
        self.meets(module)

    def to_keep(self, reads: Reads) -> list[tuple[AttributePlace, Any]]:
        """Returns the attributes that the run has set to computed values without reading before."""
        found = []
        for id_, name in self._written:
            module = self._before[id_][0] if id_ in self._before else None
            now = ABSENT if module is None else module_state(module).get(name, ABSENT)
            read = reads.attributes.get((id_, name))
            leaves = torch_pytree.flatten(now)[0]
            is_plain = all(isinstance(x, torch.Tensor) or type(x) in _PLAIN_TYPES for x in leaves)
            is_fresh = is_plain and (read is None or read.value is now)
            if module is not None and is_fresh and find_fake(leaves) is not None:
                reads.attributes.pop((id_, name), None)
                self._kept.add((id_, name))
                found.append((AttributePlace(module, name), now))
        return found

    def _note(self, module: nn.Module) -> None:
        self._on_class(type(module))
        # Copies, because code may write without nn.Module.__setattr__, which is what we patch.
        state = module_state(module)
        tables = [state, *(state[name] for name in _TABLES if name in state)]
        self._before[id(module)] = (module, [(table, dict(table)) for table in tables])

    def find(self, reads: Reads) -> list[Any]:
        """Finds the changes of a finished run that matter; see ``_counts``."""
        new = super().find(reads)
        self._before.clear()
        return new

    def _changes(self, reads: Reads, same: Callable[[Any, Any], bool]) -> Iterator[_Change]:
        for module, tables in self._before.values():
            for table, before in tables:
                for name in () if same_entries(table, before) else {**before, **table}:
                    held, now = before.get(name, ABSENT), table.get(name, ABSENT)
                    if same(now, held) or not self._counts(module, table, name, now, reads):
                        continue
                    key, what = (id(module), name), f"attribute {name!r} of {type(module).__name__}"
                    if line := self._written.get(key):  # else it was set in the __dict__
                        what = f"{what} at {line}"
                    yield _Change(what, _putting(table, name), held, now, key in self._kept)

    def _counts(self, module: nn.Module, table: Any, name: Any, now: Any, reads: Reads) -> bool:
        """Whether a change matters: it was set by code, read before, or holds a fake tensor."""
        # Not the slot for compiled calls, say, which another thread fills and empties meanwhile.
        read = reads.attributes.get((id(module), name))
        was_other = read is not None and read.value is not now
        state = module_state(module)
        is_hook = any(state.get(hooks) is table for hooks in HOOK_TABLES)
        is_set = (id(module), name) in self._written or is_hook
        return is_set or was_other or find_fake([now]) is not None


# ---- effects that a program would not have -------------------------------------------------------


OnEffects = Literal["refuse", "undo"]
"""Whether to refuse a forward with side effects, or to undo them and go on."""


class EffectError(CaptureError):
    """The forward has a side effect at each call, which a program would not have."""


class Effects:
    """Watches one run for side effects.

    The policy ``"refuse"`` raises after the run; ``"undo"`` undoes the changes and goes on, for a
    program that is only inspected or written to a file.
    """

    def __init__(self, changes: OuterChanges, policy: OnEffects) -> None:
        self.changes = changes
        self.policy = policy
        self._error: EffectError | None = None
        self._kept: torch.Tensor | None = None

    def refuse(self, doing: str, why: str = "") -> None:
        """Refuses a side effect, or a change of a state that a program would not follow."""
        self.note(doing, why)
        if self._error is not None:
            raise self._error

    def refuse_captured(self, name: str, where: str) -> None:
        """Refuses a function that sets a closure variable, under any policy: this is not undone."""
        self._error = EffectError(
            f"The model's forward may set the captured variable {name} (nonlocal) at {where}, and "
            "a compiled program would not at each call. Keep it in an attribute of an object."
        )
        raise self._error

    def note(self, doing: str, why: str = "") -> None:
        """Refuses at the end of the run, for an effect that must first be completed."""
        if self.policy == "refuse":
            self._error = EffectError(f"The model's forward {doing} at {user_line()}{why}.")

    def leaves_set(self, setting: str) -> None:
        """Refuses a forward that leaves a setting of PyTorch changed."""
        if self.policy == "refuse":
            raise EffectError(
                f"The model's forward leaves a setting of PyTorch's changed ({setting}), and a "
                "compiled program would leave it as it is."
            )

    def check_arguments(self, before: Any, arguments: Any) -> None:
        """Refuses a forward that changes a list or a dictionary that it is given."""
        leaves, spec = before
        now, now_spec = torch_pytree.flatten_outer(arguments)
        same = now_spec == spec and all(a is b for a, b in zip(now, leaves, strict=False))
        if not same and self.policy == "refuse":
            self._error = self._error or EffectError(
                "The model's forward changes a list, dictionary or object among its arguments, "
                "which a compiled program would leave as it is."
            )

    def check_result(self, arguments: Any, result: Any, is_held: Callable[[Any], bool]) -> None:
        """Refuses a result with a list of the caller's or the model's: a program returns a copy."""
        given = set(map(id, torch_pytree.changeable_parts(arguments)))
        for part in torch_pytree.changeable_parts(result):
            if self.policy == "refuse" and (id(part) in given or is_held(part)):
                raise EffectError(
                    f"The model's forward returns a {type(part).__name__} that it was given, that "
                    "the model holds, or twice: a compiled program would return a copy."
                )
            given.add(id(part))

    def check_containers(self, given: bool, held: Iterable[Any], results: Sequence[Any]) -> None:
        """Refuses objects whose state a program could not update, among results and in containers.

        If containers were given, which the run replaced by copies, also attributes that were read.
        """
        formless = torch_pytree.formless(results)
        kept = torch_pytree.formless(torch_pytree.flatten_outer(list(held))[0]) if given else ""
        if formless:
            text = f"returns or fills a {formless} whose state is more than tensors and numbers"
        elif kept:
            text = f"is given a cache, and reads a {kept} of its own that may be the same one"
        else:
            return
        raise EffectError(f"The model's forward {text}.")

    def find(self, reads: Reads) -> None:
        """Finds what a finished run has changed outside."""
        reads.closures.release()
        new = self.changes.find(reads)
        cached = self.changes.empty_caches()
        self._kept = cached if cached is not None else find_fake(new)

    def refusal(self) -> EffectError | None:
        """Returns the error for the side effects of the run, if it had any."""
        if self.policy == "undo":
            return self._error
        if self._kept is not None:
            line = f"; {self.changes.hooked} has a forward hook" if self.changes.hooked else ""
            return EffectError(
                f"The model's forward keeps a tensor ({TensorType.of(self._kept)}) outside of it, "
                f"at each call anew{line}."
            )
        if self._error is None and self.changes.what:
            return EffectError(
                f"The model's forward changes {self.changes.what}, and a compiled program could "
                "not keep doing that at every call."
            )
        return self._error


def refuse_traced(result: Any) -> None:
    """Raises VerifyError for a result that holds a fake tensor of a capture."""
    fake = find_fake([result])
    if fake is not None:
        raise VerifyError(
            f"A {TensorType.of(fake)} tensor of a capture was left where the model found it, and "
            "its result has no numbers. This is a bug of lazyinline: please report the model's "
            "Python that keeps tensors, and run it without lazyinline."
        )
