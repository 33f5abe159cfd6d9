"""Router, experts and their sum: the contract at its edges, and against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlloop.numerics.ops import Ops
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile
from rlloop.numerics.routing import Clamped, Routing

OURS, REFERENCE, STOCK, THEIRS = (
    Ops(NumericsProfile.preset(name)) for name in ("rlloop", "reference", "stock", "huggingface")
)
RULES = {
    "softmax": Routing(top_k=3),
    "normalised": Routing(top_k=2, normalise=True),
    "sigmoid": Routing(top_k=4, score="sigmoid", normalise=True, epsilon=1e-20, scale=2.5),
    "groups": Routing(top_k=3, score="sigmoid", groups=4, top_groups=2, normalise=True, scale=1.5),
}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ------------------------------------------------------------------------------------------------------------ router


@pytest.mark.parametrize("experts", [8, 13, 16, 60])
@pytest.mark.parametrize("rule", RULES)
def test_a_route_is_the_references_and_its_rows_are_their_own(rule: str, experts: int) -> None:
    routing = RULES[rule]
    if experts % routing.groups:
        experts += 4 - experts % 4
    logits, bias = draw(67, experts), 0.2 * draw(experts, seed=1)
    weights, chosen, scores = OURS.route(logits, bias, routing)
    wanted, expected, _ = REFERENCE.route(logits, bias, routing)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, wanted, rtol=3e-6, atol=0)
    for begin, end in ((0, 1), (66, 67), (3, 19)):
        alone = OURS.route(logits[begin:end], bias, routing)
        assert all(map(same_bits, alone, (weights[begin:end], chosen[begin:end], scores[begin:end])))


@pytest.mark.parametrize("experts", [8, 13, 16])
def test_equal_scores_go_to_the_lower_index(experts: int) -> None:
    """Duplicate experts, +0 beside −0, and no difference at all."""
    zeros = torch.zeros(3, experts)
    zeros[1, ::2] = -0.0
    zeros[2] = 1.0
    for rule in ("softmax", "sigmoid"):
        _, chosen, _ = OURS.route(zeros, None, RULES[rule])
        assert chosen.tolist() == [list(range(RULES[rule].top_k))] * 3
    twins = draw(50, experts)
    twins[:, 5] = twins[:, 2] = twins.max() + 1
    _, chosen, _ = OURS.route(twins, None, RULES["softmax"])
    assert (chosen[:, :2] == torch.tensor([2, 5])).all()
    _, stock, _ = STOCK.route(torch.zeros(200, experts), None, RULES["softmax"])
    assert (stock != torch.arange(3)).any(), "torch.topk breaks ties like this now, so this test shows nothing"


def test_signed_zero_and_nan_among_what_is_ranked() -> None:
    logits = torch.tensor([[0.0, 0.0, torch.nan, 0.0, 0.0, 0.0, 0.0, 0.0]])
    bias = torch.tensor([-0.5, -0.5, 9.0, -0.5, -1.0, -0.5, -0.4, -0.5])  # the sums are ±0 but for three
    _, chosen, _ = OURS.route(logits, bias, Routing(top_k=4, score="sigmoid"))
    assert chosen.tolist() == [[6, 0, 1, 3]]


def test_groups_leave_out_the_best_expert_of_a_poor_group() -> None:
    logits = torch.full((1, 8), -2.0)
    logits[0, 0], logits[0, 2:4], logits[0, 4:6] = 5.0, 3.0, 3.0  # one star alone; two pairs
    routing = Routing(top_k=3, score="sigmoid", groups=4, top_groups=2)
    _, chosen, _ = OURS.route(logits, None, routing)
    assert chosen.tolist() == [[2, 3, 4]]
    assert REFERENCE.route(logits, None, routing)[1].tolist() == [[2, 3, 4]]


@pytest.mark.parametrize("rule", RULES)
def test_the_routers_gradient_is_the_references(rule: str) -> None:
    routing, wide = RULES[rule], draw(9, 16).double().requires_grad_()
    logits = wide.detach().float().requires_grad_()
    pull, push = draw(9, routing.top_k, seed=2), draw(9, 16, seed=3)
    for ops, x in ((OURS, logits), (REFERENCE, wide)):
        weights, _, scores = ops.route(x, None, routing)
        ((weights * pull).sum() + (scores * push).sum()).backward()
    assert logits.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=1e-4, atol=1e-6)


def test_a_given_choice_is_weighed_and_not_made() -> None:
    logits, routing = draw(5, 8), RULES["normalised"]
    given = torch.tensor([[7, 0], [1, 2], [3, 3], [0, 7], [4, 6]])[:, :2]
    given[2] = torch.tensor([3, 5])
    weights, chosen, _ = OURS.route(logits, None, routing, given)
    assert torch.equal(chosen, given)
    scores = logits.softmax(-1).gather(1, given)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))
    free, picked, _ = OURS.route(logits, None, routing)
    assert same_bits(OURS.route(logits, None, routing, picked)[0], free)


# ----------------------------------------------------------------------------------------------------------- experts

CHOICES = {
    "spread": lambda tokens, experts: torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0)).topk(2)[
        1
    ],
    "one expert": lambda tokens, experts: torch.tensor([[experts - 1, 0]]).expand(tokens, 2).contiguous(),
    "two of many": lambda tokens, experts: torch.tensor([[2, 1]]).expand(tokens, 2).contiguous(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 65])
def test_an_experts_row_has_the_bits_of_a_dense_layer(tokens: int, choice: str, dtype: torch.dtype) -> None:
    experts, width, inner = 13, 40, 24
    x = draw(tokens, width, dtype=dtype)
    gate_up, down = (
        draw(experts, 2 * inner, width, seed=1, dtype=dtype),
        draw(experts, width, inner, seed=2, dtype=dtype),
    )
    chosen = CHOICES[choice](tokens, experts)
    made = OURS.experts(x, gate_up, down, chosen)
    for slot in range(2):
        for expert in chosen[:, slot].unique().tolist():
            at = chosen[:, slot] == expert
            gate, up = OURS.linear(x[at], gate_up[expert]).chunk(2, dim=-1)
            assert same_bits(made[at, slot], OURS.linear(OURS.silu_mul(gate, up), down[expert]))
    assert same_bits(OURS.experts(x[-1:], gate_up, down, chosen[-1:]), made[-1:])
    torch.testing.assert_close(made, REFERENCE.experts(x, gate_up, down, chosen), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("choice", CHOICES)
def test_the_experts_gradients_are_the_references(choice: str) -> None:
    experts, width, inner, tokens = 5, 24, 20, 37
    wide = [draw(*shape, seed=i).double().requires_grad_() for i, shape in
            enumerate([(tokens, width), (experts, 2 * inner, width), (experts, width, inner)])]  # fmt: skip
    ours = [tensor.detach().float().requires_grad_() for tensor in wide]
    chosen, pull = CHOICES[choice](tokens, experts), draw(tokens, 2, width, seed=9)
    for ops, tensors in ((OURS, ours), (REFERENCE, wide)):
        (ops.experts(*tensors, chosen) * pull).sum().backward()
    for mine, wanted in zip(ours, wide, strict=True):
        assert mine.grad is not None
        assert wanted.grad is not None
        assert ((mine.grad - wanted.grad).norm() / wanted.grad.norm()).item() < 1e-6
    idle = [expert for expert in range(experts) if not (chosen == expert).any()]
    assert all((ours[1].grad[expert] == 0).all() and (ours[2].grad[expert] == 0).all() for expert in idle)
    assert bool(idle) == (choice != "spread")


def clamped(experts: int, width: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Clamped]:
    """Limits that many numbers pass."""
    up, down = draw(experts, width, 2 * inner, seed=1, dtype=dtype), draw(experts, inner, width, seed=2, dtype=dtype)
    biases = draw(experts, 2 * inner, seed=3, dtype=dtype), draw(experts, width, seed=4, dtype=dtype)
    return up, down, Clamped(*biases, limit=3.0, alpha=1.7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_clamped_experts_row_has_the_bits_of_dense_layers(choice: str, dtype: torch.dtype) -> None:
    experts, x = 13, draw(65, 40, dtype=dtype)
    up, down, rule = clamped(experts, 40, 24, dtype)
    chosen = CHOICES[choice](65, experts)
    made = OURS.experts(x, up, down, chosen, clamped=rule)
    for slot in range(2):
        for expert in chosen[:, slot].unique().tolist():
            at = chosen[:, slot] == expert
            inner = OURS.linear(x[at], up[expert].T.contiguous(), rule.up_bias[expert]).float()
            gate, rise = inner[:, ::2].clamp(max=3.0), inner[:, 1::2].clamp(-3.0, 3.0) + 1
            held = OURS.sigmoid_mul(1.7 * gate, gate * rise).to(dtype)
            wanted = OURS.linear(held, down[expert].T.contiguous(), rule.down_bias[expert])
            assert same_bits(made[at, slot], wanted)
    for begin, end in ((0, 1), (64, 65), (3, 19)):
        alone = OURS.experts(x[begin:end], up, down, chosen[begin:end], clamped=rule)
        assert same_bits(alone, made[begin:end])
    for ops in (REFERENCE, STOCK, THEIRS):
        other = ops.experts(x, up, down, chosen, clamped=rule)
        assert (other - made).norm() < (1e-5 if dtype is torch.float32 else 2e-2) * made.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("choice", CHOICES)
def test_clamped_experts_gradients_are_the_references(choice: str, dtype: torch.dtype) -> None:
    chosen, pull, parts = CHOICES[choice](37, 5), draw(37, 2, 24, seed=9), []
    for ops, kind in ((OURS, dtype), (REFERENCE, torch.float64)):
        up, down, rule = clamped(5, 24, 20, dtype)
        leaves = [
            t.to(kind).requires_grad_() for t in (draw(37, 24, dtype=dtype), up, down, rule.up_bias, rule.down_bias)
        ]
        x, up, down, *biases = leaves
        (ops.experts(x, up, down, chosen, clamped=Clamped(*biases, 3.0, 1.7)) * pull.to(kind)).sum().backward()
        parts.append([leaf.grad for leaf in leaves])
    for mine, wanted in zip(*parts, strict=True):
        assert ((mine - wanted).norm() / wanted.norm()).item() < (1e-6 if dtype is torch.float32 else 6e-2)


def test_no_token_at_all() -> None:
    chosen = torch.zeros(0, 2, dtype=torch.int64)
    made = OURS.experts(draw(0, 8), draw(4, 6, 8), draw(4, 8, 3), chosen)
    assert made.shape == (0, 2, 8)
    assert OURS.combine(made, chosen, torch.zeros(0, 2)).shape == (0, 8)


@pytest.mark.parametrize("by_row", [True, False])
def test_products_by_head_are_linears(by_row: bool) -> None:
    x, projection = draw(19, 3, 24).requires_grad_(), draw(3 * 40, 24).requires_grad_()
    weight = projection.unflatten(0, (3, 40))[:, 4:30]  # part of a wider matrix, as latent attention has it
    weight = weight if by_row else weight[:, :24]
    made = OURS.head_linear(x, weight, by_row)
    for head in range(3):
        matrix = weight[head] if by_row else weight[head].T.contiguous()
        assert same_bits(made[:, head].contiguous(), OURS.linear(x[:, head].contiguous(), matrix))
    pull = draw(*made.shape, seed=5)
    (made * pull).sum().backward()
    ours = [x.grad, projection.grad]
    x.grad = projection.grad = None
    (REFERENCE.head_linear(x, weight, by_row) * pull).sum().backward()
    for mine, wanted in zip(ours, (x.grad, projection.grad), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)


def on_cpu(x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
    return OURS.head_linear(x, weight, by_row)


def on_gpu(x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
    pytest.importorskip("triton", reason="the module has Triton's kernels")
    from rlloop.numerics.kernels.triton.experts import head_linear  # of no rows it launches nothing

    return head_linear(x, weight, by_row)


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("head_linear", [on_cpu, on_gpu])
def test_products_by_head_of_no_token_have_gradients(head_linear, by_row: bool) -> None:
    """Else a rank without tokens would end its backward before the exchanges that the others wait in."""
    x, weight = draw(0, 3, 24).requires_grad_(), draw(3, *((40, 24) if by_row else (24, 40))).requires_grad_()
    made = head_linear(x, weight, by_row)
    assert made.shape == (0, 3, 40)
    of_x, of_weight = torch.autograd.grad(made, (x, weight), torch.ones_like(made))
    assert of_x.shape == x.shape
    assert same_bits(of_weight, torch.zeros_like(weight))


# ----------------------------------------------------------------------------------------------------------- combine


def profile(each: bool) -> Ops:
    return Ops(NumericsProfile(expert_combine="bf16_each" if each else "fp32_once"))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_the_references_bit_for_bit(dtype: torch.dtype, each: bool, shared: bool) -> None:
    slots, weights = draw(33, 4, 72, dtype=dtype), draw(33, 4, seed=1).softmax(-1)
    chosen = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(t))[:4] for t in range(33)])
    extra = draw(33, 72, seed=2, dtype=dtype) if shared else None
    made = profile(each).combine(slots, chosen, weights, extra)
    reference = Ops(NumericsProfile.preset("reference"))
    reference.profile = profile(each).profile
    assert same_bits(made, reference.combine(slots, chosen, weights, extra))
    one = None if extra is None else extra[7:8]
    assert same_bits(profile(each).combine(slots[7:8], chosen[7:8], weights[7:8], one), made[7:8])
    swapped = chosen.flip(1)
    assert same_bits(made, profile(each).combine(slots.flip(1), swapped, weights.flip(1), extra))  # slots are a set
    if dtype is torch.bfloat16:
        assert not same_bits(made, profile(not each).combine(slots, chosen, weights, extra))


def test_rounding_each_expert_is_what_transformers_does() -> None:
    slots, weights = draw(50, 4, 64, dtype=torch.bfloat16), draw(50, 4, seed=1).softmax(-1).bfloat16().float()
    chosen = torch.rand(50, 8, generator=torch.Generator().manual_seed(3)).topk(4)[1]
    total = torch.zeros(50, 64, dtype=torch.bfloat16)
    for expert in range(8):
        token, slot = torch.where(chosen == expert)
        total.index_add_(0, token, slots[token, slot] * weights[token, slot, None].bfloat16())
    assert same_bits(profile(each=True).combine(slots, chosen, weights), total)
    assert same_bits(THEIRS.combine(slots, chosen, weights), total)


@pytest.mark.parametrize("each", [True, False])
def test_the_sums_gradients(each: bool) -> None:
    slots, weights, shared = draw(9, 3, 20), draw(9, 3, seed=1), draw(9, 20, seed=2)
    inputs = [tensor.requires_grad_() for tensor in (slots, weights, shared)]
    chosen, pull = torch.tensor([[4, 1, 2]]).expand(9, 3), draw(9, 20, seed=3)
    (profile(each).combine(slots, chosen, weights, shared) * pull).sum().backward()
    wanted = (pull[:, None] * weights[..., None], (pull[:, None] * slots).sum(-1), pull)
    for mine, other in zip(inputs, wanted, strict=True):
        torch.testing.assert_close(mine.grad, other, rtol=1e-5, atol=1e-6)
