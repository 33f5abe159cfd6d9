"""The trainer's own path: logprobs of given tokens, differentiable, by the same operations that sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlloop.errors import ConfigError
from rlloop.models.transformer import Model
from rlloop.models.warp import warp_for
from rlloop.numerics.layout import AttentionLayout
from rlloop.types import SamplingParams


@dataclass(frozen=True)
class ScoreRow:
    """One sequence, and which of its tokens to score.

    Example: prompt [7, 8] and completion [3, 2]: `ScoreRow([7, 8, 3, 2], range(2, 4))`.
    """

    token_ids: list[int]
    predict: Sequence[int]  # ascending positions, 1 or more: the token there is predicted from those before it
    sampling: SamplingParams | None = None  # the distribution to score under; None: temperature 1, nothing truncated


def score(model: Model, rows: Sequence[ScoreRow]) -> tuple[Tensor, Tensor]:
    """One forward over the sequences laid end to end: the logprob of every predicted token, and the entropy there.

    Returns ([N] float32, [N] float32) in order, both differentiable. N is the number of predicted tokens of all rows.
    """
    lengths = [len(row.token_ids) for row in rows]
    starts = np.cumsum([0, *lengths[:-1]])
    flat = np.concatenate([np.asarray(row.token_ids, np.int64) for row in rows])
    positions = np.concatenate([np.arange(length) for length in lengths])
    picked = [np.asarray(row.predict, np.int64) for row in rows]
    predicted = np.concatenate([places + start for places, start in zip(picked, starts, strict=True)])
    # Scored tokens are counted from the first predicted one: what the engine calls the tokens made so far.
    made = np.concatenate([np.arange(len(places)) for places in picked])
    device = model.device

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    hidden = model.hidden(tensor(flat), tensor(positions), AttentionLayout.of_sequences(lengths, device))
    warp = warp_for(
        [row.sampling for row in rows], made, model.eos_token_ids, device=device, counts=list(map(len, picked))
    )
    before = tensor(predicted - 1)
    return model.ops.token_logprob(hidden.index_select(0, before), model.head, tensor(flat[predicted]), warp)


def token_logprobs(
    model: Model,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    sampling: Sequence[SamplingParams | None] | None = None,
) -> list[Tensor]:
    """Logprobs of completions given their prompts, as the trainer computes them: differentiable, one pass.

    `sequences` are (prompt_ids, completion_ids); `sampling`, one a sequence, is the distribution to score under (None:
    temperature 1, nothing truncated, so equal to an engine's `raw_logprobs`). Returns one [T] float32 tensor each.

    Raises ConfigError for an empty prompt or completion, an id outside the vocabulary, a sequence beyond the model's
    positions, or a `sampling` of another length.
    """
    if sampling is None:
        sampling = [None] * len(sequences)
    if len(sampling) != len(sequences):
        raise ConfigError(
            f"sampling has {len(sampling)} entries for {len(sequences)} sequences; give one each, or None"
        )
    rows = []
    for index, ((prompt, completion), params) in enumerate(zip(sequences, sampling, strict=True)):
        tokens = [*prompt, *completion]
        if not len(prompt) or not len(completion):
            raise ConfigError(f"sequence {index} has an empty prompt or completion; both need at least one token")
        if len(tokens) > model.max_positions:
            raise ConfigError(
                f"sequence {index} has {len(tokens)} tokens; the model has {model.max_positions} positions"
            )
        if not 0 <= min(tokens) <= max(tokens) < model.config.vocab_size:
            raise ConfigError(f"sequence {index} has an id outside the vocabulary of {model.config.vocab_size}")
        rows.append(ScoreRow(tokens, range(len(prompt), len(tokens)), params))
    if not rows:
        return []
    return list(score(model, rows)[0].split([len(row.predict) for row in rows]))
