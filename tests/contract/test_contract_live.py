"""The parity contract over whole runs of the real parts, from the command line to the exit code."""

import json
from pathlib import Path

import pytest

from rlloop.cli.main import main
from rlloop.models import new_model, save_model
from rlloop.runs.folder import read_records, read_rollouts, rollout_files
from rlloop.testing import planted_fault
from tests.support.tiny_run import LEARNABLE


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A random Qwen3 whose distributions are far from uniform, so that a rounding anywhere reaches the logprobs."""
    made = new_model(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": 160,
            "hidden_size": 64,
            "intermediate_size": 640,  # long sums: a stock product rounds otherwise whatever its number of rows
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        },
        seed=0,
    )
    for weight in made.parameters():
        weight.data.mul_(4.0 if weight.ndim > 1 else 1.0)
    folder = tmp_path_factory.mktemp("model")
    save_model(made, folder)
    return folder


@pytest.fixture
def train(tmp_path, monkeypatch, capsys, model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "learnable.py").write_text(LEARNABLE)

    def run(*overrides: str) -> tuple[int, str, Path]:
        """(exit code, everything printed, the run's folder)"""
        small = [f"model.path={model}", "run.dir=out", "trainer.num_steps=3", "trainer.lr=1e-3", "eval.num_draws=4"]
        small += ["rollout.num_prompts=4", "rollout.group_size=4", "reward._target_=learnable.reward"]
        code = main(["train", "--config-name", "countdown", *small, *overrides])
        captured = capsys.readouterr()
        return code, captured.out + captured.err, tmp_path / "out"

    return run


def test_every_token_of_every_step_has_the_same_bits(train):
    code, said, run = train("rollout.temperature=0.7", "rollout.top_p=0.9", "trainer.num_minibatches=2")
    assert code == 0, said
    records = list(read_records(run / "metrics.jsonl"))[1:]
    assert [record["parity/tokens_different"] for record in records] == [0.0] * 3
    assert [record["parity/k3"] for record in records] == [0.0] * 3
    assert all(record["loss/grad_norm"] > 0 for record in records)
    assert all(line["engine"] == line["trainer"] for line in read_records(run / "parity.jsonl"))
    assert main(["verify", str(run)]) == 0


@pytest.mark.parametrize("op", ["linear", "rms_norm", "activation", "attention", "token_logprob"])
def test_one_operation_swapped_for_its_stock_twin_stops_the_run(train, op):
    with planted_fault(op):
        code, said, run = train("eval.num_draws=64")  # held out comes first: some of 755 tokens on any processor
    assert code == 3, said
    report = json.loads((run / "parity_report.json").read_text())
    assert report["tokens_different"] > 0
    assert report["doctor"]["knob"] == op
    first = report["first"]
    for part in (
        f"step {report['step']}: ",
        f"sequence {first['uid']}, token {first['index']}",
        f"id {first['token_id']}",
    ):
        assert part in said
    for part in (first["engine_bits"], first["trainer_bits"], report["doctor"]["text"]):
        assert part in said
    assert "Traceback" not in said


def test_a_declared_difference_is_refused_before_anything_starts(train):
    code, said, run = train("rollout.profile.attention=stock")
    assert (code, "set parity.mode=observe" in said) == (2, True)
    assert not run.exists()


def test_observe_measures_a_declared_difference_and_reports_the_trainers_policy(train):
    code, said, run = train("rollout.profile.attention=stock", "parity.mode=observe")
    assert code == 0, said
    records = list(read_records(run / "metrics.jsonl"))
    assert all(record["parity/tokens_different"] > 0 for record in records[1:])
    assert all(0 < record["parity/k3"] < 1e-3 for record in records[1:])
    rows = [row for file in rollout_files(run) for row in read_rollouts(file)]
    assert any("trainer_logprobs" in row for row in rows)
    assert len(json.loads((run / "fingerprints.json").read_text())) == 2
    assert main(["verify", str(run)]) == 0
    same, said, _ = train("parity.mode=observe", "run.dir=same")
    assert same == 0, said
    twins = list(read_records(run.parent / "same" / "metrics.jsonl"))
    assert twins[0]["eval/reward"] == records[0]["eval/reward"]  # held-out problems are the trainer's own policy's


def test_fallback_corrects_and_says_so_once(train):
    code, said, run = train("rollout.profile.attention=stock", "parity.mode=fallback")
    assert code == 0, said
    assert [line["rung"] for line in read_records(run / "parity.jsonl")] == ["correction"] * 3
    assert (run / "run.log").read_text().count("stepped down") == 1
    assert all("is/truncated_high" in record for record in list(read_records(run / "metrics.jsonl"))[1:])


def test_fallback_on_equal_numerics_changes_nothing(train):
    codes = [train(f"parity.mode={mode}", f"run.dir={mode}")[0] for mode in ("require", "fallback")]
    assert codes == [0, 0]
    weights = [
        Path(mode, "checkpoints", "step_3", "model.safetensors").read_bytes() for mode in ("require", "fallback")
    ]
    assert weights[0] == weights[1]


def test_kl_to_the_reference_is_exactly_zero_until_the_first_update(train):
    """The reference is what the run starts from, and scoring it is the same arithmetic that sampled."""
    code, said, run = train("algorithm=reinforce_pp", "algorithm.reward_kl_coef=0.1", "rollout.temperature=0.7")
    assert code == 0, said
    kl = [record["reward/kl_ref"] for record in read_records(run / "metrics.jsonl") if record["step"] > 0]
    assert kl[0] == 0.0
    assert kl[2] != 0.0
