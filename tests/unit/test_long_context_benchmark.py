"""benchmarks/long_context.py without a GPU: a toy of both sides and of RL, too little memory, time limits."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def told_by(text: str) -> list[dict]:
    return [json.loads(line.removeprefix("#made ")) for line in text.splitlines() if line.startswith("#made ")]


def test_what_a_child_tells_arrives_at_once_and_its_time_is_limited(module):
    told = module("children").told
    path = f"import sys, time; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); from children import tell;"
    begin = time.monotonic()
    code = f"{path} tell(at=1); print('other'); tell(at=2); time.sleep(100)"
    assert [each["at"] for each in told([sys.executable, "-c", code], seconds=5)] == [1, 2]
    assert time.monotonic() - begin < 60
    with pytest.raises(subprocess.CalledProcessError):
        list(told([sys.executable, "-c", f"{path} tell(at=1); sys.exit(3)"], seconds=60))


def test_a_side_without_enough_memory_says_so_and_ends(module, capsys):
    long, lengths = module("long_context"), []

    def run(length: int) -> float:
        lengths.append(length)
        if length > 20:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return 0.5

    settings = {"lengths": {"a": 10, "b": 30, "c": 40}, "rounds": 3, "deadline": time.monotonic() + 100}
    long.measure(run, settings, "cpu")
    assert lengths == [10, 10, 10, 30]
    *rounds, last, longer = told_by(capsys.readouterr().out)
    assert [(each["length"], each["loss"]) for each in rounds] == [(10, 0.5)] * 3
    assert (last, longer) == ({"length": 30, "outgrown": True}, {"length": 40, "outgrown": True})
    lengths.clear()
    long.measure(run, {**settings, "deadline": time.monotonic() - 1}, "cpu")
    assert lengths == [10, 30]  # one of each, however late
    assert long.needed(2.0, 32, [64, 128]) == 2.0 * (1 + 4 + 16)


def test_figures_say_who_ran_out_of_memory_and_what_was_predicted(module):
    long = module("long_context")
    config, gib = long.config_of(False), 1 << 30
    settings = {"prompt": 512, "offload": "none", "keep_attention": False, "offload_activations": False}
    ran, outgrown = {"seconds": [2.0, 4.0, 8.0], "peak": 50 * gib}, {"seconds": [], "outgrown": True}

    def made(mine: dict, other: dict) -> list:
        found = {"rlloop": {1024: mine} if mine else {}, "peer": {1024: other} if other else {}}
        return long.figures_of(found, 1024, config, "a shape", settings)

    speed, memory, prediction = made(ran, {})
    assert (speed.value, speed.spread, speed.peer) == (256.0, (128.0, 512.0), None)
    assert (memory.value, prediction.peer_value) == (50.0, 50.0)
    assert prediction.value == long.predicted(config, 1024, settings) / gib
    speed, memory, _ = made(ran, {"seconds": [1.0], "peak": 25 * gib})
    assert (speed.ratio, memory.ratio) == (0.25, 0.5)
    speed, *_ = made(ran, outgrown)
    assert (speed.peer, speed.peer_value) == ("transformers, SDPA, layers recomputed: out of memory", None)
    (speed,) = made(outgrown, {"seconds": [1.0], "peak": 25 * gib})
    assert (speed.value, speed.peer_value) == (0.0, 1024.0)
    assert speed.name.endswith(": out of memory")
    assert made({}, ran) == []
    longest = [long.predicted(config, length, settings) / gib for length in long.LENGTHS.values()]
    assert longest == sorted(longest)
    assert 30 < longest[-2] < 50  # one GPU of 80 GB is said to hold 256k tokens
    assert long.predicted(config, 1024, {**settings, "offload": "masters"}) < long.predicted(config, 1024, settings)
    keeps = {**settings, "keep_attention": True}
    assert long.predicted(config, 1024, keeps) - long.predicted(config, 1024, settings) == 28 * 1024 * 16 * (256 + 4)
    speed, *_ = long.figures_of({"rlloop": {1024: ran}, "peer": {}}, 1024, config, "a shape", keeps)
    assert "layers recomputed but for attention" in speed.name
    moved = {**keeps, "offload_activations": True}
    assert long.predicted(config, 1024, settings) - long.predicted(config, 1024, moved) == 28 * 1024 * 2 * 1024
    for found in ({"rlloop": {1024: ran}, "peer": {1024: outgrown}}, {"peer": {1024: outgrown}, "rlloop": {1024: ran}}):
        speed, *_ = long.figures_of(found, 1024, config, "a shape", moved)
        assert speed.name.endswith("layers recomputed but for attention, activations offloaded")
        assert speed.peer.endswith(": out of memory")


@pytest.mark.slow
def test_a_toy_is_trained_by_both_sides_with_the_same_loss():
    done = ran("--rounds", "1")
    losses: dict[int, list[float]] = {96: [], 160: []}
    for line in done.stderr.splitlines():
        if line.startswith(("rlloop: {", "peer: {")):
            made = json.loads(line.partition(": ")[2].replace("'", '"').replace("None", "null"))
            losses[made["length"]].append(made["loss"])
    assert losses[96][0] == pytest.approx(losses[96][1], abs=1e-3)
    assert losses[160][0] == pytest.approx(losses[160][1], abs=1e-3)
    assert "forward + backward, one sequence of 160 tokens, toy bf16, layers recomputed" in done.stdout
    assert "transformers, SDPA, layers recomputed" in done.stdout


@pytest.mark.slow
def test_a_toy_takes_a_step_of_rl_with_the_bits_of_its_engine():
    done = ran("--rl", "--rounds", "2")
    last = done.stdout.splitlines()[-5:]
    assert last[-2].startswith(
        "tokens that differ, of 20, RL step, prompt of 150 tokens, 2 x 5 new, toy bf16  0 tokens"
    )
    assert last[-1].startswith("prefill in chunks, one prompt of 200 tokens")


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks" / "long_context.py", "--tiny", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
