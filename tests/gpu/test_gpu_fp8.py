"""Engines of other kernels on CUDA, fp8 ones and PyTorch's own: close to the exact result, and not ours in bits."""

from typing import Any

import pytest
import torch

from rlloop.models import Model, new_model, token_logprobs
from rlloop.numerics import stock
from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import Drift, NumericsProfile
from rlloop.rollout import Engine
from rlloop.study import fp8
from rlloop.study.drifted import DriftedSync, drifted_copy
from rlloop.study.drifted_ops import drifted_ops
from rlloop.study.quantize import e4m3_rows, rounded_activation
from rlloop.types import SamplingParams

OURS = ops_for(NumericsProfile())
FP8: dict[str, Any] = {"weights": "fp8", "granularity": "channel", "activations": "fp8", "products": "fp8"}
SIZES = {
    "vocab_size": 97, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128, "initializer_range": 0.1,
    "eos_token_id": 2,
}  # fmt: skip
DENSE = {**SIZES, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
EXPERTS = {
    **SIZES, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 96, "norm_topk_prob": True,
}  # fmt: skip
KERNELS: dict[str, Any] = dict.fromkeys(
    ("linear", "rms_norm", "activation", "rope", "attention", "router", "experts", "combine"), "stock"
)


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def off(made: torch.Tensor, exact: torch.Tensor) -> float:
    return float((made.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("rows", [1, 3, 64, 500])
def test_the_fp8_product(rows):
    x, weight = drawn(rows, 640), drawn(2560, 640)
    packed = fp8.Fp8(*e4m3_rows(weight))
    made = fp8.linear(x, packed)
    rounded = rounded_activation(x.float(), "fp8").double() @ (packed.values.double() * packed.scale).T
    assert off(made, rounded) < 0.005, "not the product of the rounded operands"
    assert 0.02 < off(made, x.double() @ weight.double().T) < 0.06
    assert same_bits(made, fp8.linear(x, packed))
    assert not same_bits(made, OURS.linear(x, weight))


def test_the_fp8_experts():
    x, up, down = drawn(70, 256), drawn(16, 192, 256) / 16, drawn(16, 256, 96) / 16
    chosen = torch.randint(0, 15, (70, 4), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    ups, downs = (fp8.Fp8(*e4m3_rows(each)) for each in (up, down))
    made = fp8.experts(x, ups, downs, chosen, True)  # nobody goes to the last expert
    for slot in range(4):
        for row in range(0, 70, 9):
            expert = int(chosen[row, slot])
            inner = fp8.linear(x[row : row + 1], fp8.Fp8(ups.values[expert], ups.scale[expert]))
            inner = stock.silu_mul(*inner.chunk(2, dim=-1))
            alone = fp8.linear(inner, fp8.Fp8(downs.values[expert], downs.scale[expert]))[0]
            assert off(made[row, slot], alone.double()) < 0.02
    assert 0.02 < off(made, OURS.experts(x, up, down, chosen).double()) < 0.1


def test_stock_experts_are_grouped_products():
    x, up, down = drawn(70, 256), drawn(16, 192, 256) / 16, drawn(16, 256, 96) / 16
    chosen = torch.randint(0, 15, (70, 4), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    exact = stock.experts(x.double(), up.double(), down.double(), chosen, True)
    assert off(stock.experts(x, up, down, chosen, True), exact) < 0.01


@pytest.mark.parametrize("heads", [2, 4])
def test_stock_attention_reads_pages(heads):
    counts, contexts = torch.tensor([3, 1, 20]), torch.tensor([5, 0, 7])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    pages = torch.tensor([[0, 16], [32, -16], [80, 64]])  # the second sequence has no second page
    layout = AttentionLayout(starts.cuda(), contexts.cuda(), pages.cuda(), block_size=16, contiguous=False)
    q, k, v = drawn(24, 4, 64), drawn(96, heads, 64), drawn(96, heads, 64)
    ours = OURS.attention(q, k, v, layout, 0.125)
    assert off(stock.attention(q, k, v, layout, 0.125), ours.double()) < 0.01


class Pair:
    """A trained model on the GPU, and an engine that drifts from it."""

    def __init__(self, config: dict, drift: Drift) -> None:
        self.model: Model = new_model(config, 0, dtype="bfloat16").to("cuda")
        profile = NumericsProfile(**KERNELS, drift=drift)
        self.engine = Engine(drifted_copy(self.model).with_profile(profile, drifted_ops))
        self.sync = DriftedSync(self.model, self.engine)

    def k3(self) -> float:
        prompts = [[5 + index, 7, 11, 13] for index in range(40)]
        made = self.engine.generate(prompts, SamplingParams(24, seed=1, ignore_eos=True))
        scored = token_logprobs(self.model, [(each.prompt_ids, each.token_ids) for each in made])
        sampled = torch.cat([torch.from_numpy(each.logprobs) for each in made]).double()
        gap = torch.cat([each.detach().cpu() for each in scored]).double() - sampled
        return float((gap.expm1() - gap).mean())


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_an_engine_of_fp8_kernels_is_further_from_the_trainer_than_one_of_pytorchs(config):
    bf16, narrow = Pair(config, Drift(from_step=9)), Pair(config, Drift(**FP8, cache="fp8"))
    for version in range(2):
        for pair in (bf16, narrow):
            pair.sync.publish(version)
        assert 0 < bf16.k3() < narrow.k3() < 0.5
        for pair in (bf16, narrow):
            with torch.no_grad():
                for weight in pair.model.parameters():
                    weight.mul_(1.03)


def test_a_drift_that_begins_later_reaches_what_graphs_have_recorded():
    pair = Pair(DENSE, Drift(**FP8, from_step=2))
    pair.sync.publish(0)
    before = pair.k3()
    pair.sync.publish(1)
    assert pair.k3() > 4 * before
