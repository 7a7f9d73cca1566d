"""Derivatives of functions and modules, to any order, compiled.

``grad``, ``vjp`` and ``jvp`` have the signatures of ``torch.func``, ``hvp`` that of
``torch.autograd.functional``. The functions that they return are compiled at their first call.
Inside a model, or inside each other, each different block has its derivatives once.
"""

from lazyinline.frontend.func.coordinates import (
    EnergyAndForces,
    derivative,
    energy_and_forces,
    laplacian,
)
from lazyinline.frontend.func.rows import hessian, jacobian
from lazyinline.frontend.func.transforms import grad, hvp, jvp, vjp

__all__ = [
    "EnergyAndForces",
    "derivative",
    "energy_and_forces",
    "grad",
    "hessian",
    "hvp",
    "jacobian",
    "jvp",
    "laplacian",
    "vjp",
]
