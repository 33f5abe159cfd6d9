"""Shapes that the GPU benchmarks share, random models of them, and timing by CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 151645,
    "bos_token_id": None,
    "pad_token_id": None,
}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 151645,
    "bos_token_id": None,
    "pad_token_id": None,
}
MODELS = {"dense": ("Qwen3 0.6B shape", QWEN3_06B), "moe": ("Qwen3-MoE, 12 layers, 64 experts", QWEN3_MOE)}
L2_BYTES = 200 << 20  # what rotating inputs take at least: several times the cache


def make_folder(model: str, folder: Path) -> None:
    """A random checkpoint of one of `MODELS`, in bfloat16."""
    from rlloop.models import new_model, save_model

    save_model(new_model(MODELS[model][1], seed=0, dtype="bfloat16"), folder)


def seconds(works: list[list[Callable[[], object]]], replays: int = 5, rounds: int = 5) -> list[float]:
    """Seconds of one call, for each of several ways to do the same work: the median of rounds that take turns.

    A way is a list of calls, on different inputs so that none is found in the cache; they are recorded as one graph.
    """
    graphs = []
    for calls in works:
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graphs.append(graph)
    times: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for i, (graph, calls) in enumerate(zip(graphs, works, strict=True)):
            graph.replay()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            times[i].append(begin.elapsed_time(end) / 1000 / replays / len(calls))
    return [statistics.median(each) for each in times]
