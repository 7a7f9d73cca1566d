"""Programs as ONNX models.

functions   each closure one local function, each call one node; control flow as ONNX has it; files
torch_onnx  adapter: torch.onnx's operator translation, and what it cannot write
"""
