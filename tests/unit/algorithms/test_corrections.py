import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from rlloop.algorithms import (
    clip,
    corrected,
    dapo,
    get_correction,
    get_loss,
    icepop,
    mask,
    measured,
    mis,
    ratio_metrics,
    reinforce,
    tis,
    veto,
)
from rlloop.algorithms.corrections import CORRECTIONS, LOG_RATIO_EDGES
from tests.support.loss_batches import POLICY_LOSSES, gradient, make_batch, random_batch

# Ratios of the trainer's probability to the engine's: two sequences, of 3 and 2 tokens.
RATIOS = [[3.0, 0.25, 1.0], [0.4, 6.0]]
PRODUCTS, GEOMETRIC = (0.75, 2.4), (0.75 ** (1 / 3), 2.4**0.5)


@pytest.fixture
def batch():
    old = [[-2.0, -2.0, -2.0], [-3.0, -3.0]]
    rollout = [[-2.0 - math.log(r) for r in RATIOS[0]], [-3.0 - math.log(r) for r in RATIOS[1]]]
    return make_batch(old, rollout=rollout, advantages=[[1.0, 1.0, 1.0], [-1.0, -1.0]]).unmasked()


def both(first: float, second: float) -> list[float]:
    return [first] * 3 + [second] * 2


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (lambda b: tis(b), [2.0, 0.25, 1.0, 0.4, 2.0]),
        (lambda b: tis(b, cap=4.0), [3.0, 0.25, 1.0, 0.4, 4.0]),
        (lambda b: tis(b, level="sequence"), both(0.75, 2.0)),
        (lambda b: tis(b, level="geometric", cap=1.5), both(GEOMETRIC[0], 1.5)),
        (lambda b: clip(b), [2.0, 0.5, 1.0, 0.5, 2.0]),
        (lambda b: clip(b, level="sequence", low=0.8, high=9.0), both(0.8, 2.4)),
        (lambda b: mis(b), [0.0, 0.25, 1.0, 0.4, 0.0]),
        (lambda b: mis(b, level="sequence"), both(0.75, 0.0)),
        (lambda b: mis(b, level="geometric", high=1.1), both(GEOMETRIC[0], 0.0)),
        (lambda b: icepop(b), [3.0, 0.0, 1.0, 0.0, 0.0]),
        (lambda b: mask(b, level="token", low=0.3, high=5.0), [1.0, 0.0, 1.0, 1.0, 0.0]),
        (lambda b: mask(b, level="sequence", low=0.5, high=2.0), both(1.0, 0.0)),
        (lambda b: mask(b, low=0.9, high=1.6), both(1.0, 1.0)),
        (lambda b: mask(b), both(0.0, 0.0)),
        (lambda b: veto(b, low=0.3), both(0.0, 1.0)),
        (lambda b: veto(b, high=5.0), both(1.0, 0.0)),
        (lambda b: veto(b), both(1.0, 1.0)),
    ],
)
def test_weights_by_hand(batch, weights, expected):
    assert weights(batch).weights.tolist() == pytest.approx(expected)


def test_fractions_touched(batch):
    def fractions(**named):
        metrics = corrected(dapo, get_correction(named))(batch).metrics
        return {k: (m.total, m.count) for k, m in metrics.items() if k.startswith("is/")}

    assert fractions(tis={}) == {"is/truncated_high": (2, 5)}
    assert fractions(clip={}) == {"is/truncated_high": (2, 5), "is/truncated_low": (2, 5)}
    assert fractions(icepop={}) == {"is/masked": (3, 5)}
    assert fractions(tis={"level": "sequence"}) == {"is/truncated_high": (2, 5)}  # the second sequence's two tokens
    assert fractions(mask={"level": "token", "low": 0.3, "high": 5.0}, veto={"low": 0.3}) == {"is/masked": (4, 5)}
    assert fractions(tis={}, veto={"low": 0.3}) == {"is/truncated_high": (2, 5), "is/masked": (3, 5)}


def test_several_corrections_multiply(batch):
    veto_of_the_first = get_correction({"tis": {}, "veto": {"low": 0.3}})
    assert veto_of_the_first(batch).weights.tolist() == pytest.approx([0.0, 0.0, 0.0, 0.4, 2.0])
    assert gradient(batch, corrected(dapo, veto_of_the_first))[:3].tolist() == [0, 0, 0]


@pytest.mark.parametrize("bound", [0.5, 2.0])
def test_a_ratio_at_a_bound_is_inside(bound):
    batch = make_batch([[math.log(bound)]], rollout=[[0.0]], advantages=[[1.0]]).unmasked()
    for correction in (
        lambda b: tis(b, cap=2.0),
        clip,
        lambda b: mis(b, low=0.5),
        lambda b: icepop(b, high=2.0),
        lambda b: mask(b, level="token", low=0.5, high=2.0),
        lambda b: veto(b, low=0.5, high=2.0),
    ):
        found = correction(batch)
        assert found.weights.item() in (1.0, pytest.approx(bound))
        assert not any(tokens.any() for tokens in found.touched.values())


def test_a_weight_scales_the_policy_term_alone(batch):
    reference = replace(batch, ref_logprobs=batch.old_logprobs - 0.5)
    penalised = get_loss("reinforce", kl_coef=0.1, kl="k2")
    plain, weighed = gradient(reference, penalised), gradient(reference, corrected(penalised, icepop))
    policy = torch.tensor([-0.5, -0.5, -0.5, 0.5, 0.5], dtype=torch.float64)
    penalty = 0.1 * 0.5 / 2
    assert torch.allclose(plain, policy + penalty)
    assert torch.allclose(weighed, policy * torch.tensor([3.0, 0.0, 1.0, 0.0, 0.0]) + penalty)


def test_denominators_do_not_depend_on_what_is_dropped(batch):
    assert gradient(batch, corrected(dapo, mask))[0] == 0
    kept = gradient(batch, corrected(dapo, lambda b: mask(b, level="token", low=0.9, high=1.1)))
    assert kept.tolist() == pytest.approx([0, 0, -1 / 5, 0, 0])


def test_discarded_is_the_union_of_clipped_and_dropped():
    batch = make_batch(
        [[-0.1, -1.0, -0.1, -1.0]],
        old=[[-1.0, -1.0, -1.0, -1.0]],
        rollout=[[-1.0, -9.0, -9.0, -1.0]],
        advantages=[[1.0, 1.0, 1.0, 1.0]],
    )
    metrics = corrected(dapo, icepop)(batch).metrics  # clipped: 0, 2; dropped: 1, 2
    assert metrics["loss/clip_high"].value == 2 / 4
    assert metrics["is/masked"].value == 2 / 4
    assert metrics["loss/tokens_discarded"].value == 3 / 4


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("loss_name", POLICY_LOSSES)
def test_where_engine_and_trainer_agree_a_correction_changes_no_bit(name, loss_name):
    batch = random_batch(seed=6, dtype=torch.float32)
    batch = replace(batch, rollout_logprobs=batch.old_logprobs)
    loss = get_loss(loss_name)
    output = corrected(loss, CORRECTIONS[name])(batch)
    assert output.loss.item() == loss(batch).loss.item()
    assert torch.equal(gradient(batch, corrected(loss, CORRECTIONS[name])), gradient(batch, loss))
    assert all(metric.value == 0 for key, metric in output.metrics.items() if key.startswith("is/"))


def test_token_weights_make_an_off_policy_gradient_unbiased():
    """Tokens of a vocabulary of three, as often as the engine samples them: weighed, the trainer's own gradient."""
    trainer = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    engine = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    times = [2, 1, 1]
    tokens = [token for token in range(3) for _ in range(times[token])]
    reward = [1.0, -2.0, 0.5]
    batch = make_batch(
        [[trainer.log()[t].item()] for t in tokens],
        rollout=[[engine.log()[t].item()] for t in tokens],
        advantages=[[reward[t]] for t in tokens],
    )
    by_sample = gradient(batch, corrected(reinforce, lambda b: tis(b, cap=10.0)))
    found = [sum(g for g, t in zip(by_sample.tolist(), tokens, strict=True) if t == token) for token in range(3)]
    assert found == pytest.approx([-p * r for p, r in zip(trainer.tolist(), reward, strict=True)])


def test_no_ratio_overflows(batch):
    far = replace(batch, old_logprobs=batch.old_logprobs + 400.0)  # products of exp(1200)
    assert tis(far, level="sequence").weights.tolist() == pytest.approx(both(2.0, 2.0))
    assert clip(far, level="sequence").weights.tolist() == pytest.approx(both(2.0, 2.0))
    assert mis(far, level="sequence").weights.tolist() == both(0.0, 0.0)


@pytest.mark.parametrize("correction", [tis, mis, icepop, lambda b: mask(b, level="token"), veto])
@pytest.mark.parametrize("name", ["grpo", "reinforce", "cispo", "gspo", "importance_sampling"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_token_that_the_trainer_finds_impossible_is_dropped_not_spread(correction, name, sign):
    batch = make_batch([[-1.0, -1.5], [-1.0, -2.0]], advantages=[[sign, sign], [-sign, -sign]])
    impossible = batch.logprobs.detach().clone()
    impossible[1] = -math.inf
    batch = replace(batch, logprobs=impossible.clone().requires_grad_(), old_logprobs=impossible)
    output = corrected(get_loss(name), correction)(batch)
    assert math.isfinite(output.loss.item())
    found = gradient(batch, corrected(get_loss(name), correction))
    assert found[1] == 0
    assert (sign * found[2:] > 0).all()


def test_ratio_metrics_by_hand(batch):
    metrics = ratio_metrics(batch)
    ratios = [r for row in RATIOS for r in row]
    assert metrics["is/ratio_mean"].value == pytest.approx(sum(ratios) / 5)
    assert metrics["is/ratio_max"].value == pytest.approx(6.0)
    assert metrics["is/ratio_min"].value == pytest.approx(0.25)
    assert metrics["is/ess"].value == pytest.approx(sum(ratios) ** 2 / (5 * sum(r * r for r in ratios)))


def test_ratio_metrics_count_unmasked_tokens_only():
    batch = make_batch(
        [[-1.0, -1.0, -1.0]], rollout=[[-1.0, -5.0, -1.0]], advantages=[[0.0] * 3], mask=[[True, False, True]]
    )
    metrics = ratio_metrics(batch)
    assert metrics["is/ratio_max"].value == 1.0
    assert metrics["is/ess"].value == 1.0
    assert sum(metrics["is/log_ratio_histogram"].value["counts"]) == 2


def test_histogram_tells_rounding_from_collapse():
    drifts = [0.0, 3e-7, 2e-6, -2e-6, 0.02, 10.0, 20.0, -math.inf]  # 10 is an edge
    batch = make_batch([drifts], rollout=[[0.0] * 8], advantages=[[0.0] * 8])
    counts = ratio_metrics(batch)["is/log_ratio_histogram"].value["counts"]
    edges = (-math.inf, *LOG_RATIO_EDGES, math.inf)
    for (low, high), count in zip(pairwise(edges), counts, strict=True):
        assert count == sum(low <= d < high for d in drifts)
    assert len(LOG_RATIO_EDGES) == 30
    assert LOG_RATIO_EDGES[15] == pytest.approx(1e-6)
    assert LOG_RATIO_EDGES[-1] == 10.0


def test_measured_adds_the_statistics_and_leaves_the_loss(batch):
    output = measured(dapo)(batch)
    assert output.loss.item() == dapo(batch).loss.item()
    assert output.metrics.keys() == dapo(batch).metrics.keys() | ratio_metrics(batch).keys()
