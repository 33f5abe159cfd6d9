"""Checks of a finished or growing run: its records against each other, and against what they must come to."""

from rlloop.audit.history import Check
from rlloop.audit.verify import Extent, verify

__all__ = ["Check", "Extent", "verify"]
