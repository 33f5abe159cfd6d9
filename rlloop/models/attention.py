"""Grouped-query attention: several query heads share one key-value head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlloop.models.architecture import ModelConfig
from rlloop.models.layers import Cache, Linear, Norm, Step
from rlloop.numerics.ops import Ops


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.eps = layer, config.rms_norm_eps
        self.head_dim, self.scale = config.head_dim, config.head_dim**-0.5
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.output_gate = config.output_gate
        self.q_proj = Linear(config.hidden_size, (1 + config.output_gate) * width, config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_width, config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_width, config.qkv_bias)
        self.o_proj = Linear(width, config.hidden_size, config.output_bias, across=True)
        self.whole_norm, self.rope_dim = config.whole_norm, config.rope_dim
        self._plain = not (config.output_gate or config.whole_norm) and config.rope_dim == config.head_dim
        self.window = config.window if layer in config.windowed else 0
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks else None
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = Norm(width if config.whole_norm else config.head_dim, config.centred_norms)
            self.k_norm = Norm(kv_width if config.whole_norm else config.head_dim, config.centred_norms)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        ops = step.ops
        if step.cache is not None and self._plain and ops.fuses:
            q, keys, values = self._projected_into_cache(x, step, step.cache)
            return self._read(q, keys, values, None, step)
        q, k, v = (project(x, ops) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.output_gate:  # each head's query, then its gate
            q, gate = (part.flatten(1) for part in q.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1))
        else:
            gate = None
        q, k = self._normed(q, self.q_norm, ops), self._normed(k, self.k_norm, ops)
        q, k, v = self._rotated(q, step), self._rotated(k, step), v.unflatten(-1, (-1, self.head_dim))
        keys, values = k, v
        if step.cache is not None:
            keys, values = step.cache.write(self.layer, k=ops.cached(k), v=ops.cached(v))
        return self._read(q, keys, values, gate, step)

    def _projected_into_cache(self, x: Tensor, step: Step, cache: Cache) -> tuple[Tensor, Tensor, Tensor]:
        """(queries, key store, value store), the step's tokens written into the stores; two fused kernels."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        if self.q_proj.bias is None:
            made = step.ops.qkv_linear(x, *(project.weight for project in projections))
        else:
            made = (project(x, step.ops) for project in projections)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in made)
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm.scale, self.k_norm.scale)
        slots, keys, values = cache.places(self.layer, "k", "v")
        q = step.ops.qkv_cache_write(q, k, v, norms, self.eps, step.positions, step.rope, slots, keys, values)
        return q, keys, values

    def _read(self, q: Tensor, keys: Tensor, values: Tensor, gate: Tensor | None, step: Step) -> Tensor:
        ops = step.ops
        read = ops.attention(q, keys, values, step.layout, self.scale, self.sinks, self.window).flatten(1)
        return self.o_proj(read if gate is None else ops.sigmoid_mul(gate, read), ops)

    def _normed(self, x: Tensor, norm: Norm | None, ops: Ops) -> Tensor:
        """[T, heads * head_dim] -> [T, heads, head_dim]"""
        heads = x.unflatten(-1, (-1, self.head_dim))
        if norm is None:
            return heads
        if self.whole_norm:
            return ops.rms_norm(x, norm.scale, self.eps)[0].unflatten(-1, (-1, self.head_dim))
        return ops.rms_norm(heads, norm.scale, self.eps)[0]

    def _rotated(self, x: Tensor, step: Step) -> Tensor:
        if not self.rope_dim:
            return x
        turned = step.ops.rope(x[..., : self.rope_dim], step.positions, *step.rope)
        return turned if self.rope_dim == self.head_dim else torch.cat((turned, x[..., self.rope_dim :]), dim=-1)


def cache_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that one layer caches for each token, by name."""
    shape = (config.num_kv_heads, config.head_dim)
    return {"k": shape, "v": shape}
