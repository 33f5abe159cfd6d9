"""Packing, budgets and mistakes of `token_logprobs` and `score`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rlloop.errors import ConfigError
from rlloop.models import Model, ScoreRow, load_model, score, token_logprobs
from rlloop.models.prompt_scores import score_prompt
from rlloop.types import ModelInput, SamplingParams
from tests.support.checkpoints import make_checkpoint

PAIRS = [([5, 6, 7], [8, 9, 10, 11]), ([12], [13, 2]), (list(range(3, 40)), list(range(40, 90))), ([1, 2], [3])]
SAMPLING = [
    SamplingParams(max_tokens=8, temperature=0.7, min_tokens=3),
    None,
    SamplingParams(max_tokens=64, top_k=80, top_p=0.99),
    SamplingParams(max_tokens=8, temperature=0.0),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("model")
    make_checkpoint(folder)
    return load_model(folder)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("max_tokens", [1, 9, 60, 10_000])
def test_neither_packing_nor_budget_changes_a_bit(model: Model, max_tokens: int) -> None:
    together = token_logprobs(model, PAIRS, sampling=SAMPLING)
    assert [len(row) for row in together] == [4, 2, 50, 1]
    assert all(row.dtype == torch.float32 and row.requires_grad for row in together)
    assert same(token_logprobs(model, PAIRS, sampling=SAMPLING, max_tokens=max_tokens), together)
    alone = [token_logprobs(model, [pair], sampling=[params])[0] for pair, params in zip(PAIRS, SAMPLING, strict=True)]
    assert same(alone, together)
    assert same(token_logprobs(model, PAIRS[::-1], sampling=SAMPLING[::-1])[::-1], together)


def test_without_sampling_parameters_logprobs_are_raw(model: Model) -> None:
    plain = token_logprobs(model, PAIRS)
    assert same(plain, token_logprobs(model, PAIRS, sampling=[SamplingParams(max_tokens=64)] * 4))
    sampled = token_logprobs(model, PAIRS, sampling=SAMPLING)
    assert [torch.equal(a, b) for a, b in zip(plain, sampled, strict=True)] == [False, True, False, True]


def test_positions_are_the_ropes_and_nothing_elses(model: Model) -> None:
    """Rope knows distances alone, so positions all moved by three keep the logprobs near, and others do not."""
    prompt, completion = [5, 6, 7], [8, 9, 10]
    (plain,) = token_logprobs(model, [(prompt, completion)])

    def at(*positions: int) -> Tensor:
        other = (ModelInput(prompt, np.array(positions)), completion)
        (alone,) = token_logprobs(model, [other])
        assert same(token_logprobs(model, [(prompt, completion), other]), [plain, alone])  # among others, too
        return alone

    assert same([at(0, 1, 2)], [plain])
    torch.testing.assert_close(at(3, 4, 5), plain, rtol=0, atol=1e-4)
    assert (at(0, 40, 41) - plain).abs().max() > 1e-3
    scores = [score_prompt(model, [*prompt, *completion]).logprobs]
    scores += [score_prompt(model, ModelInput([*prompt, *completion], np.array(p))).logprobs for p in
               ([0, 1, 2, 3, 4, 5], [0, 40, 41, 42, 43, 44])]  # fmt: skip
    assert np.array_equal(scores[0], scores[1])
    assert np.array_equal(scores[2][2:], at(0, 40, 41).detach().numpy())


def test_positions_that_the_rope_cannot_take_are_refused(model: Model) -> None:
    axes = ModelInput([5, 6], np.zeros((3, 2), np.int64))
    for pairs in ([(axes, [7])], [([5, 6], [7]), (axes, [7])]):
        with pytest.raises(ConfigError, match=r"positions have 3 axes; the rope of Qwen3ForCausalLM takes one"):
            token_logprobs(model, pairs)
    far = ModelInput([5, 6], np.array([0, model.max_positions - 1]))
    with pytest.raises(ConfigError, match=rf"sequence 0 has position {model.max_positions}; the model has"):
        token_logprobs(model, [(far, [7])])


def test_what_follows_the_scored_tokens_does_not_matter(model: Model) -> None:
    tokens = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    turns, _ = score(model, [ScoreRow(tokens, [2, 3, 6, 7])])
    (all_of_them,) = token_logprobs(model, [(tokens[:1], tokens[1:])])
    assert same([turns], [all_of_them[[1, 2, 5, 6]]])


def test_each_turn_counts_its_own_tokens(model: Model) -> None:
    """With min_tokens 2 the end-of-sequence token is impossible as a turn's first or second token, in every turn."""
    params = SamplingParams(max_tokens=8, min_tokens=2)
    tokens = [5, 2, 2, 2, 7, 7, 2, 2, 2]
    logprobs, entropy = score(model, [ScoreRow(tokens, [1, 2, 3, 6, 7, 8], params)])
    assert logprobs.isinf().tolist() == [True, True, False, True, True, False]
    assert entropy.isfinite().all()


def test_sequences_without_a_token_to_score(model: Model) -> None:
    empty, one = token_logprobs(model, [([5, 6], []), PAIRS[0]])
    assert empty.shape == (0,)
    assert same([one], token_logprobs(model, PAIRS[:1]))
    assert token_logprobs(model, []) == []
    assert [part.shape for part in score(model, [])] == [(0,), (0,)]


@pytest.mark.parametrize(
    ("pair", "sampling", "named"),
    [
        (([], [5]), None, "sequence 1 has an empty prompt"),
        (([5], [6.5]), None, r"sequence 1 is \[5, 6.5\]; it must be a list of token ids"),
        (("ab", "c"), None, "sequence 1 is .*'a'.*; it must be a list of token ids"),
        (([5], [97]), None, "sequence 1 has token id 97.*0 to 96"),
        (([-1], [5]), None, "sequence 1 has token id -1"),
        (([5], [6] * 256), None, "sequence 1 has 257 tokens; the model has 256 positions"),
        (([5], [6]), [None], "sampling has 1 entries for 2 sequences"),
        (([5], [6]), SamplingParams(max_tokens=1), "give a list, one for each sequence"),
        (([5], [6]), [None, {"temperature": 1}], r"sampling holds {'temperature': 1}; each must be SamplingParams"),
        (([[5, 6]], [7]), None, r"sequence 1 is \[\[5, 6\], 7\]; it must be a list of token ids"),
        (([5], None), None, r"sequences holds \(\[5\], None\); each must be a pair"),
        (5, None, r"sequences holds 5; each must be a pair \(prompt, completion_ids\)"),
        (([5], [6]), [None, SamplingParams(max_tokens=1, stop_token_ids=(300,))], "sequence 1 has token id 300"),
    ],
)
def test_mistakes_are_refused_by_name(model: Model, pair, sampling, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        token_logprobs(model, [PAIRS[0], pair], sampling=sampling)


@pytest.mark.parametrize("predict", [range(2), [0], [-1], [-3, 2], [2, 1], [1, 1], [3], range(2, 4)])
def test_only_tokens_that_have_one_before_them_are_predicted_in_order(model: Model, predict) -> None:
    for rows in ([([5, 6, 7], predict)], [([5, 6], [1]), ([5, 6, 7], predict), ([9, 8, 7], range(1, 3))]):
        with pytest.raises(ConfigError, match=rf"sequence {len(rows) // 2} of 3 tokens predicts those at .* ascending"):
            score(model, [ScoreRow(*row) for row in rows])


def test_a_number_of_alternatives_below_0_is_refused(model: Model) -> None:
    with pytest.raises(ConfigError, match="top_logprobs is -1; it must be 0"):
        score_prompt(model, [5, 6, 7], -1)


def test_the_last_position_can_be_used(model: Model) -> None:
    (row,) = token_logprobs(model, [([5], [6] * 255)])
    assert row.isfinite().all()
