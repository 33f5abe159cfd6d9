"""benchmarks/ranks_context.py without a GPU: its figures, a GPU without enough memory, toys over gloo."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
ARGUMENTS = {"tiny": False, "layers": None, "keep_attention": True, "offload_activations": False, "lengths": [600, 700]}


def test_figures_stand_beside_one_gpu_s_and_beside_what_was_predicted(module):
    ranks, long, args = module("ranks_context"), module("long_context"), types.SimpleNamespace(**ARGUMENTS)
    one = {"seconds": [2.0, 4.0], "peak": [40 * GIB], "logprobs": [1, 2, 3]}
    two = {"seconds": [1.0, 1.0], "peak": [20 * GIB, 30 * GIB], "logprobs": [1, 5, 3]}
    said = "one sequence of 600 tokens, Qwen3 0.6B shape bf16, layers recomputed but for attention, cp="
    speed, memory, predicted = ranks.figures_of(args, {1: {600: one}}, 1, 600)
    assert (speed.name, speed.value, speed.spread) == (f"forward + backward, {said}1", 225.0, (150.0, 300.0))
    assert (speed.peer, memory.value, predicted.peer_value) == (None, 40.0, 40.0)
    speed, memory, predicted, differ = ranks.figures_of(args, {1: {600: one}, 2: {600: two}}, 2, 600)
    assert (speed.peer, speed.value, speed.peer_value) == ("itself on 1 GPU", 600.0, 225.0)
    assert memory.name == f"peak memory, largest of the GPUs, {said}2"
    assert (memory.value, memory.peer_value) == (30.0, 40.0)
    settings = {"offload": "none", "keep_attention": True, "offload_activations": False}
    assert predicted.value == long.predicted(long.config_of(False), 600, settings, ranks.Layout(cp=2)) / GIB
    alone, split = (long.predicted(long.config_of(False), 131072, settings, ranks.Layout(cp=cp)) for cp in (1, 2))
    assert split < alone
    assert (differ.name, differ.value) == (f"logprobs that differ from one GPU's, of 3, {said}2", 1)
    outgrown = {1: {600: {"outgrown": True}}, 2: {600: two, 700: {"outgrown": True}}}
    speed, memory, _ = ranks.figures_of(args, outgrown, 2, 600)
    assert (speed.peer, speed.peer_value, memory.peer_value) == ("itself on 1 GPU: out of memory", None, None)
    (longer,) = ranks.figures_of(args, outgrown, 2, 700)
    assert longer.name.endswith("cp=2: out of memory")
    assert ranks.figures_of(args, outgrown, 1, 700) == []


def test_a_gpu_without_enough_memory_ends_the_longer_lengths_alone(module, monkeypatch, capsys):
    ranks, args = module("ranks_context"), types.SimpleNamespace(**ARGUMENTS)

    def run_ranks(command, size, folder):
        (folder / ranks.FOUND).write_text('{"600": {"seconds": [1.0]}}')
        if size == 2:
            (folder / "outgrown").write_text("700")
        return [1, -9]

    monkeypatch.setattr(ranks, "run_ranks", run_ranks)
    assert ranks.found_by(args, 2, 0.0) == ({600: {"seconds": [1.0]}, 700: {"outgrown": True}}, False)
    assert ranks.found_by(args, 4, 0.0) == ({600: {"seconds": [1.0]}}, True)
    assert "4 GPUs: ranks ended with [1, -9]" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--lengths", "10"], ["--lengths", "9999999"], ["--layers", "3"]])
def test_lengths_and_layers_that_cannot_be_are_refused(wrong):
    done = ran(*wrong)
    assert done.returncode == 2
    assert "--lengths: from 22 up to 524,352 tokens" in done.stderr or "give 1 to 2" in done.stderr


@pytest.mark.slow
def test_toys_over_ranks_have_the_logprobs_of_one():
    done = ran("--cp", "1", "2", "--layers", "1", "--rounds", "1", "--keep-attention")
    assert done.returncode == 0, done.stderr
    for tokens, counted in ((96, 76), (161, 141)):
        said = f"one sequence of {tokens} tokens, toy, 1 of 2 layers bf16, layers recomputed but for attention, cp=2"
        assert f"forward + backward, {said}" in done.stdout
        (line,) = [line for line in done.stdout.splitlines() if f"of {counted}, {said}" in line]
        assert line.split(said)[1].split() == ["0", "logprobs"]


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks" / "ranks_context.py", "--tiny", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=800)
