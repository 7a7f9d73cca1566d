"""The compiler passes, and the runner of a list of them.

state             the goal and the state of a compile; what a pass is; the runner
context           results kept per closure, from compile to compile
programs          capture, rotate, autodiff, repeat, decompose, lower; gradients as programs
link              link, and the memory plan, or why there is none; one link for many shapes
mesh              the step, or the stages, of one rank of a device mesh, in local shapes
numbers           numbers in place of symbols, for one shape
recompute         the recompute pass, which measures each choice by a trial compile
recompute_choice  the choice by policy, budget or mark
rank              the compile of one rank of a pipeline; its stages as one planned program
stages            split, autodiff, recompute, link and predict for the stages of a rank
"""
