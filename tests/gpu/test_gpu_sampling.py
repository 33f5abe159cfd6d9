"""Sampling on CUDA: the reference's tokens, the numbers that (seed, position) names, and the trainer's bits."""

import pytest
import torch

from rlloop.numerics.layout import LogitsProcessing
from rlloop.numerics.ops import ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile
from rlloop.numerics.random import uniform

OURS = ops_for(NumericsProfile())
EXACT = ops_for(NumericsProfile.preset("reference"))
KINDS = [  # temperature, top_k, top_p, min_p, banned
    (1.0, 0, 1.0, 0.0, ()),
    (0.7, 0, 1.0, 0.0, ()),
    (0.0, 0, 1.0, 0.0, (3,)),
    (1.3, 20, 1.0, 0.0, ()),
    (0.9, 0, 0.8, 0.0, ()),
    (1.1, 0, 1.0, 0.05, ()),
    (0.8, 50, 0.9, 0.01, (5, 6)),
    (1.0, 1, 1.0, 0.0, ()),
    (1.0, 0, 0.999, 0.0, (0, 1)),
]


def warp_of(kinds) -> LogitsProcessing:
    columns = list(zip(*kinds, strict=True))
    return LogitsProcessing(
        temperature=torch.tensor(columns[0], dtype=torch.float32).cuda(),
        top_k=torch.tensor(columns[1]).cuda(),
        top_p=torch.tensor(columns[2], dtype=torch.float32).cuda(),
        min_p=torch.tensor(columns[3], dtype=torch.float32).cuda(),
        banned_start=torch.tensor([0, *map(len, columns[4])]).cumsum(0).cuda(),
        banned_ids=torch.tensor([i for ids in columns[4] for i in ids], dtype=torch.int64).cuda(),
    )


@pytest.mark.parametrize("vocabulary", [97, 4096, 10000])
def test_tokens_and_logprobs_are_the_reference_s(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    rows = 8 * len(KINDS)
    hidden, weight = (torch.randn(n, 48, generator=generator).cuda() / 2 for n in (rows, vocabulary))
    warp, at = warp_of(KINDS * 8), torch.arange(rows, device="cuda")
    seeds, positions = at * 2**40 + 17, at + 2**33
    logits = OURS.logits(hidden, weight)
    ids, logprobs, raw = OURS.sample(logits, warp, seeds, positions)
    host = LogitsProcessing(**{name: value.cpu() for name, value in vars(warp).items()})
    expected = EXACT.sample(logits.cpu().double(), host, seeds.cpu(), positions.cpu())
    assert (ids.cpu() == expected[0]).float().mean() > 0.98  # a draw may fall on the edge between two
    same = ids.cpu() == expected[0]
    torch.testing.assert_close(logprobs.cpu().double()[same], expected[1][same], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(raw.cpu().double()[same], expected[2][same], rtol=2e-5, atol=2e-5)
    scored, _ = OURS.token_logprob(hidden, weight, ids, warp)
    assert same_bits(scored, logprobs)
    alone = OURS.sample(logits[5:6], warp.rows(5, 6), seeds[5:6], positions[5:6])
    assert all(same_bits(a, b[5:6]) for a, b in zip(alone, (ids, logprobs, raw), strict=True))


def test_ties_go_to_the_lowest_id():
    logits = torch.zeros(3, 300, device="cuda")
    logits[:, [7, 100, 299]] = 4.0
    kinds = [(0.0, 0, 1.0, 0.0, ()), (1.0, 1, 1.0, 0.0, ()), (1.0, 2, 1.0, 0.0, ())]
    draws = [
        OURS.sample(logits, warp_of(kinds), torch.full((3,), seed).cuda(), torch.arange(3).cuda())[0].tolist()
        for seed in range(40)
    ]
    assert {row[0] for row in draws} == {row[1] for row in draws} == {7}
    assert {row[2] for row in draws} == {7, 100}


def test_random_numbers_are_those_of_their_names():
    """A flat distribution of 4096 tokens turns u into the token floor(4096 u)."""
    logits = torch.zeros(64, 4096, device="cuda")
    seeds = torch.randint(0, 2**62, (64,), generator=torch.Generator().manual_seed(0))
    positions = torch.randint(0, 2**40, (64,), generator=torch.Generator().manual_seed(1))
    ids = OURS.sample(logits, LogitsProcessing(), seeds.cuda(), positions.cuda())[0].tolist()
    expected = [int(4096 * uniform(s, p)) for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)]
    assert ids == expected


def test_a_target_that_is_no_token_has_no_logprob():
    hidden, weight = torch.randn(2, 16, device="cuda"), torch.randn(50, 16, device="cuda")
    logprobs, _ = OURS.token_logprob(hidden, weight, torch.tensor([3, 50], device="cuda"), LogitsProcessing())
    assert logprobs.isnan().tolist() == [False, True]


@pytest.mark.parametrize("kinds", [KINDS * 300, KINDS[:1] * 2700], ids=["mixed", "plain"])  # in several chunks
def test_one_pass_scores_raw_and_draws_with_the_sampler_s_bits(kinds):
    hidden, weight = (torch.randn(n, 64).cuda().bfloat16() for n in (len(kinds), 10000))
    warp, at = warp_of(kinds), torch.arange(len(kinds), device="cuda")
    seeds, positions = at * 2**40 + 17, at + 2**33
    drawn, sampled, raw = OURS.sample(OURS.logits(hidden, weight), warp, seeds, positions)
    logprobs, entropy, raw_again, ids = OURS.token_redraw(hidden, weight, drawn, warp, seeds, positions)
    assert torch.equal(ids, drawn)
    scored = OURS.token_logprob(hidden, weight, drawn, warp)
    pairs = ((logprobs, sampled), (raw_again, raw), (logprobs, scored[0]), (entropy, scored[1]))
    assert all(same_bits(mine, theirs) for mine, theirs in pairs)
    assert (OURS.token_redraw(hidden, weight, drawn, warp, -seeds, positions)[3] == -1).all()
