"""Gradients of whole models in bfloat16, rlloop's and transformers', and how far each is from float32's.

python -m tests.support.bfloat16_gradients [cpu] [qwen3 ...]      # a row for each family
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from rlloop.models import load_model, token_logprobs
from tests.support.checkpoints import EVERY, by_our_names, make_checkpoint
from tests.support.family_table import part_of

SHAPE = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 8, "moe_intermediate_size": 96, "q_lora_rank": 64, "kv_lora_rank": 32,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
INDEXER = {"index_topk": 128, "index_head_dim": 32}
OWN: dict[str, dict[str, Any]] = {  # what differs from `checkpoints.EVERY`, whose widths are smaller
    "qwen3": {"head_dim": 64},
    "qwen3_moe": {"head_dim": 64, "moe_intermediate_size": 96},
    "deepseek_v3": LATENT,
    "deepseek_v32": {**LATENT, **INDEXER},
    "glm_moe_dsa": {**LATENT, **INDEXER},
    "minimax_m2": {"head_dim": 64, "rotary_dim": 32, "intermediate_size": 96},
    "qwen3_5_moe": {
        "head_dim": 64, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "num_hidden_layers": 2,
    },
    "nemotron_h": {
        "head_dim": 64, "moe_intermediate_size": 96, "moe_shared_expert_intermediate_size": 96,
        "moe_latent_size": 128, "ssm_state_size": 64, "mamba_num_heads": 8, "mamba_head_dim": 64,
        "num_hidden_layers": 4,
    },
    "gpt_oss": {"head_dim": 64, "intermediate_size": 96, "sliding_window": 100, "num_hidden_layers": 2},
}  # fmt: skip
LENGTHS = ((64, 128), (20, 300))  # of prompt and completion: 512 tokens


def pairs() -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(3, SHAPE["vocab_size"], n).tolist() for n in both) for both in LENGTHS]


def backward(logprobs: Iterable[Tensor]) -> None:
    """From one random weighting of all tokens."""
    generator = torch.Generator().manual_seed(1)
    rows = [(row * torch.randn(len(row), generator=generator).to(row.device)).sum() for row in logprobs]
    torch.stack(rows).sum().backward()


def theirs(folder: Path, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """transformers' gradients by rlloop's names, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    torch.nn.Module.to(model, device)
    rows = []
    for prompt, completion in pairs():
        ids = torch.tensor([prompt + completion], device=device)
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        rows.append(logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0])
    backward(rows)
    named = by_our_names({name: parameter.grad for name, parameter in model.named_parameters()})
    return {name: grad.double() for name, grad in named.items() if grad is not None}


def ours(folder: Path, device: str) -> dict[str, Tensor]:
    model = load_model(folder, dtype="bfloat16", device=device)
    backward(token_logprobs(model, pairs()))
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def errors(made: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """Norm of the difference by the norm of the exact gradient: of each part of the model, and of all of it."""
    assert made.keys() == exact.keys()
    squares: dict[str, list[float]] = {}
    for name, wanted in exact.items():
        for part in ("all", part_of(name)):
            total = squares.setdefault(part, [0.0, 0.0])
            total[0] += float((made[name] - wanted).square().sum())
            total[1] += float(wanted.square().sum())
    return {part: (off / whole) ** 0.5 for part, (off, whole) in squares.items()}


def bfloat16_errors(folder: Path, family: str, device: str) -> tuple[dict[str, float], dict[str, float]]:
    """`errors` of rlloop's bfloat16 gradients and of transformers', beside transformers' in float32 of the same
    weights. Writes a random checkpoint to the folder."""
    make_checkpoint(folder, family, dtype=torch.bfloat16, **{**SHAPE, **OWN.get(family, {})})
    exact, rounded = (theirs(folder, dtype, device) for dtype in (torch.float32, torch.bfloat16))
    return errors(ours(folder, device), exact), errors(rounded, exact)


def main() -> None:
    logging.disable_progress_bar()
    device = "cpu" if "cpu" in sys.argv else "cuda"
    for family in [name for name in sys.argv[1:] if name != "cpu"] or EVERY:
        with tempfile.TemporaryDirectory() as place:
            mine, other = bfloat16_errors(Path(place), family, device)
        print(f"{family}: " + ", ".join(f"{part} {mine[part]:.2e} ({other[part]:.2e})" for part in mine), flush=True)


if __name__ == "__main__":
    main()
