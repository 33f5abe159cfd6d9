"""Products that share a launch have the bits of those that do not."""

import pytest
import torch

from rlloop.models.weights import lay_end_to_end
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


@pytest.mark.parametrize(("width", "heads", "groups"), [(1024, 16, 8), (4096, 32, 8), (5120, 64, 8), (2560, 4, 2)])
def test_queries_keys_and_values_by_one_product_reach_the_cache(width, heads, groups):
    """Weights that lie end to end are one product, whose parts are read where they lie."""
    from rlloop.numerics.kernels.triton.multi_linear import as_one

    torch.manual_seed(0)
    sizes, most = (heads * 128, groups * 128, groups * 128), 600
    apart = [draw(n, width) / width**0.5 for n in sizes]
    laid = dict(zip([f"{name}_proj.weight" for name in "qkv"], apart, strict=True))
    lay_end_to_end(laid)
    together = [*laid.values()]
    assert as_one(together) is not None
    assert as_one(apart) is None
    norms, angle = (draw(128), draw(128)), draw(most, 64, dtype=torch.float32)
    rope = angle.cos(), angle.sin()
    for rows in (1, 64, 65, 72, 96, 128, 160, 200, 256, 384, 512, 600):
        x = draw(rows, width)
        slots, positions = torch.randperm(most, device="cuda")[:rows], torch.arange(rows, device="cuda")
        found = []
        with torch.inference_mode():
            for weights in (apart, together):
                stores = [torch.zeros(most, groups, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
                q, k, v = (each.unflatten(-1, (-1, 128)) for each in OPS.qkv_linear(x, *weights))
                q = OPS.qkv_cache_write(q, k, v, norms, 1e-6, positions, rope, slots, *stores)
                found.append((q, *stores))
        assert all(map(same_bits, *found)), f"{rows} rows"


def test_nothing_is_fused_where_gradients_or_another_arithmetic_are_wanted():
    assert not OPS.fuses
    with torch.inference_mode():
        assert not ops_for(NumericsProfile(linear="stock")).fuses
