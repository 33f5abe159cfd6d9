"""Engines and trainers over 2 and 4 GPUs: the bits of one, with CUDA graphs and NCCL, and with writes between GPUs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from rlloop import Engine, SamplingParams, token_logprobs
from rlloop.models import Model, new_model
from rlloop.models.parameters import ParameterStore
from rlloop.models.peer_gathers import peers_of
from rlloop.parallel.context import ParallelContext, join
from rlloop.parallel.layout import Layout
from rlloop.rollout.engine import graphs
from rlloop.types import Completion
from tests.support.gpu_models import CONFIG, TEN_EXPERTS, need_gpus
from tests.support.ranks import in_shares, run_ranks
from tests.support.traffic import bits, traffic

WIDE = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
SHAPES: dict[str, dict[str, Any]] = {  # name -> what is other than in `CONFIG`
    "shared key-value heads": {},  # 2 of them: at 4 ranks each lies on two
    "experts": TEN_EXPERTS,
    # parts that GPUs write to one another, and a vocabulary of which each draws its blocks
    "whole vectors": {**WIDE, "tie_word_embeddings": False, "vocab_size": 65_488},
}
CASES = [
    ("shared key-value heads", "bfloat16"), ("shared key-value heads", "float32"), ("experts", "bfloat16"),
    ("experts", "float32"), ("whole vectors", "bfloat16"),
]  # fmt: skip
SIZES = (2, 4, 8)


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def model(shape: str, dtype: str, context: ParallelContext) -> Model:
    return new_model({**CONFIG, **SHAPES[shape]}, seed=0, dtype=dtype, context=context)


def crowd(engine: Engine) -> list[Completion]:
    return engine.generate(*traffic(48))


def sampled(policy: Model) -> dict[str, Any]:
    """An engine's samples, alone and in a large batch, and the trainer's logprobs of them."""
    engine, (prompts, sampling) = Engine(policy, max_batch_tokens=512), traffic(48)
    made, apart = crowd(engine), Engine(policy, max_batch_tokens=512, prefix_caching=False)
    alone = [apart.generate([prompts[i]], sampling[i])[0] for i in (0, 17)]
    plain = engine.generate(prompts[:9], [SamplingParams(max_tokens=40, seed=i) for i in range(9)])  # drawn in graphs
    pairs = [(each.prompt_ids, each.token_ids) for each in made]
    with torch.no_grad():
        scored = token_logprobs(policy, pairs, sampling=[each.sampling for each in made])
    return {
        "crowd": [bits(each) for each in made],
        "alone": [bits(each) for each in alone],
        "plain": [bits(each) for each in plain],
        "scored": [row.cpu().numpy().tobytes() for row in scored],
        "engine's": [each.logprobs.tobytes() for each in made],
    }


def gradients(policy: Model) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 5000, (4, 300), generator=generator).tolist()
    rows = token_logprobs(policy, [(row[:20], row[20:]) for row in ids])
    policy.zero_grad()
    torch.cat(rows).mean().backward()
    entries = ParameterStore(policy).entries.items()
    return {name: entry.whole(entry.live.grad).float().cpu() for name, entry in entries if entry.live.grad is not None}


def whole(shape: str, dtype: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Of one GPU."""
    policy = model(shape, dtype, ParallelContext(here()))
    return sampled(policy), gradients(policy)


def of_a_rank(size: int) -> list[str]:
    """Differences from one GPU's results."""
    graphs.SEEN = 1  # steps with prompts are recorded when they first come
    wrong, context = [], join(here(), Layout(tp=size))
    alone = in_shares({" ".join(case): partial(whole, *case) for case in CASES})
    for shape, dtype in CASES:
        wanted, slopes = alone[f"{shape} {dtype}"]
        if wanted["scored"] != wanted["engine's"]:
            wrong.append(f"{shape} {dtype}: trainer and engine of one GPU")
        policy, name = model(shape, dtype, context), f"{shape} {dtype} tp {size}"
        found = sampled(policy)
        wrong += [f"{name}: {key}" for key in wanted if found[key] != wanted[key]]
        trained = model(shape, dtype, ParallelContext(here()))
        beside = Engine(Model(trained.config, None, context, weights_of=trained), max_batch_tokens=512)
        if [bits(each) for each in crowd(beside)] != wanted["crowd"]:
            wrong.append(f"{name}: an engine beside a whole trainer")
        # cuBLAS picks its order by the shape, so gradients agree closely, and repeat themselves exactly.
        first, again = gradients(policy), gradients(policy)
        for key, slope in slopes.items():
            if not torch.equal(first[key], again[key]):
                wrong.append(f"{name}: the gradient of {key} changes from run to run")
            if (first[key] - slope).norm() > 2e-2 * slope.norm() + 1e-8:
                wrong.append(f"{name}: the gradient of {key}")
        if shape == "whole vectors":
            with torch.no_grad():
                opened = peers_of(policy.vocabulary) is not None
            others = [other for other in range(min(size, torch.cuda.device_count())) if other != here().index]
            apart = len(others) >= size - 1
            if apart and all(torch.cuda.can_device_access_peer(here(), other) for other in others) and not opened:
                wrong.append("GPUs reach one another, and engines gather by NCCL")
    return wrong


def apart(gpus: int) -> list[str]:
    """Loads (idle, full, ragged) whose samples differ where ranks with requests of their own share experts."""
    wrong, context = [], join(here(), Layout(dp_shard=2, tp=gpus // 2, ep=gpus))
    rank = context.coordinates["dp_shard"]
    engine = Engine(model("experts", "bfloat16", context), max_batch_tokens=256)
    alone = Engine(model("experts", "bfloat16", ParallelContext(here())))
    for load, counts in {"idle": (20, 0), "full": (24, 24), "ragged": (1, 33), "plain": (5, 3)}.items():
        prompts, sampling = traffic(48)
        mine = slice(0, counts[0]) if rank == 0 else slice(48 - counts[1], 48)
        params = [replace(each, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) for each in sampling[mine]]
        params = params if load == "plain" else sampling[mine]
        made = engine.generate(prompts[mine], params)
        if [bits(each) for each in made] != [bits(each) for each in alone.generate(prompts[mine], params)]:
            wrong.append(load)
    return wrong


@pytest.mark.timeout(300)
@pytest.mark.parametrize("gpus", SIZES)
def test_a_ranks_requests_never_change_anothers_bits(gpus: int) -> None:
    need_gpus(gpus)
    for rank, wrong in enumerate(run_ranks(gpus, apart, gpus, kind="cuda")):
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("gpus", SIZES)
def test_any_number_of_gpus_has_the_bits_of_one(gpus: int) -> None:
    need_gpus(gpus)
    for rank, wrong in enumerate(run_ranks(gpus, of_a_rank, gpus, kind="cuda")):
        assert not wrong, f"rank {rank}: {wrong}"
