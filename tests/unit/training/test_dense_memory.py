"""Memory predicted for attention, the head and sums of gradients: what a CPU saves, and what GPUs measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlloop import token_logprobs
from rlloop.models import new_model
from rlloop.models.attention import Attention
from rlloop.models.checkpoint_names import HEAD
from rlloop.models.config import parse_config
from rlloop.numerics.packed import FP8
from rlloop.numerics.tree import TreeSum
from rlloop.parallel.layout import Layout
from rlloop.training import dense_memory
from rlloop.training.dense_memory import Heads
from rlloop.training.memory import ENGINES, GIB, predict, sums_held
from tests.support.memory_use import saved_by
from tests.support.rank_updates import DELTA

TOKENS = 200
WIDER = {
    "hidden_size": 16, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "max_position_embeddings": 4096,
}  # fmt: skip
DENSE = {
    **WIDER, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 160, "intermediate_size": 32,
    "num_hidden_layers": 2, "tie_word_embeddings": True, "eos_token_id": 1,
}  # fmt: skip
MODELS = {
    "norms": DENSE,
    "plain": {**DENSE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "gates": {**DELTA, **WIDER},
}
QWEN3 = {  # of 0.6B, with the positions of `benchmarks/long_context.py`
    **DENSE, "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524352,
}  # fmt: skip
MEASURED = [  # tokens, activations offloaded, cp, GiB; commits f778459a, c1398c1c, 1b37ac86 (benchmarks/results/)
    (131072, False, 1, 33.696), (262144, False, 1, 58.404), (262144, True, 1, 18.273), (524288, True, 1, 27.359),
    (131072, False, 2, 22.085),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_what_attention_saves(name: str, dtype: str) -> None:
    model = new_model(MODELS[name], seed=0, dtype=dtype)
    fewer, more = (
        saved_by(model, Attention, lambda tokens=tokens: token_logprobs(model, [([3] * (tokens - 7), [4] * 8)]))[0]
        for tokens in (TOKENS, 2 * TOKENS)
    )
    assert more - fewer == TOKENS * Heads.of(model.config, Layout()).saved(model.dtype.itemsize)


@pytest.mark.parametrize("leaf", [torch.bfloat16, torch.float32])
def test_sums_of_micro_batches(leaf: torch.dtype) -> None:
    tree = TreeSum()
    for count in range(1, 18):
        tree.push(torch.ones(64, dtype=leaf))
        held = sum(each.nbytes for each in tree._sums if each is not None)
        assert held == 64 * sums_held(count, leaf.itemsize), count
    few, most = (
        predict(parse_config(DENSE), Layout(), torch.bfloat16, 1 << 20, micro_batches=n).parts["gradients"]
        for n in (1, 8)
    )
    numbers = sum(each.numel() for each in new_model(DENSE, seed=0).parameters()) + 160 * 16  # a tied weight twice
    assert most - few == 10 * numbers


@pytest.mark.parametrize(("tokens", "offloaded", "cp", "measured"), MEASURED)
def test_what_gpus_measured(tokens: int, offloaded: bool, cp: int, measured: float) -> None:
    """Peak of tensors in forward and backward of one sequence, attention's outputs kept, in one micro-batch."""
    parts = predict(
        parse_config(QWEN3), Layout(cp=cp), torch.bfloat16, tokens, keep_attention=True, offload_activations=offloaded,
        micro_batches=1,
    ).parts  # fmt: skip
    predicted = sum(size for name, size in parts.items() if name not in (*ENGINES, "reserved")) / GIB
    assert measured <= predicted <= 1.02 * measured


def test_chunks_of_logits_are_those_of_a_gpu() -> None:
    pytest.importorskip("triton", reason="the module has Triton's kernels")
    from rlloop.numerics.kernels.triton import kept_logits, launch, token_logprob

    assert (
        token_logprob.LOGITS_ROWS, token_logprob.LOGITS_BYTES, launch.ROOM, kept_logits.KEPT_BYTES,
    ) == (
        dense_memory.LOGITS_ROWS, dense_memory.LOGITS_BYTES, dense_memory.STEP, dense_memory.KEPT_BYTES,
    )  # fmt: skip


def test_the_head_of_a_short_micro_batch_takes_most() -> None:
    def parts(tokens: int, **options: Any) -> dict[str, int]:
        return predict(parse_config(QWEN3), Layout(), torch.bfloat16, tokens, micro_batches=1, **options).parts

    short, long = parts(32768), parts(262144)
    weight, chunk = 151936 * 1024, 151936 * 2048
    assert "activations" not in short
    assert short["head"] == 3 * 2 * 32768 * 1024 + 4 * weight + (2 + 4) * chunk
    assert "head" not in long
    assert parts(32768, lora=8)["head"] == 4 * 2 * 32768 * 1024 + (2 + 4) * chunk
    apart = {**QWEN3, "tie_word_embeddings": False}
    frozen = [
        predict(parse_config(apart), Layout(), torch.bfloat16, 32768, micro_batches=1, lora=8, packed=packed).parts
        for packed in ({}, {HEAD: FP8})
    ]
    assert frozen[0]["head"] - frozen[1]["head"] == 2 * 32768 * 1024  # of a packed head nothing is kept
    kept = 2 * 16384 * 151936  # the logits' gradients of all rows
    assert parts(16384)["head"] == 3 * 2 * 16384 * 1024 + kept + 4 * chunk
