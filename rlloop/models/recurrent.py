"""Recurrent layers: gated delta networks (Yang et al. 2024, arXiv:2412.06464, as Qwen3.5 has them) and Mamba-2 (Dao and
Gu 2024, arXiv:2405.21060, as Nemotron 3 has it).

Both mix neighbouring tokens by a short causal convolution, then add each token to a decaying state. On a CPU they run
token by token, also in training (reasons in `rlloop.numerics.kernels.cpu.compiled.recurrence`); on a GPU chunk by chunk
(`rlloop.numerics.kernels.triton.scan`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlloop.models.architecture import DeltaConfig, MambaConfig, ModelConfig
from rlloop.models.attention import rows_of
from rlloop.models.layers import Divisions, Linear, Step, Weight
from rlloop.numerics.layout import RecurrentState
from rlloop.numerics.operators.parameters import each_row
from rlloop.numerics.ops import Ops
from rlloop.parallel.collectives import Ranks
from rlloop.parallel.context import ParallelContext
from rlloop.parallel.division import Division, end_to_end, gathered, heads_over, in_tiles, taken

LENGTH_EPS = 1e-6  # epsilon of the L2 norm of queries and keys, whatever `rms_norm_eps` says


class Convolution(nn.Module):
    """Hugging Face's `conv1d`, with the activation that follows it."""

    def __init__(self, channels: int, width: int, bias: bool, division: Division | None) -> None:
        super().__init__()
        self.division = division
        held = channels if division is None else division.size
        self.weight = nn.Parameter(torch.empty(held, 1, width))
        self.bias = nn.Parameter(torch.empty(held)) if bias else None

    @property
    def divisions(self) -> Divisions:
        return {} if self.division is None else {"weight": (0, self.division), "bias": (0, self.division)}

    def forward(self, x: Tensor, step: Step, layer: int) -> Tensor:
        """[T, C] -> [T, C]"""
        sums = step.ops.causal_conv(x, self.weight, self.bias, step.layout, _carried(step, layer, "inputs"))
        return step.ops.silu_mul(sums, torch.ones_like(sums)).to(x.dtype)


class _ByHead(nn.Module):
    """A recurrent layer's per-head parameters, such as `dt_bias` and `A_log`."""

    def __init__(self, count: int, groups: int, tp: Ranks) -> None:
        super().__init__()
        self.heads = heads_over(count, groups, tp)
        self.values, self.keys = self.heads or (None, None)
        held = count if self.values is None else self.values.size
        self.dt_bias = nn.Parameter(torch.empty(held))
        self.A_log = nn.Parameter(torch.empty(held))

    @property
    def divisions(self) -> Divisions:
        return {} if self.values is None else dict.fromkeys(("dt_bias", "A_log", "D"), (0, self.values))

    def _scan(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, corrects: bool, step: Step) -> Tensor:
        """`Ops.scan` over this rank's heads. If several ranks read a key head, its gradient is a sum over ranks, so in
        training every rank then computes all heads."""
        states = _carried(step, self.layer, "state")
        shared = self.keys is not None and self.keys.repeats and torch.is_grad_enabled()
        keys, values = (self.keys, self.values) if shared else (None, None)
        q, k = gathered(q, keys, 1), gathered(k, keys, 1)
        v, decay, beta = (gathered(x, values, 1) for x in (v, decay, beta))
        return taken(step.ops.scan(q, k, v, decay, beta, corrects, step.layout, states), values, 1)

    layer: int


class DeltaNet(_ByHead):
    """Gated delta network: Hugging Face's `linear_attn`."""

    def __init__(self, config: ModelConfig, delta: DeltaConfig, layer: int, tp: Ranks) -> None:
        super().__init__(delta.num_heads, delta.num_key_heads, tp)
        self.config, self.eps, self.layer = delta, config.rms_norm_eps, layer
        keys, values = delta.num_key_heads * delta.key_dim, delta.num_heads * delta.value_dim
        of_keys, self.columns = rows_of(self.keys, delta.key_dim), rows_of(self.values, delta.value_dim)
        mixed = self.columns and of_keys and end_to_end([of_keys, of_keys, self.columns])
        self.widths = _widths((keys, keys, values), (of_keys, of_keys, self.columns))
        self.conv1d = Convolution(2 * keys + values, delta.conv_width, bias=False, division=mixed)
        self.norm = Weight(delta.value_dim)
        self.out_proj = Linear(values, config.hidden_size, across=True, rows=in_tiles(config.hidden_size, tp))
        self.in_proj_qkv = Linear(config.hidden_size, 2 * keys + values, rows=mixed)
        self.in_proj_z = Linear(config.hidden_size, values, rows=self.columns)
        self.in_proj_b = Linear(config.hidden_size, delta.num_heads, rows=self.values)
        self.in_proj_a = Linear(config.hidden_size, delta.num_heads, rows=self.values)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        ops, delta = step.ops, self.config
        mixed = self.conv1d(self.in_proj_qkv(x, ops), step, self.layer)
        q, k, v = mixed.split(self.widths, dim=-1)
        q, k = (self._unit(tensor.unflatten(-1, (-1, delta.key_dim)), step) for tensor in (q, k))
        decay, _ = ops.recurrent_gates(self.in_proj_a(x, ops), self.A_log, self.dt_bias)
        b = self.in_proj_b(x, ops)
        b = b.to(torch.promote_types(b.dtype, torch.float32))
        beta = ops.sigmoid_mul(b, torch.ones_like(b))
        v = v.unflatten(-1, (-1, delta.value_dim))
        read = self._scan(q * delta.key_dim**-0.5, k, v, decay, beta, True, step).to(x.dtype)
        every = self.values if torch.is_grad_enabled() else None  # the weight's gradient is a sum over all heads
        normed = taken(ops.rms_norm(gathered(read, every, 1), self.norm.weight, self.eps)[0], every, 1)
        return self.out_proj.whole(ops.silu_mul(self.in_proj_z(x, ops), normed.flatten(1)), ops, self.columns)

    def _unit(self, x: Tensor, step: Step) -> Tensor:
        """x divided by its L2 norm, in float32: an RMS norm with weight and epsilon scaled accordingly."""
        width = x.shape[-1]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        weight = torch.full((width,), width**-0.5, dtype=wide.dtype, device=x.device)
        return step.ops.rms_norm(wide, weight, LENGTH_EPS / width)[0]


class Mamba(_ByHead):
    """Mamba-2: Hugging Face's `mixer`."""

    def __init__(self, config: ModelConfig, mamba: MambaConfig, layer: int, tp: Ranks) -> None:
        super().__init__(mamba.num_heads, mamba.num_groups, tp)
        self.config, self.eps, self.layer = mamba, config.rms_norm_eps, layer
        width, inner = mamba.num_heads * mamba.head_dim, mamba.num_groups * mamba.state_dim
        of_groups, self.columns = rows_of(self.keys, mamba.state_dim), rows_of(self.values, mamba.head_dim)
        mixed = self.columns and of_groups and end_to_end([self.columns, of_groups, of_groups])
        rows = self.columns and mixed and self.values and end_to_end([self.columns, mixed, self.values])
        self.widths = _widths((width, inner, inner), (self.columns, of_groups, of_groups))
        self.conv1d = Convolution(width + 2 * inner, mamba.conv_width, mamba.conv_bias, division=mixed)
        self.in_proj = Linear(config.hidden_size, 2 * width + 2 * inner + mamba.num_heads, mamba.bias, rows=rows)
        self.norm = Weight(width)
        self.D = nn.Parameter(torch.empty(len(self.A_log)))
        self.out_proj = Linear(
            width, config.hidden_size, mamba.bias, across=True, rows=in_tiles(config.hidden_size, tp)
        )

    def forward(self, x: Tensor, step: Step) -> Tensor:
        ops, mamba = step.ops, self.config
        gate, mixed, dt = self.in_proj(x, ops).split((self.widths[0], sum(self.widths), len(self.A_log)), dim=-1)
        v, k, q = self.conv1d(mixed, step, self.layer).split(self.widths, dim=-1)
        k, q = (tensor.unflatten(-1, (-1, mamba.state_dim)) for tensor in (k, q))
        v = v.unflatten(-1, (-1, mamba.head_dim))
        decay, beta = ops.recurrent_gates(dt, self.A_log, self.dt_bias, mamba.least_step)
        read = self._scan(q, k, v, decay, beta, False, step)
        read = (read + each_row(self.D.to(read.dtype), len(v))[..., None] * v).flatten(1)
        gated = gathered(ops.silu_mul(gate.to(read.dtype), read), self.columns)  # a rank may hold part of a group
        gated = gated.unflatten(-1, (mamba.num_groups, -1))
        ones = torch.ones(gated.shape[-1], dtype=gated.dtype, device=x.device)
        normed = ops.rms_norm(gated, ones, self.eps)[0].flatten(1).to(x.dtype)
        return self.out_proj.whole(normed * each_row(self.norm.weight, len(x)), ops)


def _carried(step: Step, layer: int, name: str) -> RecurrentState | None:
    return None if step.cache is None else step.cache.carried(layer, name)


def _widths(whole: tuple[int, ...], divisions: tuple[Division | None, ...]) -> tuple[int, ...]:
    """This rank's widths of concatenated parts."""
    return tuple(width if division is None else division.size for width, division in zip(whole, divisions, strict=True))


def delta_states(config: DeltaConfig, context: ParallelContext, ops: Ops) -> dict[str, tuple[int, ...]]:
    """Shapes of the float32 states that one layer keeps for each sequence, by name."""
    every = config.num_heads, config.num_key_heads
    heads, keys = _widths(every, _heads(*every, context.tp))
    return {
        "inputs": (config.conv_width - 1, 2 * keys * config.key_dim + heads * config.value_dim),
        "state": ops.scan_state(keys, heads, config.key_dim, config.value_dim, context.device),
    }


def mamba_states(config: MambaConfig, context: ParallelContext, ops: Ops) -> dict[str, tuple[int, ...]]:
    """As `delta_states`."""
    every = config.num_heads, config.num_groups
    heads, groups = _widths(every, _heads(*every, context.tp))
    return {
        "inputs": (config.conv_width - 1, heads * config.head_dim + 2 * groups * config.state_dim),
        "state": ops.scan_state(groups, heads, config.state_dim, config.head_dim, context.device),
    }


def _heads(count: int, groups: int, tp: Ranks) -> tuple[Division | None, Division | None]:
    return heads_over(count, groups, tp) or (None, None)
