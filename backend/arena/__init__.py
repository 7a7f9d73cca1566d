"""The static memory planner: every buffer gets an offset in one arena.

arena        the planner: choices of strategy, and the plan
live_ranges  buffers with live ranges, and the bytes live at once
packing      buffers placed one by one: first fit, best fit
repeats      repeated scratch, planned once per different block
"""
