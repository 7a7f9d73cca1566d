"""Results of compiles on disk: derivatives, decompositions, kernels and memory plans.

results  what a compile asks of the cache, and under which keys
codec    leaf closures, derivatives and kernel lists as JSON
"""
