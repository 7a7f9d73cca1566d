"""What runs a model's calls: its compiled programs, and itself where none can.

calls        finds or compiles the program for each call
model_calls  the calls of a whole model, also where it runs itself around compiled modules
parts        the parts of a model that cannot be captured
routes       the way of calls while a model runs itself
refusals     which calls run a module itself
entry        one compiled program: its inputs, and the result it builds
methods      a model's own methods, which call the compiled one in its place
peft_models  which model generates for PEFT's
torch_slot   where a module's own calls look first for something compiled
"""
