"""Forward and Taylor mode: closures that compute derivatives along curves with their results.

forward_derivative  ``ForwardDerivatives``: a closure with its series, made once per closure
jet_interpreter     an operator graph, run on values that carry their series
torch_rules         adapter: which rule an operator has, by its name
rules               of functions of one variable, of softmax and its kin, of products, of sums
jets                values with their series, and how operators act on them
analytic            Taylor coefficients of functions of one variable
polynomials         truncated power series whose zeros are known
series              what is asked for, and the types of what flows
"""
