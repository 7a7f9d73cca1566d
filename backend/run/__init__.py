"""Linked programs, run.

planned         a planned program: every buffer has an address; runs its forward and backward
leases          its arenas: which are in use, and how many idle ones are kept
rank_program    a pipeline rank: the memory plan for all its runs, and what runs them
"""
