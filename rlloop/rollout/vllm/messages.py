"""Messages between vLLM's worker and `rlloop serve proxy`. Imports neither vLLM nor torch."""

from __future__ import annotations

from typing import Any

import msgspec

from rlloop.rollout.fleet.wire import Array
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
    chooses: bool = False  # whether its worker can say which experts and past tokens a request chose
    says_weights: bool = True  # whether its answers do (0.32's do); else its worker is asked


class ReplicaState(msgspec.Struct, frozen=True):
    """State of the replica in vLLM's worker."""

    busy: bool  # it looks for newer weights, or brings them over
    waiting: bool  # for nothing to be in flight
    state: State
    error: str
    ready: bool
    torn: bool
    step: int  # of the weights that serve; TORN: of none
    label: str  # names these very weights in this very process
    metrics: dict[str, float]
    run_id: str | None = None  # of the run whose weights they are


class Chosen(msgspec.Struct, frozen=True):
    """Discrete choices of requests that have ended: rows of each, or None."""

    label: str  # of the weights that serve now: ReplicaState's, empty where no store is followed
    experts: list[Array | None]
    selected: list[Array | None]
