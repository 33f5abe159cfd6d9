"""benchmarks/long_context.py without a GPU: a toy of both sides and of RL, too little memory, time limits."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import types
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
    code = f"{path} tell(at=1); print('other'); tell(at=2); time.sleep(1000)"
    assert [each["at"] for each in told([sys.executable, "-c", code], seconds=10)] == [1, 2]
    assert time.monotonic() - begin < 300
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
    assert module("long_context_sides").needed(2.0, 32, [64, 128]) == 2.0 * (1 + 4 + 16)


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
    needs = {name: long.predicted(config, length, settings) / gib for name, length in long.LENGTHS.items()}
    assert list(needs.values()) == sorted(needs.values())
    assert 30 < needs["256k"] < 50  # one GPU of 80 GB is said to hold them
    assert long.predicted(config, 1024, {**settings, "offload": "masters"}) < long.predicted(config, 1024, settings)
    keeps = {**settings, "keep_attention": True}
    more = long.predicted(config, 32768, keeps) - long.predicted(config, 32768, settings)
    assert more == 28 * 32768 * 16 * (256 + 4)
    speed, *_ = long.figures_of({"rlloop": {1024: ran}, "peer": {}}, 1024, config, "a shape", keeps)
    assert "layers recomputed but for attention" in speed.name
    moved = {**keeps, "offload_activations": True}
    kept, waits = (long.predicted(config, 131072, each) for each in (settings, moved))
    assert kept - waits > 0.8 * 28 * 131072 * 2 * 1024
    for found in ({"rlloop": {1024: ran}, "peer": {1024: outgrown}}, {"peer": {1024: outgrown}, "rlloop": {1024: ran}}):
        speed, *_ = long.figures_of(found, 1024, config, "a shape", moved)
        assert speed.name.endswith("layers recomputed but for attention, activations offloaded")
        assert speed.peer.endswith(": out of memory")


def test_the_longest_is_searched_until_memory_or_time_is_over(module, capsys):
    sides, lengths = module("long_context_sides"), []

    def run(length: int) -> float:
        lengths.append(length)
        if length > 40:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return 0.5

    settings = {"first": 10, "most": 1000, "rounds": 2, "deadline": time.monotonic() + 100}
    sides.search(run, settings, "cpu")
    assert lengths == [10, 20, 40, 80, 40]
    made = told_by(capsys.readouterr().out)
    assert [each["length"] for each in made if "seconds" in each] == [10, 20, 40, 40]
    assert [each for each in made if "seconds" not in each] == [{"length": 80, "outgrown": True}]
    lengths.clear()
    sides.search(run, {**settings, "most": 20}, "cpu")
    assert lengths == [10, 20, 20]
    lengths.clear()
    capsys.readouterr()
    sides.search(run, {**settings, "deadline": time.monotonic() - 1}, "cpu")
    assert lengths == [10]  # one, however late
    assert told_by(capsys.readouterr().out)[-1] == {"length": 20, "late": True}
    lengths.clear()
    sides.search(run, {**settings, "first": 80}, "cpu")
    assert lengths == [80]


def test_the_peer_s_longest_counts_with_activations_offloaded_and_ours_goes_beyond_it(module, tmp_path, monkeypatch):
    long, asked, recorded = module("long_context"), [], []
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1}')

    def told(command, seconds):
        side, settings = command[3], json.loads(command[-1])
        asked.append((side, settings.get("first"), settings.get("peer_offloads"), [*settings["lengths"].values()]))
        limit = {("peer", False): 2**18, ("peer", True): 2**19}.get((side, settings.get("peer_offloads")), 2**21)
        lengths = [settings["first"] << at for at in range(4)] if side == "peer" else settings["lengths"].values()
        for length in lengths:
            if length > limit:
                yield {"length": length, "outgrown": True}
                return
            yield {"length": length, "seconds": length / 1024, "loss": 0.0, "peak": length << 10}
        if side == "rlloop":
            assert settings["positions"] == 2**20 + 64

    monkeypatch.setattr(long, "told", told)
    monkeypatch.setattr(long.Run, "record", lambda run, figures: recorded.extend(figures))
    arguments = {"tiny": False, "layers": 2, "seconds": 100, "offload": "none", "rounds": 2, "only": ["128k"]}
    given = types.SimpleNamespace(**arguments, keep_attention=False, offload_activations=False)
    run = long.Run(given, tmp_path)
    run.find()
    assert asked == [
        ("peer", 2**17, False, [2**17]), ("peer", 2**19, True, [2**19]), ("rlloop", None, None, [2**19, 2**20]),
    ]  # fmt: skip
    assert json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"] == 2**20 + 64
    peer = "transformers, SDPA, layers recomputed, activations offloaded"
    said = "Qwen3 0.6B shape, 2 of 28 layers bf16, layers recomputed"
    speeds = [each for each in recorded if each.name.startswith("forward")]
    assert [(each.name, each.peer, each.ratio) for each in speeds] == [
        (f"forward + backward, one sequence of 524,288 tokens, {said}", peer, 1.0),
        (f"forward + backward, one sequence of 1,048,576 tokens, {said}", f"{peer}: out of memory", None),
    ]
    longest = recorded[-1]
    assert longest.name == f"longest sequence trained, of twice the peer's longest and that, {said}"
    assert (longest.value, longest.peer, longest.peer_value, longest.aim) == (2**20, peer, 2**19, 2.0)
    assert not run.failed
    (untried,) = long.longest_figure(run.found, "a shape", run.settings, outgrown=False)
    assert (untried.peer, untried.aim) == (f"{peer}: no longer one was tried", None)


def test_the_number_of_layers_is_in_the_names_and_in_what_is_predicted(module):
    long = module("long_context")
    assert long.words_of(False) == long.words_of(False, 28) == "Qwen3 0.6B shape"
    assert long.words_of(False, 7) == "Qwen3 0.6B shape, 7 of 28 layers"
    assert (long.config_of(False)["num_hidden_layers"], long.config_of(False, 7)["num_hidden_layers"]) == (28, 7)
    settings = {"offload": "none", "keep_attention": False, "offload_activations": False}
    few, all_of_them = (long.predicted(long.config_of(False, layers), 2**18, settings) for layers in (7, None))
    assert all_of_them - few > 21 * 2**18 * 2 * 1024  # what is kept of 21 layers, and their weights
    for wrong in (["--layers", "29"], ["--layers", "0"], ["--find-longest", "--without", "peer"]):
        done = subprocess.run(
            [sys.executable, ROOT / "benchmarks" / "long_context.py", *wrong], capture_output=True, text=True
        )
        assert done.returncode == 2
        assert "give 1 to 28" in done.stderr or "leave --without out" in done.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
def test_a_toy_s_longest_is_found_and_its_peer_offloads_with_the_same_loss(module, tmp_path, monkeypatch):
    done = ran("--find-longest", "--layers", "1", "--rounds", "1")
    assert "longest sequence trained, of twice the peer's longest and that, toy, 1 of 2 layers bf16" in done.stdout
    assert "rlloop, 384 tokens: " in done.stdout
    long, sides = module("long_context"), module("long_context_sides")
    module("gpu_shapes").save_random(long.config_of(True, 1), tmp_path)
    settings, saved = {"prompt": 20, "warm": 32, "lengths": {"96": 96}}, []

    def counting(pin_memory: bool) -> torch.autograd.graph.saved_tensors_hooks:
        assert not pin_memory
        return torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", counting)
    kept, moved = (sides.theirs(tmp_path, "cpu", {**settings, "peer_offloads": each})(96) for each in (False, True))
    assert kept == moved
    assert saved.count((1, 96, 32)) >= 2  # the layer's input and the last norm's
    assert len(saved) < 20  # nothing of what is inside a layer


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
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=800)
