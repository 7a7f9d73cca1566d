"""The passes that programs go through, and what runs a list of them.

state             a goal; what is known of one compile between two passes; a pass; the runner
context           what a compiler keeps per closure, from compile to compile
programs         capture, autodiff, repeat, decompose, lower; the two parts that are linked
link              link, and the plan of memory, or why there is none
numbers           numbers in place of symbols, for one shape
made              what a compile made, kept for a page
recompute         what is saved, chosen by what programs would hold
recompute_choice  the choice by policy, budget or mark
gradients         in a file, with the loss; and as programs, to be differentiated
rank             the compile of one rank of a pipeline; where a model is cut into stages
stages           split, derivatives and recompute of stages so that they fit, link, predict
rank_compile      a rank's stages as one planned program
"""
