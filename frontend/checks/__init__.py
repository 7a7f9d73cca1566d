"""Whether what a user hands in can be compiled at all.

models       what no capture can take, and wrappers that train a model on several devices
refusals     what no compiled program can be run with, or return
torch_state  adapter: what a program relies on and does not see: modes, classes, memory, layouts
"""
