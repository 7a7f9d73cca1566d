"""Derivative closures: ``vjp`` of a leaf by PyTorch's autograd, of a program by reversal.

rules             rules of users that take an operator of theirs apart
traces            leaves traced: forwards taken apart, or forward and backward as one graph
derivative        ``vjp``: a pair of closures, made once per closure
leaf_derivative   the two halves of a leaf's derivative, and the boundary between them
torch_autograd    adapter: the state of PyTorch's autograd around a call
choices           which of a call's forward values are saved
draws             which closures draw random numbers, and how often
run_again         a forward run again in the backward, without drawing random numbers again
undefined         the derivative without some cotangents
training_program  forward and backward as one program: once, or called per micro-batch
forward_mode      forward and Taylor mode: derivatives along curves, beside the results
higher_order      derivatives of derivatives: the gradients of a program as a program
torch_primitives  adapter: programs reduced to primitives, to be looked at
flows             from which inputs memory, numbers and gradients flow to a program's values

It imports ``reuse`` only.
"""
