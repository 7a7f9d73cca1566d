"""What compiles keep on disk: derivatives, decompositions, kernels and memory plans.

results      what a compile asks of the cache, and under which keys
rule_traces  what stands in a key for operators that a rule takes apart
codec        leaf closures, derivatives and kernel lists as JSON
"""
