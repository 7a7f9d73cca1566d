"""What each rank does, in which order, and what that costs.

actions        the action table, as a schedule of PyTorch lays it out
rank_order     one rank's actions in order, and how long transfers stay where they are
simulation     a step of the schedule in time
plan           the plan of a pipeline
rank_memory    what a rank holds beside what its micro-batches keep
"""
