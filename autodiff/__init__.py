"""Derivative closures: ``vjp`` of a leaf by PyTorch's autograd, of a program by reversal.

traces              leaves traced: forwards taken apart, or forward and backward as one graph
derivative          ``vjp``: a pair of closures, made once per closure, by what is saved
leaf_derivative     the two halves of a leaf's derivative, and the boundary between them
control_derivative  the derivative of control flow, by those of its bodies
run_again           a forward run again in the backward, without drawing random numbers again
missing_cotangents  the derivative for a loss that leaves outputs unused
training_program    forward and backward as one program, with updates; gradients as one
forward_mode        forward and Taylor mode: derivatives along curves, with the results
inner_gradients     derivatives that a forward takes: their marks, and what is put in their place
torch_primitives    adapter: programs reduced to primitives, to be looked at
flows               from where random numbers, memory, numbers and gradients flow in a program

It imports ``reuse`` only.
"""
