"""Linked programs, run.

planned         a planned program: every buffer has an address; its forward and backward, run
leases          who works in which arena of it, and which are kept while nobody does
rank_program    what a pipeline rank runs, and where everything lies
"""
