import pytest
import torch

from rlloop.numerics.layout import LogitsProcessing
from rlloop.numerics.ops import ops_for
from rlloop.numerics.profile import WEIGHT_TYPES, Drift, NumericsProfile
from rlloop.study.drifted_ops import DriftedOps, drifted_ops
from rlloop.study.quantize import quantized, rounded_activation


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values)


def test_int4_by_channel_is_multiples_of_a_seventh_of_the_rows_largest():
    weight = rows([7.0, 3.4, -3.6, 0.5], [-14.0, 3.0, 5.0, 1.0])  # scales 1 and 2; 0.5 and 2.5 are ties, to even
    assert quantized(weight, "int4").tolist() == [[7.0, 3.0, -4.0, 0.0], [-14.0, 4.0, 4.0, 0.0]]


def test_int4_by_tensor_has_one_scale():
    weight = rows([7.0, 3.0, -3.0, 1.1], [-14.0, 3.0, 5.0, 0.9])  # scale 2
    assert quantized(weight, "int4", "tensor").tolist() == [[8.0, 4.0, -4.0, 2.0], [-14.0, 4.0, 4.0, 0.0]]


def test_int8_keeps_what_is_on_its_grid():
    weight = rows([127.0, -126.0, 1.0, 0.4])
    assert quantized(weight, "int8").tolist() == [[127.0, -126.0, 1.0, 0.0]]


def test_fp8_has_three_bits_of_mantissa_under_a_scale_of_448():
    # Spacing is 2 from 16 on, so 17 and 19 are ties; 0.001 is nearest to the smallest, 2**-9.
    weight = rows([448.0, 17.0, 18.0, 19.0, 0.001])
    assert quantized(weight, "fp8").tolist() == [[448.0, 16.0, 18.0, 20.0, 2.0**-9]]


def test_fp4_is_the_e2m1_grid_with_ties_to_the_even_code():
    weight = rows([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.3, -2.6])
    expected = [[6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.5, -3.0]]
    assert quantized(weight, "fp4", "tensor").tolist() == expected


def test_nvfp4_scales_blocks_of_16_and_rounds_the_scales_themselves():
    weight = torch.zeros(1, 40)
    weight[0, 0], weight[0, 1] = 2688.0, 448.0  # the matrix's scale is 1, this block's 448
    weight[0, 16], weight[0, 17] = 6.6, 3.3  # 1.1 is between the scales 1.0 and 1.125
    weight[0, 39] = 3.0  # the last block is short
    made = quantized(weight, "fp4", "block")
    assert made.shape == weight.shape
    assert made[0, [0, 1, 16, 17, 39]].tolist() == [2688.0, 448.0, 6.75, 3.375, 3.0]
    assert int((made != 0).sum()) == 5


def test_blocks_are_apart():
    weight = torch.cat([torch.full((1, 16), 0.01), torch.full((1, 16), 100.0)], dim=1)
    assert quantized(weight, "int4", "tensor")[0, 0] == 0
    assert quantized(weight, "int4", "block")[0, 0] == pytest.approx(0.01)


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_every_type_is_idempotent_keeps_shape_and_takes_zeros(kind):
    weight = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(0))
    weight[1] = 0
    for granularity in ("tensor", "channel", "block"):
        once = quantized(weight, kind, granularity)
        assert once.shape == weight.shape
        assert not torch.equal(once, weight)
        assert torch.equal(once[1], weight[1])
        torch.testing.assert_close(quantized(once, kind, granularity), once, rtol=1e-6, atol=0)


def test_narrower_integers_are_further_away():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    errors = [float((quantized(weight, kind) - weight).norm()) for kind in ("int8", "int6", "int5", "int4")]
    assert errors == sorted(errors)
    assert errors[-1] > 10 * errors[0]


def test_each_bit_less_of_a_width_is_twice_as_coarse():
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    steps = {"int8": 127, "int6": 31, "int5": 15, "int4": 7}  # from 0 to a row's largest
    errors = {}
    for kind, count in steps.items():
        made, scale = quantized(weight, kind), weight.abs().amax(-1, keepdim=True) / count
        torch.testing.assert_close((made / scale).round() * scale, made)
        assert ((made - weight).abs() <= scale * 0.50001).all()
        errors[kind] = float((made - weight).norm())
    for wide, narrow in (("int8", "int6"), ("int6", "int5"), ("int5", "int4")):
        assert errors[narrow] / errors[wide] == pytest.approx(steps[wide] / steps[narrow], rel=0.05)


def test_activations_are_bf16_or_fp8_by_token():
    x = rows([1.0 + 2.0**-9, 1.0], [448.0, 17.0], [0.0, 0.0])
    assert rounded_activation(x, "bf16").tolist() == [[1.0, 1.0], [448.0, 17.0], [0.0, 0.0]]
    alone = torch.cat([rounded_activation(row[None], "fp8") for row in x])
    assert torch.equal(rounded_activation(x, "fp8"), alone)
    assert alone[1].tolist() == [448.0, 16.0]


def ops(**drift) -> DriftedOps:
    made = drifted_ops(NumericsProfile(drift=Drift(**drift)))
    assert isinstance(made, DriftedOps)
    return made


def test_a_bf16_engine_computes_what_a_bf16_model_does():
    """float32 that holds bfloat16 values, every result rounded: the bits of the same operations in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    x, residual, gate = (torch.randn(5, 32, generator=generator).bfloat16() for _ in range(3))
    weight, norm = torch.randn(8, 32, generator=generator).bfloat16(), torch.randn(32, generator=generator).bfloat16()
    narrow, wide = ops_for(NumericsProfile()), ops(activations="bf16")
    for mine, theirs in (
        (wide.linear(x.float(), weight.float()), narrow.linear(x, weight)),
        (wide.rms_norm(x.float(), norm.float(), 1e-6)[0], narrow.rms_norm(x, norm, 1e-6)[0]),
        (wide.rms_norm(x.float(), norm.float(), 1e-6, residual.float()), narrow.rms_norm(x, norm, 1e-6, residual)),
        (wide.silu_mul(x.float(), gate.float()), narrow.silu_mul(x, gate)),
    ):
        for a, b in zip(*((each if isinstance(each, tuple) else (each,)) for each in (mine, theirs)), strict=True):
            assert torch.equal(a, b.float())


def test_bf16_logits_are_what_is_sampled_from_and_what_is_scored():
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(6, 16, generator=generator), torch.randn(40, 16, generator=generator)
    drifted, plain = ops(logits="bfloat16"), ops_for(NumericsProfile())
    logits = drifted.logits(hidden, head)
    assert torch.equal(logits, plain.logits(hidden, head).bfloat16().float())
    ids, logprobs, _ = drifted.sample(logits, LogitsProcessing(), torch.arange(6), torch.arange(6))
    scored, _ = drifted.token_logprob(hidden, head, ids, LogitsProcessing())
    assert torch.equal(scored, logprobs)
    assert not torch.equal(plain.token_logprob(hidden, head, ids, LogitsProcessing())[0], scored)


def test_a_drift_is_declared_and_breaks_the_contract():
    profile = NumericsProfile(drift=Drift(weights="int4"))
    assert not profile.holds_contract
    assert profile.as_dict()["drift"]["weights"] == "int4"
    assert "drift" not in NumericsProfile().as_dict()
    with pytest.raises(ValueError, match=r"Drift\.weights is 'int3'; allowed are none, bf16"):
        Drift(weights="int3")
