"""Scores of prompts, as engines answer them: logprobs of their tokens, and the likeliest tokens in their place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlloop.errors import ConfigError
from rlloop.models.logits_processing import warp_for
from rlloop.models.scoring import ScoreRow, check_rows
from rlloop.models.transformer import Model
from rlloop.models.vision import place_features
from rlloop.numerics.layout import AttentionLayout, LogitsProcessing
from rlloop.parallel.cut import shares
from rlloop.types import Alternatives, ModelInput, PromptScores, SamplingParams, as_model_input

LOGITS_AT_ONCE = 1 << 25  # limit on elements of logits held at a time while finding the likeliest tokens


@torch.inference_mode()
def score_prompt(model: Model, prompt: ModelInput | Sequence[int], top: int = 0) -> PromptScores:
    """The logprobs of a prompt's tokens, with the bits of `token_logprobs(model, [(prompt[:1], prompt[1:])])`.

    With `top`, also the `top` likeliest tokens in each one's place. Raises `ConfigError` as `token_logprobs` does.
    """
    model_input = as_model_input(prompt)
    if not len(model_input):
        raise ConfigError("a prompt is empty; it must have at least one token")
    check_alternatives(top)
    check_rows(model, [ScoreRow(model_input.token_ids, range(1, len(model_input)), model_input=model_input)])
    ids = torch.tensor(model_input.token_ids, device=model.context.device)
    count = len(ids) - 1
    if count == 0:
        return PromptScores(np.zeros(0, np.float32))
    positions = torch.from_numpy(model_input.positions_at(0, count)).to(ids.device)
    images = place_features([(model_input, 0, count, 0)], model.see)
    hidden = model.hidden(ids[:-1], positions, AttentionLayout.of_sequences([count], ids.device), images=images)
    cp = model.context.ranks("cp")
    hidden = cp.gather(hidden, 0, shares(count, cp.size))
    logprobs = model.output.token_logprob(hidden, ids[1:], LogitsProcessing())[0]
    logprobs = model.stage.shared(logprobs).cpu().numpy()
    if not top:
        return PromptScores(logprobs)
    at_once = max(1, LOGITS_AT_ONCE // (model.vocab_size * (1 + top)))
    chunks = (model.output.whole(model.logits(rows)) for rows in hidden.split(at_once))
    return PromptScores(logprobs, Alternatives.joined([likeliest(model, logits, top) for logits in chunks]))


def check_alternatives(top: int) -> None:
    """Raises `ConfigError` for a number of alternatives below 0."""
    if top < 0:
        raise ConfigError(f"top_logprobs is {top}; it must be 0, for none, or more")


def likeliest(
    model: Model, logits: Tensor, count: int, sampling: SamplingParams | None = None, length: int = 0
) -> Alternatives:
    """The `count` tokens of largest logit in each row of logits [T, V], with logprobs that have the trainer's bits.

    `sampling`: the distribution of `Alternatives.logprobs`; `length`: how many tokens the completion had before.
    """
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]  # [T, k]
    rows = logits.repeat_interleave(ids.shape[1], 0)
    counts = [len(rows)]
    warp = warp_for([sampling], np.full(len(rows), length), model.eos_token_ids, device=logits.device, counts=counts)
    scored = [model.ops.score_logits(rows, ids.flatten(), each)[0] for each in (warp, LogitsProcessing())]
    return Alternatives(ids.cpu().numpy(), *(each.view(ids.shape).cpu().numpy() for each in scored))
