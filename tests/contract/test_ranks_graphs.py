"""Tensor-parallel ranks record steps with prompts together, or none of them does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlloop import Engine
from rlloop.models import Model, new_model
from rlloop.parallel.context import ParallelContext, join
from rlloop.parallel.layout import Layout
from rlloop.rollout.engine import graphs
from rlloop.rollout.engine.graphs import EngineGraphs
from tests.support.ranks import run_ranks
from tests.support.replayed_graphs import Work, count_replays, replaying
from tests.support.traffic import VOCABULARY, bits, traffic

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "initializer_range": 0.1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
CPU = torch.device("cpu")


def model(context: ParallelContext | None = None, more: dict[str, Any] | None = None) -> Model:
    return new_model({**CONFIG, **(more or {})}, seed=0, context=context)


def sampled(layout: Layout, trouble: str) -> tuple[list[Any], dict[str, int], str]:
    """Of this rank: bits, replays, and forms with prompts in order of recording. `trouble` is the second rank's."""
    context, recorded = join(CPU, layout), list[Any]()
    with pytest.MonkeyPatch.context() as patch:
        counts = count_replays(patch)
        record, captured = EngineGraphs._record_prompts, EngineGraphs._captured

        def noted(self: EngineGraphs, form: Any) -> bool:
            if made := record(self, form):
                recorded.append(form)
            return made

        def fails(self: EngineGraphs, work: Work) -> Any:
            made = captured(self, work)
            if made[1][0].shape[-1] == CONFIG["hidden_size"] and len(recorded) == 2:
                raise RuntimeError(trouble)
            return made

        patch.setattr(EngineGraphs, "_record_prompts", noted)
        if context.rank == 1 and trouble == "no room":
            patch.setattr(torch.cuda, "mem_get_info", lambda device: (graphs.ROOM - 1, 80 << 30))
        elif context.rank == 1 and trouble:
            patch.setattr(EngineGraphs, "_captured", fails)
        more = EXPERTS if layout.ep > 1 else None
        made = replaying(model(context, more), max_running=5).generate(*traffic(24))
    return [bits(each) for each in made], dict(counts), str(recorded)


def cases() -> list[tuple[list[Any], dict[str, int], str]]:
    troubles = ("", "no room", "CUDA out of memory", "operation not permitted")
    return [*(sampled(Layout(tp=2), trouble) for trouble in troubles), sampled(Layout(tp=2, ep=2), "")]


def test_ranks_record_the_same_steps_with_prompts() -> None:
    plain, experts = (
        [bits(each) for each in Engine(model(None, more), max_running=5).generate(*traffic(24))]
        for more in (None, EXPERTS)
    )
    first, second = run_ranks(2, cases)
    assert first == second
    for made, counts, _ in first[:4]:
        assert made == plain
        assert counts["decodes"] >= 20
    usual, tight, full, refused, of_experts = ((counts.get("prompts", 0), forms) for _, counts, forms in first)
    assert usual[0] >= 5
    assert tight == (0, "[]")
    assert refused[1] == full[1] != usual[1]  # two forms
    assert 0 < refused[0] <= full[0] < usual[0]
    assert first[4][0] == experts
    assert of_experts == (0, "[]")
