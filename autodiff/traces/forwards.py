"""Forwards of leaves, traced: composite operators taken apart, no derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...reuse.ir.leaf import LaidOut, as_it_is, without_autocast
from ...reuse.ir.torch_symbols import sizes_in
from ...reuse.ir.types import TensorType
from .detach_points import StoppingInterpreter
from .layouts import attention_as_traced, results_as_captured
from .origins import NotingInterpreter
from .pure_memory import of_pure_memory, strip_detach
from .torch_differentiable import DIFFERENTIABLE
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


@without_autocast
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


@without_autocast
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


@without_autocast
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


@without_autocast
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
