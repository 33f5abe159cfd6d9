"""Memory predicted for latent attention: what layers save, what its backward works in, and an engine's pages."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from rlloop import token_logprobs
from rlloop.config.model import LoraSection
from rlloop.launch.make import with_lora
from rlloop.models import Model, new_model
from rlloop.models.latent import Indexer, LatentAttention
from rlloop.models.layers import Step
from rlloop.numerics.kernels.triton import wide_backward as kernels
from rlloop.numerics.layout import AttentionLayout
from rlloop.parallel.layout import Layout
from rlloop.training import latent_memory
from rlloop.training.latent_memory import Latents, wide_room
from rlloop.training.memory import predict
from tests.support.memory_use import Peak, saved_by
from tests.support.rank_updates import INDEXED, MIXTURE

TOKENS = 200
LATENT = {
    **MIXTURE, "hidden_size": 32, "max_position_embeddings": 512, "num_attention_heads": 4, "q_lora_rank": 24,
    "kv_lora_rank": 64, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
SPARSE = {**LATENT, **{key: INDEXED[key] for key in ("architectures", "model_type", "index_head_dim", "index_n_heads")}}
MODELS = {  # in each, another term is the largest
    "latents": {**LATENT, "num_attention_heads": 2, "kv_lora_rank": 192, "q_lora_rank": None},
    "queries' latents": {**LATENT, "num_attention_heads": 2, "q_lora_rank": 384},
    "heads": {**LATENT, "num_attention_heads": 16},
    "queries": {**LATENT, "qk_nope_head_dim": 160},
    "values": {**LATENT, "v_head_dim": 256},
    "selections": {**SPARSE, "index_topk": 160},
}
SHARING = {  # three layers read the selection of the second
    **SPARSE, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "num_hidden_layers": 5,
    "index_topk": 40, "indexer_types": ["full", "full", "shared", "shared", "full"],
}  # fmt: skip


def latents_of(model: Model, **layout: int) -> Latents:
    found = Latents.of(model.config, Layout(**layout))
    assert found is not None
    return found


def forward(model: Model, tokens: int = TOKENS) -> list[Tensor]:
    return token_logprobs(model, [([3] * (tokens - 7), [4] * 8)])


def saved_by_a_token(model: Model) -> float:
    """Bytes that the first layer saves for each token more; so what an adapter saves of its factors does not count."""
    fewer, more = (
        saved_by(model, LatentAttention, lambda tokens=tokens: forward(model, tokens))[0]
        for tokens in (TOKENS, 2 * TOKENS)
    )
    return (more - fewer) / TOKENS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_what_a_layer_saves_is_predicted_within_a_hundredth(name: str, dtype: str) -> None:
    """A CPU's products by head copy their inputs, N numbers and R, where a GPU's save the queries, N + P, and no copy
    of what is read; with an adapter both copy."""
    model = new_model(MODELS[name], seed=0, dtype=dtype)
    latents, itemsize = latents_of(model), model.dtype.itemsize
    copied = itemsize * latents.heads * (latents.rank - latents.rope)
    assert saved_by_a_token(model) == pytest.approx(latents.saved(itemsize) + copied, rel=0.01)
    adapted = with_lora(model, LoraSection(rank=8), 0)
    assert saved_by_a_token(adapted) == pytest.approx(latents.saved(itemsize, lora=8), rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("scores", "tokens", "heads", "key", "value"),
    [(1 << 20, 256, 4, 40, 32), (1 << 16, 384, 2, 40, 32), (1 << 10, 256, 2, 200, 160), (1 << 10, 128, 32, 40, 32)],
    ids=["scores of all heads", "scores of one", "keys and values", "queries"],
)
def test_room_of_attentions_backward(
    scores: int, tokens: int, heads: int, key: int, value: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (kernels, latent_memory):
        monkeypatch.setattr(module, "SCORES", scores)
    q, k, out = (torch.zeros(tokens, *shape, dtype=dtype) for shape in ((heads, key), (1, key), (heads, value)))
    every = torch.arange(tokens).expand(tokens, -1)
    for reads in (kernels.causal_reads(tokens, tokens, 0, q.device), kernels.selected_reads(every[:, :16])):
        with Peak() as peak:
            kernels.wide_backward(q, k, k[..., :value], [tokens], [reads], out, torch.zeros(tokens, heads), out, 1.0)
        assert peak.bytes == pytest.approx(wide_room(dtype.itemsize, tokens, heads, key, value), rel=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "scores"), [(4, 1 << 17), (16, 1 << 12)], ids=["scores", "heads"])
@pytest.mark.parametrize("model", [LATENT, {**SPARSE, "index_topk": 32}], ids=["dense", "sparse"])
def test_a_layers_forward_and_backward_as_a_gpu_makes_them(
    model: dict[str, Any], heads: int, scores: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that exists at a time, with a GPU's products by head and its backward, over tensors of a CPU."""
    pytest.importorskip("triton", reason="the modules have Triton's kernels")
    from rlloop.numerics.kernels.triton import attention_backward, experts, sparse
    from rlloop.numerics.operators import masked_attention

    for module in (kernels, latent_memory):
        monkeypatch.setattr(module, "SCORES", scores)
    made = new_model({**model, "num_attention_heads": heads}, seed=0, dtype=dtype)
    by_head = {True: "thk,hnk->thn", False: "thk,hkn->thn"}
    monkeypatch.setattr(experts, "_by_head", lambda x, weight, by_row: torch.einsum(by_head[by_row], x, weight))
    monkeypatch.setattr(made.ops, "head_linear", lambda x, weight, by_row, _: experts.head_linear(x, weight, by_row))
    monkeypatch.setattr(attention_backward, "WIDEST", 0)
    monkeypatch.setattr(masked_attention, "_gradients", attention_backward.attention_backward)
    monkeypatch.setattr(masked_attention, "_sparse_gradients", sparse.sparse_attention_backward)
    tokens, latents, itemsize = 256, latents_of(made), made.dtype.itemsize
    layer = next(module for module in made.modules() if isinstance(module, LatentAttention))
    x = torch.randn(tokens, made.config.hidden_size).to(made.dtype).requires_grad_()
    layout, rope = AttentionLayout.of_sequences([tokens]), (made.rope.table[0], made.rope.table[1])
    step = Step(torch.arange(tokens), rope, layout, None, made.ops, None, made.context)
    with Peak() as peak:
        layer(x, step).sum().backward()
    predicted = tokens * latents.saved(itemsize) + latents.backward(itemsize, tokens)
    assert peak.bytes == pytest.approx(predicted, rel=0.1)


def test_slots_of_selected_tokens() -> None:
    pytest.importorskip("triton", reason="the module has Triton's kernels")
    from rlloop.numerics.kernels.triton.sparse import _as_sequences

    latents = latents_of(new_model(MODELS["selections"], seed=0))
    layout = AttentionLayout.of_sequences([TOKENS])
    selected = torch.arange(latents.selected).expand(TOKENS, -1)
    with Peak() as peak:
        _as_sequences(selected, layout.query_start, layout.block_start, layout.block_size)
    assert peak.bytes == pytest.approx(latents.choosing(TOKENS), rel=0.05)


@pytest.mark.parametrize(("config", "shared"), [(MODELS["selections"], 0), (SHARING, 1)], ids=["own", "shared"])
def test_selections_are_kept_where_other_layers_read_them(
    config: dict[str, Any], shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made, select = new_model(config, seed=0), [], Indexer.forward
    model.checkpoint_layers = 1

    def selected(self: Indexer, *args: Any) -> Tensor:
        found = select(self, *args)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Indexer, "forward", selected)
    results = forward(model)
    gc.collect()
    kept = [found for each in made if (found := each()) is not None]
    latents = latents_of(model)
    assert len(kept) == shared == latents.shared
    assert sum(each.nbytes for each in kept) == TOKENS * shared * latents.kept()
    results[0].sum().backward()
    assert model.config.latent is not None
    assert model.config.latent.indexer is not None
    assert len(made) == 2 * len(model.config.latent.indexer.layers)
    stream = TOKENS * 2 * config["hidden_size"] * config["num_hidden_layers"]
    parts = predict(model.config, Layout(), torch.bfloat16, TOKENS).parts
    assert parts["kept"] == stream
    assert parts.get("selections", 0) == shared * TOKENS * latents.kept()


def test_an_engines_pages_have_latents_and_an_indexers_keys() -> None:
    config = new_model(SHARING, seed=0).config
    assert config.latent is not None
    assert config.latent.indexer is not None
    of_token = 5 * (config.latent.kv_rank + config.latent.rope_dim) + 3 * config.latent.indexer.head_dim
    cache = predict(config, Layout(), torch.bfloat16, TOKENS).parts["cache"]
    assert cache == 2 * of_token * config.max_positions * 512


def test_ranks_that_divide_tokens_have_all_latents_and_ranks_that_divide_heads_a_whole_backward() -> None:
    model, tokens = new_model(MODELS["heads"], seed=0), 4096
    one, cp, tp = latents_of(model), latents_of(model, cp=4), latents_of(model, tp=4)
    key = 2 * (one.rank + one.rope)
    assert (cp.saved(2), cp.gathered(2)) == (one.saved(2), key)
    assert cp.backward(2, tokens) < 0.6 * one.backward(2, tokens)
    assert tp.backward(2, tokens) > one.backward(2, tokens)
    parts = [predict(model.config, each, torch.bfloat16, tokens).parts for each in (Layout(), Layout(cp=4))]
    inner = [each["activations"] - 2 * rows * 2 * 32 for each, rows in zip(parts, (4096, 1024), strict=True)]
    mixture = 2 * 2 * (3 * 12 + 32)
    assert inner[0] == tokens * (one.saved(2) + mixture) + one.backward(2, tokens)
    assert inner[1] == 1024 * (cp.saved(2) + mixture) + 3072 * key + cp.backward(2, tokens)
