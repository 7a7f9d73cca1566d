"""The ``lazyinline`` command up to where it needs PyTorch: help and mistakes cost no import of it.

A package of its own, because whatever imports ``lazyinline`` imports PyTorch.

main    runs the command; what an error, an interrupt or a closed pipe ends in
parser  every command with its arguments
"""
