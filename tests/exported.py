"""ONNX files, run by onnxruntime and compared with eager."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from torch import Tensor, nn

import lazyinline


def session(path: Path) -> Any:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def run(path: Path | str, *inputs: Tensor, **named: Tensor) -> list[Any]:
    """Runs a file on inputs in its order, or by name."""
    loaded = session(Path(path))
    names = [i.name for i in loaded.get_inputs()]
    given = {**dict(zip(names, inputs, strict=False)), **named}
    return list(loaded.run(None, {name: value.numpy() for name, value in given.items()}))


def is_close(found: Any, expected: Tensor, tolerance: float = 1e-4) -> bool:
    """Compares relative to the largest expected value, apart from the exporter's own check."""
    wanted = expected.detach().double().numpy()
    assert found.shape == wanted.shape
    return bool(np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max())


def assert_trains_as_eager(
    model: nn.Module, path: Path, *args: Tensor, others: tuple[Tensor, ...] = (), **kwargs: Tensor
) -> None:
    """Exports a training graph; its loss and every gradient are eager's, on ``others`` if given."""
    report = lazyinline.export_onnx(model, args, path, kwargs=kwargs, train=True, verify=False)
    onnx.checker.check_model(str(path), full_check=True)
    given = others or (*args, *kwargs.values())
    result = model(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
    loss = result if isinstance(result, Tensor) else result.loss
    loss.backward()
    found = dict(zip(report.outputs, run(path, *given), strict=True))
    assert is_close(found["output" if isinstance(result, Tensor) else "loss"], loss, 1e-5)
    expected = {f"grad.{name}": p.grad for name, p in model.named_parameters()}
    assert expected.keys() == {name for name in found if name.startswith("grad.")}
    for name, gradient in expected.items():
        assert gradient is not None and gradient.abs().max() > 0
        assert is_close(found[name], gradient, 1e-5), name
