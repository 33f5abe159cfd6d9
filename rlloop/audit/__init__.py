"""Checks of a finished or running run: its records against each other, and against values computed again."""

from rlloop.audit.history import Check
from rlloop.audit.verify import Extent, verify

__all__ = ["Check", "Extent", "verify"]
