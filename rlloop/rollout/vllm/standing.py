"""What vLLM's worker and `rlloop serve proxy` tell each other. Imports neither vLLM nor torch."""

from __future__ import annotations

from typing import Any

import msgspec

from rlloop.sync.replica import State


class Facts(msgspec.Struct, frozen=True):
    """A model inside vLLM's server. `refused`: why it cannot be followed; the rest then says nothing."""

    refused: str = ""
    folder: str = ""
    stock: bool = False  # vLLM's own model, not rlloop's
    vocabulary: int = 0
    positions: int = 0
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: dict[str, Any] = {}


class Standing(msgspec.Struct, frozen=True):
    """A replica in vLLM's worker."""

    busy: bool  # it looks for newer weights, or brings them over
    waiting: bool  # for nothing to be in flight
    state: State
    error: str
    ready: bool
    torn: bool
    step: int  # of the weights that serve; TORN: of none
    label: str  # names these very weights in this very process
    metrics: dict[str, float]
