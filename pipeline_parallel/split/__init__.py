"""Which stage each call belongs to, and one program per stage.

coloring    the stage of each call: by marks, or by cutting the order of execution
balance     units of a program, their costs, and the exact split within memory
partition   the exact contiguous partition of layers over stages
call_costs  what calls cost, forward and backward, and what they may save instead
cut         one program per stage; composites that span stages are cut inside
"""
