"""Derivatives of functions and modules, to any order, compiled.

``grad``, ``vjp`` and ``jvp`` have the signatures of ``torch.func``, ``hvp`` that of
``torch.autograd.functional``. What they return is compiled at its first call; inside a model, or
inside one another, they become calls of derivatives that each different block has once.
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
