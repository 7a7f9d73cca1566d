"""Leads to ``models``; goes when nobody imports it any more."""

from models import WIDTH, Around, Stack, block, example, linear

__all__ = ["WIDTH", "Around", "Stack", "block", "example", "linear"]
