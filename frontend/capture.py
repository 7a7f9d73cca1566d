"""Capture: one run of the model under fake tensors, each different block traced once.

The run leaves an outer graph whose nodes belong to regions. A region is one traced instance of a
marked block; a later instance that agrees with a region's evidence becomes a single call node,
and its Python does not run. :mod:`.assemble` turns regions, call nodes and the glue between them
into a program of closures.
"""

from __future__ import annotations

import gc
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch import nn

from ..reuse import pytree
from ..reuse.errors import CaptureError
from ..reuse.evidence import (
    Evidence,
    Reads,
    TensorPath,
    follow_tensor_path,
    module_state,
    raw_attribute,
    walk_modules,
)
from ..reuse.freeze import Freezer, Identity
from ..reuse.leaf import current_autocast
from ..reuse.program import ModelTensor, Program, Source, UserInput
from ..reuse.types import TensorType
from .decorator import is_marked
from .interception import intercepted
from .torch_tracing import (
    DATA_DEPENDENT_ERRORS,
    Tracer,
    frame_text,
    is_fake,
    new_fake_mode,
    plain_tensor_access,
    profiled_calls,
    user_frame,
)

_MAX_CLOSURES_PER_BLOCK = 64
_EMPTY_MODULE = nn.Module().__dict__


@dataclass(eq=False)
class Region:
    """One traced instance of a block, or the whole model (the root region)."""

    module: nn.Module
    path: str
    name: str
    parent: Region | None = None
    items: list[torch.fx.Node | Region] = field(default_factory=list)
    reads: Reads | None = None
    inputs: list[torch.fx.Node] = field(default_factory=list)
    input_names: list[str] = field(default_factory=list)
    outputs: list[torch.fx.Node] = field(default_factory=list)
    num_calls: int = 1

    def nodes(self) -> list[torch.fx.Node]:
        """All nodes of the region and of the regions inside it, in order."""
        found: list[torch.fx.Node] = []
        for item in self.items:
            found.extend(item.nodes() if isinstance(item, Region) else [item])
        return found


@dataclass(frozen=True)
class OutputLeaf:
    """One leaf of a block's result: a new tensor, an input passed through, or a constant."""

    kind: str  # "new", "input" or "constant"
    index: int = -1
    constant: Any = None
    type: TensorType | None = None
    requires_grad: bool = False
    alias_of: int = -1  # input whose storage a new tensor shares
    storage_offset: int = 0
    prototype: torch.Tensor | None = None


@dataclass(frozen=True)
class Template:
    """What is needed to replace another instance by a call on a region's closure."""

    region: Region
    evidence: Evidence
    bindings: tuple[tuple[str, Any], ...]
    output_leaves: tuple[OutputLeaf, ...]
    output_spec: pytree.TreeSpec


@dataclass(frozen=True)
class CallSite:
    """A call node's meaning: the region whose closure it calls, and the instance's path."""

    region: Region
    path: str


@dataclass(frozen=True)
class SharingDecision:
    """Why one instance was traced, for the report."""

    path: str
    class_name: str
    shared: bool
    reason: str = ""


@dataclass
class CapturedModel:
    """A captured program and what was decided on the way."""

    program: Program
    decisions: list[SharingDecision]
    num_traced: int = 0

    def reasons(self) -> list[SharingDecision]:
        """The instances that were traced although an earlier one of their class existed."""
        return [d for d in self.decisions if not d.shared and d.reason]


def shared_call(*operands: Any) -> Any:
    """Target of call nodes in the outer graph. Never run."""
    raise AssertionError("a call node of the outer graph was executed")


class CustomFunction:
    """A ``torch.autograd.Function`` as one operator, which keeps its own derivative."""

    def __init__(self, function: type, layout: tuple[Any, ...]) -> None:
        self._function = function
        self._layout = layout
        self.__name__ = function.__name__

    def __call__(self, *tensors: Any) -> Any:
        rest = iter(tensors)
        args = [next(rest) if part is _TENSOR else part for part in self._layout]
        return self._function.apply(*args)  # type: ignore[attr-defined]

    def _key(self) -> Any:
        constants = tuple(Freezer().freeze(p) for p in self._layout if p is not _TENSOR)
        places = tuple(p is _TENSOR for p in self._layout)
        return (Identity(self._function), places, constants)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CustomFunction) and other._key() == self._key()

    def __hash__(self) -> int:
        return hash(self._function)


_TENSOR = object()


class Recorder:
    """Watches the model run and keeps the outer graph, its regions and its templates."""

    def __init__(self, model: nn.Module, reuse: str) -> None:
        self.model = model
        self.reuse = reuse
        self.paths = {id(m): p for p, m in model.named_modules()}
        self.root = Region(model, "", type(model).__name__)
        self.tracer = Tracer(new_fake_mode(), self._add_node)
        self.decisions: list[SharingDecision] = []
        self.sources: dict[torch.fx.Node, Source] = {}
        self._names = _tensor_names(model)
        self._current = self.root
        self._fakes: dict[int, torch.Tensor] = {}
        self._outside: dict[int, torch.fx.Node] = {}
        self._keep: list[Any] = []
        self._templates: dict[Any, list[Template]] = {}
        self._writes: dict[tuple[int, str], tuple[nn.Module, str, Any]] = {}
        self._signatures: dict[type, inspect.Signature | None] = {}
        self._literals: set[torch.fx.Node] = set()
        self._fresh: dict[int, nn.Module] = {}
        self._quiet = 0

    def _add_node(self, node: torch.fx.Node) -> None:
        self._current.items.append(node)

    # ---- tensors -------------------------------------------------------------------------

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tracked fake of a real tensor of the model; the same each time."""
        if is_fake(tensor):
            return tensor
        fake = self._fakes.get(id(tensor))
        if fake is None:
            with self._bookkeeping():
                fake = self.tracer.to_fake(tensor)
                self.tracer.track(fake, self.outside_node(tensor))
            self._fakes[id(tensor)] = fake
        return fake

    def outside_node(self, tensor: torch.Tensor) -> torch.fx.Node:
        """Returns the node of a real tensor, made at the first use."""
        node = self._outside.get(id(tensor))
        if node is None:
            node = self.tracer.add_outside_tensor(tensor)
            node.meta["val"] = tensor
            self._outside[id(tensor)] = node
            self._keep.append(tensor)
            self.sources[node] = self._names.get(id(tensor)) or ModelTensor(node.name, tensor)
        return node

    def node_of(self, tensor: torch.Tensor) -> torch.fx.Node:
        """Returns the node of a fake or real tensor."""
        node = self.tracer.node_of(tensor) if is_fake(tensor) else self.outside_node(tensor)
        if node is None:
            raise CaptureError(
                f"A {TensorType.of(tensor)} tensor is used that no traced operator made. "
                "Was it stored by an earlier call, or made in another thread?"
            )
        return self._resolve(node)

    def _resolve(self, node: torch.fx.Node) -> torch.fx.Node:
        """Maps a constant that the tracer added itself to the one node of its tensor."""
        if node.op != "get_attr" or node in self.sources:
            return node
        resolved = self.outside_node(self.tracer.attribute(node))
        if _feeds_only_lifts(node):
            self._literals.add(resolved)
        return resolved

    def resolve_constants(self) -> None:
        """Rewires constants that the tracer added to the one node of each tensor."""
        for node in self.tracer.constants():
            resolved = self._resolve(node)
            if resolved is not node:
                node.replace_all_uses_with(resolved)

    # ---- what the watcher is told --------------------------------------------------------

    def substitute(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gives the model fakes for its own tensors."""
        return tensor if self._quiet else self.fake_of(tensor)

    def read(self, module: nn.Module, name: str) -> None:
        """Adds an attribute read to the evidence of every open region."""
        if not self._quiet and self._current.reads is not None:
            with self._bookkeeping():
                for reads in self._open_reads():
                    reads.attribute(module, name)

    def read_all(self, module: nn.Module) -> None:
        """Adds every attribute of a module to the evidence of every open region."""
        if not self._quiet and self._current.reads is not None:
            with self._bookkeeping():
                for reads in self._open_reads():
                    reads.all_attributes(module)

    def _open_reads(self) -> Iterator[Reads]:
        region: Region | None = self._current
        while region is not None and region.reads is not None:
            yield region.reads
            region = region.parent

    def write(self, module: nn.Module, name: str) -> None:
        """Remembers an attribute's value before the first write, to put it back."""
        if self._quiet or (id(module), name) in self._writes or id(module) in self._fresh:
            return
        with self._bookkeeping():
            if module is self.tracer.root:
                return
            if id(module) not in self.paths and module_state(module).keys() == _EMPTY_MODULE.keys():
                self._fresh[id(module)] = module  # made by the forward itself
            else:
                self._writes[id(module), name] = (module, name, raw_attribute(module, name))

    def custom_function(self, function: type, args: Any, proceed: Callable[..., Any]) -> Any:
        """Records the application of a custom autograd function as one operator."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if self._quiet or not tensors or _module_of(function).startswith("torch."):
            return proceed(*args)
        args = [self.fake_of(a) if isinstance(a, torch.Tensor) else a for a in args]
        layout = tuple(_TENSOR if isinstance(a, torch.Tensor) else a for a in args)
        operands = [self.node_of(a) for a in args if isinstance(a, torch.Tensor)]
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


    # ---- block calls ---------------------------------------------------------------------

    def call(self, module: nn.Module, args: Any, kwargs: Any, proceed: Callable[..., Any]) -> Any:
        """Replaces a marked block's call by a call node where the evidence allows it."""
        if self._quiet or self.reuse == "off" or module is self.model or not is_marked(type(module)):
            return proceed(module, *args, **kwargs)
        with self._bookkeeping():
            args, kwargs = self._with_fakes(args, kwargs)
            arguments = self._bind(module, args, kwargs)
            leaves, spec = pytree.flatten(arguments)
            key = (type(module), spec, self._signature(module, leaves), _ambient_modes())
            known = self._templates.setdefault(key, [])
            reason = ""
            for template in reversed(known):
                reason = template.evidence.mismatch(module)
                if not reason:
                    return self._call_shared(template, module, leaves)
        made, why, result = self._trace_block(module, args, kwargs, proceed, arguments, leaves)
        if made is not None and len(known) < _MAX_CLOSURES_PER_BLOCK:
            known.append(made)
        self._decide(module, shared=False, reason=why or reason)
        return result

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
            return _bind(_forward_signature(module), args, kwargs)
        if type(module) not in self._signatures:
            self._signatures[type(module)] = _forward_signature(module)
        return _bind(self._signatures[type(module)], args, kwargs)

    def _decide(self, module: nn.Module, *, shared: bool, reason: str = "") -> None:
        path = self.paths.get(id(module), "")
        self.decisions.append(SharingDecision(path, type(module).__name__, shared, reason))

    def _with_fakes(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        leaves, spec = pytree.flatten((args, kwargs))
        leaves = [self.fake_of(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        result: tuple[Any, Any] = pytree.unflatten(leaves, spec)
        return result

    def _signature(self, module: nn.Module, leaves: Sequence[Any]) -> Any:
        """Describes the arguments: layouts, which share memory, and other values."""
        places = walk_modules(module)
        freezer = Freezer({id(m): p for p, m in places})
        seen: dict[int, int] = {}
        rows: list[Any] = []
        positions = {id(leaf): i for i, leaf in enumerate(leaves)}
        for path, inner in places:
            state = module_state(inner)
            for name, tensor in (*state["_parameters"].items(), *state["_buffers"].items()):
                position = positions.get(id(self._fakes.get(id(tensor))))
                if position is not None:
                    rows.append(("own tensor", path, name, position))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                memory = seen.setdefault(_storage_id(leaf), len(seen))
                same = seen.setdefault(id(leaf), len(seen))
                offset = leaf.storage_offset()
                rows.append((TensorType.of(leaf), leaf.requires_grad, memory, same, offset))
            else:
                rows.append(freezer.freeze(leaf))
        return _Hashable(tuple(map(_freeze_lists, rows)))

    def _trace_block(
        self,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        proceed: Callable[..., Any],
        arguments: Mapping[str, Any],
        leaves: Sequence[Any],
    ) -> tuple[Template | None, str, Any]:
        path = self.paths.get(id(module), "")
        region = Region(module, path, type(module).__name__, self._current, reads=Reads())
        assert region.reads is not None
        before = _freeze_leaves(leaves)
        arg_tensors = [(i, x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        arg_nodes = {self.node_of(x): i for i, x in reversed(arg_tensors)}
        known = [(x, self.node_of(x)) for x in (*(x for _, x in arg_tensors), *self._fakes.values())]
        self._current.items.append(region)
        self._current = region
        outermost = region.parent is not None and region.parent.reads is None
        profile = profiled_calls(self._function_ran) if outermost else nullcontext()
        try:
            with profile:
                result = proceed(module, *args, **kwargs)
        finally:
            assert region.parent is not None
            self._current = region.parent
        with self._bookkeeping():
            evidence = Evidence(module, region.reads)
            results = pytree.flatten(result)
            nodes = [self.node_of(r) if isinstance(r, torch.Tensor) else None for r in results[0]]
            template, reason = self._make_template(region, evidence, arguments, arg_nodes, results, nodes)
            self._restore_nodes(known)
        if evidence.side_effect or before != _freeze_leaves(leaves):
            template, reason = None, evidence.side_effect or "its forward changes an argument"
        if template is not None:
            self._note_nested(module, evidence)
        return template, reason, result

    def _function_ran(self, frame: Any) -> None:
        for reads in self._open_reads():
            reads.function(frame)

    def _note_nested(self, module: nn.Module, evidence: Evidence) -> None:
        if self._current.reads is not None:
            self._current.reads.nested.append((module, evidence))

    def _restore_nodes(self, known: Sequence[tuple[torch.Tensor, torch.fx.Node]]) -> None:
        """Undoes that an operator inside a block, by returning its operand, took over its name."""
        for tensor, node in known:
            if self.tracer.node_of(tensor) is not node:
                self.tracer.track(tensor, node)
        for key, fake in self._fakes.items():
            if self.tracer.node_of(fake) is not self._outside[key]:
                self.tracer.track(fake, self._outside[key])

    def _make_template(
        self,
        region: Region,
        evidence: Evidence,
        arguments: Mapping[str, Any],
        arg_nodes: Mapping[torch.fx.Node, int],
        flat_result: tuple[list[Any], pytree.TreeSpec],
        result_nodes: Sequence[torch.fx.Node | None],
    ) -> tuple[Template | None, str]:
        inside = set(region.nodes())
        results, spec = flat_result
        used = [self._resolve(n) for node in region.nodes() for n in node.all_input_nodes]
        used += [n for n in result_nodes if n is not None]
        region.inputs = list(dict.fromkeys(n for n in used if n not in inside))
        region.outputs = list(dict.fromkeys(n for n in result_nodes if n in inside and n is not None))
        names = [name for name, _ in pytree.flatten_with_names(arguments)]
        bindings, reason = [], ""
        for node in region.inputs:
            kind, where = self._binding(node, arg_nodes, evidence)
            region.input_names.append(_input_name(kind, where, names, node))
            reason = reason or ("" if kind != "unknown" else where)
            bindings.append((kind, where))
        output_leaves = [
            self._output_leaf(region, r, n) for r, n in zip(results, result_nodes, strict=True)
        ]
        if any(not _is_plain(leaf.constant) for leaf in output_leaves):
            reason = reason or "it returns an object that is neither a tensor nor plain data"
        template = Template(region, evidence, tuple(bindings), tuple(output_leaves), spec)
        return (None if reason else template), reason

    def _binding(
        self, node: torch.fx.Node, arg_nodes: Mapping[torch.fx.Node, int], evidence: Evidence
    ) -> tuple[str, Any]:
        if node in arg_nodes:
            return "argument", arg_nodes[node]
        source = self.sources.get(node)
        if not isinstance(source, ModelTensor):
            return "unknown", "it uses a tensor that is neither an argument nor one of its own"
        path = evidence.tensor_path(source.tensor)
        if path is not None:
            return "own", path
        if evidence.is_fixed(source.tensor) or node in self._literals:
            return "fixed", node
        return "unknown", "it uses a tensor that was reached in a way lazyinline cannot follow"

    def _output_leaf(
        self, region: Region, value: Any, node: torch.fx.Node | None
    ) -> OutputLeaf:
        if node is None:
            return OutputLeaf("constant", constant=value)
        if node in region.inputs:
            return OutputLeaf("input", region.inputs.index(node))
        storages = [_storage_id(n.meta["val"]) for n in region.inputs]
        with self.tracer.untraced():
            prototype = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            ).requires_grad_(value.requires_grad)
        storage = _storage_id(node.meta["val"])
        return OutputLeaf(
            "new",
            region.outputs.index(node),
            type=TensorType.of(value),
            requires_grad=value.requires_grad,
            alias_of=storages.index(storage) if storage in storages else -1,
            storage_offset=value.storage_offset(),
            prototype=prototype,
        )

    def _call_shared(self, template: Template, module: nn.Module, leaves: Sequence[Any]) -> Any:
        """Adds one call node for an instance that agrees with a template."""
        operands = [self._operand(b, module, leaves) for b in template.bindings]
        template.region.num_calls += 1
        node = self.tracer.call(shared_call, operands)
        node.meta["call"] = CallSite(template.region, self.paths.get(id(module), ""))
        made: dict[int, torch.Tensor] = {}
        results = []
        for leaf in template.output_leaves:
            if leaf.kind == "constant":
                results.append(leaf.constant)
            elif leaf.kind == "input":
                results.append(self._operand_tensor(template.bindings[leaf.index], module, leaves))
            else:
                if leaf.index not in made:
                    made[leaf.index] = self._new_result(template, leaf, module, leaves)
                    self.tracer.track(made[leaf.index], self.tracer.item(node, leaf.index))
                results.append(made[leaf.index])
        self._note_nested(module, template.evidence)
        self._decide(module, shared=True)
        return pytree.unflatten(results, template.output_spec)

    def _operand_tensor(
        self, binding: tuple[str, Any], module: nn.Module, leaves: Sequence[Any]
    ) -> torch.Tensor:
        kind, where = binding
        if kind == "argument":
            tensor = leaves[where]
        elif kind == "own":
            tensor = self.fake_of(follow_tensor_path(module, where))
        else:
            source = self.sources[where]
            assert isinstance(source, ModelTensor)
            tensor = self.fake_of(source.tensor)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def _operand(
        self, binding: tuple[str, Any], module: nn.Module, leaves: Sequence[Any]
    ) -> torch.fx.Node:
        kind, where = binding
        if kind == "argument":
            return self.node_of(leaves[where])
        if kind == "own":
            return self.outside_node(follow_tensor_path(module, where))
        assert isinstance(where, torch.fx.Node)
        return where

    def _new_result(
        self, template: Template, leaf: OutputLeaf, module: nn.Module, leaves: Sequence[Any]
    ) -> torch.Tensor:
        """Makes the fake result of a shared call; never an autograd leaf, so it may be changed."""
        assert leaf.type is not None
        assert leaf.prototype is not None
        shape, stride = leaf.type.shape, leaf.type.stride
        with self.tracer.untraced(), torch.set_grad_enabled(leaf.requires_grad):
            if leaf.alias_of >= 0:
                base = self._operand_tensor(template.bindings[leaf.alias_of], module, leaves)
                return base.as_strided(shape, stride, leaf.storage_offset)
            if leaf.type.is_dense:
                return leaf.prototype.clone()
            reach = 1 + sum((d - 1) * s for d, s in zip(shape, stride, strict=True))
            seed = leaf.prototype.new_empty(())
            memory = seed.requires_grad_(leaf.requires_grad) + seed.new_empty(reach)
            return memory.as_strided(shape, stride)

    # ---- the whole run -------------------------------------------------------------------

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
        """Runs the model; returns the flat results (tensors as nodes) and their tree."""
        leaves, spec = pytree.flatten((tuple(args), dict(kwargs)))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        fakes = [self._input_fake(t) for t in tensors]
        names = _argument_names(self.model, args, kwargs)
        results: list[Any] = []
        trees: list[pytree.TreeSpec] = []

        def trace(flat: Sequence[torch.Tensor]) -> None:
            rest = iter(flat)
            for index, (leaf, fake) in enumerate(zip(tensors, flat, strict=True)):
                node = self.tracer.node_of(fake)
                assert node is not None
                node.meta["val"] = fake
                self.sources[node] = UserInput(index, names[index], leaf.requires_grad)
            filled = [next(rest) if isinstance(x, torch.Tensor) else x for x in leaves]
            inner_args, inner_kwargs = pytree.unflatten(filled, spec)
            with intercepted(self):
                output = self.model(*inner_args, **inner_kwargs)
            flat_output, tree = pytree.flatten(output)
            results.extend(self.node_of(x) if isinstance(x, torch.Tensor) else x for x in flat_output)
            trees.append(tree)

        try:
            self.tracer.run(trace, fakes)
        finally:
            changed = self._undo_writes()
        if changed:
            raise CaptureError(
                f"The model's forward changes {changed}, and a compiled program could not keep "
                "doing that at every call. Register it as a buffer and change it with tensor "
                "operations, or return it."
            )
        return results, trees[0]

    def _input_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = self.tracer.fake_mode.from_tensor(tensor.detach())
        return fake.requires_grad_(tensor.requires_grad)

    def _undo_writes(self) -> str:
        """Puts written attributes back; returns the name of one whose value had changed."""
        changed = ""
        for module, name, before in self._writes.values():
            if Freezer().freeze(raw_attribute(module, name)) == Freezer().freeze(before):
                continue
            changed = changed or f"attribute {name!r} of {type(module).__name__}"
            if inspect.getattr_static(type(module), name, None) is before or not _had_value(before):
                delattr(module, name)
            else:
                setattr(module, name, before)
        return changed


def capture_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    reuse: str = "marked",
    train: bool,
) -> CapturedModel:
    """Captures a model as a program of closures and calls.

    Args:
        model: any ``nn.Module``; parameters may be on the meta device.
        args: example positional inputs; only their layout matters.
        kwargs: example keyword inputs.
        reuse: ``"marked"`` shares the instances of classes marked with ``lazy_inline``;
            ``"off"`` shares nothing.
        train: capture with grad mode on, so that a derivative can be taken.

    Raises:
        CaptureError: if the model's Python cannot be traced; names the user's line.
    """
    from .assemble import assemble

    recorder = Recorder(model, reuse)
    try:
        with torch.set_grad_enabled(train), _garbage_collection_paused():
            results, tree = recorder.run(args, kwargs or {})
    except CaptureError:
        raise
    except Exception as error:
        raise _capture_error(model, error) from error
    recorder.resolve_constants()
    program = assemble(recorder.root, results, tree, recorder.sources)
    traced = sum(not d.shared for d in recorder.decisions)
    return CapturedModel(program, recorder.decisions, traced)


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Capture makes many long-lived objects; scanning them again and again costs more than it frees."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _capture_error(model: nn.Module, error: Exception) -> CaptureError:
    line = _user_line(error)
    where = f" at {line}" if line else ""
    name = type(model).__name__
    if isinstance(error, DATA_DEPENDENT_ERRORS) or "value out of a tracing tensor" in str(error):
        return CaptureError(
            f"{name} cannot be captured: its Python needs the value of a tensor{where} "
            f"({str(error).splitlines()[0]}). A program cannot branch on data: use torch.where or "
            "masking, or move the decision out of the model."
        )
    return CaptureError(f"{name} cannot be captured{where}: {type(error).__name__}: {error}")


def _user_line(error: Exception) -> str:
    frames = [f for f, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        found = frame if user_frame(frame) is frame else None
        if found is not None:
            return frame_text(found)
    return ""


# ---- small helpers ---------------------------------------------------------------------------


class _Hashable:
    """Makes a frozen value usable as a dictionary key, comparing it in full."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashable) and self.value == other.value

    def __hash__(self) -> int:
        return len(self.value)


def _freeze_leaves(leaves: Sequence[Any]) -> list[Any]:
    return [Identity(x) if isinstance(x, torch.Tensor) else Freezer().freeze(x) for x in leaves]


def _freeze_lists(row: Any) -> Any:
    return tuple(row) if isinstance(row, list) else row


def _tensor_names(model: nn.Module) -> dict[int, ModelTensor]:
    names: dict[int, ModelTensor] = {}
    for kind, pairs in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in pairs:
            names.setdefault(id(tensor), ModelTensor(name, tensor, kind))
    return names


def _argument_names(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str]:
    """Names the tensor arguments after forward's parameters, in the order they are passed."""
    arguments = _bind(_forward_signature(model), args, kwargs)
    named: dict[int, list[str]] = {}
    for name, leaf in pytree.flatten_with_names(arguments):
        named.setdefault(id(leaf), []).append(name)
    leaves = [x for x in pytree.flatten((tuple(args), dict(kwargs)))[0] if isinstance(x, torch.Tensor)]
    names = [named[id(leaf)].pop(0) if named.get(id(leaf)) else "" for leaf in leaves]
    return [name or f"input{index}" for index, name in enumerate(names)]


def _bind(
    signature: inspect.Signature | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a call's arguments by name, defaults applied."""
    if signature is not None:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return {"args": list(args), "kwargs": dict(kwargs)}
        bound.apply_defaults()
        return dict(bound.arguments)
    return {"args": list(args), "kwargs": dict(kwargs)}


def _forward_signature(module: nn.Module) -> inspect.Signature | None:
    own = module.__dict__.get("forward")
    forward = own if own is not None else type(module).forward.__get__(module)
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None


def _ambient_modes() -> Any:
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        current_autocast(devices),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _module_of(cls: type) -> str:
    return getattr(cls, "__module__", "") or ""


def _feeds_only_lifts(node: torch.fx.Node) -> bool:
    """Whether a constant was made from Python data inside the forward (``torch.tensor(...)``)."""
    users = list(node.users)
    return bool(users) and all(u.target is torch.ops.aten.lift_fresh_copy.default for u in users)


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str, complex, torch.dtype, torch.device)


def _input_name(kind: str, where: Any, names: Sequence[str], node: torch.fx.Node) -> str:
    if kind == "argument":
        return names[where]
    if kind == "own":
        path: TensorPath = where
        return ".".join(str(p[1] if isinstance(p, tuple) else p) for p in path if p != "")
    return node.name


def _had_value(before: Any) -> bool:
    return type(before) is not object

