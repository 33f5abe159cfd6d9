"""An engine with fp8 kernels, as far as a CPU can run it; tests/gpu has the grouped product and engines."""

from typing import Any

import pytest
import torch

from rlloop.config.numerics import DriftConfig
from rlloop.errors import ConfigError
from rlloop.launch.compose import build, compose_recipe
from rlloop.numerics.layout import AttentionLayout, AttentionMask
from rlloop.numerics.profile import Drift, NumericsProfile
from rlloop.numerics.stock import attention, by_expert, padded_attention
from rlloop.study import drifted, fp8
from rlloop.study.drifted_ops import DriftedOps
from rlloop.study.quantize import e4m3_rows, quantized, rounded_activation
from tests.support.drifted_pair import EMBEDDING, LINEAR, NORM, Pair

FP8: dict[str, Any] = {"weights": "fp8", "granularity": "channel", "activations": "fp8", "products": "fp8"}


def weight_of(source: torch.Tensor) -> fp8.Fp8:
    return fp8.Fp8(*e4m3_rows(source))


def test_the_product_is_that_of_the_rounded_operands():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    made = fp8.linear(x, weight_of(weight))
    rounded = rounded_activation(x.double().float(), "fp8").double() @ quantized(weight.float(), "fp8").double().T
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made.double(), rounded, rtol=2**-7, atol=1e-3)
    assert not torch.equal(made.double(), x.double() @ weight.double().T)


def test_weights_are_narrowed_once_a_version_and_in_place():
    ops = DriftedOps(NumericsProfile(drift=Drift(**FP8)))
    weight = torch.nn.Parameter(torch.randn(16, 32))
    x = torch.randn(3, 32)
    ops.narrow(weight, weight.detach())
    first, at = ops.linear(x, weight), ops._fp8[weight].values.data_ptr()
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(ops.linear(x, weight), first)
    ops.narrow(weight, weight.detach())
    assert torch.equal(ops.linear(x, weight), 2 * first)
    assert ops._fp8[weight].values.data_ptr() == at


def test_choices_by_expert_are_stable():
    order, ends = by_expert(torch.tensor([[2, 0], [0, 3], [2, 0]]), 4)
    assert order.tolist() == [1, 2, 5, 0, 4, 3]
    assert ends.tolist() == [3, 3, 5, 6]


@pytest.mark.parametrize("window", [0, 5])
def test_padded_attention_is_the_loop_over_sequences(window):
    torch.manual_seed(1)
    counts, contexts = torch.tensor([3, 1, 4]), torch.tensor([5, 0, 2])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    pages = torch.tensor([[0, 8], [16, 999], [40, 32]])  # the second sequence has no second page
    layout = AttentionLayout(starts, contexts, pages, block_size=8, contiguous=False)
    q, k, v = torch.randn(8, 4, 16), torch.randn(48, 2, 16), torch.randn(48, 2, 16)
    expected = attention(q, k, v, layout, 0.3, AttentionMask(window=window))
    torch.testing.assert_close(padded_attention(q, k, v, layout, 0.3, window), expected)
    single = AttentionLayout(torch.arange(4), contexts, pages, block_size=8, contiguous=False)
    expected = attention(q[:3], k, v, single, 0.3, AttentionMask(window=window))
    torch.testing.assert_close(padded_attention(q[:3], k, v, single, 0.3, window), expected)


def test_an_fp8_cache_rounds_what_it_keeps_and_fp4_activations_what_enters_a_linear():
    ops = DriftedOps(NumericsProfile(drift=Drift(cache="fp8")))
    assert ops.cached(torch.tensor([17.0, 1e4])).tolist() == [16.0, 448.0]
    ops = DriftedOps(NumericsProfile(linear="stock", drift=Drift(activations="fp4")))
    x, weight = torch.randn(3, 32), torch.eye(32)
    assert torch.equal(ops.linear(x, weight)[1:2], quantized(x[1:2], "fp4", "block"))


def test_a_cpu_refuses_fp8_kernels():
    with pytest.raises(ConfigError, match="products=fp8, kernels of a GPU"):
        Pair(**FP8)
    with pytest.raises(ConfigError, match="products=fp8 calls kernels of a GPU"):  # before a warm start begins
        build(compose_recipe("countdown/collapse_gpu", ["arm=fp8_kernels", "device=cpu"]))


def test_fp8_products_need_fp8_operands():
    with pytest.raises(ConfigError, match=r"set rollout\.drift\.weights and rollout\.drift\.activations to fp8"):
        DriftConfig(products="fp8")
    with pytest.raises(ValueError, match="products=fp8 needs"):
        Drift(products="fp8", weights="fp8")
    assert DriftConfig(**FP8).declared == ["weights=fp8", "activations=fp8", "products=fp8"]


def test_the_sync_narrows_linear_weights_at_each_version(monkeypatch):
    monkeypatch.setattr(drifted, "check_drift", lambda *_: None)  # a CPU has the dense product, if a slow one
    pair = Pair(**FP8)
    parameters = dict(pair.engine.model.named_parameters())
    for version in range(2):
        pair.sync.publish(version)
        ops = pair.engine.model.ops
        assert isinstance(ops, DriftedOps)
        values, scale = e4m3_rows(pair.weight(LINEAR))
        held = ops._fp8[parameters[LINEAR]]
        assert torch.equal(held.values.float(), values.float())
        assert torch.equal(held.scale, scale)
        assert parameters[EMBEDDING] not in ops._fp8
        assert parameters[NORM] not in ops._fp8
        assert pair.differs()
        pair.train()
