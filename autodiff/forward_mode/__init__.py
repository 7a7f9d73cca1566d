"""Forward and Taylor mode: closures that also compute derivatives along curves.

forward_derivative  closures with their series, made once per closure; graphs run on such values
torch_rules         adapter: rules of operators, and which one each has, by its name
jets                series: values that have one, and operators on them; Taylor coefficients
"""
