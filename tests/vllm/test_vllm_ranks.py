"""rlloop's model in vLLM over tensor-parallel ranks, in its own server and in processes of a trainer: the tokens and
logprobs of rlloop's engine on one rank."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from rlloop import Engine, SamplingParams, load_model
from rlloop.models import new_model, save_model
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from rlloop.types import Completion
from tests.support.ranks import run_ranks
from tests.support.tiny_run import make_model
from tests.support.vllm_families import FAMILIES, SMALL
from tests.support.vllm_server import KEY, vllm_of

PROMPTS = [[5, 6, 7], list(range(3, 40)), [9]]
OURS = ("--config-format", "rlloop", "--load-format", "rlloop", "--dtype", "float32", "--tensor-parallel-size", "2")


SAMPLING = [SamplingParams(max_tokens=16, seed=seed, ignore_eos=True) for seed in range(len(PROMPTS))]
CONFIG = {**SMALL, **FAMILIES["mixture"]}
FEW = {
    **CONFIG,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}  # of 3 ranks the first has none


def bits(made: list[Completion]) -> list[tuple]:
    return [(each.token_ids, each.logprobs.tobytes(), each.raw_logprobs.tobytes()) for each in made]


def in_this_process(config: dict[str, object], size: int) -> list[tuple]:
    from rlloop.rollout.vllm.engine import VllmEngine

    model = new_model(config, seed=0, context=join(torch.device("cpu"), Layout(tp=size)))
    engine = VllmEngine(model, max_cache_tokens=512, max_running=8)
    try:
        return bits(engine.generate(PROMPTS, SAMPLING))
    finally:
        engine.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("config", "size"), [(CONFIG, 2), (FEW, 3)], ids=["experts", "fewer experts than ranks"])
def test_engines_of_ranks_make_the_same(config: dict[str, object], size: int) -> None:
    wanted = bits(Engine(new_model(config, seed=0)).generate(PROMPTS, SAMPLING))
    assert run_ranks(size, in_this_process, config, size) == [wanted] * size


@pytest.mark.timeout(900)
@pytest.mark.parametrize("more", [(), ("--enable-expert-parallel",)])
def test_ranks_have_the_bits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # it wants a NUMA node for each rank
    make_model(tmp_path)
    shutil.rmtree(tmp_path / "model")
    save_model(new_model(CONFIG, seed=0), tmp_path / "model")
    wanted = Engine(load_model(tmp_path / "model")).generate(PROMPTS, SAMPLING)
    with (
        vllm_of(tmp_path, *OURS, *more) as url,
        httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=300) as client,
    ):
        for prompt, params, expected in zip(PROMPTS, SAMPLING, wanted, strict=True):
            asked = {"model": "policy", "prompt": prompt, "max_tokens": 16, "seed": params.seed, "temperature": 1.0}
            answer = client.post("/v1/completions", json={**asked, "logprobs": 0, "ignore_eos": True})
            assert answer.status_code == 200, answer.text
            logprobs = answer.json()["choices"][0]["logprobs"]
            assert [int(token.removeprefix("w")) for token in logprobs["tokens"]] == expected.token_ids
            assert np.array(logprobs["token_logprobs"], np.float32).tobytes() == expected.logprobs.tobytes()
