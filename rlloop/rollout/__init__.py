"""Engines: they continue prompts, and report the probabilities that they sampled with."""

from rlloop.rollout.engine.engine import Engine

__all__ = ["Engine"]
