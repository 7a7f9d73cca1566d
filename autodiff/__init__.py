"""Derivative closures: ``vjp`` of a leaf by PyTorch's autograd, of a program by reversal.

traces              traces of leaves: forwards decomposed, or forward and backward as one graph
derivative          ``vjp``: a pair of closures, made once per closure, by what is saved
leaf_derivative     the two halves of a leaf's derivative, their boundary; those of control flow
run_again           recompute of whole closures, without drawing random numbers a second time
missing_cotangents  the derivative for a loss that leaves outputs unused
training_program    forward and backward as one program, with updates; gradients as one
forward_mode        forward and Taylor mode: derivatives along curves, with the results
inner_gradients     derivatives inside a forward: their marks, and the calls that replace them
torch_primitives    adapter: programs reduced to primitives, to be read and counted
flows               data flow: where random draws, shared memory, values and gradients come from

It imports ``reuse`` only.
"""
