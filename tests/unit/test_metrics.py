import math
import re
from pathlib import Path

import pytest

from rlloop.metrics import PEER_NAMES, Max, Mean, Min, Sum, as_peer, is_timing, merge, pass_or_fail, values


def test_merged_mean_is_the_mean_of_everything_not_of_means():
    parts = [{"a": Mean(10.0, 1)}, {"a": Mean(0.0, 9)}]
    assert values(merge(parts)) == {"a": 1.0}  # the mean of means would be 5


def test_each_reduction_merges_in_its_own_way():
    parts = [
        {"mean": Mean(1, 2), "sum": Sum(1), "max": Max(1), "min": Min(1)},
        {"sum": Sum(5), "max": Max(5), "min": Min(5)},
    ]
    assert values(merge(parts)) == {"mean": 0.5, "sum": 6, "max": 5, "min": 1}


@pytest.mark.parametrize(
    ("name", "timing"),
    [
        ("time/step", True),
        ("perf/mfu", True),
        ("sync/pause_seconds", True),
        ("sync/wire_bytes", True),  # a replica that joins late takes an anchor
        ("loss/total", False),
    ],
)
def test_only_clocks_count_as_timing(name, timing):
    assert is_timing(name) is timing


def test_a_peer_with_the_other_sign_gets_the_other_sign():
    ours = {"parity/k1": 0.25, "parity/tokens_different": 0.5, "parity/tokens": 10}
    assert as_peer(ours, "torchtitan") == {"bit_wise/logprob_diff/mean": -0.25, "bit_wise/ratio_tokens_different": 0.5}
    assert as_peer(ours, "verl") == {"rollout_corr/kl": 0.25}


def test_an_unknown_peer_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'nobody'.*torchtitan"):
        as_peer({}, "nobody")


def test_one_of_theirs_may_be_the_sum_of_two_of_ours():
    ours = {"loss/clip_high": 0.25, "loss/clip_low": 0.125, "loss/clip_dual": 0.0625}
    assert as_peer(ours, "verl") == {"actor/pg_clipfrac": 0.375, "actor/pg_clipfrac_lower": 0.0625}
    assert as_peer({"loss/clip_high": 0.25}, "verl") == {}, "half of a sum is not the sum"


def test_no_two_names_of_a_peer_count_the_same_metric():
    for peer, names in PEER_NAMES.items():
        counted = [ours for parts in names.values() for ours in parts]
        assert len(set(counted)) == len(counted), peer


def test_every_metric_that_the_code_names_is_documented():
    root = Path(__file__).parents[2]
    known = set(re.findall(r"`([a-z]+/[a-z0-9_]+)`", (root / "docs" / "metrics.md").read_text()))
    sections = "|".join(sorted({name.partition("/")[0] for name in known}))
    panels = root / "rlloop" / "dashboard" / "panels.py"  # has room for metrics of other frameworks
    named = {
        name
        for file in (root / "rlloop").rglob("*.py")
        if file != panels
        for name in re.findall(rf'"((?:{sections})/[a-z0-9_]+)"', file.read_text())
    }
    named.discard("sync/wire")  # a prefix, for is_timing
    assert len(named) > 50
    assert not {name for name in named if name not in known and not name.startswith(("time/", "fleet/"))}


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([(0.25, 0.25)], True),
        ([(0.0, 0.0)], False),  # nothing is solved yet, if anything can be
        ([(0.1, 0.0), (0.2, 0.1)], True),  # partial credit, and something is solved
        ([(0.43, 0.0)], False),
        ([(3.1, 0.9)], False),
        ([(-1.0, 0.0)], False),
        ([(math.nan, 0.0), (0.5, 0.5)], True),
    ],
)
def test_rewards_that_pass_or_fail(rewards, expected):
    assert pass_or_fail(rewards) is expected
