"""Engines over tensor-parallel ranks, beside trainers of another layout: the tokens of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlloop import Engine, SamplingParams
from rlloop.models import Model, new_model, save_model
from rlloop.models.parameters import ParameterStore
from rlloop.numerics.layout import AttentionLayout
from rlloop.parallel.context import ParallelContext, join
from rlloop.parallel.layout import Layout
from rlloop.types import Completion
from tests.support.ranks import run_ranks

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 301, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "initializer_range": 0.1, "eos_token_id": 2,
}  # fmt: skip
SHARED = "model.layers.0.mlp.gate_proj.weight"
CPU = torch.device("cpu")
PROMPTS = [[5, 6], list(range(3, 40)), [9]]
SAMPLING = [
    SamplingParams(max_tokens=6, seed=1),
    SamplingParams(max_tokens=6, temperature=0.0),
    SamplingParams(max_tokens=8),
]


def model(context: ParallelContext | None = None, config: dict[str, Any] = CONFIG) -> Model:
    return new_model(config, seed=0, context=context)


MIXTURE = {
    **CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 5,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
LATENT = {
    **MIXTURE, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 6,
    "n_routed_experts": 5, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "q_lora_rank": None, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
for name in ("num_experts", "head_dim", "decoder_sparse_step", "mlp_only_layers"):
    del LATENT[name]
LOADS = {"idle": (6, 0), "full": (5, 5), "ragged": (1, 9), "nothing": (0, 0)}  # requests of each rank along dp_shard


def traffic(rank: int, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [[(7 * i + 3 * rank + at) % 290 + 3 for at in range(1 + 5 * i)] for i in range(count)]
    return prompts, [SamplingParams(max_tokens=3 + i, seed=i, temperature=1.0 - 0.1 * (i % 3)) for i in range(count)]


def attended_apart(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Two ranks' requests around one set of experts, also where each of the two is a pair of tensor-parallel ranks."""
    results = []
    for layout in (Layout(dp_shard=2, ep=2), Layout(dp_shard=2, tp=2, ep=4)):
        context = join(CPU, layout)
        rank = context.coordinates["dp_shard"]
        engine, found = Engine(model(context, config), page_size=8, max_batch_tokens=16), {}
        for load, counts in LOADS.items():
            found[load] = seen(engine.generate(*traffic(rank, counts[rank])))
        results.append({"rank": rank, **found})
    return results + [known_sizes(config, tp) for tp in (2, 4)]


def known_sizes(config: dict[str, Any], tp: int) -> dict[str, Any]:
    """Hidden states of tokens that no host has counted, as in CUDA graphs, and of the same tokens counted."""
    policy = model(join(CPU, Layout(tp=tp)), config)
    ids, positions = torch.arange(3, 10), torch.arange(7)
    with torch.no_grad():
        hidden = [policy.hidden(ids, positions, AttentionLayout.of_sequences([7]), even=even) for even in (False, True)]
    return {"equal": torch.equal(*hidden)}


@pytest.mark.parametrize("config", [MIXTURE, LATENT], ids=["heads", "latents"])
def test_a_ranks_requests_never_change_anothers_bits(config: dict[str, Any]) -> None:
    engine = Engine(model(config=config), page_size=8)
    for of_rank in run_ranks(4, attended_apart, config):
        assert [found.pop("equal") for found in of_rank[2:]] == [True, True]
        for found in of_rank[:2]:
            for load, counts in LOADS.items():
                prompts, sampling = traffic(found["rank"], counts[found["rank"]])
                assert found[load] == seen([engine.generate([p], s)[0] for p, s in zip(prompts, sampling, strict=True)])


def seen(made: list[Completion]) -> list[Any]:
    return [(each.token_ids, each.logprobs.tobytes(), each.raw_logprobs.tobytes()) for each in made]


def move(weights: Model) -> None:
    """An update, the same on every layout: each number becomes another one, by its own value."""
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.mul_(1.25)


def one_rank(config: dict[str, Any] = CONFIG) -> list[Any]:
    whole = model(config=config)
    engine = Engine(whole, page_size=8, max_batch_tokens=16)
    before = engine.generate(PROMPTS, SAMPLING)
    move(whole)
    engine.set_version(1)
    return [seen(before), seen(engine.generate(PROMPTS, SAMPLING))]


def layouts(folder: Path) -> dict[str, Any]:
    """Samples of engines in each layout with weights of trainers in each layout, before and after an update."""
    found: dict[str, Any] = {}
    contexts = {tp: join(CPU, Layout(tp=tp)) for tp in (1, 2, 4)}
    for trainer_tp, engine_tp in ((1, 4), (1, 2), (2, 1), (2, 4), (4, 2), (2, 2)):
        trained = model(contexts[trainer_tp])
        sampled = Model(trained.config, None, contexts[engine_tp], weights_of=trained)
        if trainer_tp == 1:
            whole, part = (dict(each.named_parameters())[SHARED].data_ptr() for each in (trained, sampled))
            assert whole <= part < whole + 80 * 48 * 4, "a part of the whole takes no memory of its own"
        engine = Engine(sampled, page_size=8, max_batch_tokens=16)
        before = engine.generate(PROMPTS, SAMPLING)
        move(trained)
        engine.set_version(1)
        found[f"{trainer_tp} {engine_tp}"] = [seen(before), seen(engine.generate(PROMPTS, SAMPLING))]
    save_model(model(contexts[4]), folder / f"saved-{contexts[4].rank}")
    return found


def test_any_engine_samples_one_ranks_tokens_beside_any_trainer(tmp_path: Path) -> None:
    alone = one_rank()
    assert np.array_equal(alone[0] == alone[1], False), "the update is seen"
    for found in run_ranks(4, layouts, tmp_path):
        assert len(found) == 6
        assert {name: made == alone for name, made in found.items()} == dict.fromkeys(found, True)
    save_model(model(), tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved-0", "whole"], "the first rank writes"
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "saved-0" / path.name).read_bytes()


def stages() -> list[list[Any]]:
    """`one_rank`'s samples of a pipeline's engine, whose stages read weights that ranks of the trainer divide."""
    results: list[list[Any]] = []
    context = join(CPU, Layout(pp=2))
    for config, degrees in ((CONFIG, {"tp": 2}), (MIXTURE, {"dp_shard": 2, "ep": 2})):
        trained = model(join(CPU, Layout(**degrees)), config)
        apart = new_model(config, seed=1, context=context)  # as with trainer.shard=parameters
        sampled = Model(trained.config, None, context, weights_of=trained)
        engines = [Engine(each, page_size=8, max_batch_tokens=16) for each in (sampled, apart)]
        found: list[list[Any]] = [[], []]
        for version in range(2):
            if version:
                move(trained)
            ParameterStore(apart).copy_wholes(ParameterStore(trained).wholes())
            for engine, made in zip(engines, found, strict=True):
                engine.set_version(version)
                made.append(seen(engine.generate(PROMPTS, SAMPLING)))
        results += found
    return results


def test_stages_of_an_engine_read_weights_that_a_trainers_ranks_divide() -> None:
    alone = [one_rank(config) for config in (CONFIG, MIXTURE) for _ in range(2)]
    for found in run_ranks(2, stages):
        assert found == alone


def samples(tp: int) -> list[Any]:
    """Of models with few key-value heads, with fewer experts than ranks, and with latents."""
    made = []
    for config in (CONFIG, MIXTURE, LATENT):
        layout = Layout(tp=tp) if config is CONFIG else Layout(tp=tp, ep=min(tp, 3))
        engine = Engine(model(join(CPU, layout), config), page_size=8, max_batch_tokens=16)
        made.append(seen(engine.generate(PROMPTS, SAMPLING)))
    return made


def test_six_ranks_with_a_head_each_draw_one_ranks_tokens() -> None:
    alone = run_ranks(1, samples, 1)
    assert run_ranks(6, samples, 6) == 6 * alone
