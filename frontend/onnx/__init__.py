"""``export_onnx(model, args, path)``: a program as an ONNX file.

export   a program as an ONNX file, one function per closure
check    compares onnxruntime with the model on the example inputs
"""
