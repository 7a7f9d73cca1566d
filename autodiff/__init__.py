"""Derivative closures: ``vjp`` of a leaf through PyTorch's autograd, of a program by reversal."""
