"""The passes that programs go through, and what runs a list of them.

state             a goal; what is known of one compile between two passes; a pass; the runner
context           what a compiler keeps per closure, from compile to compile
programs         capture, rotate, autodiff, repeat, decompose, lower; gradients, as programs too
link              link, and the plan of memory, or why there is none
many_shapes       one link for many shapes: the same program with other numbers in it
mesh              the step, or the stages, of one rank of a device mesh, in local shapes
numbers           numbers in place of symbols, for one shape
recompute         what is saved, chosen by what programs would hold
recompute_choice  the choice by policy, budget or mark
rank             the compile of one rank of a pipeline; its stages as one planned program
stages           split, derivatives and recompute of stages so that they fit, link, predict
"""
