"""The recorder: watches a model run under the tracer and decides which blocks become calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
from torch import nn

from ...reuse import torch_pytree
from ...reuse.containers import numbered
from ...reuse.errors import CaptureError
from ...reuse.evidence.evidence import Evidence
from ...reuse.evidence.module_state import (
    Places,
    has_hooks,
    module_state,
    raw_attribute,
    walk_modules,
)
from ...reuse.evidence.reads import Reads
from ...reuse.ir.program import UserInput
from ...reuse.ir.types import TensorType
from ...reuse.torch_names import own_attributes
from ..checks.refusals import (
    DIFFERENTIATES,
    refuse_hidden_tensors,
    refuse_read_attributes,
    refuse_recurrent,
)
from ..marks import recompute_mark
from ..tracing.custom_function import TENSOR, CustomFunction
from ..tracing.torch_patches import intercepted
from ..tracing.torch_tracing import (
    Tracer,
    is_fake,
    is_mode_switch,
    new_fake_mode,
    plain_tensor_access,
    profiled_calls,
    unprofiled,
    user_line,
)
from .assemble import ResultTree
from .blocks import Blocks, dissolve
from .effects import EffectError, Effects
from .init_key import InitKey, InitKeys
from .inside_changes import Change, InsideChanges, is_plain
from .outside_changes import OutsideChanges
from .outside_tensors import OutsideTensors
from .regions import Region, SharingDecision, Sizes, Template
from .shared_calls import TemplateMaker
from .signatures import (
    CallSignature,
    ambient_modes,
    argument_names,
    bind_arguments,
    forward_signature,
    freeze_arguments,
)

CallKey = tuple[type, torch_pytree.TreeSpec, CallSignature, Any, tuple[tuple[str, str], ...]]
_MAX_CLOSURES_PER_BLOCK = 64
_OTHER_CALL = "it is called in another way than earlier instances"
_REENTRANT_CHECKPOINT = ("torch.utils.checkpoint", "CheckpointFunction")


class UnsettledError(CaptureError):
    """The forward changed plain data that the model holds; running it again may not.

    Carries the finished trace, and ``redo``, which makes the change again.
    """

    def __init__(
        self,
        text: str,
        recorder: Recorder,
        results: list[Any],
        tree: ResultTree,
        redo: Callable[[], None],
    ) -> None:
        super().__init__(text)
        self.recorder = recorder
        self.results = results
        self.tree = tree
        self.redo = redo

    def undo(self) -> None:
        """Puts back what :attr:`redo` changed again."""
        self.recorder.undo()


@dataclass(frozen=True)
class _Changes:
    """What a run changed in the model, as a text; whether the next may not; what does it again."""

    what: str
    may_settle: bool
    redo: Callable[[], None]


class Recorder:
    """Watches the model run and keeps the outer graph, its regions and its templates."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        sizes: Sizes | None = None,
        effects: str = "refuse",
    ) -> None:
        self.model = model
        self.sizes = sizes
        self.blocks = blocks
        places = walk_modules(model)
        self.paths = {id(module): path for path, module in reversed(places)}
        self.inside = InsideChanges(model)
        self.effects = Effects(OutsideChanges(model), effects)
        self.reads = Reads(self.inside.contents, self.effects.changes.found, is_root=True)
        self.root = Region(model, "", type(model).__name__, reads=self.reads)
        self.tracer = Tracer(sizes.mode if sizes else new_fake_mode(), self._add_node)
        self.decisions: list[SharingDecision] = []
        self.init_keys = InitKeys()
        self.decided: list[Region | None] = []  # for each decision the region, if it was traced
        self.tensors = OutsideTensors(self.tracer, places)
        self._current = self.root
        self._templating = TemplateMaker(self.tracer, self.tensors)
        self._templates: dict[Any, list[Template]] = {}
        self._signatures: dict[type, inspect.Signature | None] = {}
        self._traced: dict[type, tuple[CallKey, str]] = {}
        self._ran: set[tuple[Any, type]] = set()
        self._changed: list[Change] = []
        self._quiet = 0
        self._num_nodes = 0

    def let_go(self) -> None:
        """Lets go of the model's tensors; what was recorded stays, in cycles, until collected."""
        self.tracer.forget_tensors()
        self.tensors.let_go()
        self.reads.attributes.clear()

    def _add_node(self, node: torch.fx.Node) -> None:
        self._current.items.append(node)
        self._num_nodes += 1

    def _fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._bookkeeping():
            return self.tensors.fake_of(tensor)

    # ---- what the watcher is told --------------------------------------------------------

    def substitute(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gives the model fakes for its own tensors."""
        return tensor if self._quiet else self._fake_of(tensor)

    def read(self, module: nn.Module, name: str) -> None:
        """Notes an attribute read, in the innermost region."""
        if self._quiet or module is self.tracer.root:
            return
        with self._bookkeeping():
            self.inside.meets(module)
            self._current.reads.attribute(module, name)

    def read_all(self, module: nn.Module) -> None:
        """Notes that every attribute of a module was read."""
        if self._quiet or module is self.tracer.root:
            return
        with self._bookkeeping():
            self.inside.meets(module)
            self._current.reads.all_attributes(module)

    def write(self, module: nn.Module, name: str, value: Any) -> bool:
        """Notes a module before the first write, to put it back; says whether to leave it as it is.

        Writing back a tensor that was changed in place (``self.count += 1``) writes nothing.
        """
        if self._quiet or module is self.tracer.root:
            return False
        if value is self.tensors.fakes.get(id(raw_attribute(module, name)), self):
            return True
        with self._bookkeeping():
            self.inside.writes(module, name)
        return False

    def custom_function(self, function: type, args: Any, proceed: Callable[..., Any]) -> Any:
        """Records the application of a custom autograd function as one operator."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if self._quiet or not tensors or _module_of(function).startswith("torch._"):
            return proceed(*args)
        if (_module_of(function), function.__name__) == _REENTRANT_CHECKPOINT:
            run_function, _, *inputs = args
            with self.checkpoint("full"):
                return run_function(*inputs)
        args = [self._fake_of(a) if isinstance(a, torch.Tensor) else a for a in args]
        layout = tuple(TENSOR if isinstance(a, torch.Tensor) else a for a in args)
        operands = [self.tensors.node_of(a) for a in args if isinstance(a, torch.Tensor)]
        with self.tracer.untraced():
            result = proceed(*args)
        node = self.tracer.call(CustomFunction(function, layout), operands)
        if isinstance(result, torch.Tensor):
            self.tracer.track(result, node)
        else:
            for index, part in enumerate(result):
                if isinstance(part, torch.Tensor):
                    self.tracer.track(part, self.tracer.item(node, index))
        return result

    def output(self, emit: Callable[[], None], where: str) -> bool:
        """Holds back what the forward prints or logs; says whether that is so."""
        if not self._quiet:
            self.effects.hold_back(emit, where)
        return not self._quiet

    def text(self, tensor: torch.Tensor) -> None:
        """Refuses to write out a tensor."""
        if not self._quiet:
            self.effects.asks_for_text(tensor)

    def setting(self, what: str) -> None:
        """Refuses a forward that sets a state of PyTorch."""
        if not self._quiet:
            self.effects.sets(what)

    def gradient_hook(self, doing: str) -> None:
        """Refuses a hook in a backward: it would be put on a fake tensor's and never run."""
        if not self._quiet:
            raise CaptureError(
                f"The model's forward {doing} at {user_line()}. A "
                "compiled program cannot call it: use a torch.autograd.Function with that "
                "backward, or put the hook on a parameter, outside the forward."
            )

    def backward(self) -> None:
        """Refuses a forward that runs a backward of its own."""
        if not self._quiet:
            raise CaptureError(
                f"{type(self.model).__name__} cannot be captured: its forward {DIFFERENTIATES} "
                f"(torch.autograd.grad, torch.func, backward) at "
                f"{user_line()}, which cannot be followed to operators. Run it outside the model."
            )

    def run_state(self, tensor: torch.Tensor, name: str) -> None:
        """Refuses to take what a tensor says of this run for what it says in every run."""
        if self._quiet:
            return
        what = {"grad": "gradient", "_version": "version"}.get(name, "memory")
        raise CaptureError(
            f"The model's forward asks for the {what} of a {TensorType.of(tensor)} tensor at "
            f"{user_line()} (Tensor.{name}), which changes from run to run, and a compiled program "
            "would use this run's answer at every call. Pass it in, or keep it in a buffer."
        )

    # ---- block calls ---------------------------------------------------------------------

    def call(self, module: nn.Module, args: Any, kwargs: Any, proceed: Callable[..., Any]) -> Any:
        """Replaces a block's call by a call node where the evidence allows it."""
        if self._quiet:
            return proceed(module, *args, **kwargs)
        if self.effects.policy == "refuse":
            refuse_recurrent(module)
        if module is self.model:
            return proceed(module, *args, **kwargs)
        if not self.blocks.wants(module, self._current):
            return self._run_inline(module, args, kwargs, proceed)
        with self._bookkeeping(), unprofiled():
            arguments = self._bind(module, args, kwargs)
            leaves, spec = torch_pytree.flatten(arguments)
            if any(isinstance(x, torch.Tensor) and not is_fake(x) for x in leaves):
                args, kwargs = self._with_fakes(args, kwargs)
                arguments = self._bind(module, args, kwargs)
                leaves, spec = torch_pytree.flatten(arguments)
            places = walk_modules(module)
            marks = _recompute_marks(places)
            signature = CallSignature(module, leaves, self.tensors.real_ids)
            key = (type(module), spec, signature, ambient_modes(), marks)
            plain = not self.tensors.have_attributes(leaves)
            known = self._templates.setdefault(key, []) if plain else []
            earlier = self._traced.get(type(module))
            reason, compared = "", ""
            if not known and earlier is not None:
                compared, reason = earlier[1], _other_call(key, earlier[0], arguments)
            init_key = self.init_keys.key(module)
            for template in self._likeliest_first(known, init_key):
                reason, compared = template.evidence.mismatch_at(places), template.region.path
                if not reason:
                    result = self._call_shared(template, module, leaves, places)
                    self._decide(module, init_key, None, compared=compared)
                    return result
            if reason:
                self.blocks.differs(module)
            path = self.paths.get(id(module), "")
            reads = self.reads.of_block()
            region = Region(module, path, type(module).__name__, self._current, reads=reads)
            region.recompute, region.init_key = recompute_mark(module), init_key
        made, why, result = self._trace_block(region, args, kwargs, proceed, arguments, leaves)
        if not self.blocks.pays(region):
            dissolve(self._current, {region})
            return result
        if made is not None and len(known) < _MAX_CLOSURES_PER_BLOCK:
            known.append(made)
        self._traced[type(module)] = (key, region.path)
        self._decide(module, init_key, region, reason=why or reason, compared=compared)
        return result

    @staticmethod
    def _likeliest_first(known: Sequence[Template], init_key: InitKey) -> list[Template]:
        """Orders what a block may share with: made with equal arguments first, then the newest."""
        return sorted(reversed(known), key=lambda t: bool(init_key.differing(t.region.init_key)))

    def checkpoint(self, policy: str) -> AbstractContextManager[None]:
        """What runs inside is to be computed again in the backward."""
        if self._quiet or not torch.is_grad_enabled():
            return nullcontext()
        return self._part("checkpoint", f"{self._current.path}.checkpoint".lstrip("."), policy)

    def _run_inline(
        self, module: nn.Module, args: Any, kwargs: Any, proceed: Callable[..., Any]
    ) -> Any:
        """Runs a module that is no block; one marked for recompute makes a part of its own."""
        before, mark = self._num_nodes, recompute_mark(module)
        path = self.paths.get(id(module), "")
        with self._part(type(module).__name__, path, mark) if mark else nullcontext():
            result = proceed(module, *args, **kwargs)
        self.blocks.ran(module, self._num_nodes - before)
        return result

    @contextmanager
    def _part(self, name: str, path: str, mark: str) -> Iterator[None]:
        """Makes what runs inside a region of its own, marked for recompute."""
        parent = self._current
        region = Region(self.model, path, name, parent, reads=parent.reads, recompute=mark)
        self._current = region
        try:
            yield
        finally:
            self._current = parent
            parent.items.extend(_unwrapped(region))

    @contextmanager
    def _bookkeeping(self) -> Iterator[None]:
        """What capture itself reads and writes inside is not the model's doing."""
        self._quiet += 1
        try:
            with plain_tensor_access():
                yield
        finally:
            self._quiet -= 1

    def _bind(self, module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
        if "forward" in module_state(module):
            return bind_arguments(forward_signature(module), args, kwargs)
        if type(module) not in self._signatures:
            self._signatures[type(module)] = forward_signature(module)
        return bind_arguments(self._signatures[type(module)], args, kwargs)

    def _decide(
        self,
        module: nn.Module,
        init_key: InitKey,
        traced: Region | None,
        reason: str = "",
        compared: str = "",
    ) -> None:
        path = self.paths.get(id(module), "")
        name, shared = type(module).__name__, traced is None
        self.decisions.append(SharingDecision(path, name, shared, reason, compared, key=init_key))
        self.decided.append(traced)

    def _with_fakes(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        leaves, spec = torch_pytree.flatten((args, kwargs))
        leaves = [self._fake_of(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        result: tuple[Any, Any] = torch_pytree.unflatten(leaves, spec)
        return result

    def _trace_block(
        self,
        region: Region,
        args: Any,
        kwargs: Any,
        proceed: Callable[..., Any],
        arguments: Mapping[str, Any],
        leaves: Sequence[Any],
    ) -> tuple[Template | None, str, Any]:
        module = region.module
        before = freeze_arguments(arguments)
        arg_tensors = [(i, x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        arg_nodes = {self.tensors.node_of(x): i for i, x in reversed(arg_tensors)}
        known = [
            (x, self.tensors.node_of(x))
            for x in (*(x for _, x in arg_tensors), *self.tensors.fakes.values())
        ]
        self._current.items.append(region)
        self._current = region
        try:
            result = proceed(module, *args, **kwargs)
        finally:
            assert region.parent is not None
            self._current = region.parent
            # A read is noted once, where it happened; whoever is around learns of it here.
            self._current.reads.absorb(region.reads)
        with self._bookkeeping():
            evidence = Evidence(module, region.reads)
            results = torch_pytree.flatten(result)
            nodes = [
                self.tensors.node_of(r) if isinstance(r, torch.Tensor) else None for r in results[0]
            ]
            template, reason = self._templating.make(
                region, evidence, arguments, arg_nodes, results, nodes
            )
            self.tensors.restore(known)
        if any(has_hooks(inner, "forward") for _, inner in walk_modules(module)):
            template, reason = None, "it has forward hooks, which may keep what they see"
        if evidence.side_effect or before != freeze_arguments(arguments):
            template, reason = None, evidence.side_effect or "its forward changes an argument"
        if isinstance(results[1], torch_pytree.Nested):
            template, reason = None, "it returns an object that holds tensors"
        if self.tensors.have_attributes((*leaves, *results[0])):
            template, reason = None, "a tensor that it is given or returns has attributes"
        if template is not None:
            self._note_nested(module, evidence)
        return template, reason, result

    def _function_ran(self, frame: Any) -> None:
        code = frame.f_code
        self.effects.changes.began(frame)
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        reads = self._current.reads
        if reads is not self.reads:
            reads.function(frame)
        elif (code, type(first)) not in self._ran:  # another layer's finds what this one found
            reads.function(frame)
            if isinstance(first, nn.Module):
                self._ran.add((code, type(first)))

    def _note_nested(self, module: nn.Module, evidence: Evidence) -> None:
        if self._current.reads is not self.reads:
            self._current.reads.nested.append((module, evidence))

    def _call_shared(
        self, template: Template, module: nn.Module, leaves: Sequence[Any], places: Places
    ) -> Any:
        """Replaces an instance that agrees with a template by one call node."""
        path = self.paths.get(id(module), "")
        result = self._templating.call(template, module, leaves, path)
        self._note_nested(module, template.evidence)
        self.reads.like(template.evidence.plain_reads, dict(places))
        return result

    def undo(self) -> None:
        """Puts back what the run changed and what was then changed again."""
        self.inside.contents.put_back()
        for change in self._changed:
            change.undo()
        self.effects.put_back(self.reads)

    # ---- the whole run -------------------------------------------------------------------

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], ResultTree]:
        """Runs the model once under fake tensors, and leaves everything as it was before.

        Returns:
            The flat results (tensors as nodes), and their tree; see :class:`.assemble.OutputTree`.

        Raises:
            CaptureError: if its Python cannot be traced, or changed what cannot be restored.
            EffectError: if it does more at each call than compute.
            UnsettledError: if it changed plain data, which another run may find settled.
        """
        leaves, spec = torch_pytree.flatten((tuple(args), dict(kwargs)))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        names = argument_names(self.model, args, kwargs)
        outcomes: list[tuple[list[Any], ResultTree]] = []

        def trace(flat: Sequence[torch.Tensor]) -> None:
            self._note_inputs(tensors, flat, names)
            outcomes.append(self._outcome(leaves, spec, flat))
            self.tensors.refuse_changed_attributes()
            refuse_read_attributes(tensors, self.reads.names())

        try:
            self.tracer.run(trace, [self._input_fake(t) for t in tensors])
        except BaseException:
            self.effects.put_back(self.reads)
            raise
        finally:
            # Also of a run that failed: nothing of a capture may stay behind in the model.
            inside = self._undo_inside()
        results, tree = outcomes[0]
        self._refuse_changes(inside, results, tree)
        return results, tree

    def _note_inputs(
        self, tensors: Sequence[torch.Tensor], fakes: Sequence[torch.Tensor], names: Sequence[str]
    ) -> None:
        for index, (leaf, fake) in enumerate(zip(tensors, fakes, strict=True)):
            node = self.tracer.node_of(fake)
            assert node is not None
            node.meta["val"] = fake
            self.tensors.sources[node] = UserInput(index, names[index], leaf.requires_grad)

    def _outcome(
        self, leaves: Sequence[Any], spec: torch_pytree.TreeSpec, fakes: Sequence[torch.Tensor]
    ) -> tuple[list[Any], ResultTree]:
        """Calls the model with fakes in place of its tensors; returns what it returned, flat.

        Containers that it was given are stand-ins. They follow the result, as the forward left
        them, so that a run can bring the caller's own up to date.
        """
        rest = iter(fakes)
        filled = [next(rest) if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = torch_pytree.unflatten(filled, spec)
        before = torch_pytree.flatten_outer((args, kwargs))
        known = numbered(torch_pytree.containers((args, kwargs)))
        given = [leaf for leaf in before[0] if id(leaf) in known]
        with intercepted(self), profiled_calls(self._function_ran):
            output = self.model(*args, **kwargs)
        self.effects.check_arguments(before, (args, kwargs))
        result = (output, given) if given else output
        flat, tree = torch_pytree.flatten(result, known)
        held = (read.value for read in self.reads.attributes.values())
        self.effects.check_containers(bool(given), held, flat)
        refuse_hidden_tensors(flat)
        nodes = [self.tensors.node_of(x) if isinstance(x, torch.Tensor) else x for x in flat]
        return nodes, (tree, bool(given))

    def _undo_inside(self) -> _Changes:
        """Puts back what the run changed in the model's attributes and in what they hold."""
        contents = self.inside.contents
        new, change_again = contents.changed_values(), contents.put_forward()
        what = contents.put_back()
        what = f"{what} that an attribute holds" if what else ""
        self._changed = changes = self.inside.put_back(self.reads)
        if contents.lasting:
            self.effects.put_back(self.reads)
            contents.refuse_lasting()
        if changes:
            what = f"attribute {changes[0].name!r} of {type(changes[0].module).__name__}"

        def redo() -> None:
            change_again()
            for change in changes:
                change.redo()

        may_settle = all(map(is_plain, new)) and all(change.may_settle() for change in changes)
        return _Changes(what, may_settle, redo)

    def _refuse_changes(self, inside: _Changes, results: list[Any], tree: ResultTree) -> None:
        """Raises for what the run changed: a program would not change it at each call.

        Plain data may be written once only (a configuration that is noted at the first call), so
        the capture tries again with it. An object that is changed may be changed at each call.
        """
        if not inside.what:
            self.effects.end(self.reads)
            outside = self.effects.unsettled()
            if outside:
                raise UnsettledError(outside, self, results, tree, self.effects.redo)
            return
        self.effects.put_back(self.reads)
        text = (
            f"The model's forward changes {inside.what}, and a compiled program could not keep "
            "doing that at every call. Register it as a buffer and change it in place "
            "(add_, copy_), or return it."
        )
        if inside.may_settle:
            raise UnsettledError(text, self, results, tree, inside.redo)
        raise EffectError(text)

    def _input_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = self.sizes.fake(tensor) if self.sizes else self.tracer.to_fake(tensor.detach())
        vars(fake).update(own_attributes(tensor))
        return fake.requires_grad_(tensor.requires_grad)


def _unwrapped(region: Region) -> list[torch.fx.Node | Region]:
    """Hands a region's mark on to the one block call in it, if there is nothing else in it."""
    items = [i for i in region.items if isinstance(i, Region) or not is_mode_switch(i)]
    first = items[0] if items else None
    if isinstance(first, Region) and len(items) == 1:
        first.parent, first.recompute = region.parent, first.recompute or region.recompute
        return items
    if isinstance(first, torch.fx.Node) and "call" in first.meta:
        site = first.meta["call"]
        if all(isinstance(i, torch.fx.Node) and i.args[0] is first for i in items[1:]):
            first.meta["call"] = replace(site, recompute=site.recompute or region.recompute)
            return items
    return [region] if items else []


def _recompute_marks(places: Places) -> tuple[tuple[str, str], ...]:
    """Returns which modules inside a block are marked, and how."""
    marks = ((path, recompute_mark(module)) for path, module in places[1:])
    return tuple((path, mark) for path, mark in marks if mark)


def _other_call(key: CallKey, earlier: CallKey, arguments: Mapping[str, Any]) -> str:
    """Says in which way a call differs from an earlier one of the class."""
    names = [name for name, _ in torch_pytree.flatten_with_names(arguments)]
    detail = key[2].difference(earlier[2], names)
    if key[1] != earlier[1]:
        detail = "its arguments are nested in another way"
    elif not detail and key[3] != earlier[3]:
        detail = "a mode such as grad mode or autocast is another"
    elif not detail and key[4] != earlier[4]:
        detail = "its sub-modules are marked for recompute in another way"
    return f"{_OTHER_CALL}: {detail}" if detail else _OTHER_CALL


def _module_of(cls: type) -> str:
    return getattr(cls, "__module__", "") or ""
