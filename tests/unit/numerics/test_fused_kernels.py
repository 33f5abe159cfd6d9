"""Operations that share a kernel have the bits of those that do not."""

import pytest
import torch

from rlloop.numerics.ops import ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile

OURS = ops_for(NumericsProfile())
ROWS = [0, 1, 2, 5, 64, 513]


@pytest.fixture(autouse=True, params=[torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
def dtype(request):
    torch.manual_seed(0)
    with torch.inference_mode():
        assert OURS.fuses
        yield request.param


@pytest.mark.parametrize(("width", "outputs"), [(64, (48, 16, 16)), (300, (33, 7, 130)), (1300, (80, 80, 80))])
def test_products_of_one_input(width, outputs, dtype):
    weights = [torch.randn(n, width, dtype=dtype) for n in outputs]
    gate, up = weights[0], torch.randn(outputs[0], width, dtype=dtype)
    for rows in ROWS:
        x = torch.randn(rows, width, dtype=dtype) * 0.1
        for together, alone in zip(OURS.qkv_linear(x, *weights), weights, strict=True):
            assert same_bits(together, OURS.linear(x, alone)), f"{rows} rows"
        separate = OURS.silu_mul(OURS.linear(x, gate), OURS.linear(x, up))
        assert same_bits(OURS.gated_linear(x, gate, up), separate), f"{rows} rows"


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 2, 64), (6, 1, 24), (2, 2, 128)])
def test_the_way_into_the_cache(heads, groups, width, normed, dtype):
    q, k, v = (torch.randn(77, n, width, dtype=dtype) for n in (heads, groups, groups))
    norms = (torch.randn(width, dtype=dtype), torch.randn(width)) if normed else None  # a centred norm's is float32
    angle, positions = torch.rand(500, width // 2) * 500, torch.randint(500, (77,))
    rope, slots = (angle.cos(), angle.sin()), torch.randperm(100)[:77]
    keys, values = (torch.zeros(100, groups, width, dtype=dtype) for _ in "kv")
    entered = OURS.qkv_cache_write(q, k, v, norms, 1e-6, positions, rope, slots, keys, values)
    if norms is not None:
        q, k = (OURS.rms_norm(x, weight, 1e-6)[0] for x, weight in zip((q, k), norms, strict=True))
    assert same_bits(entered, OURS.rope(q, positions, *rope))
    assert same_bits(keys[slots], OURS.rope(k, positions, *rope))
    assert same_bits(values[slots], v)
    untouched = torch.ones(100, dtype=torch.bool).index_fill(0, slots, False)
    assert not keys[untouched].any()
    assert not values[untouched].any()


def test_nothing_is_fused_where_gradients_or_another_arithmetic_are_wanted(dtype):
    assert not ops_for(NumericsProfile(linear="stock")).fuses
    with torch.inference_mode(False), torch.enable_grad():
        assert not OURS.fuses
