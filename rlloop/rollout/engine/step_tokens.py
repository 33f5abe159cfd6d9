"""The flat tokens of a scheduled step: their indices, positions, cache slots and pages, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rlloop.numerics.transfer import on_device
from rlloop.rollout.engine.request import RequestTable
from rlloop.rollout.engine.scheduler import ScheduledStep

LateTokens = tuple[np.ndarray, Tensor]  # places in a step's tokens, and the tokens, which only the device knows


@dataclass(frozen=True)
class StepTokens:
    """T flat tokens of S requests, one request after the other; all int64."""

    query_start: np.ndarray  # [S + 1] where each request's tokens begin
    sequence: np.ndarray  # [T] the request of each token
    index: np.ndarray  # [T] its place in the request
    tokens: np.ndarray  # [T]; of a step scheduled ahead, some are not known yet
    positions: np.ndarray  # [T], or [3, T]: for the rope
    slots: np.ndarray  # [T] of the cache
    block_start: np.ndarray  # [S, B] first slots of each request's pages

    @classmethod
    def of(cls, batch: ScheduledStep, table: RequestTable, page_size: int) -> StepTokens:
        query_start = np.concatenate(([0], np.cumsum(batch.counts)))
        sequence = np.repeat(np.arange(len(batch.rows)), batch.counts)
        index = np.arange(query_start[-1]) - query_start[sequence] + batch.context[sequence]
        blocks = -(-int((batch.context + batch.counts).max()) // page_size)
        block_start = table.blocks[batch.rows, :blocks] * page_size
        slots = block_start[sequence, index // page_size] + index % page_size
        positions = table.rope_positions(batch.rows, batch.context, batch.counts, index)
        tokens = table.tokens[batch.rows[sequence], index]
        return cls(query_start, sequence, index, tokens, positions, slots, block_start)


def with_late(tokens: Tensor, late: LateTokens | None) -> Tensor:
    """Puts late tokens among `tokens` [T], in place. −1, where no token could be drawn, becomes 0; the host checks."""
    if late is not None and len(late[0]):
        tokens.index_copy_(0, on_device(late[0], tokens.device), late[1].clamp(min=0))
    return tokens
