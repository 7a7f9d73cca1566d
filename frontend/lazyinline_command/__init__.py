"""The ``lazyinline`` command. It parses arguments before it imports PyTorch, so help is fast.

A package of its own, because ``import lazyinline`` imports PyTorch.

main    all commands with their arguments; runs a command; exit status of errors and interrupts
"""
