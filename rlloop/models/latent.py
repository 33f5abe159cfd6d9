"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434) in its absorbed form, and the lightning indexer
that makes it sparse (DeepSeek-V3.2-Exp).

A token's keys and values of all heads are compressed into one latent c [R] and one rotated key [rope]. Queries are
projected into the latent space (q^T W_uk) and results back out of it (W_uv c), so training, prefill and decode read
latents only: a single key head [R + rope], whose first R numbers are also the values.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlloop.errors import ConfigError
from rlloop.models.architecture import IndexerConfig, LatentConfig, ModelConfig
from rlloop.models.attention import rows_of
from rlloop.models.context_parallel import own_rows, spread_attention
from rlloop.models.layers import Linear, Step, Weight
from rlloop.models.tensor_parallel import cut_attention, cut_head_linear
from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import Ops
from rlloop.parallel.collectives import Ranks
from rlloop.parallel.division import evenly, in_tiles, taken

LATENT_EPS = 1e-6  # epsilon of the latents' norms, whatever `rms_norm_eps` says


class LatentAttention(nn.Module):
    def __init__(self, config: ModelConfig, latent: LatentConfig, layer: int, tp: Ranks) -> None:
        super().__init__()
        self.heads = evenly(config.num_heads, tp)  # latents and the indexer's inputs are whole on every rank
        self.layer, self.latent = layer, latent
        self.num_heads = config.num_heads if self.heads is None else self.heads.size
        heads, width = config.num_heads, latent.nope_dim + latent.rope_dim
        rows, self.columns = rows_of(self.heads, width), rows_of(self.heads, latent.v_dim)
        if latent.q_rank is None:
            self.q_proj = Linear(config.hidden_size, heads * width, rows=rows)
        else:
            self.q_a_proj = Linear(config.hidden_size, latent.q_rank, config.qkv_bias)
            self.q_a_layernorm = Weight(latent.q_rank)
            self.q_b_proj = Linear(latent.q_rank, heads * width, rows=rows)
        self.kv_a_proj_with_mqa = Linear(config.hidden_size, latent.kv_rank + latent.rope_dim, config.qkv_bias)
        self.kv_a_layernorm = Weight(latent.kv_rank)
        self.kv_b_proj = Linear(
            latent.kv_rank,
            heads * (latent.nope_dim + latent.v_dim),
            rows=rows_of(self.heads, latent.nope_dim + latent.v_dim),
        )
        self.o_proj = Linear(
            heads * latent.v_dim,
            config.hidden_size,
            config.output_bias,
            across=True,
            rows=in_tiles(config.hidden_size, tp),
        )
        indexer = latent.indexer
        self.indexed_by = max(at for at in indexer.layers if at <= layer) if indexer else None
        # A selection that no other layer reads does not outlive its layer: of a long sequence it is large.
        self.shares = indexer is not None and layer + 1 < config.num_layers and layer + 1 not in indexer.layers
        if indexer and latent.q_rank is not None and self.indexed_by == layer:
            self.indexer = Indexer(config.hidden_size, latent.q_rank, latent.rope_dim, indexer, layer)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        ops, latent = step.ops, self.latent
        reduced, q = self._queries(x, ops)
        q_nope, q_rope = q.unflatten(-1, (self.num_heads, -1)).split([latent.nope_dim, latent.rope_dim], dim=-1)
        c, k_rope = self.kv_a_proj_with_mqa(x, ops).split([latent.kv_rank, latent.rope_dim], dim=-1)
        c, _ = ops.rms_norm(c, self.kv_a_layernorm.weight, LATENT_EPS)
        q_rope, k_rope = (_rotated(tensor, step, latent.interleaved) for tensor in (q_rope, k_rope[:, None]))
        keys = torch.cat((c[:, None], k_rope), dim=-1)
        if step.cache is not None:
            (keys,) = step.cache.write(self.layer, latent=step.ops.cached(keys))
        values = keys[..., : latent.kv_rank]
        if ops.profile.latent == "expanded":
            read = self._expanded(torch.cat((q_nope, q_rope), dim=-1), keys, step)
            return self.o_proj.whole(read.flatten(1), ops, self.columns)
        weight = self.kv_b_proj.weight
        up = weight.unflatten(0, (self.num_heads, -1))  # [H, nope + v, R]
        keyed = cut_head_linear(ops, q_nope, up[:, : latent.nope_dim], False, weight, self.heads)
        queries = torch.cat((keyed, q_rope), dim=-1)

        def attend(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, selected: Tensor | None) -> Tensor:
            if selected is None:
                return ops.attention(q, k, v, layout, latent.scale)
            return ops.sparse_attention(q, k, v, selected, layout, latent.scale)

        selected = None if latent.indexer is None else self._selected(x, reduced, step)
        heads = None if self.heads is None else (self.heads, None)
        if step.context.ranks("cp").size > 1:
            read = spread_attention(
                lambda q, k, _, layout, chosen: attend(q, k, k[..., : latent.kv_rank], layout, chosen),
                queries, keys, None, step, selected,
            )  # fmt: skip
        else:
            read = cut_attention(attend, queries, keys, values, selected, step.layout, heads)
        output = cut_head_linear(ops, read, up[:, latent.nope_dim :], True, weight, self.heads).flatten(1)
        return self.o_proj.whole(output, ops, self.columns)

    def _expanded(self, queries: Tensor, latents: Tensor, step: Step) -> Tensor:
        """Unabsorbed attention over every head's keys and values, as in the paper's equations; for comparisons.

        With a cache it expands every slot in each step.
        """
        ops, latent = step.ops, self.latent
        if latent.indexer is not None:
            raise ConfigError("profile.latent=expanded is not for sparse attention, which reads latents; set absorbed")
        c, k_rope = latents[:, 0].split([latent.kv_rank, latent.rope_dim], dim=-1)
        k_nope, values = self.kv_b_proj(c, ops).unflatten(-1, (self.num_heads, -1)).split(
            [latent.nope_dim, latent.v_dim], dim=-1
        )  # fmt: skip
        every = self.num_heads if self.heads is None else self.heads.count
        keys = torch.cat((k_nope, taken(k_rope[:, None].expand(-1, every, -1), self.heads, 1)), dim=-1)
        if step.context.ranks("cp").size > 1:
            return spread_attention(
                lambda q, k, v, layout, _: ops.attention(q, k, v, layout, latent.scale), queries, keys, values, step
            )
        return ops.attention(queries, keys, values, step.layout, latent.scale)

    def _queries(self, x: Tensor, ops: Ops) -> tuple[Tensor | None, Tensor]:
        """(query latents [T, q_rank], or None without `q_rank`; queries [T, H * (nope + rope)])."""
        if self.latent.q_rank is None:
            return None, self.q_proj(x, ops)
        reduced, _ = ops.rms_norm(self.q_a_proj(x, ops), self.q_a_layernorm.weight, LATENT_EPS)
        return reduced, self.q_b_proj(reduced, ops)

    def _selected(self, x: Tensor, reduced: Tensor | None, step: Step) -> Tensor:
        """[T, S] int64: indices of past tokens, by this layer's indexer or the nearest one below."""
        assert self.indexed_by is not None
        if self.indexed_by != self.layer:
            return step.selected[self.indexed_by]
        assert reduced is not None
        selected = self.indexer(x, reduced, step)
        if self.shares:
            step.selected[self.layer] = selected
        if step.routes is not None:
            step.routes.record_selected(self.indexer.place, selected)
        return selected


class Indexer(nn.Module):
    """Selects the past tokens that each query reads. The selection has no gradient, so no loss here trains it."""

    def __init__(self, hidden_size: int, q_rank: int, rope_dim: int, config: IndexerConfig, layer: int) -> None:
        super().__init__()
        self.config, self.rope_dim, self.layer = config, rope_dim, layer
        self.place = config.layers.index(layer)  # among the layers that have an indexer
        self.wq_b = Linear(q_rank, config.num_heads * config.head_dim)
        self.wk = Linear(hidden_size, config.head_dim)
        self.k_norm = Linear(1, config.head_dim, bias=True)
        self.k_norm.weight = nn.Parameter(torch.empty(config.head_dim))
        self.weights_proj = Linear(hidden_size, config.num_heads)

    @torch.no_grad()
    def forward(self, x: Tensor, reduced: Tensor, step: Step) -> Tensor:
        """x [T, D], reduced [T, q_rank] -> indices of tokens [T, top_k] int64, ascending, padded with −1."""
        ops, heads = step.ops, self.config.num_heads
        q = self.wq_b(reduced, ops).unflatten(-1, (heads, -1))
        assert self.k_norm.bias is not None
        k = ops.layer_norm(self.wk(x, ops), self.k_norm.weight, self.k_norm.bias, LATENT_EPS)[:, None]
        q, k = (self._with_rope(tensor, step) for tensor in (q, k))
        if step.cache is not None:
            (k,) = step.cache.write(self.layer, index_k=k)
        weights = ops.index_weights(x, self.weights_proj.weight) * heads**-0.5
        layout, cp = step.layout, step.context.ranks("cp")
        if cp.size > 1:  # own queries score all keys
            rows = own_rows(step)
            begin = sum(rows[: cp.rank])
            k, layout = cp.gather(k, 0, rows), layout.part(begin, begin + len(q))
        return ops.select(q, k, weights, layout, self.config.head_dim**-0.5, self.config.top_k)

    def _with_rope(self, x: Tensor, step: Step) -> Tensor:
        turned = _rotated(x[..., : self.rope_dim], step, self.config.interleaved)
        return torch.cat((turned, x[..., self.rope_dim :]), dim=-1)


def _rotated(x: Tensor, step: Step, interleaved: bool) -> Tensor:
    """Rope over x [T, H, rope]. Interleaved pairs are reordered into halves and stay so; scores do not change."""
    if interleaved:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    return step.ops.rope(x, step.positions, *step.rope)


def cache_shapes(config: LatentConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that one layer caches for each token, by name."""
    shapes: dict[str, tuple[int, ...]] = {"latent": (1, config.kv_rank + config.rope_dim)}
    if config.indexer is not None and layer in config.indexer.layers:
        shapes["index_k"] = (1, config.indexer.head_dim)
    return shapes
