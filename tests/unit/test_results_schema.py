"""What a run of some peers or cells leaves of the figures recorded before, and what it puts away."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT, PACKED = "trainer, 64 x (128 + 384)", "transformers, packed, compiled"


@pytest.fixture
def schema(module, tmp_path, monkeypatch):
    schema = module("results_schema")
    monkeypatch.setattr(schema, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "gpu_engine.py"), "--without", "vLLM batch-invariant"])
    return schema


@pytest.fixture
def run(schema, tmp_path):
    """Another process: records (name, value, peer, its kind, its value), and returns the rows of the file."""

    def record(*figures: tuple, again: bool = False, part: bool = True, write: bool = True) -> list[tuple]:
        if not again:
            schema.RECORDED.clear()
        made = [
            schema.Figure(name=name, unit="tokens/s", value=value, peer=peer, peer_kind=kind, peer_value=theirs)
            for name, value, peer, kind, theirs in figures
        ]
        schema.report("engine", made, device="a GPU", part=part, write=write)
        return rows(tmp_path / "engine.json")

    yield record
    schema.RECORDED.clear()


def rows(path: Path) -> list[tuple]:
    return [(each["name"], each["value"], each["peer"]) for each in json.loads(path.read_text())]


def test_a_run_of_some_peers_keeps_the_other_peers_records(run, tmp_path):
    default, invariant = "vLLM default, unseeded", "vLLM batch-invariant, unseeded"
    run(*[(name, 1.0, peer, None, 5.0) for name in ("one", "crowd") for peer in (default, invariant)])
    ended = "vLLM default: it ended"
    made = run(("one", 2.0, ended, None, None), ("crowd", 2.0, default, None, 6.0))
    assert made == [("one", 2.0, ended), ("one", 1.0, invariant), ("crowd", 2.0, default), ("crowd", 1.0, invariant)]
    assert rows(tmp_path / "earlier.json") == [("one", 1.0, default), ("crowd", 1.0, default)]
    assert run(("one", 3.0, default, None, 6.0))[:2] == [("one", 3.0, default), ("one", 1.0, invariant)]
    assert rows(tmp_path / "earlier.json")[2:] == [("one", 2.0, ended)]


def test_a_peer_whose_details_differ_is_of_the_kind_that_its_script_names(run, tmp_path):
    before, after = f"{PACKED}, flex_attention", f"{PACKED}, flash_attention_3, gradient's norm 0.975 of rlloop's"
    plain, padded = "transformers, packed, flex_attention", "transformers, padded, compiled, sdpa"
    others = [(SHORT, 1.0, plain, "transformers, packed", 4.0), (SHORT, 1.0, padded, "transformers, padded", 3.0)]
    run((SHORT, 1.0, before, PACKED, 5.0), *others)
    made = run((SHORT, 2.0, after, PACKED, 5.0))
    assert made == [(SHORT, 2.0, after), (SHORT, 1.0, plain), (SHORT, 1.0, padded)]
    assert rows(tmp_path / "earlier.json") == [(SHORT, 1.0, before)]


def test_a_record_without_a_peer_is_replaced_by_any_and_replaces_no_peers(run, tmp_path):
    run(("step", 1.0, None, None, None))
    assert run(("step", 2.0, "vLLM default", None, 1.0)) == [("step", 2.0, "vLLM default")]
    assert run(("step", 3.0, None, None, None)) == [("step", 3.0, None), ("step", 2.0, "vLLM default")]
    assert rows(tmp_path / "earlier.json") == [("step", 1.0, None)]


def test_what_a_run_completes_or_repeats_is_not_an_earlier_record(run, tmp_path):
    run(("step", 1.0, None, None, None))
    run(("step", 1.0, "vLLM TP: does not run here", None, None), again=True)
    assert run(("step", 1.0, "SGLang", None, 2.0), again=True) == [("step", 1.0, "SGLang")]
    run(("step", 1.0, "SGLang", None, 2.0))  # the same on another day would have another date
    run(("step", 9.0, "SGLang", None, 2.0), write=False)  # --quick
    assert not (tmp_path / "earlier.json").exists()
    run(("step", 4.0, "SGLang", None, 2.0))
    run(("step", 1.0, "SGLang", None, 2.0))
    run(("step", 4.0, "SGLang", None, 2.0))
    assert sorted(rows(tmp_path / "earlier.json")) == [("step", 1.0, "SGLang"), ("step", 4.0, "SGLang")]


def test_a_run_of_the_whole_makes_its_file_anew_and_puts_away_what_it_replaces(run, tmp_path):
    run(("one", 1.0, "SGLang", None, 2.0), ("two", 1.0, None, None, None))
    whole = [("one", 2.0, "vLLM", None, 2.0)], [("one", 2.0, "vLLM", None, 2.0), ("three", 2.0, None, None, None)]
    run(*whole[0], part=False)
    assert run(*whole[1], again=True, part=False) == [("one", 2.0, "vLLM"), ("three", 2.0, None)]  # as each cell ends
    assert rows(tmp_path / "earlier.json") == [("one", 1.0, "SGLang"), ("two", 1.0, None)]


def test_no_two_recorded_rows_of_a_name_are_of_one_kind_of_peer(module):
    schema = module("results_schema")
    for path in schema.RESULTS.glob("*.json"):
        if path.name not in ("earlier.json", "chaos.json"):
            kinds = Counter((each["name"], schema.kind_of(each)) for each in json.loads(path.read_text()))
            assert [kind for kind, count in kinds.items() if count > 1] == [], path.name


@pytest.mark.parametrize("script", ["ranks_engine", "ranks_experts"])
def test_each_peer_of_several_ranks_that_ended_is_named(module, script):
    ranks = module(script)
    work, (_, ended, measured) = next(iter(ranks.WORK)), ranks.SIDES
    made = ranks.figures_of(work, {"rlloop": [2.0], measured: [1.0]}, 2, [ended, measured])
    assert [each.peer_value for each in made] == [None, 1.0]
    assert re.fullmatch(rf"{re.escape(ended)} (tp )?2: it ended", made[0].peer)
    (alone,) = ranks.figures_of(work, {"rlloop": [2.0]}, 2, [])
    assert (alone.peer, alone.value) == (None, 2.0)
