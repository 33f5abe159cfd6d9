"""The table of docs/models.md: what is checked of each family, measured.

    python -m tests.support.family_table                  # every family
    python -m tests.support.family_table qwen3_moe glm_moe_dsa

The tests beside it hold each figure to a bound; this shows the figures themselves.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from transformers.utils import logging

from rlloop import Engine, load_model, token_logprobs
from tests.support.checkpoints import EVERY, make_checkpoint
from tests.support.family_checks import PROMPTS, SAMPLING, compare, memorise

# Parts of a model, by what stands in the names of their parameters; the first that fits.
PARTS = {
    "embeddings, head": ("embed_tokens", "lm_head"),
    "recurrence": ("linear_attn", "A_log", "dt_bias", "conv1d", ".mixer.D", ".mixer.in_proj", ".mixer.out_proj"),
    "norms": ("norm",),
    "shared experts": ("shared_expert",),
    "experts": (".experts.",),
    "router": (".gate.", ".router."),
    "attention": ("self_attn", ".mixer.q_proj", ".mixer.k_proj", ".mixer.v_proj", ".mixer.o_proj"),
    "MLP": (".mlp.", ".mixer."),
}


def by_part(errors: Mapping[str, float]) -> dict[str, float]:
    """The largest of each part's parameters."""
    found: dict[str, float] = {}
    for name, error in errors.items():
        found[part_of(name)] = max(found.get(part_of(name), 0.0), error)
    return found


def part_of(name: str) -> str:
    """The part of a model that a parameter belongs to."""
    return next((part for part, marks in PARTS.items() if any(mark in name for mark in marks)), "other")


def engine_differences(folder: Path, dtype: str) -> tuple[int, int]:
    """(tokens whose logprob has other bits in the trainer than in the engine that sampled it, tokens)."""
    model = load_model(folder, dtype=dtype)
    made = Engine(model, max_batch_tokens=32).generate(PROMPTS, SAMPLING)
    scored = token_logprobs(model, [(each.prompt_ids, each.token_ids) for each in made], sampling=SAMPLING)
    pairs = [(each.logprobs, row.detach().numpy()) for each, row in zip(made, scored, strict=True)]
    different = sum(int((mine.view(np.int32) != theirs.view(np.int32)).sum()) for mine, theirs in pairs)
    return different, sum(len(mine) for mine, _ in pairs)


def row(family: str) -> list[str]:
    with tempfile.TemporaryDirectory() as place:
        float32, bfloat16 = Path(place) / "float32", Path(place) / "bfloat16"
        reference = make_checkpoint(float32, family)
        make_checkpoint(bfloat16, family, dtype=torch.bfloat16)
        logprob, gradients = compare(float32, reference)
        losses, _ = memorise(float32)
        counts = [engine_differences(float32, "float32"), engine_differences(bfloat16, "bfloat16")]
    parts = ", ".join(f"{part} {error:.1e}" for part, error in sorted(by_part(gradients).items()))
    same = ", ".join(f"{different} of {tokens}" for different, tokens in counts)
    return [f"`{family}`", f"{logprob:.1e}", parts, f"{losses[0]:.1f} -> {losses[-1]:.1e}", same]


def main() -> None:
    logging.disable_progress_bar()
    head = ["family", "logprob error", "gradient error by part", "loss, 40 steps", "tokens that differ, fp32, bf16"]
    print("\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head))))
    for family in sys.argv[1:] or EVERY:
        print(f"| {' | '.join(row(family))} |", flush=True)


if __name__ == "__main__":
    main()
