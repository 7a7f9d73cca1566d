"""Programs as ONNX models.

functions        each closure one local function, each call one node
leaf             one leaf closure as an ONNX graph
torch_onnx       adapter: torch.onnx's operator translation
convolution      the gradients of a convolution as convolutions
grouped_product  the grouped product of experts
flat             every call replaced by its function's nodes
file             the file on disk: weights inside, or streamed beside it
"""
