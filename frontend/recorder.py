"""The recorder: watches a model run under the tracer and decides which blocks become calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
    has_hooks,
    module_state,
    raw_attribute,
    walk_modules,
)
from ..reuse.freeze import Freezer
from ..reuse.program import ModelTensor, UserInput
from ..reuse.torch_names import memory_id
from ..reuse.types import TensorType
from .contents import MISSING, Contents
from .custom_function import TENSOR, CustomFunction
from .decorator import is_marked
from .interception import intercepted
from .outside_tensors import OutsideTensors
from .regions import CallSite, OutputLeaf, Region, SharingDecision, Template, shared_call
from .signatures import (
    CallSignature,
    ambient_modes,
    argument_names,
    bind_arguments,
    forward_signature,
    freeze_arguments,
)
from .torch_tracing import (
    Tracer,
    is_fake,
    new_fake_mode,
    plain_tensor_access,
    profiled_calls,
    user_line,
)

_PLAIN_TYPES = (bool, int, float, str, type(None))
_MAX_CLOSURES_PER_BLOCK = 64
_OTHER_CALL = (
    "it is called in another way than earlier instances (layout, requires_grad or value of an "
    "argument, or a mode such as autocast)"
)
_MODULE_NAMES = frozenset((*dir(nn.Module), *vars(nn.Module())))
_EMPTY_MODULE = nn.Module().__dict__
_REENTRANT_CHECKPOINT = ("torch.utils.checkpoint", "CheckpointFunction")


class UnsettledError(CaptureError):
    """The forward changed plain data in an object of the model; running it again may not.

    Carries the finished trace, and ``redo``, which makes the change again.
    """

    def __init__(
        self,
        text: str,
        recorder: Recorder,
        results: list[Any],
        tree: pytree.TreeSpec,
        redo: Callable[[], None],
    ) -> None:
        super().__init__(text)
        self.recorder = recorder
        self.results = results
        self.tree = tree
        self.redo = redo


class Recorder:
    """Watches the model run and keeps the outer graph, its regions and its templates."""

    def __init__(self, model: nn.Module, reuse: str) -> None:
        self.model = model
        self.reuse = reuse
        self.paths = {id(m): p for p, m in model.named_modules()}
        self.root = Region(model, "", type(model).__name__)
        self.tracer = Tracer(new_fake_mode(), self._add_node)
        self.decisions: list[SharingDecision] = []
        self.tensors = OutsideTensors(self.tracer, model)
        self._current = self.root
        self._templates: dict[Any, list[Template]] = {}
        self._writes: dict[tuple[int, str], tuple[nn.Module, str, Any]] = {}
        self._signatures: dict[type, inspect.Signature | None] = {}
        self._fresh: dict[int, nn.Module] = {}
        self.attribute_reads: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self.contents = Contents()
        self._traced: set[type] = set()
        self._quiet = 0

    def _add_node(self, node: torch.fx.Node) -> None:
        self._current.items.append(node)

    def _fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._bookkeeping():
            return self.tensors.fake_of(tensor)

    # ---- what the watcher is told --------------------------------------------------------

    def substitute(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gives the model fakes for its own tensors."""
        return tensor if self._quiet else self._fake_of(tensor)

    def read(self, module: nn.Module, name: str) -> None:
        """Adds an attribute read to the evidence of every open region."""
        if self._quiet or module is self.tracer.root:
            return
        with self._bookkeeping():
            self._note_read(module, name)
            for reads in self._open_reads():
                reads.attribute(module, name)

    def _note_read(self, module: nn.Module, name: str) -> None:
        """Remembers what an attribute holds, so that a later change is noticed at the call."""
        key = (id(module), name)
        if name in _MODULE_NAMES or key in self.attribute_reads or id(module) not in self.paths:
            return
        state = module_state(module)
        tables = (state, *(state[table] for table in ("_parameters", "_buffers", "_modules")))
        table = next((t for t in tables if name in t), state)
        value = table.get(name, MISSING)
        if not isinstance(value, (torch.Tensor, nn.Module)):
            self.attribute_reads[key] = (table, name, value)
            self.contents.look_into(value)

    def read_all(self, module: nn.Module) -> None:
        """Adds every attribute of a module to the evidence of every open region."""
        if self._quiet or self._current.reads is None or module is self.tracer.root:
            return
        with self._bookkeeping():
            for reads in self._open_reads():
                reads.all_attributes(module)

    def _open_reads(self) -> Iterator[Reads]:
        region: Region | None = self._current
        while region is not None and region.reads is not None:
            yield region.reads
            region = region.parent

    def write(self, module: nn.Module, name: str, value: Any) -> bool:
        """Remembers an attribute's value before the first write, to put it back.

        Writing back a tensor that was changed in place (``self.count += 1``) writes nothing.
        """
        if self._quiet or module is self.tracer.root or id(module) in self._fresh:
            return False
        if value is self.tensors.fakes.get(id(raw_attribute(module, name)), self):
            return True
        if (id(module), name) in self._writes:
            return False
        with self._bookkeeping():
            if id(module) not in self.paths and module_state(module).keys() == _EMPTY_MODULE.keys():
                self._fresh[id(module)] = module  # made by the forward itself
            else:
                self._writes[id(module), name] = (module, name, raw_attribute(module, name))
        return False

    def custom_function(self, function: type, args: Any, proceed: Callable[..., Any]) -> Any:
        """Records the application of a custom autograd function as one operator."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if self._quiet or not tensors or _module_of(function).startswith("torch._"):
            return proceed(*args)
        if (_module_of(function), function.__name__) == _REENTRANT_CHECKPOINT:
            run_function, _, *inputs = args
            return run_function(*inputs)  # what is saved is for the compiler to decide
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

    def gradient_hook(self) -> None:
        """Refuses a hook on a gradient: it would be put on a fake tensor and never run."""
        if not self._quiet:
            raise CaptureError(
                f"The model's forward puts a hook on a tensor's gradient at {user_line()}. A "
                "compiled program cannot call it: use a torch.autograd.Function with that "
                "backward, or put the hook on a parameter, outside the forward."
            )

    # ---- block calls ---------------------------------------------------------------------

    def call(self, module: nn.Module, args: Any, kwargs: Any, proceed: Callable[..., Any]) -> Any:
        """Replaces a marked block's call by a call node where the evidence allows it."""
        if (
            self._quiet
            or self.reuse == "off"
            or module is self.model
            or not is_marked(type(module))
        ):
            return proceed(module, *args, **kwargs)
        with self._bookkeeping():
            args, kwargs = self._with_fakes(args, kwargs)
            arguments = self._bind(module, args, kwargs)
            leaves, spec = pytree.flatten(arguments)
            key = (
                type(module),
                spec,
                CallSignature(module, leaves, self.tensors.fakes),
                ambient_modes(),
            )
            known = self._templates.setdefault(key, [])
            reason = "" if known or type(module) not in self._traced else _OTHER_CALL
            for template in reversed(known):
                reason = template.evidence.mismatch(module)
                if not reason:
                    return self._call_shared(template, module, leaves)
        made, why, result = self._trace_block(module, args, kwargs, proceed, arguments, leaves)
        if made is not None and len(known) < _MAX_CLOSURES_PER_BLOCK:
            known.append(made)
        self._traced.add(type(module))
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
            return bind_arguments(forward_signature(module), args, kwargs)
        if type(module) not in self._signatures:
            self._signatures[type(module)] = forward_signature(module)
        return bind_arguments(self._signatures[type(module)], args, kwargs)

    def _decide(self, module: nn.Module, *, shared: bool, reason: str = "") -> None:
        path = self.paths.get(id(module), "")
        self.decisions.append(SharingDecision(path, type(module).__name__, shared, reason))

    def _with_fakes(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        leaves, spec = pytree.flatten((args, kwargs))
        if not any(isinstance(x, torch.Tensor) and not is_fake(x) for x in leaves):
            return args, kwargs  # the very lists and dictionaries: a block may add to them
        leaves = [self._fake_of(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        result: tuple[Any, Any] = pytree.unflatten(leaves, spec)
        return result

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
        before = freeze_arguments(arguments)
        arg_tensors = [(i, x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        arg_nodes = {self.tensors.node_of(x): i for i, x in reversed(arg_tensors)}
        known = [
            (x, self.tensors.node_of(x))
            for x in (*(x for _, x in arg_tensors), *self.tensors.fakes.values())
        ]
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
            nodes = [
                self.tensors.node_of(r) if isinstance(r, torch.Tensor) else None for r in results[0]
            ]
            template, reason = self._make_template(
                region, evidence, arguments, arg_nodes, results, nodes
            )
            self.tensors.restore(known)
        if any(has_hooks(inner, "forward") for _, inner in walk_modules(module)):
            template, reason = None, "it has forward hooks, which may keep what they see"
        if evidence.side_effect or before != freeze_arguments(arguments):
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
        used = [self.tensors.resolve(n) for node in region.nodes() for n in node.all_input_nodes]
        used += [n for n in result_nodes if n is not None]
        region.inputs = list(dict.fromkeys(n for n in used if n not in inside))
        region.outputs = list(
            dict.fromkeys(n for n in result_nodes if n in inside and n is not None)
        )
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
        source = self.tensors.sources.get(node)
        if not isinstance(source, ModelTensor):
            return "unknown", "it uses a tensor that is neither an argument nor one of its own"
        path = evidence.tensor_path(source.tensor)
        if path is not None:
            return "own", path
        if evidence.is_fixed(source.tensor) or node in self.tensors.literals:
            return "fixed", node
        return "unknown", "it uses a tensor that was reached in a way lazyinline cannot follow"

    def _output_leaf(self, region: Region, value: Any, node: torch.fx.Node | None) -> OutputLeaf:
        if node is None:
            return OutputLeaf("constant", constant=value)
        if node in region.inputs:
            return OutputLeaf("input", region.inputs.index(node))
        storages = [memory_id(n.meta["val"]) for n in region.inputs]
        with self.tracer.untraced():
            prototype = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            ).requires_grad_(value.requires_grad)
        storage = memory_id(node.meta["val"])
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
        for inner, name in template.evidence.reads_on(module):
            self._note_read(inner, name)
        self._decide(module, shared=True)
        return pytree.unflatten(results, template.output_spec)

    def _operand_tensor(
        self, binding: tuple[str, Any], module: nn.Module, leaves: Sequence[Any]
    ) -> torch.Tensor:
        kind, where = binding
        if kind == "argument":
            tensor = leaves[where]
        elif kind == "own":
            tensor = self._fake_of(follow_tensor_path(module, where))
        else:
            source = self.tensors.sources[where]
            assert isinstance(source, ModelTensor)
            tensor = self._fake_of(source.tensor)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def _operand(
        self, binding: tuple[str, Any], module: nn.Module, leaves: Sequence[Any]
    ) -> torch.fx.Node:
        kind, where = binding
        if kind == "argument":
            return self.tensors.node_of(leaves[where])
        if kind == "own":
            return self.tensors.outside_node(follow_tensor_path(module, where))
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

    def run(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], pytree.TreeSpec]:
        """Runs the model; returns the flat results (tensors as nodes) and their tree."""
        leaves, spec = pytree.flatten((tuple(args), dict(kwargs)))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        fakes = [self._input_fake(t) for t in tensors]
        names = argument_names(self.model, args, kwargs)
        results: list[Any] = []
        trees: list[pytree.TreeSpec] = []

        def trace(flat: Sequence[torch.Tensor]) -> None:
            rest = iter(flat)
            for index, (leaf, fake) in enumerate(zip(tensors, flat, strict=True)):
                node = self.tracer.node_of(fake)
                assert node is not None
                node.meta["val"] = fake
                self.tensors.sources[node] = UserInput(index, names[index], leaf.requires_grad)
            filled = [next(rest) if isinstance(x, torch.Tensor) else x for x in leaves]
            inner_args, inner_kwargs = pytree.unflatten(filled, spec)
            with intercepted(self):
                output = self.model(*inner_args, **inner_kwargs)
            flat_output, tree = pytree.flatten(output)
            _refuse_hidden_tensors(flat_output)
            results.extend(
                self.tensors.node_of(x) if isinstance(x, torch.Tensor) else x for x in flat_output
            )
            trees.append(tree)

        try:
            self.tracer.run(trace, fakes)
        finally:
            new, redo = self.contents.changed_values(), self.contents.put_forward()
            inside = self.contents.put_back()
            changed = self._undo_writes()
        if changed or inside:
            what = changed or f"{inside} that an attribute holds"
            text = (
                f"The model's forward changes {what}, and a compiled program could not keep "
                "doing that at every call. Register it as a buffer and change it in place "
                "(add_, copy_), or return it."
            )
            if not changed and all(type(v) in _PLAIN_TYPES for v in new):
                raise UnsettledError(text, self, results, trees[0], redo)
            raise CaptureError(text)
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


def _refuse_hidden_tensors(results: Sequence[Any]) -> None:
    """Raises CaptureError for a result of the model whose tensors cannot be seen."""
    hidden: list[torch.Tensor] = []
    for result in results:
        if not isinstance(result, torch.Tensor):
            Freezer(on_tensor=lambda tensor, keys: hidden.append(tensor)).freeze(result)
        if hidden:
            raise CaptureError(
                f"The model returns a {type(result).__qualname__}, which holds tensors and is "
                "unknown to PyTorch. Return a tuple, a dict or a NamedTuple, or register the class "
                "(torch.export.register_dataclass)."
            )


def _module_of(cls: type) -> str:
    return getattr(cls, "__module__", "") or ""


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (
        bool,
        int,
        float,
        str,
        complex,
        torch.Size,
        torch.dtype,
        torch.device,
    )


def _input_name(kind: str, where: Any, names: Sequence[str], node: torch.fx.Node) -> str:
    if kind == "argument":
        return names[where]
    if kind == "own":
        path: TensorPath = where
        return ".".join(str(p[1] if isinstance(p, tuple) else p) for p in path if p != "")
    return node.name


def _had_value(before: Any) -> bool:
    return type(before) is not object
