"""The recorder: runs a model once under the tracer, and leaves everything as it was before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.fx
from torch import nn

from ...reuse import torch_pytree
from ...reuse.errors import CaptureError
from ...reuse.ir.program import UserInput
from ...reuse.torch_names import own_attributes
from ...reuse.torch_pytree import cache_classes, numbered
from ..checks.refusals import refuse_read_attributes, refuse_unlike_constants
from ..effects.effects import EffectError, OnEffects
from ..effects.given_objects import watched
from ..effects.torch_allowed_calls import is_allowed
from ..tracing.frames import profiled_calls
from ..tracing.torch_asked_classes import sizes_like_numbers
from ..tracing.torch_patches import intercepted
from ..tracing.torch_settings import settings_put_back
from .assemble import ResultTree
from .block_calls import BlockCalls
from .blocks import Blocks
from .recording import Recording
from .regions import Sizes
from .signatures import argument_names
from .watcher import ModelWatcher


class ChangedStateError(CaptureError):
    """The forward changed something that running it again may not: it stays changed meanwhile.

    Carries the finished run.
    """

    def __init__(
        self, text: str, recording: Recording, results: list[Any], tree: ResultTree
    ) -> None:
        super().__init__(text)
        self.recording = recording
        self.results = results
        self.tree = tree


class Recorder:
    """Runs a model once, with a watcher that keeps the recording."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        sizes: Sizes | None,
        effects: OnEffects,
    ) -> None:
        self.model = model
        self.recording = Recording(model, blocks, sizes, effects)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], ResultTree]:
        """Runs the model once under fake tensors, and leaves everything as it was before.

        Returns:
            The flat results (tensors as nodes), and their tree; see :data:`.assemble.ResultTree`.

        Raises:
            CaptureError: if its Python cannot be traced, or changed what cannot be restored.
            EffectError: if it does more at each call than compute.
            ChangedStateError: if it changed plain data, which another run may find settled.
        """
        recording = self.recording
        leaves, spec = torch_pytree.flatten((tuple(args), dict(kwargs)))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        given = zip(argument_names(self.model, args, kwargs), leaves, strict=True)
        names = [name for name, leaf in given if isinstance(leaf, torch.Tensor)]
        distinct = {id(x): x for x in tensors}  # one that is passed twice is one in the trace
        outcomes: list[tuple[list[Any], ResultTree]] = []

        def trace(flat: Sequence[torch.Tensor]) -> None:
            fakes = dict(zip(distinct, flat, strict=True))
            self._note_inputs(tensors, fakes, names)
            outcomes.append(self._outcome(leaves, spec, fakes))
            refuse_read_attributes(tensors, recording.reads.names())

        try:
            recording.tracer.run(trace, [self._input_fake(t) for t in distinct.values()])
        except BaseException:  # nothing of a capture may stay behind in the model
            recording.find_changes()
            recording.undo()
            raise
        finally:
            recording.asked_classes.release()
        self._refuse_changes(*outcomes[0])
        return outcomes[0]

    def _note_inputs(
        self,
        tensors: Sequence[torch.Tensor],
        fakes: Mapping[int, torch.Tensor],
        names: Sequence[str],
    ) -> None:
        """Notes where the inputs come from: each from the first place where it is passed."""
        tracer, known = self.recording.tracer, self.recording.tensors
        for index, leaf in enumerate(tensors):
            node = tracer.node_of(fakes[id(leaf)])
            assert node is not None
            if node not in known.sources:
                node.meta["val"] = fakes[id(leaf)]
                known.sources[node] = UserInput(
                    index, names[index] or f"input{index}", leaf.requires_grad
                )
                known.watch(fakes[id(leaf)], leaf)

    def _outcome(
        self, leaves: Sequence[Any], spec: torch_pytree.TreeSpec, fakes: Mapping[int, torch.Tensor]
    ) -> tuple[list[Any], ResultTree]:
        """Calls the model with fakes in place of its tensors; returns what it returned, flat."""
        recording = self.recording
        watcher = ModelWatcher(recording, BlockCalls(recording))
        recording.tracer.let_follow(watcher)
        # Containers are replaced by stand-ins. They follow the result as the forward left them, so
        # that a run can bring the caller's own up to date.
        filled = [
            fakes[id(x)] if isinstance(x, torch.Tensor) else self._given(index, x)
            for index, x in enumerate(leaves)
        ]
        recording.refuse_unreadable()
        args, kwargs = torch_pytree.unflatten(filled, spec)
        before = torch_pytree.flatten_outer((args, kwargs))
        known = numbered(torch_pytree.containers((args, kwargs)))
        given = [leaf for leaf in before[0] if id(leaf) in known]
        calls = profiled_calls(
            recording.function_ran, recording.builtin_called, recording.asked, is_allowed
        )
        kept = settings_put_back(recording.effects.leaves_set)
        objects = watched(cache_classes(), recording.objects)
        numbers = sizes_like_numbers() if recording.sizes else nullcontext()
        with kept, intercepted(watcher), objects, calls, numbers:
            output = self.model(*args, **kwargs)
        recording.asked_classes.refuse()
        recording.effects.check_arguments(before, (args, kwargs))
        recording.effects.check_result((args, kwargs), output, recording.holds)
        result = (output, given) if given else output
        flat, tree = torch_pytree.flatten(result, known)
        held = (read.value for read in recording.reads.attributes.values())
        recording.effects.check_containers(bool(given), held, flat)
        refuse_unlike_constants(flat)
        recording.tensors.refuse_lost_gradients(flat)
        recording.tensors.refuse_changed(flat)
        node_of = recording.tensors.node_of
        nodes = [node_of(x) if isinstance(x, torch.Tensor) else x for x in flat]
        return nodes, (tree, bool(given))

    def _given(self, index: int, leaf: Any) -> Any:
        """Returns what stands in the trace for a flat input that is no tensor."""
        sizes = self.recording.sizes
        self.recording.effects.changes.is_given(leaf)
        self.recording.given.append(leaf)
        given = sizes.given(index, leaf) if sizes else leaf
        self.recording.tracer.track_size(given)
        return given

    def _refuse_changes(self, results: list[Any], tree: ResultTree) -> None:
        """Raises for what the run changed: a program would not change it at each call."""
        recording = self.recording
        recording.find_changes()
        inside, effects = recording.inside, recording.effects
        # What a run surely does again needs no second run to show.
        error, text = effects.refusal(), effects.unsettled()
        if inside.what:
            error = None
            text = (
                f"The model's forward changes {inside.what}, and a compiled program could not keep "
                "doing that at every call. Register it as a buffer and change it in place "
                "(add_, copy_), or return it."
            )
        # A change that may happen only once (a configuration noted at the first call, a line
        # printed once) stays done, as eager leaves it, and another run shows whether it comes
        # again. A changed object may be changed at each call.
        if error is None and text:
            if inside.may_settle:
                raise ChangedStateError(text, recording, results, tree)
            error = EffectError(text)
        recording.undo()
        if error is not None:
            raise error
        if effects.policy == "undo":
            effects.emit()

    def _input_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        sizes, tracer = self.recording.sizes, self.recording.tracer
        fake = sizes.fake(tensor) if sizes else tracer.to_fake(tensor.detach())
        vars(fake).update(own_attributes(tensor))
        return fake.requires_grad_(tensor.requires_grad)
