"""Results that autograd gives no gradient, so that none is asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.fx

from ...reuse.ir.leaf import ModalInterpreter, without_autocast
from ...reuse.ir.program import outputs_of
from ...reuse.ir.types import TensorType
from .torch_make_fx import fake_tensor, new_fake_mode, sizes_kept_open

NOT_DIFFERENTIABLE = "is not differentiable with respect to argument"
"""What PyTorch says of an operand that no gradient can be asked for."""


@without_autocast
def stop_what_has_no_gradient(
    module: torch.fx.GraphModule, types: Sequence[TensorType], active: Sequence[int]
) -> None:
    """Detaches those results of a graph that autograd gives no gradient (a norm's statistics).

    Where they are operands of another graph, no gradient of theirs must be asked for.

    Args:
        module: a forward, functional; it is changed.
        types: of its inputs.
        active: positions of the inputs that want a gradient now. Others may at another order.
    """
    flags = _with_gradients(module, types, active)
    output = module.graph.output_node()
    new = list(outputs_of(module))
    with module.graph.inserting_before(output):
        for index, (node, has_gradient) in enumerate(zip(new, flags, strict=True)):
            if not has_gradient:
                new[index] = module.graph.call_function(torch.ops.aten.detach.default, (node,))
                new[index].meta["val"] = node.meta["val"]
    output.args = (tuple(new),)
    module.recompile()


def _with_gradients(
    module: torch.fx.GraphModule, types: Sequence[TensorType], active: Sequence[int]
) -> list[bool]:
    """Says of each result whether autograd gives it a gradient if every input wants one.

    Some inputs cannot (a norm's running statistics): PyTorch says so where one does.
    """
    mode = new_fake_mode(module)

    def run(wanting: Collection[int]) -> list[bool]:
        inputs = [fake_tensor(mode, t).requires_grad_(i in wanting) for i, t in enumerate(types)]
        with mode, sizes_kept_open(mode), torch.enable_grad():
            results = ModalInterpreter(module).run_flat(inputs)
        return [not isinstance(x, torch.Tensor) or x.requires_grad for x in results]

    wanting = {i for i, type_ in enumerate(types) if type_.is_differentiable}
    try:
        return run(wanting)
    except RuntimeError as error:
        if NOT_DIFFERENTIABLE not in str(error):
            raise
    for index in wanting - set(active):
        try:
            run({*active, index})
        except RuntimeError:
            wanting.discard(index)
    return run(wanting)
