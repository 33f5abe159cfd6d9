"""Grouped-query attention: several query heads share one key-value head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from rlloop.models.architecture import ModelConfig
from rlloop.models.context_parallel import own_heads, spread_attention
from rlloop.models.layers import Cache, Divisions, Linear, Norm, Step
from rlloop.models.tensor_parallel import cut_attention
from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import Ops
from rlloop.parallel.collectives import Ranks
from rlloop.parallel.division import Division, gathered, heads_over, in_tiles, taken


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, tp: Ranks) -> None:
        super().__init__()
        self.layer, self.eps = layer, config.rms_norm_eps
        self.head_dim, self.scale = config.head_dim, config.head_dim**-0.5
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.output_gate = config.output_gate
        self.heads = heads_over(config.num_heads, config.num_kv_heads, tp)
        queries, groups = self.heads or (None, None)
        q_rows, kv_rows = (rows_of(division, config.head_dim) for division in (queries, groups))
        self.columns, gate_width = q_rows, (1 + config.output_gate) * config.head_dim
        self.q_proj = Linear(
            config.hidden_size, (1 + config.output_gate) * width, config.qkv_bias, rows=rows_of(queries, gate_width)
        )
        self.k_proj = Linear(config.hidden_size, kv_width, config.qkv_bias, rows=kv_rows)
        self.v_proj = Linear(config.hidden_size, kv_width, config.qkv_bias, rows=kv_rows)
        self.o_proj = Linear(
            width, config.hidden_size, config.output_bias, across=True, rows=in_tiles(config.hidden_size, tp)
        )
        self.whole_norm, self.rope_dim = config.whole_norm, config.rope_dim
        self._plain = not (config.output_gate or config.whole_norm) and config.rope_dim == config.head_dim
        self.window = config.window if layer in config.windowed else 0
        held = config.num_heads if queries is None else queries.size
        self.sinks = nn.Parameter(torch.empty(held)) if config.sinks else None
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = Norm(width if config.whole_norm else config.head_dim, config.centred_norms)
            self.k_norm = Norm(kv_width if config.whole_norm else config.head_dim, config.centred_norms)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        weights = [project.weight for project in (self.q_proj, self.k_proj, self.v_proj)]
        for weight, laid in zip(weights, end_to_end(weights), strict=True):
            if laid is not weight:
                weight.data = laid
        return self

    @property
    def divisions(self) -> Divisions:
        return {} if self.heads is None else {"sinks": (0, self.heads[0])}

    def forward(self, x: Tensor, step: Step) -> Tensor:
        ops = step.ops
        if step.cache is not None and self._plain and ops.fuses:
            q, keys, values = self._projected_into_cache(x, step, step.cache)
            return self._read(q, keys, values, None, step)
        q, k, v = self._projected(x, ops)
        if self.output_gate:  # each head's query, then its gate
            q, gate = (chunk.flatten(1) for chunk in q.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1))
        else:
            gate = None
        q, k = self._placed(q, k, step)
        v = v.unflatten(-1, (-1, self.head_dim))
        keys, values = k, v
        if step.cache is not None:
            keys, values = step.cache.write(self.layer, k=ops.cached(k), v=ops.cached(v))
        return self._read(q, keys, values, gate, step)

    def _projected(self, x: Tensor, ops: Ops) -> Sequence[Tensor]:
        projections = self.q_proj, self.k_proj, self.v_proj
        alone = self.q_proj.rows is None and self.q_proj.bias is None and torch.is_grad_enabled() and type(ops) is Ops
        made = ops.products(x, *(project.weight for project in projections)) if alone else None
        return made or [project(x, ops) for project in projections]

    def _projected_into_cache(self, x: Tensor, step: Step, cache: Cache) -> tuple[Tensor, Tensor, Tensor]:
        """(queries, key store, value store), the step's tokens written into the stores; two fused kernels."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        if self.q_proj.bias is None:
            projected = step.ops.qkv_linear(x, *(project.weight for project in projections))
        else:
            projected = (project(x, step.ops) for project in projections)
        q, k, v = (tensor.unflatten(-1, (-1, self.head_dim)) for tensor in projected)
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm.scale, self.k_norm.scale)
        slots, keys, values = cache.places(self.layer, "k", "v")
        q = step.ops.qkv_cache_write(q, k, v, norms, self.eps, step.positions, step.rope, slots, keys, values)
        return q, keys, values

    def _read(self, q: Tensor, keys: Tensor, values: Tensor, gate: Tensor | None, step: Step) -> Tensor:
        ops, heads = step.ops, self.heads
        if (written := self._written(q, keys, values, gate, step)) is not None:
            return self.o_proj.whole(written, ops, then_norm=step.read is None)
        sinks = own_heads(self.sinks, q.shape[1], keys.shape[1], step)

        def attend(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, _: Tensor | None) -> Tensor:
            return ops.attention(q, k, v, layout, self.scale, sinks, self.window)

        if step.context.ranks("cp").size > 1:
            read = spread_attention(attend, q, keys, values, step).flatten(1)
        elif sinks is not None and heads is not None and heads[1].repeats and torch.is_grad_enabled():
            sinks = gathered(sinks, heads[0], 0)  # a sink's gradient is a sum over all sequences: every rank makes all
            k, v = gathered(keys, heads[1], 1), gathered(values, heads[1], 1)
            read = taken(attend(gathered(q, heads[0], 1), k, v, step.layout, None), heads[0], 1).flatten(1)
        else:
            read = cut_attention(attend, q, keys, values, None, step.layout, heads).flatten(1)
        gated = read if gate is None else ops.sigmoid_mul(gate, read)
        return self.o_proj.whole(gated, ops, self.columns, then_norm=step.read is None, unread=step.unread)

    def _written(self, q: Tensor, keys: Tensor, values: Tensor, gate: Tensor | None, step: Step) -> Tensor | None:
        """All ranks' results [T, N], for `o_proj` alone, where attention's own kernel writes them to peers."""
        if (
            self.columns is None
            or self.window
            or self.sinks is not None
            or gate is not None
            or type(step.ops) is not Ops
        ):
            return None
        peers = self.o_proj.peers(q.flatten(1), step.ops, self.columns)
        if peers is None or step.ops.profile.attention_splits != "default":
            return None
        return peers.attended(q, keys, values, step.layout, self.scale, self.columns)

    def _placed(self, q: Tensor, k: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Queries and keys, normed and rotated. [T, heads * head_dim] -> [T, heads, head_dim], of this rank's heads."""
        ops, (queries, groups) = step.ops, self.heads or (None, None)
        at_once = self._plain and type(ops) is Ops  # subclasses depart, and `parity`'s `Trace` records each
        if at_once and self.q_norm is not None and self.k_norm is not None:
            if not torch.is_grad_enabled():  # else all heads: a weight's gradient is a sum over them
                queries = groups = None
            q, k = (gathered(x.unflatten(-1, (-1, self.head_dim)), of, 1) for x, of in ((q, queries), (k, groups)))
            q, k = ops.norm_rope(q, k, (self.q_norm.scale, self.k_norm.scale), self.eps, step.positions, *step.rope)
            return taken(q, queries, 1), taken(k, groups, 1)
        q, k = self._normed(q, self.q_norm, queries, ops), self._normed(k, self.k_norm, groups, ops)
        return self._rotated(q, step), self._rotated(k, step)

    def _normed(self, x: Tensor, norm: Norm | None, heads: Division | None, ops: Ops) -> Tensor:
        """[T, heads * head_dim] -> [T, heads, head_dim], of this rank's heads."""
        own = x.unflatten(-1, (-1, self.head_dim))
        if norm is None:
            return own
        if not self.whole_norm and not torch.is_grad_enabled():
            return ops.rms_norm(own, norm.scale, self.eps)[0]
        every = gathered(own, heads, 1)  # the weight's gradient is a sum over all heads
        normed, _ = ops.rms_norm(every.flatten(1) if self.whole_norm else every, norm.scale, self.eps)
        return taken(normed.view(every.shape), heads, 1)

    def _rotated(self, x: Tensor, step: Step) -> Tensor:
        if not self.rope_dim:
            return x
        turned = step.ops.rope(x[..., : self.rope_dim], step.positions, *step.rope)
        return turned if self.rope_dim == self.head_dim else torch.cat((turned, x[..., self.rope_dim :]), dim=-1)


def end_to_end(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """Queries', keys' and values' weights, of 16 bits on a GPU, laid one behind the other in memory; others as they
    are. One product makes all three then (`qkv_linear`), and of some hundred rows it takes down to half as long."""
    plain = all(type(each) in (Tensor, nn.Parameter) and each.is_cuda and each.itemsize == 2 for each in weights)
    return torch.cat([each.detach() for each in weights]).split([len(each) for each in weights]) if plain else weights


def rows_of(heads: Division | None, width: int) -> Division | None:
    """The rows of a projection that makes `width` numbers for each head."""
    return None if heads is None else heads.times(width)


def cache_shapes(config: ModelConfig, tp: Ranks) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that one layer caches for each token, by name."""
    heads = heads_over(config.num_heads, config.num_kv_heads, tp)
    shape = (config.num_kv_heads if heads is None else heads[1].size, config.head_dim)
    return {"k": shape, "v": shape}
