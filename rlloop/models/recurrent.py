"""Recurrent layers: gated delta networks (Yang et al. 2024, arXiv:2412.06464, as Qwen3.5 has them) and Mamba-2 (Dao and
Gu 2024, arXiv:2405.21060, as Nemotron 3 has it).

Both mix neighbouring tokens by a short causal convolution, then write each token to a decaying state. Both run token by
token here, in training too (`rlloop.numerics.kernels.cpu.compiled.recurrence` says why).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlloop.models.architecture import DeltaConfig, MambaConfig, ModelConfig
from rlloop.models.layers import Linear, Step, Weight
from rlloop.numerics.layout import RecurrentState
from rlloop.numerics.operators.parameters import each_row

LENGTH_EPS = 1e-6  # epsilon of the L2 norm of queries and keys, whatever `rms_norm_eps` says


class Convolution(nn.Module):
    """Hugging Face's `conv1d`, with the activation that follows it."""

    def __init__(self, channels: int, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, x: Tensor, step: Step, layer: int) -> Tensor:
        """[T, C] -> [T, C]"""
        sums = step.ops.causal_conv(x, self.weight, self.bias, step.layout, _carried(step, layer, "inputs"))
        return step.ops.silu_mul(sums, torch.ones_like(sums)).to(x.dtype)


class DeltaNet(nn.Module):
    """Gated delta network: Hugging Face's `linear_attn`."""

    def __init__(self, config: ModelConfig, delta: DeltaConfig, layer: int) -> None:
        super().__init__()
        self.config, self.eps, self.layer = delta, config.rms_norm_eps, layer
        keys, values = delta.num_key_heads * delta.key_dim, delta.num_heads * delta.value_dim
        self.widths = (keys, keys, values)
        self.conv1d = Convolution(sum(self.widths), delta.conv_width, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(delta.num_heads))
        self.A_log = nn.Parameter(torch.empty(delta.num_heads))
        self.norm = Weight(delta.value_dim)
        self.out_proj = Linear(values, config.hidden_size, across=True)
        self.in_proj_qkv = Linear(config.hidden_size, sum(self.widths))
        self.in_proj_z = Linear(config.hidden_size, values)
        self.in_proj_b = Linear(config.hidden_size, delta.num_heads)
        self.in_proj_a = Linear(config.hidden_size, delta.num_heads)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        ops, delta = step.ops, self.config
        mixed = self.conv1d(self.in_proj_qkv(x, ops), step, self.layer)
        q, k, v = mixed.split(self.widths, dim=-1)
        q, k = (self._unit(part.unflatten(-1, (-1, delta.key_dim)), step) for part in (q, k))
        decay, _ = ops.recurrent_gates(self.in_proj_a(x, ops), self.A_log, self.dt_bias)
        b = self.in_proj_b(x, ops)
        b = b.to(torch.promote_types(b.dtype, torch.float32))
        beta = ops.sigmoid_mul(b, torch.ones_like(b))
        v, states = v.unflatten(-1, (-1, delta.value_dim)), _carried(step, self.layer, "state")
        read = ops.scan(q * delta.key_dim**-0.5, k, v, decay, beta, True, step.layout, states).to(x.dtype)
        normed, _ = ops.rms_norm(read, self.norm.weight, self.eps)
        return self.out_proj(ops.silu_mul(self.in_proj_z(x, ops), normed.flatten(1)), ops)

    def _unit(self, x: Tensor, step: Step) -> Tensor:
        """x divided by its L2 norm, in float32: an RMS norm with weight and epsilon scaled accordingly."""
        width = x.shape[-1]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        weight = torch.full((width,), width**-0.5, dtype=wide.dtype, device=x.device)
        return step.ops.rms_norm(wide, weight, LENGTH_EPS / width)[0]


class Mamba(nn.Module):
    """Mamba-2: Hugging Face's `mixer`."""

    def __init__(self, config: ModelConfig, mamba: MambaConfig, layer: int) -> None:
        super().__init__()
        self.config, self.eps, self.layer = mamba, config.rms_norm_eps, layer
        width, inner = mamba.num_heads * mamba.head_dim, mamba.num_groups * mamba.state_dim
        self.widths = (width, inner, inner)
        self.conv1d = Convolution(sum(self.widths), mamba.conv_width, mamba.conv_bias)
        self.in_proj = Linear(config.hidden_size, width + sum(self.widths) + mamba.num_heads, mamba.bias)
        self.dt_bias = nn.Parameter(torch.empty(mamba.num_heads))
        self.A_log = nn.Parameter(torch.empty(mamba.num_heads))
        self.norm = Weight(width)
        self.D = nn.Parameter(torch.empty(mamba.num_heads))
        self.out_proj = Linear(width, config.hidden_size, mamba.bias, across=True)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        ops, mamba = step.ops, self.config
        gate, mixed, dt = self.in_proj(x, ops).split((self.widths[0], sum(self.widths), mamba.num_heads), dim=-1)
        v, k, q = self.conv1d(mixed, step, self.layer).split(self.widths, dim=-1)
        k, q = (part.unflatten(-1, (mamba.num_groups, -1)) for part in (k, q))
        v, states = v.unflatten(-1, (mamba.num_heads, -1)), _carried(step, self.layer, "state")
        decay, beta = ops.recurrent_gates(dt, self.A_log, self.dt_bias, mamba.least_step)
        read = ops.scan(q, k, v, decay, beta, False, step.layout, states)
        read = (read + each_row(self.D.to(read.dtype), len(v))[..., None] * v).flatten(1)
        gated = ops.silu_mul(gate.to(read.dtype), read).unflatten(-1, (mamba.num_groups, -1))
        ones = torch.ones(gated.shape[-1], dtype=gated.dtype, device=x.device)
        normed = ops.rms_norm(gated, ones, self.eps)[0].flatten(1).to(x.dtype)
        return self.out_proj(normed * each_row(self.norm.weight, len(x)), ops)


def _carried(step: Step, layer: int, name: str) -> RecurrentState | None:
    return None if step.cache is None else step.cache.carried(layer, name)


def delta_states(config: DeltaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the float32 states that one layer keeps for each sequence, by name."""
    channels = 2 * config.num_key_heads * config.key_dim + config.num_heads * config.value_dim
    return {
        "inputs": (config.conv_width - 1, channels),
        "state": (config.num_heads, config.key_dim, config.value_dim),
    }


def mamba_states(config: MambaConfig) -> dict[str, tuple[int, ...]]:
    """As `delta_states`."""
    channels = config.num_heads * config.head_dim + 2 * config.num_groups * config.state_dim
    return {
        "inputs": (config.conv_width - 1, channels),
        "state": (config.num_heads, config.state_dim, config.head_dim),
    }
