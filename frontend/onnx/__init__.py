"""``export_onnx(model, args, path)``.

export  a program as an ONNX file, one function per closure
check   onnxruntime against the model, on the example inputs
"""
