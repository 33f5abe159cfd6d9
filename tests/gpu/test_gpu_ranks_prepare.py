"""Steps recorded ahead over 2 GPUs: a crowd, ragged requests and single ones record no further step, and have the bits
of one GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from rlloop import Engine, SamplingParams
from rlloop.models import new_model
from rlloop.parallel.context import ParallelContext, join
from rlloop.parallel.layout import Layout
from tests.support.gpu_models import CONFIG, TEN_EXPERTS, need_gpus
from tests.support.ranks import in_shares, run_ranks
from tests.support.traffic import bits

WIDE = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
APART = {"dp_shard": 2, "ep": 2}  # each rank has requests of its own
CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2}, {**WIDE, "tie_word_embeddings": False}), ({"tp": 2, "ep": 2}, TEN_EXPERTS), (APART, TEN_EXPERTS)
]  # fmt: skip
REQUESTS, TOKENS = 512, 1536


def works() -> list[tuple[list[list[int]], list[SamplingParams]]]:
    """A crowd, ragged groups, and one request as often as a step with prompts comes before it is recorded."""
    rng = np.random.default_rng(5)

    def of(lengths: list[int], new: list[int]) -> tuple[list[list[int]], list[SamplingParams]]:
        prompts = [rng.integers(3, CONFIG["vocab_size"], length).tolist() for length in lengths]
        sampling = [SamplingParams(count, seed=seed, ignore_eos=True) for seed, count in enumerate(new)]
        return prompts * (len(new) // len(prompts)), sampling

    ragged = of(rng.integers(64, 513, 64).tolist(), rng.integers(32, 1025, 512).tolist())
    return [of([128] * 256, [64] * 256), ragged, *(of([128], [256]) for _ in range(3))]


def sampled(model: dict[str, Any], degrees: dict[str, int] | None, whole: bool = True) -> tuple[list[Any], str]:
    """Bits of the requests, or of those of this rank, and what is wrong with the steps of an engine over ranks;
    `degrees` None: on this GPU alone."""
    device, wrong = torch.device("cuda", torch.cuda.current_device()), ""
    context = ParallelContext(device) if degrees is None else join(device, Layout(**degrees))
    policy = new_model({**CONFIG, **model}, seed=0, dtype="bfloat16", context=context)
    engine = Engine(policy, max_running=REQUESTS, sleep=True)
    ahead: dict[Any, Any] = {}
    if degrees is not None:
        engine.sleep()
        count = engine.prepare(REQUESTS, TOKENS)
        assert engine._graphs is not None
        ahead = dict(engine._graphs._recorded)
        if count != len(ahead) or len({tuple(each) for each in context.ranks("world").gather_objects([*ahead])}) != 1:
            wrong = "ranks recorded other steps"
        if any(form.tokens for form in ahead) != (degrees == CASES[0][0]):
            wrong += " steps with prompts were recorded where they cannot be, or recording them failed"
        engine.sleep()
    half = slice(None) if whole else slice(context.rank, None, 2)
    made = [[bits(each) for each in engine.generate(prompts[half], how[half])] for prompts, how in works()]
    if degrees is not None and engine._graphs is not None:
        later = engine._graphs._recorded
        if further := [form for form in later if later[form] is not ahead.get(form)]:
            wrong += f" recorded later: {further}"
    engine.close()
    return made, wrong


def compared() -> list[str]:
    found = []
    alone = in_shares({str(model): partial(sampled, model, None) for _, model in CASES})
    for degrees, model in CASES:
        expected, _ = alone[str(model)]
        whole = degrees != APART
        made, wrong = sampled(model, degrees, whole)
        half = slice(None) if whole else slice(torch.cuda.current_device(), None, 2)
        if made != [each[half] for each in expected]:
            wrong += " other bits than one GPU's"
        if wrong:
            found.append(f"{degrees}: {wrong}")
    return found


@pytest.mark.timeout(600)
def test_no_step_is_recorded_after_ranks_have_prepared() -> None:
    need_gpus(2)
    for rank, wrong in enumerate(run_ranks(2, compared, kind="cuda")):
        assert not wrong, f"rank {rank}: {wrong}"
