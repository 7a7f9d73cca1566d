"""The core: programs, closures and calls, their printer and verifier, and the evidence for sharing.

Imports nothing else of lazyinline.
"""
