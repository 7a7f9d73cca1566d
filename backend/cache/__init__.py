"""Results of compiles on disk: derivatives, decompositions, kernels and memory plans.

results  the results that a compile takes from the cache, and their keys
codec    leaf closures, derivatives and kernel lists as JSON
"""
