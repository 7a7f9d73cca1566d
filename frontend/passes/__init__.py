"""The passes that programs go through, and what runs a list of them.

state             what is known of one compile between two passes; a pass; what runs a list of them
context           what a compiler keeps per closure, from compile to compile
programs          capture, autodiff, repeat, decompose, lower; reduce to primitives
memory            link, and the plan of a program's or a step's memory, or why there is none
made              what a compile made, kept for a page
recompute         what is saved, for a program that is called and for a step
recompute_choice  what is saved, by policy, budget or mark
parts             a program and its derivative, as they are linked
sizes             with symbols in place of sizes, and numbers in place of symbols
gradients         beside the loss in a file; and as programs, to be differentiated
rank              the compile of one rank of a pipeline, between two passes
stages            split, derivatives and recompute of stages, link of one rank, predict
stage_split       where a model is cut into stages
stage_recompute   what stages hold, and what they compute again so that it fits
rank_compile      a rank's stages as one planned program
"""
