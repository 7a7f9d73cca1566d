"""What PEFT names its models, whose ``generate`` calls the model inside and not themselves.

This module alone says those names. They are known by their class, once the user's code has imported
PEFT; nothing is imported here.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

_CLASSES = ("PeftModel", "PeftMixedModel")


def model_that_generates(model: nn.Module) -> nn.Module | None:
    """Returns the model that ``generate`` of one of PEFT's calls; None for any other model."""
    peft = sys.modules.get("peft")
    found = (getattr(peft, name, None) for name in _CLASSES)
    if not isinstance(model, tuple(kind for kind in found if isinstance(kind, type))):
        return None
    base: Any = model.base_model  # what puts adapters in; it has the methods of the model inside
    inside = getattr(getattr(base, "generate", None), "__self__", None)
    return inside if isinstance(inside, nn.Module) and inside is not model else None
