"""Products that share a launch have the bits of those that do not."""

import pytest
import torch

from rlloop.numerics.ops import ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile

OPS = ops_for(NumericsProfile())
ROWS = [1, 2, 8, 9, 16, 17, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257, 512, 513]


def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize(
    ("width", "outputs", "dtype"),
    [
        (1024, (2048, 1024, 1024), torch.bfloat16),
        (4096, (4096, 1024, 1024), torch.float16),
        (4096, (12288, 1024, 512), torch.bfloat16),
        (2560, (9728, 512, 64), torch.bfloat16),
        (1032, (17408, 1024, 1024), torch.bfloat16),
        (328, (40, 72, 72), torch.bfloat16),  # no tile fits
        (64, (64, 32, 32), torch.float32),
    ],
)
def test_products_that_share_a_launch(width, outputs, dtype):
    torch.manual_seed(0)
    weights, up = [draw(n, width, dtype=dtype) for n in outputs], draw(outputs[0], width, dtype=dtype)
    for rows in ROWS:
        x = draw(rows, width, dtype=dtype)
        with torch.inference_mode():
            assert OPS.fuses
            for together, alone in zip(OPS.qkv_linear(x, *weights), weights, strict=True):
                assert same_bits(together, OPS.linear(x, alone)), f"{rows} rows"
            x *= 0.01
            separate = OPS.silu_mul(OPS.linear(x, weights[0]), OPS.linear(x, up))
            assert same_bits(OPS.gated_linear(x, weights[0], up), separate), f"{rows} rows"


def test_nothing_is_fused_where_gradients_or_another_arithmetic_are_wanted():
    assert not OPS.fuses
    with torch.inference_mode():
        assert not ops_for(NumericsProfile(linear="stock")).fuses
