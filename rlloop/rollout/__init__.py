"""Engines: what continues prompts and says with which probabilities."""

from rlloop.rollout.engine.engine import Engine

__all__ = ["Engine"]
