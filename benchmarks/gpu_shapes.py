"""Shapes that the GPU benchmarks share, random models of them, and timing by CUDA graphs."""

from __future__ import annotations

import functools
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
    """A configuration of the Qwen3 family, with 8 heads of keys and values."""
    return {
        **COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
        "tie_word_embeddings": tied,
    }  # fmt: skip


def _mixture(hidden: int, layers: int, heads: int, groups: int, experts: int) -> dict[str, Any]:
    """A configuration of the Qwen3-MoE family: eight experts of 768 for each token."""
    return {
        **COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "moe_intermediate_size": 768, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, "num_experts": experts, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    }  # fmt: skip


QWEN3_06B = _dense(1024, 3072, 28, 16, tied=True)
QWEN3_MOE = _mixture(1024, 12, 16, 8, experts=64)
REPLAYS, ROUNDS = 5, 5
MODELS = {"dense": ("Qwen3 0.6B shape", QWEN3_06B), "moe": ("Qwen3-MoE, 12 layers, 64 experts", QWEN3_MOE)}
SHAPES = {  # name -> (words for it, config.json)
    "0.6B": MODELS["dense"],
    "4B": ("Qwen3 4B shape", _dense(2560, 9728, 36, 32, tied=True)),
    "8B": ("Qwen3 8B shape", _dense(4096, 12288, 36, 32, tied=False)),
    "14B": ("Qwen3 14B shape", _dense(5120, 17408, 40, 40, tied=False)),
    "32B": ("Qwen3 32B shape", _dense(5120, 25600, 64, 64, tied=False)),
    # Whole, these do not fit on 80 GB: 8B to train, the others twice, so that they take turns with their peer.
    "8B-8": ("Qwen3 8B shape, 8 of 36 layers", _dense(4096, 12288, 8, 32, tied=False)),
    "14B-16": ("Qwen3 14B shape, 16 of 40 layers", _dense(5120, 17408, 16, 40, tied=False)),
    "32B-16": ("Qwen3 32B shape, 16 of 64 layers", _dense(5120, 25600, 16, 64, tied=False)),
    "mixture": ("mixture, 16 layers, width 2,048, 128 experts, 8 a token", _mixture(2048, 16, 32, 4, experts=128)),
    "moe": MODELS["moe"],
}


def _qwen35(hidden: int, layers: int, experts: tuple[int, int, int], heads: int, delta: int) -> dict[str, Any]:
    """Of the Qwen3.5-MoE family: gated delta networks, attention every fourth layer, experts (how many, of what size,
    how many a token) and a shared one. vLLM knows it with a tower alone: this one is small, for texts do not use it."""
    count, inner, chosen = experts
    vision = {
        "model_type": "qwen3_5_moe", "depth": 1, "hidden_size": 128, "num_heads": 2, "intermediate_size": 256,
        "in_channels": 3, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
        "out_hidden_size": hidden, "num_position_embeddings": 2304, "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": [],
    }  # fmt: skip
    text = {
        "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": hidden, "num_hidden_layers": layers,
        "layer_types": ["full_attention" if at % 4 == 3 else "linear_attention" for at in range(layers)],
        "full_attention_interval": 4, "attn_output_gate": True, "num_attention_heads": heads, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": delta, "linear_num_value_heads": 2 * delta,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "num_experts": count, "moe_intermediate_size": inner,
        "num_experts_per_tok": chosen, "shared_expert_intermediate_size": inner, "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "mamba_ssm_dtype": "float32", "eos_token_id": 248044,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    }  # fmt: skip
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "text_config": text, "vision_config": vision, "tie_word_embeddings": False,
        "image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053,
        "vision_end_token_id": 248054,
    }  # fmt: skip


def _nemotron(hidden: int, pattern: str, experts: tuple[int, int, int], heads: int, mamba: int) -> dict[str, Any]:
    """Of the Nemotron 3 family: Mamba-2 (M), attention (*) and experts (E) in layers of their own, a shared expert of
    twice the size."""
    count, inner, chosen = experts
    return {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "vocab_size": 131072,
        "hidden_size": hidden, "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern),
        "num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": inner,
        "mamba_num_heads": mamba, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
        "chunk_size": 128, "expand": 2, "mamba_hidden_act": "silu", "mamba_proj_bias": False, "use_conv_bias": True,
        "use_bias": False, "mlp_bias": False, "mlp_hidden_act": "relu2", "attention_bias": False,
        "time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 0.0001, "mamba_ssm_cache_dtype": "float32",
        "n_routed_experts": count, "n_shared_experts": 1, "moe_intermediate_size": inner, "num_experts_per_tok": chosen,
        "moe_shared_expert_intermediate_size": 2 * inner, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "layer_norm_epsilon": 1e-5, "residual_in_fp32": False,
        "max_position_embeddings": 262144, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0,
    }  # fmt: skip


RECURRENT = {  # the released widths, the first layers
    "qwen3.5-moe": ("Qwen3.5-35B-A3B, 8 of 40 layers", _qwen35(2048, 8, (256, 512, 8), heads=16, delta=16)),
    "nemotron": ("Nemotron 3 Nano, 8 of 52 layers", _nemotron(2688, "MEMEM*EM", (128, 1856, 6), heads=32, mamba=64)),
}
TINY = ("toy", {**_dense(32, 64, 2, 16, tied=True), "head_dim": 8})  # for a CPU, to try a script out
TINIES = {
    "tiny": TINY,
    "tiny-qwen3.5-moe": ("toy Qwen3.5-MoE", _qwen35(64, 4, (8, 32, 2), heads=2, delta=2)),
    "tiny-nemotron": ("toy Nemotron", _nemotron(64, "ME*", (8, 32, 2), heads=2, mamba=8)),
}
EVERY = {**SHAPES, **RECURRENT, **TINIES}
L2_BYTES = 200 << 20  # what rotating inputs take at least: several times the cache


def random_model(
    config: Mapping[str, Any],
    device: str = "cuda",
    own: Callable[[str, torch.Size, torch.Generator], torch.Tensor | None] | None = None,
) -> Model:
    """A random model in bfloat16, drawn where it is to be (a CPU draws 8B numbers for minutes), as `new_model` does.

    `own(name, shape, generator)` may draw a frozen weight otherwise; None from it: as usual.
    """
    from rlloop.models import Model
    from rlloop.models.config import parse_config
    from rlloop.models.experts import BIAS
    from rlloop.models.layers import Norm
    from rlloop.models.ropes import RopeTable
    from rlloop.models.weights import lay_end_to_end
    from rlloop.parallel.context import ParallelContext

    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    parsed, context = parse_config(config), ParallelContext(place)
    with torch.device("meta"):
        model = Model(parsed, None, context)
    centred = {f"{name}.weight" for name, each in model.named_modules() if isinstance(each, Norm) and each.centred}
    generator, state, frozen = torch.Generator(place).manual_seed(0), dict[str, torch.Tensor](), list[str]()
    for name, parameter in model.named_parameters():
        kind = torch.float32 if name.endswith(BIAS) else torch.bfloat16
        if own is not None and (drawn := own(name, parameter.shape, generator)) is not None:
            state[name] = torch.nn.Parameter(drawn, requires_grad=False)
            frozen.append(name)
        elif name.endswith("A_log"):
            state[name] = torch.arange(1, len(parameter) + 1, device=place).log().to(kind)
        elif name in centred or (name.endswith("bias") and not name.endswith("dt_bias")):
            state[name] = torch.zeros(parameter.shape, device=place, dtype=kind)
        elif parameter.ndim == 1:  # norms, and of recurrent layers dt_bias and D
            state[name] = torch.ones(parameter.shape, device=place, dtype=kind)
        else:
            drawn = torch.randn(parameter.shape, device=place, dtype=kind, generator=generator)
            state[name] = drawn.mul_(parsed.initializer_range)
    lay_end_to_end(state)
    model.load_state_dict(state, assign=True)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    model.rope = RopeTable(parsed, "cpu").to(place)
    return model


@functools.cache
def bytes_of(shape: str) -> tuple[int, int, int]:
    """Bytes of all weights in bfloat16, of a token's keys and values, and of a request's recurrent states."""
    from rlloop.models import Model
    from rlloop.models.config import parse_config
    from rlloop.rollout.engine.kv_cache import bytes_per_token

    with torch.device("meta"):
        model = Model(parse_config(EVERY[shape][1]))
    weights = 2 * sum(parameter.numel() for parameter in model.parameters())
    return (
        weights,
        bytes_per_token(model.cache_spec(), torch.bfloat16),
        bytes_per_token(model.state_spec(), torch.float32),
    )


def make_folder(model: str, folder: Path) -> None:
    """A random checkpoint of one of `MODELS` or `EVERY`, in bfloat16."""
    from rlloop.models import save_model

    config = {**EVERY, **MODELS}[model][1]
    save_model(random_model(config, "cuda" if torch.cuda.is_available() else "cpu"), folder)
    torch.cuda.empty_cache()  # for whoever loads it


def save_random(config: Mapping[str, Any], folder: str | Path) -> None:
    """A random checkpoint, by a process of its own, so that its memory is free again."""
    subprocess.run([sys.executable, __file__, json.dumps(config), str(folder)], check=True)


def seconds(works: list[list[Callable[[], object]]], recorded: bool = True) -> list[list[float]]:
    """Seconds of one call in each round, for each of several ways to do the same work, which take turns.

    A way is a list of calls, on different inputs so that none is found in the cache; they are `recorded` as one graph.
    """
    replays = [_recorded(calls) if recorded else functools.partial(_call_all, calls) for calls in works]
    times: list[list[float]] = [[] for _ in works]
    for _ in range(ROUNDS):
        for i, (replay, calls) in enumerate(zip(replays, works, strict=True)):
            replay()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(REPLAYS):
                replay()
            end.record()
            end.synchronize()
            times[i].append(begin.elapsed_time(end) / 1000 / REPLAYS / len(calls))
    return times


def _recorded(calls: list[Callable[[], object]]) -> Callable[[], None]:
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _call_all(calls)
    return graph.replay


def _call_all(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


if __name__ == "__main__":
    from rlloop.models import save_model

    save_model(random_model(json.loads(sys.argv[1]), "cuda" if torch.cuda.is_available() else "cpu"), Path(sys.argv[2]))
