"""Says if what a user hands in can be compiled at all.

refusals     models that no capture can take, and what no program can be run with, or return
torch_state  adapter: what a program relies on and does not see: modes, classes, memory, layouts
"""
