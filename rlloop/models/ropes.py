"""Rotary position embeddings (rope): their keys in config.json, and tables of cos and sin."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from rlloop.errors import ModelError
from rlloop.models.architecture import LinearScaling, Llama3Scaling, ModelConfig, RopeConfig, YarnScaling
from rlloop.models.config_reader import Keys, all_are

# architecture -> defaults of missing keys other than theta 10,000 over the whole head, unscaled
MISSING: dict[str, dict[str, Any]] = {
    "MiniMaxM2ForCausalLM": {"rope_theta": 5e6},
    "Qwen3_5MoeForCausalLM": {"partial_rotary_factor": 0.25},
    "Qwen3_5MoeForConditionalGeneration": {"partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
    "Qwen3VLForConditionalGeneration": {"rope_theta": 500000.0, "mrope_section": [24, 20, 20]},
    "Qwen3VLMoeForConditionalGeneration": {"rope_theta": 500000.0, "mrope_section": [24, 20, 20]},
    "GptOssForCausalLM": {
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False,
        },
    },
}  # fmt: skip
PARTIAL = (  # part of a head may be rotated
    "MiniMaxM2ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "NemotronHForCausalLM",
)  # fmt: skip
# Keys about images, without effect on text: all axes of its positions are equal.
IMAGES = {"Qwen3_5MoeForCausalLM": ("mrope_section", "mrope_interleaved")}


def read_rope(keys: Keys, max_positions: int, architecture: str) -> RopeConfig:
    """Read the rope's keys in either form: `rope_theta` beside `rope_scaling`, or both in `rope_parameters`
    (transformers 5)."""
    missing = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, **MISSING.get(architecture, {})}
    scaling, parameters = keys.take("rope_scaling"), keys.take("rope_parameters")
    for name, value in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if value is not None and not isinstance(value, dict):
            keys.refuse(name, value, "null or an object")
    if scaling and parameters and scaling != parameters:
        raise ModelError("config.json has both rope_scaling and rope_parameters, and they differ; keep one")
    name, settings = "rope_scaling" if scaling else "rope_parameters", scaling or parameters
    rope = Keys(missing.get("rope_parameters", {}) if settings is None else settings, f"{name}.")
    if architecture == "MiniMaxM2ForCausalLM" and keys.has("rotary_dim"):  # its name for the share
        width = keys.copy().count("head_dim", 128)
        missing["partial_rotary_factor"] = keys.count("rotary_dim", most=width) / width
    keys.where_null(partial_rotary_factor=1.0)
    if rope.has("rope_theta"):  # it wins
        keys.where_null(rope_theta=missing["rope_theta"])
    theta, share = (
        rope.number(name, keys.number(name, missing[name])) for name in ("rope_theta", "partial_rotary_factor")
    )
    older_name = rope.take("type", "default")
    kind = None if rope.null("rope_type") else rope.take("rope_type", older_name)
    if kind not in (kinds := ("default", *SCALINGS)):
        rope.refuse("rope_type", kind, " or ".join(kinds))
    for name in IMAGES.get(architecture, ()):
        rope.take(name)
    sections = _sections(rope, missing["mrope_section"]) if "mrope_section" in missing else None
    if share > 1 or (share < 1 and architecture not in PARTIAL):
        rope.refuse("partial_rotary_factor", share, "at most 1" if architecture in PARTIAL else f"1 for {architecture}")
    if kind == "yarn" and theta <= 1:
        rope.refuse("rope_theta", theta, "above 1 under yarn")
    scaled = SCALINGS[kind](rope, max_positions) if kind in SCALINGS else None
    rope.refuse_the_rest()
    return RopeConfig(theta, scaled, share, sections)


def _sections(rope: Keys, default: list[int]) -> tuple[int, ...]:
    """Frequencies by axis of the position: time, height, width."""
    rope.fixed("mrope_interleaved", True)
    sections = rope.take("mrope_section", default)
    if not all_are(sections, int) or len(sections) != 3 or min(sections) < 0:
        rope.refuse("mrope_section", sections, "three whole numbers, of time, height and width")
    return tuple(sections)


def _linear(rope: Keys, max_positions: int) -> LinearScaling:
    return LinearScaling(rope.number("factor"))


def _llama3(rope: Keys, max_positions: int) -> Llama3Scaling:
    scaled = Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_positions=rope.count("original_max_position_embeddings", max_positions),
    )
    if scaled.high_freq_factor <= scaled.low_freq_factor:
        rope.refuse("high_freq_factor", scaled.high_freq_factor, f"above low_freq_factor ({scaled.low_freq_factor})")
    return scaled


def _yarn(rope: Keys, max_positions: int) -> YarnScaling:
    original, factor = rope.count("original_max_position_embeddings", max_positions), rope.number("factor")
    rope.where_null(beta_fast=32.0, beta_slow=1.0, mscale=0.0, mscale_all_dim=0.0, truncate=False)
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if fast < slow:
        rope.refuse("beta_fast", fast, f"at least beta_slow ({slow:g})")
    if original < 2 * math.pi * slow:
        least = math.ceil(2 * math.pi * slow)
        rope.refuse("original_max_position_embeddings", original, f"at least {least}, a context of beta_slow turns")
    mscale, everywhere = rope.number("mscale", 0.0, zero=True), rope.number("mscale_all_dim", 0.0, zero=True)
    both = _mscale(factor, mscale) / _mscale(factor, everywhere) if mscale and everywhere else _mscale(factor, 1)
    rope.where_null(attention_factor=both)
    return YarnScaling(
        factor=factor,
        original_positions=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=rope.number("attention_factor", both),
        truncate=rope.flag("truncate", True),
        score_factor=_mscale(factor, everywhere) ** 2 if everywhere else 1.0,
    )


SCALINGS = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class RopeTable(nn.Module):
    """cos and sin, [2, positions, rope_dim / 2], float32 whatever the model is cast to; not stored in checkpoints."""

    table: Tensor

    def __init__(self, config: ModelConfig, device: str | None = None) -> None:
        """Without a device the table is uninitialised, as a new model's parameters are."""
        super().__init__()
        if device is None:
            table = torch.empty(2, config.max_positions, config.rope_dim // 2)
        else:
            table = torch.stack(rope_table(config.rope, config.rope_dim, config.max_positions, device))
        self.register_buffer("table", table, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        exact = self.table
        super()._apply(fn, recurse)
        self.table = exact.to(self.table.device)
        return self


def turned_by_axis(table: Tensor, positions: Tensor, sections: tuple[int, ...]) -> Tensor:
    """Rows of a table [2, P, D / 2] for positions [3, T] int64 of time, height and width -> [2, T, D / 2].

    Frequencies 1, 4, 7, ... turn by the height and 2, 5, 8, ... by the width, as many as the sections say, and all
    others by the time (interleaved MRoPE of Qwen3-VL, arXiv:2511.21631).
    """
    rows = table[:, positions[0]]
    for axis in (1, 2):
        own = slice(axis, 3 * sections[axis], 3)
        rows[..., own] = table[:, positions[axis], own]
    return rows


def rope_table(rope: RopeConfig, head_dim: int, positions: int, device: str | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin, [positions, head_dim / 2] float32 each, with transformers' order of operations."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    frequency, factor = 1.0 / (rope.theta**steps), 1.0
    if isinstance(rope.scaling, LinearScaling):
        frequency = frequency / rope.scaling.factor
    elif isinstance(rope.scaling, Llama3Scaling):
        frequency = _stretched_llama3(frequency, rope.scaling)
    elif isinstance(rope.scaling, YarnScaling):
        frequency, factor = _stretched_yarn(rope.theta, steps, rope.scaling), rope.scaling.attention_factor
    angle = torch.outer(torch.arange(positions, device=device).float(), frequency)
    return angle.cos() * factor, angle.sin() * factor


def _stretched_llama3(frequency: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3's scaling (Meta's llama-models, `apply_scaling`).

    Frequencies of wavelengths above `original_positions / low_freq_factor` are divided by `factor`, those below
    `original_positions / high_freq_factor` stay, and those between are blended.
    """
    wavelength = 2 * math.pi / frequency
    ratio = scaling.original_positions / wavelength
    smooth = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    low = wavelength > scaling.original_positions / scaling.low_freq_factor
    high = wavelength < scaling.original_positions / scaling.high_freq_factor
    return torch.where(low, frequency / scaling.factor, torch.where(high, frequency, blended))


def _stretched_yarn(theta: float, steps: Tensor, scaling: YarnScaling) -> Tensor:
    """YaRN's scaling.

    Frequencies that turn fewer than `beta_slow` times over the original context are divided by `factor`, those that
    turn more than `beta_fast` times stay, and those between are blended along the dimensions.
    """
    width = 2 * len(steps)

    def dimension(turns: float) -> float:
        return width * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0  # where low is above high the ramp falls, as transformers' does
    ramp = (torch.arange(len(steps), dtype=torch.float32, device=steps.device) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    power = theta**steps
    return 1.0 / (scaling.factor * power) * (1 - kept) + 1.0 / power * kept
