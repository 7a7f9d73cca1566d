"""What transformers names the set of its classes of outputs. This module alone says that name.

A class of outputs is put in there once, when it is registered with PyTorch's tree registry, and
transformers only asks whether a class is in it. What all those classes are is no part of a model.
"""

from __future__ import annotations

import sys
from typing import Any

_MODULE, _NAME = "transformers.utils.generic", "_registered_model_output_types"


def is_set_of_outputs(value: Any) -> bool:
    """Whether a value is that set; nothing is imported for it."""
    return type(value) is set and value is getattr(sys.modules.get(_MODULE), _NAME, None)
