"""The passes that programs go through, and what runs a list of them.

state             what is known of one compile between two passes; a pass; what runs a list of them
context           what a compiler keeps per closure, from compile to compile
programs         capture, autodiff, repeat, decompose, lower; the two parts that are linked
memory           what is saved, by a choice; link, and the plan of memory, or why there is none
made              what a compile made, kept for a page
recompute_choice  what is saved, by policy, budget or mark
sizes             with symbols in place of sizes, and numbers in place of symbols
gradients         beside the loss in a file; and as programs, to be differentiated
rank             the compile of one rank of a pipeline; where a model is cut into stages
stages           split, derivatives and recompute of stages so that they fit, link, predict
rank_compile      a rank's stages as one planned program
"""
