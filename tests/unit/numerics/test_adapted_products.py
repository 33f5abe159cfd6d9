"""Products with adapters: longer chains, bit for bit, and their gradients."""

import pytest
import torch

from rlloop.numerics.layout import AdapterSlots, Factors, LogitsProcessing
from rlloop.numerics.ops import ops_for
from rlloop.numerics.profile import NumericsProfile
from rlloop.numerics.routing import Clamped

OPS = ops_for(NumericsProfile())
TYPES = [torch.float32, torch.bfloat16]


def randn(*shape, seed, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def same(a, b):
    view = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(view), b.contiguous().view(view))


def factors(outputs, width, ranks, *groups, dtype, seed=0, own=False):
    """Slots of these ranks, the last without an adapter; zero beyond a slot's rank. `own`: each group has its A."""
    slots, most = len(ranks), max(ranks)
    down = randn(*(groups if own else ()), slots, most, width, seed=seed, dtype=dtype, scale=width**-0.5)
    up = randn(*groups, slots, outputs, most, seed=seed + 1, dtype=dtype)
    for slot, rank in enumerate(ranks):
        down[..., slot, rank:, :], up[..., slot, :, rank:] = 0, 0
    return Factors(down, up, torch.tensor(ranks))


SLOTS = torch.tensor([0, 0, 1, 2, 1, 0, 2, 1, 1, 2, 0])
RANKS = [3, 24, 0]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("outputs", "width"), [(33, 40), (64, 300), (20, 2048), (70, 2300), (17, 4100)])
def test_a_row_has_the_bits_of_one_longer_product(outputs, width, dtype):
    x, weight = randn(len(SLOTS), width, seed=0, dtype=dtype), randn(outputs, width, seed=1, dtype=dtype)
    bias, of = randn(outputs, seed=2, dtype=dtype), factors(outputs, width, RANKS, dtype=dtype)
    got = OPS.with_adapters(AdapterSlots({id(weight): of}, SLOTS)).linear(x, weight, bias)
    for row, slot in enumerate(SLOTS.tolist()):
        rank, one = RANKS[slot], x[row : row + 1]
        z = OPS.linear(one, of.down[slot, :rank]) if rank else one[:, :0]
        if width % 2048 == 0 and rank:  # the concatenation would begin another segment with the terms
            continue
        rest = -width % 32 if dtype == torch.bfloat16 and rank else 0  # bfloat16's blocks: the terms begin a new one
        longer = (
            torch.cat((one, one.new_zeros(1, rest), z), 1),
            torch.cat((weight, weight.new_zeros(outputs, rest), of.up[slot, :, :rank]), 1),
        )
        assert same(got[row : row + 1], OPS.linear(*longer, bias))


@pytest.mark.parametrize("dtype", TYPES)
def test_neighbours_and_order_leave_the_bits_alone(dtype):
    x, weight = randn(len(SLOTS), 2300, seed=0, dtype=dtype), randn(50, 2300, seed=1, dtype=dtype)
    of = factors(50, 2300, RANKS, dtype=dtype)
    whole = OPS.with_adapters(AdapterSlots({id(weight): of}, SLOTS)).linear(x, weight)
    turned = torch.tensor([7, 3, 1, 10, 0, 2, 9, 8, 6, 5, 4])
    mixed = OPS.with_adapters(AdapterSlots({id(weight): of}, SLOTS[turned])).linear(x[turned], weight)
    assert same(mixed, whole[turned])
    for row in range(len(x)):
        alone = OPS.with_adapters(AdapterSlots({id(weight): of}, SLOTS[row : row + 1])).linear(x[row : row + 1], weight)
        assert same(alone, whole[row : row + 1])
    some = slice(0, 4)
    first = Factors(of.down[:1], of.up[:1], of.ranks[:1])
    uniform = OPS.with_adapters(AdapterSlots({id(weight): first})).linear(x[some], weight)
    assert same(uniform[:2], whole[:2])
    assert not same(uniform[2:], whole[2:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "sizes"), [(64, (128, 64, 64)), (136, (40, 24, 72))])
def test_weights_of_one_input_have_the_bits_of_each(width, sizes, dtype):
    slots = SLOTS.repeat(4)
    x, weights = randn(len(slots), width, seed=0, dtype=dtype), [randn(n, width, seed=n, dtype=dtype) for n in sizes]
    table = {id(each): factors(len(each), width, RANKS, dtype=dtype, seed=len(each)) for each in weights}
    ops = OPS.with_adapters(AdapterSlots(table, slots))
    with torch.no_grad():
        apart = [ops.linear(x, each) for each in weights]
        assert all(map(same, ops.qkv_linear(x, *weights), apart))
        pair = weights[1], randn(sizes[1], width, seed=9, dtype=dtype)
        ops = OPS.with_adapters(AdapterSlots({**table, id(pair[1]): table[id(pair[0])]}, slots))
        wanted = ops.silu_mul(*(ops.linear(x, each) for each in pair))
        assert same(ops.gated_linear(x, *pair), wanted)


@pytest.mark.parametrize("dtype", TYPES)
def test_without_an_adapter_or_with_b_zero_the_base_has_its_bits(dtype):
    x, weight = randn(9, 2300, seed=0, dtype=dtype), randn(50, 2300, seed=1, dtype=dtype)
    of = factors(50, 2300, RANKS, dtype=dtype)
    none = OPS.with_adapters(AdapterSlots({id(weight): of}, torch.full((9,), 2)))
    zero = OPS.with_adapters(AdapterSlots({id(weight): Factors(of.down, torch.zeros_like(of.up), of.ranks)}, SLOTS[:9]))
    other = OPS.with_adapters(AdapterSlots({}, SLOTS[:9]))
    for ops in (none, zero, other):
        assert same(ops.linear(x, weight), OPS.linear(x, weight))
        assert same(ops.logits(x, weight), OPS.logits(x, weight))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_experts_have_the_bits_of_dense_layers_of_their_factors(dtype, gated):
    experts, width, size, tokens = 5, 40, 24, len(SLOTS)
    x = randn(tokens, width, seed=0, dtype=dtype)
    up = randn(experts, (1 + gated) * size, width, seed=1, dtype=dtype, scale=0.2)
    down = randn(experts, width, size, seed=2, dtype=dtype, scale=0.2)
    of_up = factors(up.shape[1], width, RANKS, experts, dtype=dtype, own=True)
    of_down = factors(width, size, RANKS, experts, dtype=dtype, own=True, seed=7)
    chosen = torch.stack(
        [torch.randperm(experts, generator=torch.Generator().manual_seed(t))[:2] for t in range(tokens)]
    )
    ops = OPS.with_adapters(AdapterSlots({id(up): of_up, id(down): of_down}, SLOTS))
    got = ops.experts(x, up, down, chosen, gated)
    for token, slot in enumerate(SLOTS.tolist()):
        for place, expert in enumerate(chosen[token].tolist()):
            inner, one = x[token : token + 1], []
            for weight, of in ((up[expert], of_up), (down[expert], of_down)):
                each = Factors(of.down[expert], of.up[expert], of.ranks)
                dense = OPS.with_adapters(AdapterSlots({id(weight): each}, torch.tensor([slot])))
                if one:
                    inner = OPS.silu_mul(*one[0].chunk(2, 1)) if gated else one[0].relu().square()
                one.append(dense.linear(inner, weight))
            assert same(got[token, place : place + 1], one[1])
    only = OPS.with_adapters(AdapterSlots({id(down): of_down}, SLOTS)).experts(x, up, down, chosen, gated)
    assert not same(only, got)
    assert same(only[3], OPS.experts(x, up, down, chosen, gated)[3])  # slot 2 has no adapter


def test_clamped_experts_go_on_before_their_biases():
    experts, width, size, tokens, dtype = 4, 32, 24, len(SLOTS), torch.bfloat16
    x = randn(tokens, width, seed=0, dtype=dtype)
    up, down = randn(experts, width, 2 * size, seed=1, dtype=dtype), randn(experts, size, width, seed=2, dtype=dtype)
    rule = Clamped(randn(experts, 2 * size, seed=3), randn(experts, width, seed=4), 1.702, 7.0)
    of_up = factors(2 * size, width, RANKS, experts, dtype=dtype, own=True)
    of_down = factors(width, size, RANKS, experts, dtype=dtype, own=True, seed=7)
    chosen = torch.arange(2 * tokens).view(tokens, 2) % experts
    ops = OPS.with_adapters(AdapterSlots({id(up): of_up, id(down): of_down}, SLOTS))
    got, base = ops.experts(x, up, down, chosen, clamped=rule), OPS.experts(x, up, down, chosen, clamped=rule)
    without = SLOTS == 2
    assert same(got[without], base[without])
    merged = [
        weight.float()[None].repeat(2, 1, 1, 1) + (of.up.float() @ of.down.float()).transpose(0, 1)[:2].mT
        for weight, of in ((up, of_up), (down, of_down))
    ]
    for slot in range(2):
        rows = slot == SLOTS
        close = OPS.experts(x[rows].float(), merged[0][slot], merged[1][slot], chosen[rows], clamped=rule)
        torch.testing.assert_close(got[rows].float(), close, rtol=0.1, atol=0.05 * float(close.abs().max()))


@pytest.mark.parametrize("dtype", TYPES)
def test_heads_have_the_bits_of_dense_layers_of_their_rows(dtype):
    heads, nope, v, latent, tokens = 3, 24, 16, 40, len(SLOTS)
    weight = randn(heads * (nope + v), latent, seed=0, dtype=dtype, scale=0.2)
    of = factors(nope + v, latent, RANKS, heads, dtype=dtype)
    ops, parts = OPS.with_adapters(AdapterSlots({id(weight): of}, SLOTS)), weight.unflatten(0, (heads, -1))
    read = randn(tokens, heads, latent, seed=3, dtype=dtype)
    values = ops.head_linear(read, parts[:, nope:], by_row=True, part_of=weight)
    queries = randn(tokens, heads, nope, seed=4, dtype=dtype)
    keyed = ops.head_linear(queries, parts[:, :nope], by_row=False, part_of=weight)
    assert same(values[3], OPS.head_linear(read, parts[:, nope:], by_row=True)[3])
    for token, slot in enumerate(SLOTS.tolist()):
        for head in range(heads):
            matrix = parts[head, nope:].contiguous()
            each = Factors(of.down, of.up[head, :, nope:].contiguous(), of.ranks)
            dense = OPS.with_adapters(AdapterSlots({id(matrix): each}, torch.tensor([slot])))
            assert same(values[token, head : head + 1], dense.linear(read[token, head : head + 1], matrix))
            matrix = parts[head, :nope].mT.contiguous()
            each = Factors(of.up[head, :, :nope].mT.contiguous(), of.down.mT.contiguous(), of.ranks)
            dense = OPS.with_adapters(AdapterSlots({id(matrix): each}, torch.tensor([slot])))
            assert same(keyed[token, head : head + 1], dense.linear(queries[token, head : head + 1], matrix))


def gradients_agree(make, inputs, expected):
    """Gradients of `make` against those of `expected`, which computes the same in float64 by plain operations."""
    wide = [each.detach().double().requires_grad_() for each in inputs]
    out = make(*inputs)
    slope = randn(*out.shape, seed=99)
    out.backward(slope.to(out.dtype))
    expected(*wide).backward(slope.double())
    for ours, exact in zip(inputs, wide, strict=True):
        torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=1e-4 * float(exact.grad.abs().max()))


def leaves(*tensors):
    return [each.clone().requires_grad_() for each in tensors]


@pytest.mark.parametrize("slots", [None, SLOTS])
def test_gradients_of_a_product(slots):
    ranks = [5] if slots is None else RANKS
    of = factors(30, 50, ranks, dtype=torch.float32)
    weight, which = randn(30, 50, seed=1), torch.zeros(11, dtype=torch.int64) if slots is None else slots

    def ours(x, down, up):
        ops = OPS.with_adapters(AdapterSlots({id(weight): Factors(down, up, of.ranks)}, slots))
        return ops.linear(x, weight)

    def exact(x, down, up):
        z = torch.einsum("tk,trk->tr", x, down[which])
        return x @ weight.double().T + torch.einsum("tr,tnr->tn", z, up[which])

    gradients_agree(ours, leaves(randn(11, 50, seed=5), of.down, of.up), exact)


@pytest.mark.parametrize("slots", [None, SLOTS])
def test_gradients_of_experts(slots):
    ranks, experts = [5] if slots is None else RANKS, 4
    of_up = factors(32, 20, ranks, experts, dtype=torch.float32, own=True)
    of_down = factors(20, 16, ranks, experts, dtype=torch.float32, own=True, seed=6)
    up, down = randn(experts, 32, 20, seed=1), randn(experts, 20, 16, seed=2)
    chosen = torch.arange(22).view(11, 2) % experts
    which = torch.zeros(11, dtype=torch.int64) if slots is None else slots

    def ours(x, a, b, c, d):
        made = {id(up): Factors(a, b, of_up.ranks), id(down): Factors(c, d, of_down.ranks)}
        return OPS.with_adapters(AdapterSlots(made, slots)).experts(x, up, down, chosen)

    def exact(x, a, b, c, d):
        outs = []
        for token in range(11):
            for expert in chosen[token].tolist():
                slot = int(which[token])
                gate, other = ((up[expert].double() + b[expert, slot] @ a[expert, slot]) @ x[token]).chunk(2)
                inner = torch.nn.functional.silu(gate) * other
                outs.append((down[expert].double() + d[expert, slot] @ c[expert, slot]) @ inner)
        return torch.stack(outs).view(11, 2, 20)

    inputs = leaves(randn(11, 20, seed=5, scale=0.3), of_up.down, of_up.up, of_down.down, of_down.up)
    gradients_agree(ours, inputs, exact)


@pytest.mark.parametrize("by_row", [True, False])
def test_gradients_by_head(by_row):
    heads, nope, v, latent = 3, 8, 6, 20
    weight = randn(heads * (nope + v), latent, seed=0, scale=0.3)
    of = factors(nope + v, latent, [5], heads, dtype=torch.float32)
    parts = weight.unflatten(0, (heads, -1))
    part = parts[:, nope:] if by_row else parts[:, :nope]

    def ours(x, down, up):
        ops = OPS.with_adapters(AdapterSlots({id(weight): Factors(down, up, of.ranks)}))
        return ops.head_linear(x, part, by_row=by_row, part_of=weight)

    def exact(x, down, up):
        rows = up[:, 0, nope:] if by_row else up[:, 0, :nope]
        matrix = part.double() + rows @ down[0]
        return torch.einsum("thk,hnk->thn", x, matrix) if by_row else torch.einsum("thk,hkn->thn", x, matrix)

    gradients_agree(ours, leaves(randn(7, heads, latent if by_row else nope, seed=5), of.down, of.up), exact)


@pytest.mark.parametrize("dtype", TYPES)
def test_logprobs_of_an_adapted_head(dtype):
    weight, hidden = randn(150, 40, seed=0, dtype=dtype), randn(len(SLOTS), 40, seed=1, dtype=dtype)
    of = factors(150, 40, RANKS, dtype=dtype)
    ops = OPS.with_adapters(AdapterSlots({id(weight): of}, SLOTS))
    targets, seeds = torch.arange(len(SLOTS)) * 13 % 150, torch.arange(len(SLOTS))
    logits = ops.logits(hidden, weight)
    expected = OPS.score_logits(logits, targets, LogitsProcessing())
    assert same(ops.token_logprob(hidden, weight, targets, LogitsProcessing())[0], expected[0])
    redrawn = ops.token_redraw(hidden, weight, targets, LogitsProcessing(), seeds, seeds)
    ids = OPS.sample(logits, LogitsProcessing(), seeds, seeds)[0]
    assert torch.equal(redrawn[3], ids)
    assert same(redrawn[2], expected[0])
    assert not same(OPS.token_logprob(hidden, weight, targets, LogitsProcessing())[0], expected[0])


@pytest.mark.parametrize("slots", [None, SLOTS])
def test_gradients_of_an_adapted_head(slots, monkeypatch):
    monkeypatch.setattr("rlloop.numerics.kernels.cpu.distribution.LOGITS_BYTES", 4 * 60 * 4)  # in several chunks
    ranks = [5] if slots is None else RANKS
    of = factors(60, 20, ranks, dtype=torch.float32)
    weight, targets = randn(60, 20, seed=0), torch.arange(11) * 5
    which = torch.zeros(11, dtype=torch.int64) if slots is None else slots

    def ours(x, down, up):
        ops = OPS.with_adapters(AdapterSlots({id(weight): Factors(down, up, of.ranks)}, slots))
        return ops.token_logprob(x, weight, targets, LogitsProcessing())[0]

    def exact(x, down, up):
        logits = x @ weight.double().T + torch.einsum(
            "tr,tnr->tn", torch.einsum("tk,trk->tr", x, down[which]), up[which]
        )
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    gradients_agree(ours, leaves(randn(11, 20, seed=5), of.down, of.up), exact)


def test_a_frozen_weight_gets_no_gradient():
    weight, x = randn(30, 20, seed=0), randn(5, 20, seed=1).requires_grad_()
    of = factors(30, 20, [4], dtype=torch.float32)
    down = of.down.requires_grad_()
    ops = OPS.with_adapters(AdapterSlots({id(weight): Factors(down, of.up, of.ranks)}))
    ops.linear(x, weight).sum().backward()
    ops.token_logprob(x, weight, torch.zeros(5, dtype=torch.int64), LogitsProcessing())[0].sum().backward()
    assert weight.grad is None
    assert down.grad is not None
