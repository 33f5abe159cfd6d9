"""Recurrent layers: gated delta networks (Yang et al. 2024, arXiv:2412.06464, as Qwen3.5 has them) and Mamba-2 (Dao and
Gu 2024, arXiv:2405.21060, as Nemotron 3 has it).

Both mix neighbouring tokens by a short causal convolution, then add each token to a decaying state. On a CPU they run
token by token, also in training (reasons in `rlloop.numerics.kernels.cpu.compiled.recurrence`); on a GPU chunk by chunk
(`rlloop.numerics.kernels.triton.scan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from rlloop.models.architecture import DeltaConfig, MambaConfig, ModelConfig
from rlloop.models.context_parallel import all_tokens, own_tokens
from rlloop.models.layers import Divisions, Linear, Step, Weight
from rlloop.numerics.layout import RecurrentState
from rlloop.numerics.operators.parameters import each_row
from rlloop.numerics.ops import Ops
from rlloop.parallel.collectives import Ranks
from rlloop.parallel.context import ParallelContext
from rlloop.parallel.division import Division, end_to_end, gathered, heads_over, in_tiles, taken

VALUES, KEYS = 0, 1
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

    def forward(self, x: Tensor, step: Step, layer: int, channels: Division | None = None) -> Tensor:
        """[T, C] -> [T, C]. `channels`: those of a weight held whole that x has."""
        weight, bias = _own(self.weight, channels), None if self.bias is None else _own(self.bias, channels)
        sums = step.ops.causal_conv(x, weight, bias, step.layout, _carried(step, layer, "inputs"))
        return step.ops.silu_mul(sums, torch.ones_like(sums)).to(x.dtype)


def _own(x: Tensor, division: Division | None) -> Tensor:
    return x if division is None else division.take(x, 0)


@dataclass(frozen=True, eq=False)
class _Channels:
    """Divisions of a recurrent layer over the ranks of one axis; each is None for one rank."""

    values: Division | None  # heads
    keys: Division | None  # key heads, each with the heads that read it
    columns: Division | None  # the heads' outputs
    mixed: Division | None  # channels of the convolution: three parts, end to end
    exchanged: Division | None  # these channels and the gates' inputs, end to end
    widths: tuple[int, ...]  # of the three parts on this rank


@lru_cache(maxsize=64)  # a model's layers share them
def _channels_over(
    ranks: Ranks, heads: tuple[int, int], widths: tuple[int, int], parts: tuple[int, int, int], gates: int
) -> _Channels:
    """`heads` and `widths`: of values and of keys. `parts`: which of the two each part of the convolution has."""
    whole = tuple(heads[part] * widths[part] for part in parts)
    divisions = heads_over(*heads, ranks)
    if divisions is None:
        return _Channels(None, None, None, None, None, whole)
    by_part = [divisions[part].times(widths[part]) for part in parts]
    mixed = end_to_end(by_part)
    exchanged = end_to_end([mixed, *[divisions[0]] * gates])
    return _Channels(*divisions, divisions[0].times(widths[0]), mixed, exchanged, tuple(each.size for each in by_part))


class _ByHead(nn.Module):
    """A recurrent layer's per-head parameters, such as `dt_bias` and `A_log`, and its heads over ranks.

    Tensor-parallel ranks have own heads of all tokens. Context-parallel ranks have own tokens and whole weights; they
    exchange own tokens' channels of all heads for all tokens' channels of own heads, and return the results.
    """

    def __init__(
        self, heads: tuple[int, int], widths: tuple[int, int], parts: tuple[int, int, int], gates: int, tp: Ranks
    ) -> None:
        super().__init__()
        self._shape = heads, widths, parts, gates
        self.channels = _channels_over(tp, *self._shape)
        held = heads[0] if self.channels.values is None else self.channels.values.size
        self.dt_bias = nn.Parameter(torch.empty(held))
        self.A_log = nn.Parameter(torch.empty(held))

    @property
    def divisions(self) -> Divisions:
        values = self.channels.values
        return {} if values is None else dict.fromkeys(("dt_bias", "A_log", "D"), (0, values))

    def spread(self, cp: Ranks) -> _Channels:
        """This layer over context-parallel ranks."""
        return _channels_over(cp, *self._shape)

    def _scan(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, corrects: bool, step: Step) -> Tensor:
        """`Ops.scan` over this rank's heads. If several ranks read a key head, its gradient is a sum over ranks, so in
        training every rank then computes all heads."""
        states = _carried(step, self.layer, "state")
        keys, values = self.channels.keys, self.channels.values
        if keys is None or not keys.repeats or not torch.is_grad_enabled():
            keys = values = None
        q, k = gathered(q, keys, 1), gathered(k, keys, 1)
        v, decay, beta = (gathered(x, values, 1) for x in (v, decay, beta))
        return taken(step.ops.scan(q, k, v, decay, beta, corrects, step.layout, states), values, 1)

    layer: int


class DeltaNet(_ByHead):
    """Gated delta network: Hugging Face's `linear_attn`."""

    def __init__(self, config: ModelConfig, delta: DeltaConfig, layer: int, tp: Ranks) -> None:
        heads, widths = (delta.num_heads, delta.num_key_heads), (delta.value_dim, delta.key_dim)
        super().__init__(heads, widths, (KEYS, KEYS, VALUES), 2, tp)
        self.config, self.eps, self.layer = delta, config.rms_norm_eps, layer
        keys, values, own = delta.num_key_heads * delta.key_dim, delta.num_heads * delta.value_dim, self.channels
        self.conv1d = Convolution(2 * keys + values, delta.conv_width, bias=False, division=own.mixed)
        self.norm = Weight(delta.value_dim)
        self.out_proj = Linear(values, config.hidden_size, across=True, rows=in_tiles(config.hidden_size, tp))
        self.in_proj_qkv = Linear(config.hidden_size, 2 * keys + values, rows=own.mixed)
        self.in_proj_z = Linear(config.hidden_size, values, rows=own.columns)
        self.in_proj_b = Linear(config.hidden_size, delta.num_heads, rows=own.values)
        self.in_proj_a = Linear(config.hidden_size, delta.num_heads, rows=own.values)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        ops, delta, own, spread = step.ops, self.config, self.channels, self.spread(step.context.ranks("cp"))
        projected = [each(x, ops) for each in (self.in_proj_qkv, self.in_proj_a, self.in_proj_b)]
        mixed, a, b = _all_tokens(projected, spread, step)
        mixed = self.conv1d(mixed, step, self.layer, spread.mixed)
        q, k, v = mixed.split((own if spread.values is None else spread).widths, dim=-1)
        q, k = (self._unit(tensor.unflatten(-1, (-1, delta.key_dim)), step) for tensor in (q, k))
        decay, _ = ops.recurrent_gates(a, _own(self.A_log, spread.values), _own(self.dt_bias, spread.values))
        b = b.to(torch.promote_types(b.dtype, torch.float32))
        beta = ops.sigmoid_mul(b, torch.ones_like(b))
        v = v.unflatten(-1, (-1, delta.value_dim))
        read = self._scan(q * delta.key_dim**-0.5, k, v, decay, beta, True, step).to(x.dtype)
        read = own_tokens(read, spread.values, step)
        every = own.values if torch.is_grad_enabled() else None  # the weight's gradient is a sum over all heads
        normed = taken(ops.rms_norm(gathered(read, every, 1), self.norm.weight, self.eps)[0], every, 1)
        return self.out_proj.whole(ops.silu_mul(self.in_proj_z(x, ops), normed.flatten(1)), ops, own.columns)

    def _unit(self, x: Tensor, step: Step) -> Tensor:
        """x divided by its L2 norm, in float32: an RMS norm with weight and epsilon scaled accordingly."""
        width = x.shape[-1]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        weight = torch.full((width,), width**-0.5, dtype=wide.dtype, device=x.device)
        return step.ops.rms_norm(wide, weight, LENGTH_EPS / width)[0]


class Mamba(_ByHead):
    """Mamba-2: Hugging Face's `mixer`."""

    def __init__(self, config: ModelConfig, mamba: MambaConfig, layer: int, tp: Ranks) -> None:
        heads, widths = (mamba.num_heads, mamba.num_groups), (mamba.head_dim, mamba.state_dim)
        super().__init__(heads, widths, (VALUES, KEYS, KEYS), 1, tp)
        self.config, self.eps, self.layer = mamba, config.rms_norm_eps, layer
        width, inner, own = mamba.num_heads * mamba.head_dim, mamba.num_groups * mamba.state_dim, self.channels
        rows = own.columns and own.exchanged and end_to_end([own.columns, own.exchanged])
        self.conv1d = Convolution(width + 2 * inner, mamba.conv_width, mamba.conv_bias, division=own.mixed)
        self.in_proj = Linear(config.hidden_size, 2 * width + 2 * inner + mamba.num_heads, mamba.bias, rows=rows)
        self.norm = Weight(width)
        self.D = nn.Parameter(torch.empty(len(self.A_log)))
        self.out_proj = Linear(
            width, config.hidden_size, mamba.bias, across=True, rows=in_tiles(config.hidden_size, tp)
        )

    def forward(self, x: Tensor, step: Step) -> Tensor:
        ops, mamba, own, spread = step.ops, self.config, self.channels, self.spread(step.context.ranks("cp"))
        gate, *parts = self.in_proj(x, ops).split((own.widths[0], sum(own.widths), len(self.A_log)), dim=-1)
        mixed, dt = _all_tokens(parts, spread, step)
        mixed = self.conv1d(mixed, step, self.layer, spread.mixed)
        v, k, q = mixed.split((own if spread.values is None else spread).widths, dim=-1)
        k, q = (tensor.unflatten(-1, (-1, mamba.state_dim)) for tensor in (k, q))
        v = v.unflatten(-1, (-1, mamba.head_dim))
        rate, bias, skip = (_own(each, spread.values) for each in (self.A_log, self.dt_bias, self.D))
        decay, beta = ops.recurrent_gates(dt, rate, bias, mamba.least_step)
        read = self._scan(q, k, v, decay, beta, False, step)
        read = read + each_row(skip.to(read.dtype), len(v))[..., None] * v
        read = own_tokens(read, spread.values, step).flatten(1)
        gated = gathered(ops.silu_mul(gate.to(read.dtype), read), own.columns)  # a rank may hold part of a group
        gated = gated.unflatten(-1, (mamba.num_groups, -1))
        ones = torch.ones(gated.shape[-1], dtype=gated.dtype, device=x.device)
        normed = ops.rms_norm(gated, ones, self.eps)[0].flatten(1).to(x.dtype)
        return self.out_proj.whole(normed * each_row(self.norm.weight, len(x)), ops, unread=step.unread)


def _carried(step: Step, layer: int, name: str) -> RecurrentState | None:
    return None if step.cache is None else step.cache.carried(layer, name)


def _all_tokens(parts: Sequence[Tensor], spread: _Channels, step: Step) -> Sequence[Tensor]:
    """Exchange own tokens' channels of the convolution and inputs of the gates, [t, ...] each and of all heads, for all
    tokens' of own heads. They travel together; without context parallelism they stay."""
    if spread.exchanged is None or spread.mixed is None or spread.values is None:
        return parts
    every = all_tokens(torch.cat(list(parts), dim=-1), spread.exchanged, step)
    return every.split([spread.mixed.size, *[spread.values.size] * (len(parts) - 1)], dim=-1)


def _held(heads: int, groups: int, tp: Ranks) -> tuple[int, int]:
    """The number of heads, and of key heads, that a tensor-parallel rank has."""
    divisions = heads_over(heads, groups, tp)
    return (heads, groups) if divisions is None else (divisions[0].size, divisions[1].size)


def delta_states(config: DeltaConfig, context: ParallelContext, ops: Ops) -> dict[str, tuple[int, ...]]:
    """Shapes of the float32 states that one layer keeps for each sequence, by name."""
    heads, keys = _held(config.num_heads, config.num_key_heads, context.tp)
    return {
        "inputs": (config.conv_width - 1, 2 * keys * config.key_dim + heads * config.value_dim),
        "state": ops.scan_state(keys, heads, config.key_dim, config.value_dim, context.device),
    }


def mamba_states(config: MambaConfig, context: ParallelContext, ops: Ops) -> dict[str, tuple[int, ...]]:
    """As `delta_states`."""
    heads, groups = _held(config.num_heads, config.num_groups, context.tp)
    return {
        "inputs": (config.conv_width - 1, heads * config.head_dim + 2 * groups * config.state_dim),
        "state": ops.scan_state(groups, heads, config.state_dim, config.head_dim, context.device),
    }
