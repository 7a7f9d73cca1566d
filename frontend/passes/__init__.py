"""The compiler passes, and the runner of a list of them.

state             the goal and the state of a compile; what a pass is; the runner
context           results kept per closure, from compile to compile; the choice of recompute
programs          capture, rotate, autodiff, repeat, decompose, lower; gradients as programs
link              link, and the memory plan, or why there is none; one link for many shapes
mesh              the step, or the stages, of one rank of a device mesh, in local shapes
numbers           numbers in place of symbols, for one shape
rank              the compile of one rank of a pipeline; its stages as one planned program
stages            recompute by trial compiles; split, autodiff, link and predict for a rank
"""
