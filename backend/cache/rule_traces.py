"""What stands in a key for operators that a rule takes apart: the graph that they are traced to.

Neither the name of such an operator nor the text of its rule says what it computes, nor what its
derivative does. So both are traced, without a backend: that costs little beside kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...autodiff.derivative import Request
from ...autodiff.traces.forwards import trace_forward
from ...autodiff.traces.joint_cut import outputs_of
from ...autodiff.traces.joint_trace import JointTrace
from ...reuse.ir.leaf import flat_types, node_type
from ...reuse.ir.program import Leaf, input_nodes


def forward_traced(leaf: Leaf) -> tuple[Leaf, Any]:
    """Returns what a leaf computes as PyTorch's operators alone."""
    return replace(
        leaf, module=trace_forward(leaf.module, flat_types(leaf.input_types), {}), level="aten"
    ), "forward"


def derivative_traced(leaf: Leaf, request: Request) -> tuple[Leaf, Any]:
    """Returns a leaf with its gradients as PyTorch's operators alone, and where gradients flow."""
    types = flat_types(leaf.input_types)
    joint = JointTrace(leaf.module, types, request.inputs, request.outputs, {})
    if not joint.tangent_outputs:
        return forward_traced(leaf)
    module = joint.graph_module
    traced = replace(
        leaf,
        module=module,
        input_types=tuple(map(node_type, input_nodes(module))),
        output_types=tuple(map(node_type, outputs_of(module))),
        level="aten",
    )
    return traced, [list(joint.tangent_outputs), list(joint.grad_inputs)]
