import dataclasses
import json

import numpy as np
import pytest

from rlloop.config.run import ParityConfig, ParityMode
from rlloop.errors import ConfigError
from rlloop.metrics import LOG_RATIO_EDGES
from rlloop.parity.certificate import Certificate, bits_digest, content_digest, find_breaks
from rlloop.parity.monitor import Finding, ParityMonitor, compare, describe, fingerprint_differences, report
from rlloop.runs.folder import Journal, read_records
from rlloop.types import Completion, Example, Recomputed, RewardResult, Sample, SamplingParams


def sample(uid: str, logprobs: list[float]) -> Sample:
    array = np.array(logprobs, dtype=np.float32)
    made = Completion([7, 8], [3] * len(array), array, array, 0, "stop", SamplingParams(max_tokens=9, seed=0))
    return Sample(uid, Example(uid, [7, 8], "", {}), made, "", RewardResult(0.0), group=0)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_equal_bits_are_exactly_zero_everywhere():
    result = compare([sample("a", [-0.1, -2.0]), sample("b", [-3.0])], [floats(-0.1, -2.0), floats(-3.0)])
    assert result.equal
    assert result.engine_digest == result.trainer_digest
    assert result.raw_digests is None  # the trainer told none
    assert (result.first, result.worst, result.certain) == (None, None, 0)
    assert result.metrics == {
        "parity/tokens": 3,
        "parity/tokens_different": 0.0,
        "parity/tokens_certain": 0.0,
        "parity/logprob_diff_max": 0.0,
        "parity/logprob_diff_mean": 0.0,
        "parity/logprob_diff_p999": 0.0,
        "parity/k1": 0.0,
        "parity/k3": 0.0,
        "parity/chi2": 0.0,
        "parity/ppl_ratio": 1.0,
        "is/ratio_mean": 1.0,
        "is/ratio_max": 1.0,
        "is/ratio_min": 1.0,
        "is/ess": 1.0,
        "is/log_ratio_histogram": {"edges": list(LOG_RATIO_EDGES), "counts": [3 * (at == 15) for at in range(31)]},
    }


def test_formulas_and_signs_by_hand():
    mu, pi = [-1.0, -2.0, -0.5], [floats(-1.5, -1.75), floats(-0.5)]
    found = compare([sample("a", mu[:2]), sample("b", mu[2:])], pi).metrics
    d = np.array([-0.5, 0.25, 0.0])
    r = np.exp(d)
    assert found["parity/tokens_different"] == pytest.approx(2 / 3)
    assert found["parity/k1"] == pytest.approx(0.25 / 3)  # mean(mu − pi): the engine finds its own tokens likelier
    assert found["parity/k3"] == pytest.approx((r - 1 - d).mean())
    assert found["parity/chi2"] == pytest.approx((r**2).mean() - 1)
    assert found["parity/logprob_diff_max"] == 0.5
    assert found["parity/logprob_diff_mean"] == 0.25
    assert found["parity/ppl_ratio"] == pytest.approx((np.exp((-1.5 + 1.625)) + 1) / 2)
    assert found["is/ess"] == pytest.approx(r.sum() ** 2 / (3 * (r**2).sum()))
    assert (found["is/ratio_max"], found["is/ratio_min"]) == (pytest.approx(r.max()), pytest.approx(r.min()))


def test_the_perplexity_ratio_is_a_mean_over_sequences_that_have_tokens():
    samples = [sample("a", []), sample("b", [-1.0, -2.0]), sample("c", [-3.0]), sample("d", [])]
    found = compare(samples, [floats(), floats(-1.5, -1.75), floats(-3.5), floats()]).metrics
    assert found["parity/ppl_ratio"] == pytest.approx((np.exp(-1.5 + 1.625) + np.exp(-3.0 + 3.5)) / 2)


def test_infinities_are_seen_and_not_warned_of():
    found = compare([sample("a", [-np.inf, -1.0, -1e30])], [floats(-np.inf, -np.inf, -1.0)])
    assert (found.tokens_different, found.metrics["is/ratio_max"]) == (2, pytest.approx(np.nan, nan_ok=True))
    assert sum(found.metrics["is/log_ratio_histogram"]["counts"]) == 2  # inf − inf belongs to no bin


def test_a_ratio_at_an_edge_of_the_histogram_is_in_the_bin_that_begins_there():
    found = compare([sample("a", [-1.5, -0.5])], [floats(-0.5, -1.5)]).metrics["is/log_ratio_histogram"]
    assert [found["counts"][LOG_RATIO_EDGES.index(edge) + 1] for edge in (-1.0, 1.0)] == [1, 1]


def test_k3_of_a_tiny_drift_is_not_lost_in_rounding():
    a = np.float32(-1.0)
    b = np.nextafter(a, np.float32(0))
    d = float(b) - float(a)
    assert compare([sample("a", [a])], [floats(b)]).metrics["parity/k3"] == pytest.approx(d * d / 2, rel=1e-6)


@pytest.mark.parametrize(("mine", "theirs", "different"), [(0.0, -0.0, 1), (np.nan, np.nan, 0), (-1.0, -1.0000001, 1)])
def test_bits_are_compared_not_values(mine, theirs, different):
    assert compare([sample("a", [mine])], [floats(theirs)]).tokens_different == different


def test_first_and_worst_difference_are_named_with_their_bits():
    engine = [sample("1/0/0", [-1.0, -2.0]), sample("1/0/1", [-3.0, -4.0])]
    result = compare(engine, [floats(-1.0, -2.5), floats(-3.0, -9.0)])
    assert (result.tokens_different, result.sequences_different) == (2, 2)
    assert result.first is not None
    assert result.worst is not None
    assert (result.first.uid, result.first.index, result.first.position, result.first.token_id) == ("1/0/0", 1, 3, 3)
    assert (result.first.engine_bits, result.first.trainer_bits) == ("0xc0000000", "0xc0200000")
    assert (result.worst.uid, result.worst.trainer) == ("1/0/1", -9.0)
    assert str(result.first) == (
        "sequence 1/0/0, token 1 of the completion (id 3): engine -2 (0xc0000000), trainer -2.5 (0xc0200000)"
    )
    assert describe(result) == (
        "2 of 4 trained tokens, in 2 sequences, have other bits in the trainer than in the engine. "
        f"First: {result.first}"
    )


@pytest.mark.parametrize(("trainer", "worst"), [((-7.5, -3.0, -2.0), 1), ((-7.5, np.nan, -30.0), 1)])
def test_the_worst_difference_is_the_widest_and_nothing_is_wider_than_not_a_number(trainer, worst):
    result = compare([sample("a", [-8.0, -1.0, -2.0])], [floats(*trainer)])
    assert result.first is not None
    assert result.worst is not None
    assert (result.first.index, result.worst.index) == (0, worst)


def test_a_trainer_that_scored_other_tokens_is_a_broken_invariant():
    with pytest.raises(AssertionError, match="other tokens"):
        compare([sample("a", [-1.0])], [floats(-1.0, -1.0)])


def monitor(tmp_path, mode: ParityMode, **options) -> ParityMonitor:
    certificate = Certificate(Journal(tmp_path / "parity.jsonl"))
    return ParityMonitor(ParityConfig(mode=mode, **options), certificate, {"cpu": "x"}, {"cpu": "x"})


def certified(judge: ParityMonitor, *step):
    """A step compared, and its line written."""
    found = judge.compare(*step)
    judge.certificate.seal()
    return found


def test_modes_judge_the_same_difference_differently(tmp_path):
    for index, (mode, stops) in enumerate([("require", True), ("fallback", False), ("observe", False)]):
        folder = tmp_path / str(index)
        folder.mkdir()
        judge = monitor(folder, ParityMode(mode))
        same = certified(judge, 1, 0, [sample("a", [-1.0])], Recomputed([floats(-1.0)]))
        assert judge.objection(same) is None
        other = certified(judge, 2, 1, [sample("a", [-1.0])], Recomputed([floats(-1.001)]))
        assert (judge.objection(other) is not None) is stops


def test_fallback_steps_down_once_stays_there_and_stops_above_its_limit(tmp_path):
    judge = monitor(tmp_path, ParityMode.fallback, max_k3=0.01)
    rungs = []
    for step, theirs in enumerate([-1.0, -1.001, -1.0], start=1):
        result = certified(judge, step, step - 1, [sample("a", [-1.0])], Recomputed([floats(theirs)]))
        assert judge.objection(result) is None
        down = f"stepped down from bitwise to correction: {describe(result)}"
        assert result.step_down == (down if step == 2 else None)
        rungs.append(judge.rung)
    assert rungs == ["bitwise", "correction", "correction"]
    assert [line["rung"] for line in read_records(tmp_path / "parity.jsonl")] == rungs
    far = certified(judge, 4, 3, [sample("a", [-1.0])], Recomputed([floats(-2.0)]))
    assert "max_k3=0.01" in (judge.objection(far) or "")
    nothing = certified(judge, 5, 4, [sample("a", [-1.0])], Recomputed([floats(np.nan)]))
    assert judge.objection(nothing) is not None  # not a number is not below the limit
    found = compare([sample("a", [-1.0])], [floats(-1.25)])
    k3 = found.metrics["parity/k3"]
    assert monitor(tmp_path, ParityMode.fallback, max_k3=k3).objection(found) is None
    assert monitor(tmp_path, ParityMode.fallback, max_k3=float(np.nextafter(k3, 0))).objection(found) is not None


def test_differing_fingerprints_are_refused_by_require_only(tmp_path):
    mine, theirs = {"cpu": "avx2", "profile": {"linear": "stock"}}, {"cpu": "amx", "profile": {"linear": "rlloop"}}
    certificate = Certificate(Journal(tmp_path / "parity.jsonl"))
    listed = r"\n  cpu: engine 'avx2', trainer 'amx'\n  profile\.linear: engine 'stock', trainer 'rlloop'\nparity\.mode"
    with pytest.raises(ConfigError, match=listed):
        ParityMonitor(ParityConfig(), certificate, mine, theirs)
    ParityMonitor(ParityConfig(mode=ParityMode.observe), certificate, mine, theirs)


def test_a_step_without_tokens_is_certified_too(tmp_path):
    judge = monitor(tmp_path, ParityMode.require)
    result = certified(judge, 1, 0, [], Recomputed([]))
    assert result.equal
    assert result.metrics == {}  # absent, never 0
    assert find_breaks(read_records(tmp_path / "parity.jsonl")) == []


@pytest.mark.parametrize(
    "tamper",
    [
        lambda lines: [lines[0], lines[2]],
        lambda lines: [lines[0], {**lines[1], "tokens_different": 0}, lines[2]],
        lambda lines: [lines[1], lines[0], lines[2]],
        lambda lines: lines[1:],
    ],
    ids=["taken out", "changed", "swapped", "beginning cut"],
)
def test_the_chain_shows_tampering(tmp_path, tamper):
    judge = monitor(tmp_path, ParityMode.observe)
    for step in (1, 2, 3):
        certified(judge, step, step - 1, [sample("a", [-1.0])], Recomputed([floats(-1.0 - step)]))
    lines = list(read_records(tmp_path / "parity.jsonl"))
    assert find_breaks(lines) == []
    assert find_breaks(tamper(lines)) != []


def test_a_reopened_certificate_goes_on_with_the_chain(tmp_path):
    for step in (1, 2):
        judge = monitor(tmp_path, ParityMode.observe)
        certified(judge, step, step - 1, [sample("a", [-1.0])], Recomputed([floats(-1.0)]))
    assert find_breaks(read_records(tmp_path / "parity.jsonl")) == []


def test_comparisons_are_plain_json(tmp_path):
    result = compare([sample("a", [-1.0])], [floats(-2.0)])
    json.dumps(dataclasses.asdict(result))


def test_replay_is_the_rung_between_where_expert_choices_differ(tmp_path):
    judge = monitor(tmp_path, ParityMode.fallback, max_k3=1.0)
    samples = [sample("1/0/0", [-1.0, -2.0])]
    other = [np.array([-1.5, -2.0], np.float32)]
    reasons = []
    for step, (logprobs, flips) in enumerate([(None, 0.0), (other, 0.25), (None, 0.0), (other, 0.0), (other, 0.0)], 1):
        own = [samples[0].completion.logprobs] if logprobs is None else logprobs
        found = certified(judge, step, step - 1, samples, Recomputed(own), {"parity/router_different": flips})
        assert found.metrics["parity/router_different"] == flips
        assert judge.objection(found) is None
        reasons.append((judge.rung, judge.replays, found.step_down))
    rungs, replays, texts = zip(*reasons, strict=True)
    assert rungs == ("bitwise", "replay", "replay", "correction", "correction")
    assert replays == (False, True, True, True, True)
    assert [text is not None for text in texts] == [False, True, False, True, False]
    described = describe(compare(samples, other))
    assert texts[1] == (
        f"stepped down from bitwise to replay: {described}; 25.00% of expert choices differ: the trainer takes the "
        "engine's"
    )
    assert texts[3] == f"stepped down from replay to correction: with the engine's experts too, {described}"
    lines = list(read_records(judge.certificate._journal.path))
    assert ["reason" in line for line in lines] == [False, True, False, True, False]
    judge.certificate.reload()
    assert (judge.rung, judge.replays) == ("correction", True)


def test_replay_comes_first_where_there_are_experts_though_none_differs_yet(tmp_path):
    judge = monitor(tmp_path, ParityMode.fallback, max_k3=1.0)
    other = [np.array([-1.5, -2.0], np.float32)]
    rungs = []
    for step in (1, 2):
        found = certified(
            judge, step, step - 1, [sample("1/0/0", [-1.0, -2.0])], Recomputed(other), {"parity/router_different": 0.0}
        )
        rungs.append((judge.rung, judge.replays))
        assert found.step_down is not None
    assert rungs == [("replay", True), ("correction", True)]


def witnessed(raw: list[float], drawn: list[int], logprobs: tuple[float, ...] = (0.0, -2.0)) -> Recomputed:
    return Recomputed([floats(*logprobs)], [floats(*raw)], [np.array(drawn)])


def told(*raw: float) -> Sample:
    """Two tokens of id 3, the first of probability 1."""
    plain = sample("1/0/0", [0.0, -2.0])
    return dataclasses.replace(plain, completion=dataclasses.replace(plain.completion, raw_logprobs=floats(*raw)))


def test_raw_logprobs_are_compared_where_the_others_say_nothing(tmp_path):
    judge = monitor(tmp_path, ParityMode.require)
    found = certified(judge, 1, 0, [told(-1.0, -3.0)], witnessed([-1.5, -3.0], [3, 3]))
    assert (found.tokens_different, found.raw_different, found.certain, found.equal) == (0, 1, 1, False)
    assert (found.metrics["parity/raw_different"], found.metrics["parity/tokens_certain"]) == (0.5, 0.5)
    said = judge.objection(found) or ""
    assert "1 of 2 trained tokens, in 1 sequences, have other raw bits" in said
    assert "sequence 1/0/0, token 0 of the completion (id 3): raw, engine -1 (0xbf800000), trainer -1.5" in said
    (line,) = read_records(tmp_path / "parity.jsonl")
    assert (line["certain"], line["raw_different"], line["tokens_different"]) == (1, 1, 0)
    assert line["raw"]["engine"] != line["raw"]["trainer"]
    assert line["engine"] == line["trainer"]


def test_an_engine_that_tells_no_raw_logprobs_is_found_by_require_alone(tmp_path):
    for mode, different in ((ParityMode.require, 2), (ParityMode.observe, 0)):
        found = monitor(tmp_path, mode).compare(1, 0, [told(np.nan, np.nan)], witnessed([-1.0, -3.0], [3, 3]))
        assert found.raw_different == different
        assert ("parity/raw_different" in found.metrics) == (mode is ParityMode.require)


def test_a_token_that_its_seed_does_not_draw_is_named_with_the_one_that_it_draws(tmp_path):
    judge = monitor(tmp_path, ParityMode.require)
    found = certified(judge, 1, 0, [told(-1.0, -3.0)], witnessed([-1.0, -3.0], [3, 5]))
    assert (found.draws.tokens, found.draws.different, found.equal) == (2, 1, True)
    assert found.metrics["parity/redrawn_different"] == 0.5
    assert "token 1 of the completion: its id is 3, and seed 0 draws 5" in (judge.objection(found) or "")
    json.dumps(report(1, "", found, None))
    none = certified(judge, 2, 1, [told(-1.0, -3.0)], witnessed([-1.0, -3.0], [3, -1]))
    assert (none.draws.tokens, judge.objection(none)) == (1, None)


def test_fallback_stops_at_a_draw_that_no_arithmetic_explains(tmp_path):
    judge = monitor(tmp_path, ParityMode.fallback, max_k3=1.0)
    drifted = certified(judge, 1, 0, [told(-1.0, -3.0)], witnessed([-1.0, -3.0], [3, 5], (0.0, -2.01)))
    assert judge.objection(drifted) is None
    same = certified(judge, 2, 1, [told(-1.0, -3.0)], witnessed([-1.0, -3.0], [3, 5]))
    assert "draws 5" in (judge.objection(same) or "")


@pytest.mark.parametrize(("mode", "stops"), [("require", True), ("fallback", True), ("observe", False)])
def test_what_was_not_asked_for_is_judged_though_it_is_not_trained(tmp_path, mode, stops):
    judge = monitor(tmp_path, ParityMode(mode))
    other = dataclasses.replace(told(-1.0, -3.0), uid="1/0/7", fault="its prompt is [1], and was asked for as [2]")
    found = certified(judge, 1, 0, [told(-1.0, -3.0)], witnessed([-1.0, -3.0], [3, 3]), None, [other])
    assert found.faults == ("1/0/7: its prompt is [1], and was asked for as [2]",)
    assert judge.objection(found) == (
        f"1 completions are not what the engine was asked for. First, sequence {found.faults[0]}" if stops else None
    )
    (line,) = read_records(tmp_path / "parity.jsonl")
    assert line["faults"] == 1


@pytest.mark.parametrize(("mode", "stops"), [("require", True), ("fallback", False), ("observe", False)])
def test_held_out_tokens_are_judged_alike_and_take_no_step_down(tmp_path, mode, stops):
    judge = monitor(tmp_path, ParityMode(mode), max_k3=1.0)
    made = [told(-1.0, -3.0)]
    judge.certificate.note(rollouts="digest")
    judge.compare(2, 1, made, witnessed([-1.0, -3.0], [3, 3]))
    found = judge.compare_held_out(2, made, witnessed([-1.0, -3.0], [3, 3], (0.0, -2.9)), [])
    judge.certificate.seal()
    objection = judge.objection(found)
    assert objection is None or "1 of 2 held-out tokens" in objection
    assert ((objection is not None), judge.rung, found.step_down) == (stops, "bitwise", None)
    (line,) = read_records(tmp_path / "parity.jsonl")
    assert (line["version"], line["tokens_different"], line.get("held_out")) == (
        (2, 1, True) if stops else (1, 0, None)
    )
    assert line["rollouts"] == "digest"


def test_what_a_line_and_a_report_hold(tmp_path):
    judge = monitor(tmp_path, ParityMode.require)
    found = certified(judge, 4, 3, [told(-1.0, -3.0)], witnessed([-1.0, -3.0], [3, 5], (0.0, -2.5)))
    (line,) = read_records(tmp_path / "parity.jsonl")
    assert {key: line[key] for key in line if key not in ("previous", "hash")} == {
        "step": 4,
        "version": 3,
        "tokens": 2,
        "tokens_different": 1,
        "engine": bits_digest([floats(0.0, -2.0)]),
        "trainer": bits_digest([floats(0.0, -2.5)]),
        "certain": 1,
        "raw_different": 0,
        "raw": {"engine": bits_digest([floats(-1.0, -3.0)]), "trainer": bits_digest([floats(-1.0, -3.0)])},
        "redrawn": 2,
        "redrawn_different": 1,
        "faults": 0,
        "fingerprints": {"engine": content_digest({"cpu": "x"}), "trainer": content_digest({"cpu": "x"})},
        "rung": "bitwise",
    }
    difference = {
        "uid": "1/0/0",
        "index": 1,
        "position": 3,
        "token_id": 3,
        "engine": -2.0,
        "engine_bits": "0xc0000000",
        "trainer": -2.5,
        "trainer_bits": "0xc0200000",
        "raw": False,
    }
    assert report(4, "why", found, Finding("layer 3", {"layer": 3})) == {
        "step": 4,
        "objection": "why",
        "tokens": 2,
        "tokens_different": 1,
        "sequences_different": 1,
        "raw_different": 0,
        "first": difference,
        "worst": difference,
        "redrawn": dataclasses.asdict(found.draws),
        "faults": (),
        "metrics": found.metrics,
        "doctor": {"text": "layer 3", "layer": 3},
    }
    assert report(4, "why", found, None)["doctor"] is None


def test_fingerprints_differ_by_dotted_key_and_absent_is_none():
    engine = {"cpu": "a", "profile": {"linear": 1, "deep": {"x": 1, "same": 2}}, "only": 0, "kind": {"a": 1}}
    trainer = {"cpu": "a", "profile": {"linear": 2, "deep": {"x": 3, "same": 2}}, "mine": 5, "kind": 7}
    assert fingerprint_differences(engine, trainer) == {
        "kind": ({"a": 1}, 7),
        "mine": (None, 5),
        "only": (0, None),
        "profile.deep.x": (1, 3),
        "profile.linear": (1, 2),
    }
