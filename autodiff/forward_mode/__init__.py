"""Forward and Taylor mode: closures that also compute derivatives along curves.

forward_derivative  closures with their series, made once per closure; graphs run on such values
torch_rules         adapter: rules of operators, and which one each has, by its name
jets                series: which coefficients there are, values with a series, operators on them
polynomials         power series whose zeros are known; Taylor coefficients of functions
"""
