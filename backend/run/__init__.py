"""Linked programs, run.

runtime         how a compiled forward, and the backward of the same flight, are run
planned         a planned program: every buffer has an address
unplanned       programs without a plan of memory: one called, a step, the parts of a rank
rank_program    what a pipeline rank runs, and where everything lies
"""
