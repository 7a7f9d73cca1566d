"""Adapter: programs of ``torch.export``; repeated regions are found as in Dynamo's graphs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.fx
from torch import nn
from torch.export import ExportedProgram

from ...reuse import torch_pytree
from ...reuse.errors import CaptureError, LazyInlineError
from ...reuse.ir.fx_form import program_in
from ...reuse.ir.program import Program
from ...reuse.ir.verify import verify
from ..capture.assemble import OutputTree
from ..capture.capture import Subject, capture_model
from ..sizes.torch_input_sizes import InputSizes
from .outline import outlined
from .torch_dynamo_backend import HandedOnError, read_graph, size_names


def module_of_exported(exported: ExportedProgram) -> nn.Module:
    """Returns a module that is called as the exported model is, in which what repeats is blocks.

    Raises:
        CaptureError: if it holds what no program can say.
    """
    module: torch.fx.GraphModule = exported.module()  # type: ignore[assignment]
    # Nothing else would notice inputs of other shapes than the exported ones.
    if not hasattr(module, "_guards_fn"):
        raise CaptureError(
            "This exported program has no example_inputs, without which PyTorch makes no check of "
            "its inputs: set them."
        )
    for node in module.graph.find_nodes(op="call_module"):
        node.meta.pop("nn_module_stack", None)  # what checks the inputs is no part of a block
    try:
        graph = read_graph(module)
    except HandedOnError as error:
        raise CaptureError(f"This exported program cannot be taken: {error}.") from error
    made = outlined(graph.module, graph.calls)
    made.graph.set_codegen(module.graph._codegen)  # which takes and gives what the model does
    made.recompile()
    vars(made).update(train=_refuse_mode, eval=_refuse_mode)
    return made


def _refuse_mode(*_: Any) -> NoReturn:
    raise NotImplementedError("The mode of an exported program stands in its graph.")


def target_in(file: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Returns the module of a file of ``torch.export.save``, and its example inputs."""
    try:
        exported = torch.export.load(file)
    except Exception as error:
        raise LazyInlineError(f"{file} cannot be loaded: {error}") from error
    return module_of_exported(exported), *exported.example_inputs


def program_of_exported(exported: ExportedProgram, *, train: bool) -> Program:
    """Returns the program; see :func:`lazyinline.from_exported`."""
    # Its own text is read where there is one: blocks come back as they were, without a search.
    read = program_in(exported)
    if read is not None:
        spec = torch_pytree.flatten(exported.call_spec.out_spec.unflatten(range(len(read[1]))))[1]
        return replace(read[0], output_tree=OutputTree(read[1], spec))
    model = module_of_exported(exported)
    leaves, spec = torch_pytree.flatten(exported.example_inputs)
    leaves = [_plain(leaf) for leaf in leaves]
    args, kwargs = torch_pytree.unflatten(leaves, spec)
    subject = Subject(model, args, kwargs, effects="undo")
    given = set(exported.graph_signature.user_inputs)
    # Parameters are inputs of the exported graph, too; only the caller's may vary in size.
    inputs = exported.graph.find_nodes(op="placeholder")
    names = tuple(size_names(node) for node in inputs if node.name in given)
    if any(map(any, names)):
        subject = replace(subject, sizes=partial(InputSizes, leaves, names))
    return verify(capture_model(subject, train=train).program)


def _plain(example: Any) -> Any:
    """Returns an example input without the attributes that PyTorch leaves on one it has loaded."""
    if not isinstance(example, torch.Tensor):
        return example
    return example.detach().requires_grad_(example.requires_grad)
