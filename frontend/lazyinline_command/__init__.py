"""The ``lazyinline`` command up to where it needs PyTorch: help and mistakes cost no import of it.

A package of its own, because whatever imports ``lazyinline`` imports PyTorch.

main    every command with its arguments; runs it; what an error or an interrupt ends in
"""
