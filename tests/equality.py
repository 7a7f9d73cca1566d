"""Leads to ``comparing``; goes when nobody imports it any more."""

from comparing import DOUBLE_TOLERANCE as TOLERANCE
from comparing import Outcome, assert_equals_eager

__all__ = ["TOLERANCE", "Outcome", "assert_equals_eager"]
