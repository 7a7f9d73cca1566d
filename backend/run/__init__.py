"""Linked programs, run.

runtime         how a compiled forward, and the backward of the same flight, are run
planned         a planned program: every buffer has an address
unplanned       programs whose memory is not planned, as one Python function, and steps of them
rank_program    what a pipeline rank runs, and where everything lies
"""
