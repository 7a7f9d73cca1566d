"""Linked programs, run.

planned         a planned program: every buffer has an address; its forward and backward, run
rank_program    what a pipeline rank runs, and where everything lies
unplanned       closures one by one, without a plan of memory: programs, the parts of a rank
"""
