"""The program that all passes work on.

program        closures, calls on them, and the values that flow between
types          types of program values: tensors with a layout, structs; how a tensor is sent
control        control flow: leaves that choose between closures, or repeat one
operators      what an operator is: a view, in place, random, elementwise, a primitive
leaf           leaf bodies: ATen graphs built and compared; the reference interpreter
printer        programs as text: the same bytes for the same program; text that fits a screen
parser         programs from their text
read_leaves    leaves from text: values of their operators, checked
costs          FLOPs, bytes and seconds of operators and programs; a device is a row of rates
verify         whether a program keeps the rules of its level; which operators it holds
rewrite        each different leaf rewritten once; programs without struct values
fx_form        a program as a module of torch.fx, as graphs of networkx, as torch.export has it
rotate         the end of a block and the start of the next as one closure
masks          removes constant attention masks that hide nothing, or what ``is_causal`` hides
constants      closures that differ in Python numbers only become one, with the same bits
size_tape      integers that record how they are computed from sizes
torch_fake_rules  adapter: rules for fake tensors where a kernel takes more than PyTorch's own
torch_symbols  adapter: sizes that are expressions of symbols, in graphs
torch_updates  adapter: an optimizer's update as an operator, by PyTorch's fused kernels
"""
