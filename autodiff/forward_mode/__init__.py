"""Forward and Taylor mode: closures that compute derivatives along curves with their results.

forward_derivative  closures with their series, made once per closure; graphs run on such values
torch_rules         adapter: rules of operators, and which one each has, by its name
jets                series: what is asked for, values that carry one, how operators act on them
polynomials         power series whose zeros are known; Taylor coefficients of functions
"""
