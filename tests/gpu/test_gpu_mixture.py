"""Experts, latent and sparse attention on CUDA: a token's bits are its own, decoded, prefilled and trained."""

import numpy as np
import pytest
import torch

from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.models import token_logprobs
from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile
from rlloop.numerics.routing import Routing
from rlloop.rollout.engine.engine import Engine
from rlloop.trainer import Trainer
from tests.support.gpu_mixtures import FAMILIES, model_of, traffic
from tests.support.samples import as_sample, different
from tests.support.traffic import bits

OURS = ops_for(NumericsProfile())
EXACT = ops_for(NumericsProfile.preset("reference"))
TYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_have_the_same_bits_and_choices(family, dtype):
    model = model_of(family, dtype)
    prompts, sampling = traffic(48)
    made = Engine(model).generate(prompts, sampling)
    for settings in ({"max_batch_tokens": 64, "page_size": 64, "prefix_caching": False}, {"max_running": 3}):
        again = Engine(model, **settings).generate(prompts[:12], sampling[:12])
        assert [bits(c) for c in again] == [bits(c) for c in made[:12]]
        for a, b in zip(again, made, strict=False):
            assert np.array_equal(np.sort(a.routed_experts), np.sort(b.routed_experts))
    pairs = [(c.prompt_ids, c.token_ids) for c in made]
    for max_tokens in (None, 300):
        scored = token_logprobs(model, pairs, sampling=sampling, max_tokens=max_tokens)
        for completion, logprobs in zip(made, scored, strict=True):
            assert completion.logprobs.tobytes() == logprobs.detach().cpu().numpy().tobytes()


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_equals_engine_before_and_after_every_update(family):
    model = model_of(family, "bfloat16")
    engine, trainer = Engine(model), Trainer(model, TrainerConfig(lr=3e-3, max_batch_tokens=1500))
    rng = np.random.default_rng(0)
    for step in range(3):
        made = engine.generate(*traffic(24))
        samples = [as_sample(i, c, float(rng.normal())) for i, c in enumerate(made)]
        result = trainer.forward_backward(samples, get_loss("grpo"))
        assert different(samples, result.logprobs) == 0
        assert trainer.optim_step()["loss/grad_norm"] > 0
        assert different(samples, trainer.logprobs(samples)) > 50
        engine.set_version(step + 1)


def randn(*shape, seed=0, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to("cuda", dtype)


def choices(tokens, count, top_k, seed=0):
    scores = torch.rand(tokens, count, generator=torch.Generator().manual_seed(seed)) ** 3
    scores[:, 1] += 0.5  # a favourite
    return scores.topk(top_k)[1].cuda()


@pytest.mark.parametrize("dtype", [*TYPES, torch.float16])
@pytest.mark.parametrize(("hidden", "inner", "count", "top_k"), [(256, 96, 8, 2), (75, 20, 15, 4), (512, 64, 128, 8)])
def test_an_expert_s_row_has_the_bits_of_a_dense_layer(hidden, inner, count, top_k, dtype):
    tokens = 700
    x, chosen = randn(tokens, hidden, dtype=dtype), choices(tokens, count, top_k)
    gate_up, down = (
        randn(count, 2 * inner, hidden, seed=1, dtype=dtype, scale=0.1),
        randn(count, hidden, inner, seed=2, dtype=dtype, scale=0.2),
    )
    whole = OURS.experts(x, gate_up, down, chosen)
    for rows in (1, 2, 15, 16, 17, 64, 65, 300):
        assert same_bits(OURS.experts(x[:rows], gate_up, down, chosen[:rows]), whole[:rows]), f"{rows} rows"
        assert same_bits(OURS.experts(x[-rows:], gate_up, down, chosen[-rows:]), whole[-rows:]), f"last {rows} rows"
    for expert in range(count):
        token, slot = torch.where(chosen == expert)
        if len(token):
            gate, up = OURS.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
            dense = OURS.linear(OURS.silu_mul(gate, up), down[expert])
            assert same_bits(dense, whole[token, slot]), f"expert {expert}"
    trained = OURS.experts(x.clone().requires_grad_(), gate_up, down, chosen)
    assert same_bits(trained.detach(), whole)


@pytest.mark.parametrize(("count", "dtype"), [(64, torch.bfloat16), (127, torch.bfloat16), (17, torch.float16)])
@pytest.mark.parametrize("crowd", ["favourite", "few", "last"])
def test_experts_of_real_widths_have_the_same_bits_however_many_rows_there_are(crowd, count, dtype):
    """As many rows as lead to every size of tile: a favourite, all tokens on eight experts, one that has hardly any."""
    tokens, hidden, inner = 3000, 2048, 768
    chosen = choices(tokens, count, 8)
    if crowd == "few":
        chosen = (torch.arange(8, device="cuda") + 3).expand(tokens, 8).contiguous()
    if crowd == "last":
        chosen[:-1] = chosen[:-1].clamp(max=count - 2)  # the last expert has at most one row; a token may say one twice
    generator = torch.Generator("cuda").manual_seed(0)
    x, gate_up, down = (
        torch.randn(shape, dtype=dtype, device="cuda", generator=generator) * scale
        for shape, scale in (
            ((tokens, hidden), 1), ((count, 2 * inner, hidden), 0.02), ((count, hidden, inner), 0.04),
        )
    )  # fmt: skip
    whole = OURS.experts(x, gate_up, down, chosen)
    for rows in (1, 2, 3, 9, 40, 100, 140, 270, 530, 1100, 2100):
        assert same_bits(OURS.experts(x[:rows], gate_up, down, chosen[:rows]), whole[:rows]), f"{rows} rows"
        assert same_bits(OURS.experts(x[-rows:], gate_up, down, chosen[-rows:]), whole[-rows:]), f"last {rows} rows"
    for expert in (0, 3, count - 2, count - 1):
        token, slot = torch.where(chosen == expert)
        if len(token):
            gate, up = OURS.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
            dense = OURS.linear(OURS.silu_mul(gate, up), down[expert])
            assert same_bits(dense, whole[token, slot]), f"expert {expert}"
    trained = OURS.experts(x.clone().requires_grad_(), gate_up, down, chosen)
    assert same_bits(trained.detach(), whole)


def test_stock_experts_fail_the_check_of_rows():
    """In float16: PyTorch's grouped product of bfloat16 does not split K either."""
    half = {"dtype": torch.float16, "scale": 0.02}
    x, chosen = randn(700, 4096, dtype=torch.float16), choices(700, 4, 2)
    weights = randn(4, 4096, 4096, **half), randn(4, 4096, 2048, **half)
    for ops, holds in ((OURS, True), (ops_for(NumericsProfile.preset("stock")), False)):
        whole = ops.experts(x, *weights, chosen)
        same = all(same_bits(ops.experts(x[:n], *weights, chosen[:n]), whole[:n]) for n in (1, 2, 7, 33, 300))
        assert same is holds


RULES = [
    Routing(4), Routing(3, normalise=True, epsilon=1e-20, scale=2.5), Routing(2, "sigmoid"),
    Routing(6, "sigmoid", 4, 2, True, 1e-20, 1.5),
]  # fmt: skip


@pytest.mark.parametrize("count", [8, 16, 128, 12])
@pytest.mark.parametrize("rule", RULES)
def test_routes_are_the_reference_s(rule, count):
    logits = randn(77, count)
    logits[3, 2] = logits[3, 5] = logits[3].max() + 1  # ties
    logits[4], logits[5, 1] = 0, float("nan")
    bias = randn(count, seed=1, scale=0.3) if rule.groups > 1 else None
    if rule.top_k > count // rule.groups * rule.top_groups:
        pytest.skip("more experts than the groups have")
    weights, chosen, scores = OURS.route(logits, bias, rule)
    expected = EXACT.route(logits.cpu(), None if bias is None else bias.cpu(), rule)
    assert torch.equal(chosen.cpu(), expected[1])
    torch.testing.assert_close(weights.cpu(), expected[0], equal_nan=True)
    torch.testing.assert_close(scores.cpu(), expected[2], equal_nan=True)
    for rows in (1, 16, 33):
        assert all(
            same_bits(a, b[:rows])
            for a, b in zip(OURS.route(logits[:rows], bias, rule), (weights, chosen, scores), strict=True)
        )
    given = chosen.flip(1).contiguous()
    again, same, _ = OURS.route(logits, bias, rule, given)
    assert torch.equal(same, given)
    torch.testing.assert_close(again.cpu(), EXACT.route(logits.cpu(), None, rule, given.cpu())[0], equal_nan=True)


@pytest.mark.parametrize("combine", ["fp32_once", "bf16_each"])
@pytest.mark.parametrize("dtype", TYPES)
def test_sums_of_experts_have_the_reference_s_bits(combine, dtype):
    slots, chosen, shared = randn(40, 4, 700, dtype=dtype), choices(40, 16, 4), randn(40, 700, seed=1, dtype=dtype)
    weights = torch.rand(40, 4, generator=torch.Generator().manual_seed(2)).cuda()
    for extra in (None, shared):
        made = ops_for(NumericsProfile(expert_combine=combine)).combine(slots, chosen, weights, extra)
        expected = ops_for(NumericsProfile(combine="reference", expert_combine=combine)).combine(
            slots.cpu(), chosen.cpu(), weights.cpu(), None if extra is None else extra.cpu()
        )
        assert same_bits(made.cpu(), expected)


def paged(keys, page=16):
    """Scattered pages of one sequence's keys [L, 1, W]: (the store, its first slots)."""
    count = -(-len(keys) // page)
    starts = torch.randperm(count, generator=torch.Generator().manual_seed(1)).cuda() * page
    at = torch.arange(len(keys), device="cuda")
    store = torch.zeros(count * page, *keys.shape[1:], dtype=keys.dtype, device="cuda")
    store[starts[at // page] + at % page] = keys
    return store, starts


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "rank", "rope"), [(16, 512, 64), (4, 32, 16), (128, 512, 64)])
def test_latent_attention_is_the_same_in_every_phase(heads, rank, rope, dtype):
    length, page = 1300, 16
    q, latents = randn(length, heads, rank + rope, dtype=dtype), randn(length, 1, rank + rope, seed=1, dtype=dtype)
    scale = (rank + rope) ** -0.5
    whole = OURS.attention(q, latents, latents[..., :rank], AttentionLayout.of_sequences([length], "cuda"), scale)
    store, starts = paged(latents, page)

    def layout(counts, contexts):
        return AttentionLayout(
            query_start=torch.tensor([0, *counts], device="cuda").cumsum(0),
            context=torch.tensor(contexts, device="cuda"), block_start=starts.repeat(len(counts), 1), block_size=page,
            contiguous=False,
        )  # fmt: skip

    last = [0, 15, 63, 64, 500, 1023, 1024, 1299]
    decoded = OURS.attention(q[last], store, store[..., :rank], layout([1] * len(last), last), scale)
    assert same_bits(decoded, whole[last])
    chunk = OURS.attention(q[900:1200], store, store[..., :rank], layout([300], [900]), scale)
    assert same_bits(chunk, whole[900:1200])
    scores = torch.einsum("hd,jd->hj", q[700].double(), latents[:701, 0].double()) * scale
    expected = scores.softmax(-1) @ latents[:701, 0, :rank].double()
    torch.testing.assert_close(whole[700].double(), expected, rtol=0.02, atol=2e-3 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_selected(dtype):
    """Ties go to the lowest position, and a query's selection does not depend on its neighbours or the pages."""
    length, count = 300, 20
    q, k, weights = randn(length, 8, 32, dtype=dtype), randn(length, 1, 32, seed=1, dtype=dtype), randn(length, 8)
    k[40:60] = k[39]  # twenty equals
    layout = AttentionLayout.of_sequences([length], "cuda")
    selected = OURS.select(q, k, weights, layout, 0.2, count)
    for t in (0, 5, 19, 20, 150, 299):
        row = [p for p in selected[t].tolist() if p >= 0]
        assert len(row) == min(t + 1, count)
        assert row == sorted(set(row))
        assert row[-1] <= t
        equals = [p for p in row if 39 <= p < 60]
        assert equals == list(range(39, 39 + len(equals)))
    store, starts = paged(k)
    last = [0, 19, 20, 63, 64, 299]
    alone = AttentionLayout(
        query_start=torch.arange(len(last) + 1, device="cuda"), context=torch.tensor(last, device="cuda"),
        block_start=starts.repeat(len(last), 1), block_size=16, contiguous=False,
    )  # fmt: skip
    assert torch.equal(OURS.select(q[last], store, weights[last], alone, 0.2, count), selected[last])
    if dtype == torch.float32:
        expected = EXACT.select(*(x.cpu() for x in (q[:60], k[:60], weights[:60])), AttentionLayout.of_sequences([60]),
                                0.2, count)  # fmt: skip
        assert (selected[:60].cpu() == expected).all(1).float().mean() > 0.9  # sums may round apart
    every = OURS.select(q, k, weights, layout, 0.2, length)
    heads = randn(length, 4, 48, dtype=dtype)
    latents = randn(length, 1, 48, seed=2, dtype=dtype)
    full = OURS.attention(heads, latents, latents[..., :32], layout, 0.2)
    assert same_bits(OURS.sparse_attention(heads, latents, latents[..., :32], every, layout, 0.2), full)


GRADIENTS = {
    "experts": (
        lambda o, x, a, b: o.experts(x, a, b, choices(130, 8, 2).to(x.device)), [(130, 40), (8, 24, 40), (8, 40, 12)]
    ),
    "head_linear": (lambda o, x, w: o.head_linear(x, w, True), [(70, 3, 24), (3, 20, 24)]),
    "head_linear by column": (lambda o, x, w: o.head_linear(x, w, False), [(70, 3, 20), (3, 20, 24)]),
    "combine": (
        lambda o, s, w: o.combine(s, choices(9, 8, 3).to(s.device), w if o is EXACT else w.float()),
        [(9, 3, 70), (9, 3)],
    ),
    "route": (lambda o, x: torch.cat(o.route(x, None, RULES[1])[::2], -1), [(30, 16)]),
    "wide attention": (
        lambda o, q, k: o.attention(q, k, k[..., :256], AttentionLayout.of_sequences([2, 70, 1], q.device), 0.05),
        [(73, 4, 272), (73, 1, 272)],
    ),
    "sparse attention": (
        lambda o, q, k: o.sparse_attention(
            q, k, k[..., :32], torch.tensor([[max(0, t - 3), t] if t else [0, -1] for t in range(40)], device=q.device),
            AttentionLayout.of_sequences([40], q.device), 0.2,
        ),
        [(40, 4, 48), (40, 1, 48)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_choice_of_no_expert_is_left_out(tokens, dtype):
    """Its number is that of the experts: a rank has a choice of other ranks' experts so."""
    x, up, down = (
        randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(tokens, 64), (8, 96, 64), (8, 64, 48)])
    )
    chosen = choices(tokens, 8, 3)
    wanted = OURS.experts(x, up, down, chosen)
    begin, end = 2, 5
    own = (chosen >= begin) & (chosen < end)
    mine = torch.where(own, chosen - begin, end - begin)
    assert same_bits(OURS.experts(x, up[begin:end], down[begin:end], mine)[own], wanted[own])


@pytest.mark.parametrize("tokens", [0, 1])
def test_experts_that_no_token_goes_to_have_gradients_of_zero(tokens):
    """A rank whose experts get no row still takes part in the backward."""
    x, up, down = randn(tokens, 40), randn(8, 24, 40, seed=1), randn(8, 40, 12, seed=2)
    leaves = [each.requires_grad_() for each in (x, up, down)]
    out = OURS.experts(*leaves, torch.full((tokens, 2), 3, device="cuda"))
    assert out.shape == (tokens, 2, 40)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves]
    idle = [0, 1, 2, 4, 5, 6, 7] if tokens else range(8)
    assert not any(grad[list(idle)].any() for grad in grads[1:])


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("name", list(GRADIENTS))
def test_gradients_are_the_reference_in_float64_and_repeat_themselves(name):
    function, shapes = GRADIENTS[name]
    inputs = [randn(*shape, seed=seed) for seed, shape in enumerate(shapes)]

    def gradients(ops, dtype, device="cuda"):
        leaves = [tensor.to(device, dtype).requires_grad_() for tensor in inputs]
        out = function(ops, *leaves)
        return torch.autograd.grad(out, leaves, randn(*out.shape, seed=99).to(device, dtype))

    mine, exact = gradients(OURS, torch.float32), gradients(EXACT, torch.float64, "cpu")
    for ours, theirs in zip(mine, exact, strict=True):
        assert theirs.abs().max() > 1e-3
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=5e-4, atol=5e-4)
    assert all(same_bits(a, b) for a, b in zip(mine, gradients(OURS, torch.float32), strict=True))


@pytest.mark.parametrize("by_row", [True, False])
def test_products_by_head_of_no_token_take_part_in_the_backward(by_row):
    x, weight = randn(0, 3, 24).requires_grad_(), randn(3, 24, 24, seed=1).requires_grad_()
    out = OURS.head_linear(x, weight, by_row)
    of_x, of_weight = torch.autograd.grad(out, (x, weight), torch.ones_like(out))
    assert of_x.shape == x.shape
    assert not of_weight.any()
