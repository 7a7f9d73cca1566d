"""``export_onnx(model, args, path)``: a program as an ONNX file.

export   a program as an ONNX file, one function per closure
check     onnxruntime against the model, on the example inputs
subject  what is exported, and what its parts are called in the file
"""
