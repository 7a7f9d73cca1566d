"""A GPT as an ONNX file: one function for all its blocks, any batch and length, run by onnxruntime.

    pip install 'lazyinline[onnx]'
    python examples/export_onnx.py
    python examples/export_onnx.py --to decoder.onnx        # keep the file, look at it in Netron

What it prints:

    the model calls:
      glue     glue
      Block    blocks.0
      Block    blocks.1
      Block    blocks.2
      Block    blocks.3
      Block    blocks.4
      Block    blocks.5
      glue_1   glue_1
    its functions:
      glue     6 nodes: 2 Constant, 1 Gather, 1 Shape, 1 Slice, 1 Add, ...
      Block    74 nodes: 17 Constant, 8 Add, 7 Transpose, 7 Slice, 6 MatMul, ...
      glue_1   4 nodes: 1 LayerNormalization, 1 Transpose, 1 MatMul, 1 Add, ...
    2 x 16: onnxruntime gives the logits of PyTorch
    5 x 33: onnxruntime gives the logits of PyTorch
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import tempfile

import onnx
import torch
from decoder import Decoder
from torch.export import Dim

import lazyinline

try:
    import onnxruntime
except ImportError:
    raise SystemExit("This example runs its file: pip install 'lazyinline[onnx]'") from None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--to", type=pathlib.Path, help="where to write the file")
    options = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    path = options.to or pathlib.Path(folder.name, "decoder.onnx")

    torch.manual_seed(0)
    model = Decoder(options.layers).eval()
    ids = torch.randint(0, 128, (2, 16))
    sizes = {"ids": {0: Dim("batch"), 1: Dim("time", min=2, max=64)}}  # it has 64 places
    lazyinline.export_onnx(model, (ids,), path, dynamic_shapes=sizes)

    file = onnx.load(path)
    print("the model calls:")
    for node in file.graph.node:
        print(f"  {node.op_type:<8} {node.name}")
    print("its functions:")
    for function in file.functions:
        counts = collections.Counter(node.op_type for node in function.node)
        operators = ", ".join(f"{count} {name}" for name, count in counts.most_common(5))
        print(f"  {function.name:<8} {len(function.node)} nodes: {operators}, ...")

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    for batch, time in ((2, 16), (5, 33)):
        ids = torch.randint(0, 128, (batch, time))
        (logits,) = session.run(None, {name: ids.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.tensor(logits), model(ids), rtol=1e-4, atol=1e-5)
        print(f"{batch} x {time}: onnxruntime gives the logits of PyTorch")


if __name__ == "__main__":
    main()
