"""How PyTorch is made to show what a model runs. Mostly adapters.

torch_tracing     pre-dispatch tracing with fake tensors, and what a tensor was computed from
frames            whose code runs, what a forward of the user's calls, what users call a module
torch_patches     the temporary patches that let capture watch a model run
gradients         a gradient of a function as calls of ``torch.autograd.grad``
torch_tensor_answers  what a tensor without numbers may answer; all else is reported
torch_asked_classes  classes of tensors and sizes, asked for by code that asks nobody
torch_settings    settings of PyTorch, found by rule, and what else a call can ask again
torch_gpu_autocast  autocast as on a GPU, for a model that is traced on the CPU
"""
