"""Errors of engines and their clients.

RlloopError
├── VersionUnavailable             the engine's weights are not of the requested version
├── Busy                           the engine takes no more work now; try later or elsewhere
├── EngineLost                     the engine is unreachable, or its process is gone
├── Fenced                         another process drives the engine
├── BadAnswer                      the engine answered wrongly
├── NoEngine                       no engine of a pool is serving
└── ConfigError
    └── WrongToken                 the engine's server was started with another token
"""

from __future__ import annotations

from rlloop.errors import ConfigError, RlloopError


class VersionUnavailable(RlloopError):
    """The engine's weights are not of the requested version. `passed`: they are newer, so waiting will not help."""

    def __init__(self, have: int, lowest: int | None, highest: int | None) -> None:
        self.have, self.lowest, self.highest = have, lowest, highest
        self.passed = highest is not None and have > highest
        wanted = f"{lowest}" if lowest == highest else f"from {lowest} to {'any' if highest is None else highest}"
        super().__init__(f"this engine has version {have} of the weights; asked for is {wanted}")


class Busy(RlloopError):
    """The engine takes no more work now: its queue is full, it was shut down, or the request was cancelled."""


class EngineLost(RlloopError):
    """The engine cannot be reached, broke off in the middle, or its process is gone."""


class Fenced(RlloopError):
    """Another process drives the engine now: this one's lease is over."""


class BadAnswer(RlloopError):
    """An engine's answer does not fit its request, or cannot be read."""


class NoEngine(RlloopError):
    """No engine served the requested version within the allowed time."""


class WrongToken(ConfigError):
    """The engine's server was started with another token."""
