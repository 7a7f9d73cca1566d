"""What runs a model's calls: its compiled programs, and itself where none can.

calls        finds or compiles the program for each call, and knows which run the module itself
model_calls  the calls of a whole model, also where it runs itself around compiled modules
parts        the parts of a model that cannot be captured, and the way of calls to them
entry        one compiled program: its inputs, and the result it builds
torch_slot   where a module's own calls look first for something compiled
"""
