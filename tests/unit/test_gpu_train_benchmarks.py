"""What the benchmarks of trainers and of whole RL steps on a GPU do without one: peers, figures, toys."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def test_micro_batches_keep_their_budget_and_every_sequence(module):
    train, peers = module("gpu_train"), module("train_peers")
    batch = train.sequences("ragged")
    lengths = [len(ids) for ids, *_ in batch]
    assert len(batch) == 96
    assert 128 <= min(lengths) < 200 < 2000 < max(lengths) <= 2176
    for padded in (True, False):
        parts = peers.micro_batches(batch, 16384, padded)
        sizes = [len(part) * len(part[0][0]) if padded else sum(len(ids) for ids, *_ in part) for part in parts]
        assert max(sizes) <= 16384
        assert sorted(len(ids) for part in parts for ids, *_ in part) == sorted(lengths)
    assert len(peers.micro_batches(train.sequences("long"), 16384, padded=True)) == 4


def test_the_fastest_peer_counts_for_speed_and_the_leanest_for_memory(module):
    train = module("gpu_train")

    def rounds(name, speeds, peak, norm=2.0):
        return [{"speed": each, "peak": peak, "name": name, "loss": -1.0, "norm": norm} for each in speeds]

    found = {
        "rlloop": rounds("rlloop", [110.0, 120.0, 130.0], 60.0),
        "padded": rounds("transformers, padded, sdpa", [90.0, 80.0, 85.0], 20.0),
        "packed": rounds("transformers, packed, flex_attention", [99.0, 100.0, 140.0], 30.0, norm=1.5),
    }
    failures = {"packed, compiled": "RuntimeError: no"}
    fast, slow, none, lean, fat = train.figures_of("8B-8", "short", found, failures)
    assert fast.peer == "transformers, packed, flex_attention, gradient's norm 0.750 of rlloop's"
    assert (fast.value, fast.ratio, fast.aim, fast.spread) == (120.0, 1.2, 1.15, (110.0, 130.0))
    assert (slow.peer, slow.peer_value, slow.aim) == ("transformers, padded, sdpa", 85.0, None)
    assert none.peer == "transformers, packed, compiled: does not run here (RuntimeError: no)"
    lacks = 16 * 2.787e9 / 2**30  # masters, two moments, a gradient, in float32
    assert (lean.peer_value, fat.peer_value) == pytest.approx((20 + lacks, 30 + lacks), rel=1e-3)
    assert lean.peer == "transformers, padded, sdpa: 20.0, and 41.5 of masters, moments, gradients"
    assert (lean.ratio, lean.aim, fat.aim) == (lean.peer_value / 60, 1.0, None)
    assert len({each.name for each in (fast, slow, none)}) == 1
    kinds = [each.peer_kind.removeprefix("transformers, ") for each in (fast, slow, none, lean, fat)]
    assert kinds == ["packed", "padded", "packed, compiled", "padded", "packed"]
    assert train.together("0.6B", 4, 80e9)
    assert not train.together("8B-8", 4, 80e9)
    assert train.together("8B-8", 4, 150e9)
    assert train.figures_of("8B-8", "short", {"padded": found["padded"]}, failures) == []


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_a_peer_has_the_gradients_of_whole_logits(module, tmp_path, monkeypatch, packed):
    peers, shapes = module("train_peers"), module("gpu_shapes")
    shapes.make_folder("tiny", tmp_path)
    monkeypatch.setattr(peers, "CHUNK", 4)  # of 18 completion tokens
    peer = peers.Peer(tmp_path, "cpu", packed=packed, compiled=False)
    peer.model.float()
    batch = module("gpu_train").sequences("tiny")
    parts = peer.lay_out(batch, 20)
    peer.tune(parts)
    loss, logprobs = peer.forward_backward(parts)
    made = {name: each.grad.clone() for name, each in peer.model.named_parameters()}
    norm = peer.gradient_norm()
    peer.drop_gradient()
    total, scored = 0.0, []
    for row in sorted(batch, key=lambda row: -len(row.tokens)):
        logits = peer.model(torch.from_numpy(row.tokens)[None]).logits[0, row.prompt - 1 : -1]
        lines = logits.log_softmax(-1).gather(-1, torch.from_numpy(row.tokens[row.prompt :])[:, None])[:, 0]
        ratio = (lines - torch.from_numpy(row.old)).exp()
        total = total - torch.minimum(ratio * row.advantage, ratio.clamp(0.8, 1.2) * row.advantage).mean() / 3
        scored.append(lines.detach())
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-5)
    torch.testing.assert_close(torch.cat(logprobs), torch.cat(scored))
    for name, each in peer.model.named_parameters():
        torch.testing.assert_close(made[name], each.grad, rtol=1e-4, atol=1e-6)
    assert norm == pytest.approx(peer.gradient_norm(), rel=1e-5)


@pytest.mark.slow
def test_an_attention_that_does_not_run_is_named_and_another_taken(module, tmp_path, monkeypatch, capfd):
    peers, shapes = module("train_peers"), module("gpu_shapes")
    shapes.make_folder("tiny", tmp_path)
    peer = peers.Peer(tmp_path, "cpu", packed=True, compiled=False)
    parts = peer.lay_out(module("gpu_train").sequences("tiny"), 20)
    monkeypatch.setattr(peers, "attentions", lambda packed, device: [peers.BUILT_IN, "sdpa"])
    peer.tune(parts)  # a CPU has no such operation
    assert peer.name == "transformers, packed, sdpa"
    assert f"{peers.BUILT_IN} does not run here: NotImplementedError" in capfd.readouterr().err
    monkeypatch.setattr(peers, "attentions", lambda packed, device: [peers.BUILT_IN])
    with pytest.raises(NotImplementedError):
        peer.tune(parts)


@pytest.mark.slow
def test_pytorchs_flash_attention_is_called_by_transformers_interface(module, tmp_path, monkeypatch):
    peers, shapes = module("train_peers"), module("gpu_shapes")
    shapes.make_folder("tiny", tmp_path)
    peer = peers.Peer(tmp_path, "cpu", packed=True, compiled=False)
    parts = peer.lay_out(module("gpu_train").sequences("tiny"), 20)
    expected = peer.forward_backward(parts)[0]

    def flash(query, key, value, ends, _, longest, *rest, scale):
        sizes = ends.diff().tolist()
        assert max(sizes) == longest
        made = [
            torch.nn.functional.scaled_dot_product_attention(
                *(each.transpose(0, 1)[None] for each in one), is_causal=True, scale=scale, enable_gqa=True
            )[0].transpose(0, 1)
            for one in zip(*(each.split(sizes) for each in (query, key, value)), strict=True)
        ]
        return torch.cat(made), None, None, None, None

    monkeypatch.setattr(peers, "flash_attention", flash)
    peer._use(peers.BUILT_IN, compiled=False)
    assert peer.forward_backward(parts)[0] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_a_batchs_time_is_told_by_operation():
    command = [sys.executable, ROOT / "benchmarks" / "gpu_train.py", "--tiny", "--profile"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert re.search(r"tiny/tiny: [\d,]+ us a step; the device works 0 us, in 0 kernels\n", said)
    assert re.search(r"  host +[\d.]+ us +\d+\.0 x  rlloop::token_logprob_backward\n", said)


@pytest.mark.slow
def test_a_trainer_is_measured_beside_its_peers_on_a_cpu():
    command = [sys.executable, ROOT / "benchmarks" / "gpu_train.py", "--tiny", "--rounds", "1"]
    without = ["--without", "padded", "--without", "padded, compiled", "--without", "packed"]
    done = subprocess.run([*command, *without], capture_output=True, text=True, check=True, timeout=800)
    assert "transformers, packed, compiled, sdpa  " in done.stdout
    assert "rlloop's" not in done.stdout  # losses and gradients agree
    assert "does not run here" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_peers_step_learns_and_updates_as_rlloops_does(module, tmp_path, monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", False)  # as it was, afterwards
    step, shapes = module("gpu_step"), module("gpu_shapes")
    shapes.make_folder("tiny", tmp_path)
    ours = step.Ours(tmp_path, step.SMALL, "cpu")

    def generate(prompts, new):
        return [(each.token_ids, each.logprobs) for each in ours.rollout(0)]

    theirs = step.Theirs(tmp_path, step.SMALL, "cpu", "an engine", generate)
    assert ours.learn(ours.rollout(0)) == (0.0, 0)
    k3, differ = theirs.learn(theirs.rollout(0))
    assert 0 < k3 < 1e-4
    assert 0 < differ <= 32
    norm = ours.trainer.optim_step()["loss/grad_norm"]
    assert theirs.peer.gradient_norm() == pytest.approx(norm, rel=0.02)
    theirs.update()
    assert theirs.name == "an engine + transformers, padded, compiled, sdpa"
    masters = dict(zip(dict(theirs.peer.model.named_parameters()), theirs.masters, strict=True))
    for name, master in ours.trainer.masters.items():
        torch.testing.assert_close(masters[name].view_as(master), master, rtol=0, atol=2.1e-6)


def test_parts_of_a_step_are_added_and_a_device_idles_between_kernels(module):
    step = module("gpu_step")
    assert step.busy([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.0)]) == 4.0
    assert step.busy([]) == 0.0
    parts = {"rollout": [3.0, 2.0], "learn": [4.0, 5.0], "update": [1.0, 1.0], "publish": [0.5, 0.5], "score": [1.0]}
    mine = {"name": "rlloop", "whole": [8.0, 10.0, 9.0], "parts": parts, "k3": 0.0, "idle": 0.05}
    peer = {**mine, "name": "others", "whole": [18.0], "k3": 1e-4}
    figures = {each.name: each for each in step.figures_of("toy", step.SMALL, mine, peer)}
    whole = figures["RL step, toy bf16, 4 x (6 in, 8 out)"]
    assert (whole.value, whole.ratio, whole.peer) == (32 / 9, 2.0, "others")
    beside = figures["RL step, toy bf16, 4 x (6 in, 8 out): rlloop"]
    assert (beside.value, beside.spread, beside.peer_value, beside.ratio) == (9.0, (8.0, 10.0), 7.5, 7.5 / 9)
    assert beside.aim == 0.9
    assert figures["forward + backward alone, RL step, toy bf16, 4 x (6 in, 8 out)"].peer_value == 4.5
    assert figures["idle share of the device, RL step, toy bf16, 4 x (6 in, 8 out)"].value == 0.05
    assert len(step.figures_of("toy", step.SMALL, mine, None)) == len(figures) - 2


@pytest.mark.slow
def test_a_step_is_measured_on_a_cpu():
    command = [sys.executable, ROOT / "benchmarks" / "gpu_step.py", "--tiny", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800)
    assert "the sum of its parts alone, each at its best" in done.stdout
    assert "k3 0, 0 differ" in done.stderr


def test_a_peer_that_ended_beside_others_runs_once_more_alone(module, monkeypatch):
    train, tried, recorded = module("gpu_train"), [], []

    def in_turns(children, works, rounds, known, ended):
        found, names = {}, [each.name for each in children]
        for work in works:
            tried.append((work, *names))
            ends = [each for each in children if each.name == "padded" or (each.name == "packed" and len(names) > 1)]
            for each in ends:
                ended(each, train.Ended(each.name, 1, ["OutOfMemoryError: full"]))
            found[work] = {each.name: [name_of(each)] * rounds for each in children if each not in ends}
            known(work, found[work])
        return found

    def name_of(child):
        return {"speed": 2.0, "peak": 1.0, "loss": 1.0, "norm": 1.0, "name": child.name}

    class Child:
        def __init__(self, name, command) -> None:
            self.name = name

    monkeypatch.setattr(train, "in_turns", in_turns)
    monkeypatch.setattr(train, "Child", Child)
    names = ["rlloop", "padded", "packed"]
    assert train.measure("tiny", iter(["short", "long"]), names, 3, True, recorded.append, 20)
    assert tried == [
        ("short", *names), ("long", *names), ("short", "padded"), ("short", "packed"), ("long", "padded"),
        ("long", "packed"),
    ]  # fmt: skip
    first, last = recorded[0], recorded[-1]
    assert all(each.name.endswith(", at most 20 tokens at once") for each in first)
    assert [each.peer for each in first] == [
        f"transformers, {name}: does not run here (OutOfMemoryError: full)" for name in ("padded", "packed")
    ]
    assert [(each.peer, each.peer_value) for each in last if "peak" not in each.name] == [
        ("packed", 2.0), ("transformers, padded: does not run here (OutOfMemoryError: full)", None),
    ]  # fmt: skip
    tried.clear()
    assert not train.measure("tiny", iter(["short"]), ["padded"], 3, False, recorded.append, 32768)
    assert tried == [("short", "padded")]
