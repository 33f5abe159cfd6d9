"""Engines: they sample completions of prompts, and return the logprobs that they sampled with."""

from rlloop.rollout.engine.engine import Engine

__all__ = ["Engine"]
