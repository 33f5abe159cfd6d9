"""benchmarks/gpu_latency.py without vLLM: its tokenizer, commands and figures."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from rlloop.cli.serve_options import parse


@pytest.fixture
def latency(module):
    return module("gpu_latency")


def test_every_token_is_a_word_that_is_read_again(latency, tmp_path):
    latency.save_words(tmp_path, 2000, 15)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = [0, 1, 15, 150, 1999, 15, 1515]
    assert tokenizer.decode(ids) == "w0 w1 w15 w150 w1999 w15 w1515"
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert (tokenizer.eos_token_id, tokenizer.all_special_ids, tokenizer.vocab_size) == (15, [15, 0], 2000)


def test_servers_are_started_with_options_that_they_have(latency, tmp_path):
    words = latency.command_of("rlloop", tmp_path, 7001, 1000, 0, "cuda")
    options = parse(words[words.index("serve") + 1 :])
    assert (options.kind, options.port, options.device, options.max_cache_tokens) == ("engine", 7001, "cuda", 1000)
    words = latency.command_of(latency.PEER, tmp_path, 7002, 1000, 1 << 30, "cuda")
    assert words[words.index("--kv-cache-memory-bytes") + 1] == str(1 << 30)
    assert "--enforce-eager" not in words
    assert "--enforce-eager" in latency.command_of(latency.PEER, tmp_path, 7002, 1000, 0, "cpu")


def test_both_servers_get_the_same_requests_and_each_round_others(latency, tmp_path, capsys):
    class Client:
        def __init__(self):
            self.asked = []

        def ask(self, line):
            self.asked.append(json.loads(line))
            place = 2.0 if self.asked[-1]["port"] == 2 else 1.0
            return {name: place * len(self.asked) for name in latency.MEASURED.values()}

    client = Client()
    rounds = latency.Rounds(client, {"rlloop": 1, latency.PEER: 2}, tmp_path, (128, 64), window=5.0)
    found = rounds.measured(16.0, 3)
    assert [each["port"] for each in client.asked] == [1, 2] * 4
    loads = [{**each, "port": 0} for each in client.asked]
    assert loads[::2] == loads[1::2]
    assert len({each["seed"] for each in loads}) == 4
    assert {each["count"] for each in loads} == {80}
    first, *_, last = latency.figures_of("a shape", (128, 64), 16.0, found)
    assert first.name == "latency, a shape bf16, 16 requests/s of (128 in, 64 out): first token, p50"
    assert (first.value, first.peer_value, first.aim) == (5.0, 12.0, 1.0)  # of rounds 1 to 3; the warm-up is left out
    assert first.ratio == pytest.approx(12 / 5)  # lower is better
    assert last.name.endswith("whole answer, p50")
    (alone, *_) = latency.figures_of("a shape", (128, 64), 16.0, {"rlloop": found["rlloop"]})
    assert (alone.peer, alone.aim) == (None, None)
    assert "rlloop, 16 requests/s, round 3: first token, p50 7.0" in capsys.readouterr().err


def test_the_client_is_asked_for_what_is_read_from_its_answer(latency):
    asked = {"port": 1, "folder": "m", "size": (8, 4), "rate": 2.0, "count": 9, "seed": 3}
    words = latency.words_of(asked)
    for name in latency.MEASURED.values():
        percentile, metric, _ = name.split("_")
        assert percentile.removeprefix("p") in words[words.index("--metric-percentiles") + 1].split(",")
        assert metric in words[words.index("--percentile-metrics") + 1].split(",")
