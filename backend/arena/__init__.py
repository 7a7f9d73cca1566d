"""The static memory planner: every buffer gets an offset in one arena.

arena        the planner: choices of strategy, repeats planned once per different block
live_ranges  buffers with live ranges; placed one by one, by first fit or best fit
"""
