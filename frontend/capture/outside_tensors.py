"""Tensors that come from outside a trace: the model's own, user inputs, and constants.

Each real tensor has one node in the outer graph and at most one fake, both made on first use: of a
thousand layers that share a closure, only one gets fakes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from ...reuse.errors import CaptureError
from ...reuse.evidence.module_state import Places, module_state
from ...reuse.ir.leaf import stamp_of
from ...reuse.ir.operators import changed_operand
from ...reuse.ir.program import ModelTensor, Source, TensorKind, UserInput, wants_gradient
from ...reuse.ir.torch_symbols import is_size
from ...reuse.ir.types import TensorType
from ...reuse.torch_names import memory_id, own_attributes
from ..tracing.torch_state import why_no_memory
from ..tracing.torch_tensor_answers import TensorState, state_of
from ..tracing.torch_tracing import Tracer, feeds_only_lifts, is_fake, made_of


class OutsideTensors:
    """Real tensors, their fakes and their nodes."""

    def __init__(self, tracer: Tracer, places: Places) -> None:
        self._tracer = tracer
        # The source of each input node of the outer graph.
        self.sources: dict[torch.fx.Node, Source] = {}
        self.fakes: dict[int, torch.Tensor] = {}  # ``id(real tensor) -> fake``
        self.real_ids: dict[int, int] = {}  # ``id(fake) -> id(real tensor)``
        self.memories: dict[int | None, int] = {}  # of a fake -> of the real tensor
        self.classes: dict[int, type] = {}  # ``id(fake) -> class of the real tensor``
        # Nodes of constants made from Python data inside the forward.
        self.literals: set[torch.fx.Node] = set()
        self._names = _tensor_names(places)
        self._outside: dict[int, torch.fx.Node] = {}
        self._keep: list[Any] = []
        self._watched: list[tuple[torch.Tensor, TensorState, dict[str, Any]]] = []
        self._switched: list[torch.Tensor] = []
        self._num_users: dict[torch.fx.Node, int] = {}  # at the time of requires_grad_(False)

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tracked fake of a real tensor of the model; the same each time."""
        if is_fake(tensor):
            return tensor
        fake = self.fakes.get(id(tensor))
        if fake is None:
            fake = self._tracer.to_fake(tensor)
            vars(fake).update(own_attributes(tensor))
            self._tracer.track(fake, self.outside_node(tensor))
            self.fakes[id(tensor)] = fake
            self.real_ids[id(fake)] = id(tensor)
            if not why_no_memory(tensor):
                self.memories[memory_id(fake)] = memory_id(tensor)
            self.watch(fake, tensor)
        return fake

    def release(self) -> None:
        """Forgets every real tensor."""
        for node in self._outside.values():
            node.meta.pop("val", None)
        for table in (self.sources, self.fakes, self._names, self._outside):
            table.clear()
        for kept in (self._keep, self._watched, self._switched, self.classes):
            kept.clear()

    def attributes_of(self, fake: torch.Tensor) -> dict[str, Any]:
        """Returns the Python attributes that code set on a fake tensor (``x.scale = 2.0``)."""
        if len(vars(fake)) < len(self._tracer.fake_names):
            return {}  # only parameters have all of ``fake_names`` without any
        held = own_attributes(fake)
        return {name: held[name] for name in held.keys() - self._tracer.fake_names}

    def have_attributes(self, values: Iterable[Any]) -> bool:
        """Whether one of the fakes among some values has Python attributes."""
        fakes = (value for value in values if isinstance(value, torch.Tensor) and is_fake(value))
        return any(map(self.attributes_of, fakes))

    def attributes_read(self, names: Collection[str]) -> list[dict[str, Any]]:
        """Returns the Python attributes of those model tensors that have one of these names."""
        found = [vars(tensor) for tensor in self._keep if vars(tensor)]
        return [held for held in found if not held.keys().isdisjoint(names)]

    def watch(self, fake: torch.Tensor, tensor: torch.Tensor) -> None:
        """Notes the state of a tensor from outside, before the forward gets its fake."""
        self._watched.append((fake, state_of(fake), own_attributes(tensor)))
        self.classes[id(fake)] = type(tensor)

    def is_named(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of the model's parameters and buffers."""
        return id(tensor) in self._names

    def may_switch(self, fake: torch.Tensor, before: TensorState, now: TensorState) -> bool:
        """Whether a program can express that the forward sets ``requires_grad`` of a tensor."""
        node = self.node_of(fake)
        source = self.sources.get(node)
        if now == before:
            return True
        if source is not None:
            # The program sets it at the start of each call, so no operator may have used it yet.
            is_taken = not all(map(is_size, node.users))
            if isinstance(source, UserInput) and source.is_switched and not fake.requires_grad:
                self.sources[node] = replace(source, is_switched_back=True)
                self._num_users[node] = len(node.users)
                return True
            if not isinstance(source, UserInput) or is_taken or not fake.requires_grad:
                return False
            self.sources[node] = replace(source, requires_grad=True, is_switched=True)
        self._switched.append(fake)
        return True

    def refuse_changed(self, results: Iterable[Any], left: Iterable[Any]) -> None:
        """Raises CaptureError if the forward changed more than the values of an outside tensor.

        Python attributes on a result, or on a tensor left in some place, are refused too.
        """
        for fake, before, had in self._watched:
            now = self.attributes_of(fake)
            changed = [n for n in {**had, **now} if now.get(n, self) is not had.get(n, self)]
            if changed:
                raise CaptureError(
                    f"The model's forward changes the attribute {changed[0]!r} of one of its "
                    "tensors, and a compiled program could not keep doing that at every call. "
                    "Keep it in a buffer and change it in place (add_, copy_), or return it."
                )
            is_switched = any(fake is switched for switched in self._switched)
            now_is = state_of(fake)
            if now_is[:2] != before[:2] or not (is_switched or now_is == before):
                raise CaptureError(
                    f"The model's forward changes more than the values of a {TensorType.of(fake)} "
                    "tensor from outside (its storage, layout, requires_grad, gradient or hooks), "
                    "and a compiled program would not do that at each call."
                )
        if any(len(node.users) > count for node, count in self._num_users.items()):
            raise CaptureError(
                "The model's forward uses an input after it was switched not to require grad, "
                "which a compiled program does at its end. Use x.detach() there."
            )
        results = [x for x in results if isinstance(x, torch.Tensor) and is_fake(x)]
        for one in (*results, *(x for x in left if isinstance(x, torch.Tensor) and is_fake(x))):
            self._refuse_attributes(one)
        for result in results:
            self._refuse_unreachable(result)

    def _refuse_attributes(self, result: torch.Tensor) -> None:
        """Raises CaptureError for a result with Python attributes: a program would not set them."""
        node = self.node_of(result)
        held = () if node in self.sources else self.attributes_of(result)
        if held:
            raise CaptureError(
                f"The model's forward puts the attribute {next(iter(held))!r} on a tensor that it "
                "returns, and a compiled program would not. Return it together with the tensor."
            )

    def _refuse_unreachable(self, result: torch.Tensor) -> None:
        """Raises CaptureError for a result whose gradient flows only to tensors made inside."""
        node = self.node_of(result)
        made = made_of(node) if self._switched and result.requires_grad else ()
        if any(self.node_of(x) in made for x in self._switched) and not any(
            wants_gradient(self.sources[n]) for n in made if n in self.sources
        ):
            raise CaptureError(
                "The model's forward returns a tensor whose gradient flows only to a tensor made "
                "in the forward (requires_grad_), which no caller of a compiled program can reach."
            )

    def refuse_lost_gradients(self, results: Iterable[Any]) -> None:
        """Raises CaptureError for a result that requires grad although the caller's mode is off."""
        # A program compiled for such a call has no backward, but eager's result would have one.
        for result in results:
            is_made = isinstance(result, torch.Tensor) and not torch.is_grad_enabled()
            if is_made and result.requires_grad and self.node_of(result) not in self.sources:
                raise CaptureError(
                    f"The model's forward enables grad mode, called without, and returns a "
                    f"{TensorType.of(result)} tensor that requires grad. Return it detached."
                )

    def outside_node(self, tensor: torch.Tensor) -> torch.fx.Node:
        """Returns the node of a real tensor, made on first use."""
        node = self._outside.get(id(tensor))
        if node is None:
            self.refuse_without_memory(tensor, "A tensor outside the model")
            node = self._tracer.add_outside_tensor(tensor)
            node.meta["val"] = self._tracer.to_fake(tensor) if tensor.is_meta else tensor
            self._outside[id(tensor)] = node
            self._keep.append(tensor)
            self.sources[node] = self._names.get(id(tensor)) or ModelTensor(node.name, tensor)
        return node

    def refuse_without_memory(self, tensor: torch.Tensor, what: str) -> None:
        """Raises CaptureError for a tensor, not on meta, without storage that a kernel can read."""
        why = "" if tensor.is_meta else why_no_memory(tensor)
        if why:
            source = self._names.get(id(tensor))
            raise CaptureError(
                f"{source.name if source else what} is {why}, which "
                "has no memory that a kernel could read, so what is computed with it cannot be "
                "captured."
            )

    def is_own(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the model's, or a fake of one."""
        return not is_fake(tensor) or id(tensor) in self.real_ids

    def node_of(self, tensor: torch.Tensor) -> torch.fx.Node:
        """Returns the node of a fake or real tensor."""
        node = self._tracer.node_of(tensor) if is_fake(tensor) else self.outside_node(tensor)
        if node is None:
            raise CaptureError(
                f"A {TensorType.of(tensor)} tensor is used that no traced operator made. Was it "
                "stored by an earlier call, made in another thread, or by `.data`?"
            )
        refuse_inside(node, "used outside of it")
        return self.resolve(node)

    def resolve(self, node: torch.fx.Node) -> torch.fx.Node:
        """Returns the one node that represents a node's tensor."""
        # An in-place operator returns the same tensor as another node.
        operand = changed_operand(node)
        if operand is not None:
            return self.resolve(operand)
        if node.op != "get_attr" or node in self.sources:
            return node
        tensor = self._tracer.attribute(node)
        lines = [stamp_of(user).source for user in node.users]
        at = f" at {lines[0]}" if lines else ""
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(
                f"The model's forward hands a {type(tensor).__name__} to an operator{at}, and a "
                "compiled program would use this one at every call. Random numbers must come from "
                "PyTorch's default generator."
            )
        if is_fake(tensor):
            raise CaptureError(
                f"A {TensorType.of(tensor)} tensor{at} cannot be followed to the operator that "
                "made it: `.data` hides that (use `.detach()`), and so do torch.func's transforms "
                "(vmap, jvp) and other threads."
            )
        resolved = self.outside_node(tensor)
        if feeds_only_lifts(node):
            self.literals.add(resolved)
        return resolved

    def resolve_all(self, nodes: Sequence[torch.fx.Node]) -> None:
        """Rewires the users of constants and of ``nodes`` to the one node of each tensor."""
        for node in (*self._tracer.constants(), *nodes):
            resolved = self.resolve(node)
            if resolved is not node:
                node.replace_all_uses_with(resolved)

    def restore(self, known: Sequence[tuple[torch.Tensor, torch.fx.Node]]) -> None:
        """Maps tensors to their nodes before a block, where an operator returned its operand."""
        for tensor, node in known:
            if self._tracer.node_of(tensor) is not node:
                self._tracer.track(tensor, node)
        for key, fake in self.fakes.items():
            if self._tracer.node_of(fake) is not self._outside[key]:
                self._tracer.track(fake, self._outside[key])


def refuse_inside(node: torch.fx.Node, what: str) -> None:
    """Raises CaptureError for a node inside a finished body of control flow."""
    if "body" in node.meta:
        source = stamp_of(node).source or node.meta["body"]
        raise CaptureError(
            f"A tensor made in a body of control flow ({source}) is {what}. "
            "Return it from the body."
        )


def _tensor_names(places: Places) -> dict[int, ModelTensor]:
    names: dict[int, ModelTensor] = {}
    tables: tuple[tuple[TensorKind, str], ...] = (
        ("parameter", "_parameters"),
        ("buffer", "_buffers"),
    )
    for kind, table in tables:
        for path, module in places:
            prefix = f"{path}." if path else ""
            for name, tensor in module_state(module)[table].items():
                if tensor is not None and id(tensor) not in names:
                    names[id(tensor)] = ModelTensor(prefix + name, tensor, kind)
    return names
