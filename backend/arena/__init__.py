"""The static memory planner: every buffer gets an offset in one arena.

arena        the planner: choices of strategy, and the plan
live_ranges  buffers with live ranges; placed one by one, by first fit or best fit
repeats      repeated scratch, planned once per different block
"""
