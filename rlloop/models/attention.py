"""Attention whose query heads share key-value heads."""

from __future__ import annotations

from torch import Tensor, nn

from rlloop.models.parts import Linear, Step, Weight
from rlloop.models.shape import ModelConfig


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.eps = layer, config.rms_norm_eps
        self.head_dim, self.scale = config.head_dim, config.head_dim**-0.5
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, width, config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_width, config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_width, config.qkv_bias)
        self.o_proj = Linear(width, config.hidden_size, config.output_bias)
        self.q_norm = Weight(config.head_dim) if config.qk_norm else None
        self.k_norm = Weight(config.head_dim) if config.qk_norm else None

    def forward(self, x: Tensor, step: Step) -> Tensor:
        ops = step.ops
        q, k, v = (
            project(x, ops).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, _ = ops.rms_norm(q, self.q_norm.weight, self.eps)
            k, _ = ops.rms_norm(k, self.k_norm.weight, self.eps)
        q, k = ops.rope(q, step.positions, *step.rope), ops.rope(k, step.positions, *step.rope)
        keys, values = (k, v) if step.cache is None else step.cache.write(self.layer, k=k, v=v)
        return self.o_proj(ops.attention(q, keys, values, step.layout, self.scale).flatten(1), ops)


def cache_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """What one layer keeps of a token."""
    shape = (config.num_kv_heads, config.head_dim)
    return {"k": shape, "v": shape}
