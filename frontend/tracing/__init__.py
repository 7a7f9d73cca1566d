"""How PyTorch is made to show what a model runs. Mostly adapters.

torch_tracing     pre-dispatch tracing with fake tensors
torch_patches     the temporary patches that let capture watch a model run
ways              what a tensor was computed from: by operators, by writes, and as autograd says
torch_tensor_answers  what a tensor without numbers may answer; all else is told
torch_asked_classes  classes of tensors and sizes, asked for by code that asks nobody
readings          what a forward was told and a call can be asked again
torch_settings    PyTorch's own settings, found by rule
custom_function   a user's ``torch.autograd.Function`` as one operator
watched_objects   reads and writes of the parts of a cache, seen while a block is traced
torch_mutations   operators of others that change their operands, as pure ones
torch_fake_rules  operators that take more than PyTorch's rule for fake tensors allows
torch_gpu_autocast  autocast as on a GPU, for a model that is traced on the CPU
capture_errors    what the user is told of an error of their model
"""
