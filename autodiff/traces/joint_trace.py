"""Leaves traced: a forward alone, or forward and backward as one graph (:class:`JointTrace`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...reuse.errors import CaptureError
from ...reuse.ir.leaf import LaidOut, ModalInterpreter, as_it_is, stamp_of, without_autocast
from ...reuse.ir.operators import mutated_args
from ...reuse.ir.program import input_nodes
from ...reuse.ir.torch_symbols import sizes_in
from ...reuse.ir.types import TensorType
from .pure_memory import (
    attention_as_traced,
    captured_results,
    laid_out_as,
    of_pure_memory,
    results_as_captured,
    strip_detach,
    type_as_captured,
)
from .torch_interpreters import (
    DIFFERENTIABLE,
    DifferentiableInterpreter,
    Gradients,
    NotingInterpreter,
    StoppingInterpreter,
)
from .torch_make_fx import (
    Decompositions,
    FakeTensorMode,
    fake_tensor,
    growing_graph,
    new_fake_mode,
    sizes_kept_open,
    traced,
)
from .torch_user_rules import rules_above_autograd, rules_beneath_autograd

CHANGED_IN_PLACE = "has been modified by an inplace operation"
"""The error of PyTorch's autograd at a saved value that was changed in place since."""


class JointTrace:
    """Traces forward and backward of a leaf as one graph.

    ``grad_inputs`` lists the flat inputs that get a gradient, ``tangent_outputs`` the flat outputs
    that take a cotangent: both may be fewer than asked, where autograd says nothing flows.

    Gradients that will be differentiated are traced with ``create_graph``: each operator's
    derivative is then itself made of operators that have one. So is attention, in plain form.
    """

    @without_autocast()
    def __init__(
        self,
        module: torch.fx.GraphModule,
        input_types: Sequence[TensorType],
        wanted_inputs: Sequence[int],
        wanted_outputs: Sequence[int],
        decompositions: Decompositions,
        gradients: Gradients = "final",
    ) -> None:
        # One that has a derivative of its own keeps it for the next derivative.
        rules = rules_beneath_autograd() if gradients == "final" else rules_above_autograd()
        decompositions = {**decompositions, **rules}
        self._gradients: Gradients = gradients
        self.grad_inputs: tuple[int, ...] = ()
        self.tangent_outputs: tuple[int, ...] = ()
        self.num_outputs = 0
        self.graph_module = module
        self._forward: set[str] = set()
        self._module = module
        mode = new_fake_mode(module)
        primals = [fake_tensor(mode, t) for t in input_types]
        # Only what is wanted: autograd then leaves out the branches that lead to nothing else.
        for index in wanted_inputs:
            primals[index].requires_grad_()
        with self._attention():
            tangents = self._find_tangents(mode, primals, wanted_outputs)
        if self.tangent_outputs:
            with mode, self._attention(), sizes_kept_open(mode), torch.enable_grad():
                self._trace(primals, tangents, wanted_inputs, decompositions)

    def _trace(
        self,
        primals: list[torch.Tensor],
        tangents: list[torch.Tensor],
        wanted: Sequence[int],
        decompositions: Decompositions,
    ) -> None:
        sizes = sizes_in(self._module)
        with _changes_of_saved_values_refused(self._module):
            joint = traced(partial(self._joint, wanted), [primals, tangents], sizes, decompositions)
            self._tag_forward(joint)
            names = _rename_inputs(joint, len(primals))
            inputs = [*(p.detach() for p in primals), *tangents]
            self.graph_module = of_pure_memory(
                joint, inputs, decompositions, sizes, names, gradients=self._gradients
            )

    def _attention(self) -> AbstractContextManager[Any]:
        """Takes attention apart where its gradient is differentiated: fused, it has no second."""
        return sdpa_kernel(SDPBackend.MATH) if self._is_differentiated else nullcontext()

    @property
    def _is_differentiated(self) -> bool:
        return self._gradients == "differentiated"

    def _find_tangents(
        self, mode: FakeTensorMode, primals: Sequence[torch.Tensor], wanted: Sequence[int]
    ) -> list[torch.Tensor]:
        with mode, sizes_kept_open(mode), torch.enable_grad():
            outputs = ModalInterpreter(self._module, attention_as_traced).run_flat(primals)
        self.num_outputs = len(outputs)
        # A run before the trace: a tangent is an input of the trace, and its layout is that of the
        # result, which nobody knows before.
        self.tangent_outputs = tuple(i for i in wanted if outputs[i].requires_grad)
        captured = captured_results(self._module)
        types = [
            type_as_captured(TensorType.of(outputs[i]), captured[i]).cotangent()
            for i in self.tangent_outputs
        ]
        return [fake_tensor(mode, t) for t in types]

    def _joint(
        self, wanted: Sequence[int], primals: list[torch.Tensor], tangents: list[torch.Tensor]
    ) -> tuple[Any, ...]:
        graph = growing_graph()
        kind = DifferentiableInterpreter if self._is_differentiated else NotingInterpreter
        interpreter = kind(self._module, graph, attention_as_traced)
        outputs = results_as_captured(self._module, interpreter.run_flat(primals))
        # What stands in the graph now is the forward; all that autograd runs comes behind it.
        self._forward = {n.name for n in graph.nodes}
        gradients = torch.autograd.grad(
            [outputs[i] for i in self.tangent_outputs],
            [primals[i] for i in wanted],
            tangents,
            allow_unused=True,
            create_graph=self._is_differentiated,
        )
        interpreter.write()
        # None is no zero: no path leads there, and an optimizer has to skip such a parameter.
        pairs = [(i, g) for i, g in zip(wanted, gradients, strict=True) if g is not None]
        self.grad_inputs = tuple(i for i, _ in pairs)
        return (
            *outputs,
            *(laid_out_as(g, TensorType.of(primals[i]).cotangent()) for i, g in pairs),
        )

    def _tag_forward(self, joint: torch.fx.GraphModule) -> None:
        """Tells the default partitioner where the forward ends."""
        for node in joint.graph.nodes:
            if node.name in self._forward:
                node.meta["partitioner_tag"] = "is_forward"


def _rename_inputs(module: torch.fx.GraphModule, num_primals: int) -> list[str]:
    """Gives placeholders the names that the partitioners know."""
    names = []
    placeholders = input_nodes(module)
    for index, node in enumerate(placeholders):
        is_primal = index < num_primals
        name = f"primals_{index + 1}" if is_primal else f"tangents_{index - num_primals + 1}"
        node.name = node.target = name
        names.append(name)
    return names


@contextmanager
def _changes_of_saved_values_refused(module: torch.fx.GraphModule) -> Iterator[None]:
    """Says in our words that a value which the backward reads is changed in place afterwards.

    Eager PyTorch refuses only the backward, and under ``checkpoint`` does not even look: a module
    that runs eagerly is right wherever eager is.

    Raises:
        CaptureError: with the lines that change something in place.
    """
    try:
        yield
    except RuntimeError as error:
        if CHANGED_IN_PLACE not in str(error):
            raise
        changing = [node for node in module.graph.nodes if mutated_args(node)]
        lines = dict.fromkeys(stamp_of(n).source or str(n.target) for n in changing)
        raise CaptureError(
            f"A value that the backward reads is changed in place after it was computed (changes "
            f"in place: {', '.join(lines)}). Make a new tensor instead, such as x = x * 2."
        ) from error


@without_autocast()
def trace_forward(
    module: torch.fx.GraphModule,
    types: Sequence[TensorType],
    decompositions: Decompositions,
    laid_out: LaidOut = as_it_is,
) -> torch.fx.GraphModule:
    """Takes composite operators of a leaf body apart; no derivative, no in-place operators.

    Args:
        module: the body.
        types: of its inputs.
        decompositions: of the operators.
        laid_out: gives each operator's result its layout, as of ModalInterpreter.
    """
    mode = new_fake_mode(module)
    inputs = [fake_tensor(mode, t) for t in types]
    with sizes_kept_open(mode):
        sizes = sizes_in(module)
        return trace_forward_on(module, inputs, mode, decompositions, sizes, laid_out)


@without_autocast()
def trace_forward_on(
    module: torch.fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    decompositions: Decompositions,
    sizes: Sequence[Any] = (),
    laid_out: LaidOut = as_it_is,
) -> torch.fx.GraphModule:
    """Does :func:`trace_forward` on given fake inputs.

    Without ``sizes`` the traced graph computes those that are no numbers itself.
    """

    def forward(flat: list[torch.Tensor]) -> tuple[Any, ...]:
        interpreter = NotingInterpreter(module, growing_graph(), laid_out)
        results = results_as_captured(module, interpreter.run_flat(flat))
        interpreter.write()
        return results

    decompositions = {**decompositions, **rules_beneath_autograd()}
    with mode, torch.no_grad():
        module = traced(forward, [inputs], sizes, decompositions)
        return of_pure_memory(module, inputs, decompositions, sizes)


@without_autocast()
def trace_taken_apart(
    module: torch.fx.GraphModule, types: Sequence[TensorType], decompositions: Decompositions
) -> torch.fx.GraphModule:
    """Does :func:`trace_forward` for rules of derivatives: what stops a gradient stays, marked.

    Attention is in plain form: the fused one has neither forward mode nor a second derivative.
    """
    mode = new_fake_mode(module)
    inputs, sizes = [fake_tensor(mode, t) for t in types], sizes_in(module)
    # A derivative of an operator's own goes backwards only: no rule replaces it here.
    decompositions = {**decompositions, **rules_above_autograd()}

    def forward(flat: list[torch.Tensor]) -> tuple[Any, ...]:
        interpreter = StoppingInterpreter(module, growing_graph(), attention_as_traced)
        outputs = results_as_captured(module, interpreter.run_flat(flat))
        interpreter.write()
        return outputs

    with mode, torch.no_grad(), sizes_kept_open(mode), sdpa_kernel(SDPBackend.MATH):
        plain = traced(forward, [inputs], sizes, decompositions)
        return of_pure_memory(plain, inputs, decompositions, sizes, gradients="differentiated")


@without_autocast()
def trace_function(
    function: Callable[[list[torch.Tensor]], tuple[Any, ...]],
    types: Sequence[TensorType],
    module: torch.fx.GraphModule,
) -> torch.fx.GraphModule:
    """Traces a function of tensors into a graph that has derivatives of its own.

    Args:
        function: takes its inputs as one list. What it detaches by :func:`stop_in_trace` stays.
        types: of the inputs.
        module: what it runs; sizes are those of its shape environment.
    """
    mode = new_fake_mode(module)
    inputs, sizes = [fake_tensor(mode, t) for t in types], sizes_in(module)
    with mode, torch.no_grad(), sizes_kept_open(mode):
        made = traced(function, [inputs], sizes, DIFFERENTIABLE)
    strip_detach(made)
    return made
