"""Programs as ONNX models.

functions   each closure one local function, each call one node; control flow as ONNX has it
torch_onnx  adapter: torch.onnx's operator translation, and what it cannot write
file        flattened, and written to disk: weights inside, or streamed into a second file
"""
