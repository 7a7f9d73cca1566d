"""Traces what a model runs, with PyTorch's tracer and temporary patches. Mostly adapters.

torch_tracing     pre-dispatch tracing with fake tensors; what a tensor was computed from
frames            whose code a frame runs, the calls of user code, the user's names of modules
torch_patches     the temporary patches that let capture watch a model run
gradients         a gradient of a function as calls of ``torch.autograd.grad``
torch_tensor_answers  which attributes a fake tensor answers itself; all others are reported
torch_asked_classes  ``type(x)`` and ``x is y`` of fakes and symbolic sizes, as in eager or refused
torch_state  settings, modes, tensor classes, memory: what programs depend on and guards read again
torch_gpu_autocast  autocast as on a GPU, for a model that is traced on the CPU
"""
