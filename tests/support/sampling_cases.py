"""Ways to warp logits, for the tests of `token_logprob` and `sample`."""

import itertools

import torch

from rlloop.numerics.layout import LogitsProcessing

TEMPERATURES, TOP_KS, TOP_PS, MIN_PS, BANS = (1.0, 0.6, 1.7), (0, 1, 5), (1.0, 0.8), (0.0, 0.04), ((), (0, 3, 16))
COMBINATIONS = [*itertools.product(TEMPERATURES, TOP_KS, TOP_PS, MIN_PS, BANS), (0.0, 5, 0.8, 0.04, (0, 3))]


def warp_of(settings):
    """A warp whose row t follows settings[t] = (temperature, top_k, top_p, min_p, banned ids)."""
    temperature, top_k, top_p, min_p, bans = zip(*settings, strict=True)
    return LogitsProcessing(
        temperature=torch.tensor(temperature),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p),
        min_p=torch.tensor(min_p),
        banned_start=torch.tensor([0, *map(len, bans)]).cumsum(0),
        banned_ids=torch.tensor([*itertools.chain(*bans)], dtype=torch.int64),
    )


def mixed(rows):
    """Every combination in turn, so that neighbours differ."""
    return warp_of([COMBINATIONS[t * 29 % len(COMBINATIONS)] for t in range(rows)])


def head(rows, vocabulary, width=8, seed=0):
    """hidden [rows, width] and weight [vocabulary, width] whose logits spread over a few nats, with exact ties."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator)
    weight[vocabulary // 2] = weight[1]
    return hidden, weight


def bits(x):
    return x.detach().contiguous().view(torch.int32)
