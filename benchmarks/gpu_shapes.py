"""Shapes that the GPU benchmarks share, random models of them, and timing by CUDA graphs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rlloop.models import Model

COMMON: dict[str, Any] = {
    "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
    "eos_token_id": 151645, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def _dense(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    """Of the Qwen3 family, with 8 heads of keys and values."""
    return {
        **COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
        "tie_word_embeddings": tied,
    }  # fmt: skip


def _mixture(hidden: int, layers: int, heads: int, groups: int, experts: int) -> dict[str, Any]:
    """Of the Qwen3-MoE family: eight experts of 768 for each token."""
    return {
        **COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "moe_intermediate_size": 768, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, "num_experts": experts, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    }  # fmt: skip


QWEN3_06B = _dense(1024, 3072, 28, 16, tied=True)
QWEN3_MOE = _mixture(1024, 12, 16, 8, experts=64)
MODELS = {"dense": ("Qwen3 0.6B shape", QWEN3_06B), "moe": ("Qwen3-MoE, 12 layers, 64 experts", QWEN3_MOE)}
SHAPES = {  # name -> (words for it, config.json)
    "0.6B": MODELS["dense"],
    "4B": ("Qwen3 4B shape", _dense(2560, 9728, 36, 32, tied=True)),
    "8B": ("Qwen3 8B shape", _dense(4096, 12288, 36, 32, tied=False)),
    "14B": ("Qwen3 14B shape", _dense(5120, 17408, 40, 40, tied=False)),
    "32B": ("Qwen3 32B shape", _dense(5120, 25600, 64, 64, tied=False)),
    "mixture": ("mixture, 16 layers, width 2,048, 128 experts, 8 a token", _mixture(2048, 16, 32, 4, experts=128)),
    "moe": MODELS["moe"],
}
TINY = ("toy", {**_dense(32, 64, 2, 16, tied=True), "head_dim": 8})  # for a CPU, to try a script out
L2_BYTES = 200 << 20  # what rotating inputs take at least: several times the cache


def random_model(config: Mapping[str, Any], device: str = "cuda") -> Model:
    """A random Qwen3 or Qwen3-MoE in bfloat16, drawn where it is to be: a CPU draws 8B numbers for minutes."""
    from rlloop.models import Model
    from rlloop.models.config import parse_config
    from rlloop.models.ropes import RopeTable
    from rlloop.parallel.context import ParallelContext

    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    parsed, context = parse_config(config), ParallelContext(place)
    with torch.device("meta"):
        model = Model(parsed, None, context)
    generator, state = torch.Generator(place).manual_seed(0), {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms
            state[name] = torch.ones(parameter.shape, device=place, dtype=torch.bfloat16)
        else:
            drawn = torch.randn(parameter.shape, device=place, dtype=torch.bfloat16, generator=generator)
            state[name] = drawn.mul_(parsed.initializer_range)
    model.load_state_dict(state, assign=True)
    model.rope = RopeTable(parsed, "cpu").to(place)
    return model


def make_folder(model: str, folder: Path) -> None:
    """A random checkpoint of one of `MODELS` or `SHAPES`, in bfloat16."""
    from rlloop.models import save_model

    config = {**SHAPES, **MODELS, "tiny": TINY}[model][1]
    save_model(random_model(config, "cuda" if torch.cuda.is_available() else "cpu"), folder)
    torch.cuda.empty_cache()  # for whoever loads it


def save_random(config: Mapping[str, Any], folder: str | Path) -> None:
    """A random checkpoint, by a process of its own, so that its memory is free again."""
    subprocess.run([sys.executable, __file__, json.dumps(config), str(folder)], check=True)


def seconds(works: list[list[Callable[[], object]]], replays: int = 5, rounds: int = 5) -> list[list[float]]:
    """Seconds of one call in each round, for each of several ways to do the same work, which take turns.

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
    return times


if __name__ == "__main__":
    from rlloop.models import save_model

    save_model(random_model(json.loads(sys.argv[1]), "cuda" if torch.cuda.is_available() else "cpu"), Path(sys.argv[2]))
