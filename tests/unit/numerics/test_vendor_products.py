"""Which rows of a product on a GPU go to cuBLAS, without a GPU: both sides are PyTorch's product here."""

from __future__ import annotations

import pytest
import torch

from rlloop.rollout.engine import graphs
from rlloop.rollout.engine.graph_forms import decode_forms, prompt_forms

pytest.importorskip("triton", reason="the module has Triton's kernels")

K, N = 32, 24


@pytest.fixture
def calls(monkeypatch):
    from rlloop.numerics.kernels.triton import linear

    made: list[tuple[str, int, bool]] = []

    def by(name):
        def work(x, weight, dtype, out, bias):
            made.append((name, len(x), bias is not None))
            total = x.float() @ weight.float().T + (0 if bias is None else bias.float())
            return total.to(dtype) if out is None else out.copy_(total)

        return work

    vendor, chain = by("cuBLAS"), by("ours")
    monkeypatch.setattr(linear, "few_rows", lambda x, outputs, rows=None: None)
    monkeypatch.setattr(linear, "vendor_agrees", lambda *shape: shape[-1] in (True, False))
    monkeypatch.setattr(linear, "vendor", lambda x, w, dtype, out=None, bias=None: vendor(x, w, dtype, out, bias))
    monkeypatch.setattr(linear, "chain", lambda x, w, bias, dtype, out=None: chain(x, w, dtype, out, bias))
    return made


def drawn(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """At addresses as the GPU's allocator has them."""
    found = []
    for count, width in ((rows, K), (N, K), (1, N)):
        memory = torch.randn(count * width + 256).bfloat16()
        begin = -memory.data_ptr() % 256 // 2
        found.append(memory[begin : begin + count * width].view(count, width))
    return found[0], found[1], found[2][0]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (64, [("ours", 64)]), (65, [("cuBLAS", 72)]), (72, [("cuBLAS", 72)]), (128, [("cuBLAS", 128)]),
        (130, [("cuBLAS", 144)]), (288, [("cuBLAS", 288)]), (300, [("cuBLAS", 320)]), (1000, [("cuBLAS", 1024)]),
        (1023, [("cuBLAS", 1024)]), (1024, [("cuBLAS", 1024)]), (1100, [("cuBLAS", 1024), ("ours", 76)]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("biased", [True, False])
def test_whole_steps_of_rows_are_cublass(calls, rows, expected, biased):
    from rlloop.numerics.kernels.triton.linear import product

    x, weight, bias = drawn(rows)
    out = product(x, weight, bias if biased else None, torch.bfloat16)
    assert calls == [(*each, biased) for each in expected]
    assert torch.equal(out, (x.float() @ weight.float().T + (bias.float() if biased else 0)).bfloat16())


@pytest.mark.parametrize(
    ("agreed", "expected"),
    [({1024, 1280}, [("cuBLAS", 1280)]), ({1024}, [("cuBLAS", 1024), ("ours", 76)]), (set(), [("ours", 1100)])],
)
@pytest.mark.parametrize("biased", [True, False])
def test_a_step_is_filled_up_by_what_lies_behind_many_rows(calls, monkeypatch, agreed, expected, biased):
    from rlloop.numerics.kernels.triton import linear
    from rlloop.numerics.kernels.triton.launch import rows_like, with_room

    monkeypatch.setattr(linear, "vendor_agrees", lambda *shape: shape[0] in agreed)
    monkeypatch.setattr(linear, "VENDOR_ALIGNMENT", 1)  # a CPU's memory is at other addresses
    drawn_x, weight, bias = drawn(1100)
    x = rows_like(drawn_x, 1100, K).copy_(drawn_x)
    behind = with_room(x, 1280)
    assert behind is not None
    behind[1100:] = torch.nan
    out = linear.product(x, weight, bias if biased else None, torch.bfloat16)
    assert calls == [(*each, biased) for each in expected]
    assert torch.equal(out, (x.float() @ weight.float().T + (bias.float() if biased else 0)).bfloat16())
    assert (with_room(out, 1280) is not None) == (len(calls) == 1 and 1280 in agreed)
    assert not x._is_view()
    assert not out._is_view()


def test_rows_that_are_few_or_not_contiguous_have_no_room():
    from rlloop.numerics.kernels.triton.launch import rows_like, with_room

    x = torch.zeros(2, 4)
    assert rows_like(x, 300, 4).untyped_storage().nbytes() == 300 * 4 * 4
    many = rows_like(x, 1300, 3, 4, dtype=torch.bfloat16)
    assert (many.shape, many.dtype, many.untyped_storage().nbytes()) == ((1300, 3, 4), torch.bfloat16, 1536 * 12 * 2)
    assert with_room(many.flatten(1), 1536) is not None
    assert with_room(many.flatten(1), 1537) is None
    assert with_room(many.flatten(1)[10:], 1526) is not None
    assert with_room(many.flatten(1)[10:], 1527) is None
    assert with_room(rows_like(x, 1100, 8)[:, :4], 1280) is None


@pytest.mark.parametrize(
    ("agreed", "taken"), [({352, 384}, ("cuBLAS", 352)), ({416}, ("ours", 288)), (set(), ("ours", 288))]
)
def test_rows_are_padded_to_rows_that_agree(calls, monkeypatch, agreed, taken):
    from rlloop.numerics.kernels.triton import linear

    monkeypatch.setattr(linear, "vendor_agrees", lambda *shape: shape[0] in agreed)
    for biased in (True, False):
        x, weight, bias = drawn(288)
        out = linear.product(x, weight, bias if biased else None, torch.bfloat16)
        assert calls.pop() == (*taken, biased)
        assert torch.equal(out, (x.float() @ weight.float().T + (bias.float() if biased else 0)).bfloat16())
        assert out.is_contiguous()
    assert not calls


@pytest.mark.parametrize(("rows", "large", "taken"), [
    (200, False, ("ours", 200)), (200, True, ("cuBLAS", 208)), (128, True, ("ours", 128)), (256, True, ("ours", 256)),
])  # fmt: skip
def test_few_rows_stay_ours_where_they_fill_tiles_and_for_small_weights(calls, monkeypatch, rows, large, taken):
    from rlloop.numerics.kernels.triton import linear

    monkeypatch.setattr(linear, "few_rows", lambda x, outputs, rows=None: print)
    monkeypatch.setattr(linear, "LARGE_WEIGHT", K * N if large else K * N + 1)
    x, weight, _ = drawn(rows)
    linear.product(x, weight, None, torch.bfloat16)
    assert calls == [(*taken, False)]


@pytest.mark.parametrize(
    ("rows", "ours", "agreed", "taken"),
    [
        (200, True, {224}, ("cuBLAS", 224)), (200, True, {256}, ("ours", 256)), (200, False, {256}, ("cuBLAS", 256)),
        (72, True, set(), ("ours", 128)), (150, True, {176, 208}, ("cuBLAS", 176)), (150, True, {192}, ("ours", 192)),
    ],
)  # fmt: skip
def test_few_rows_are_ours_filled_up_where_their_steps_are_not_cublass(calls, monkeypatch, rows, ours, agreed, taken):
    from rlloop.numerics.kernels.triton import linear

    monkeypatch.setattr(linear, "few_rows", lambda x, outputs, rows=None: print if ours else None)
    monkeypatch.setattr(linear, "LARGE_WEIGHT", K * N)
    monkeypatch.setattr(linear, "vendor_agrees", lambda *shape: shape[0] in agreed)
    x, weight, _ = drawn(rows)
    out = linear.product(x, weight, None, torch.bfloat16)
    assert calls == [(*taken, False)]
    assert torch.equal(out, (x.float() @ weight.float().T).bfloat16())


def test_few_outputs_fill_tiles_of_ours_and_more_are_cublass(calls, monkeypatch):
    from rlloop.numerics.kernels.triton import linear

    monkeypatch.setattr(linear, "few_rows", lambda x, outputs, rows=None: print)
    monkeypatch.setattr(linear, "LARGE_WEIGHT", K * N)
    for most, taken in ((N, "ours"), (N - 1, "cuBLAS")):
        monkeypatch.setattr(linear, "OUR_OUTPUTS", most)
        x, weight, _ = drawn(128)
        linear.product(x, weight, None, torch.bfloat16)
        assert calls.pop() == (taken, 128, False)
    monkeypatch.setattr(linear, "vendor_agrees", lambda *shape: False)
    linear.product(drawn(200)[0], weight, None, torch.bfloat16)
    assert calls == [("ours", 200, False)]  # many outputs and rows: not filled up, which would take as long as it saves


def test_weights_that_lie_end_to_end_are_one_product_of_cublass(calls, monkeypatch):
    from rlloop.numerics.kernels.triton import linear, multi_linear

    def same(x: torch.Tensor) -> bool:
        parts = [x.float() @ weight.float().T for weight in weights]
        made = multi_linear.qkv_linear(x, *weights)
        return all(torch.equal(a, b.bfloat16()) for a, b in zip(made, parts, strict=True))

    weights = torch.randn(56, K).bfloat16().split([24, 16, 16])
    whole = multi_linear.as_one(weights)
    assert whole is not None
    assert (whole.shape, whole.data_ptr()) == ((56, K), weights[0].data_ptr())
    for others in (weights[:1] + weights[2:], weights[1:] + weights[:1], [each.clone() for each in weights]):
        assert multi_linear.as_one(others) is None
    x = torch.randn(300, K).bfloat16()
    assert same(x)
    assert calls == [("cuBLAS", 320, False)]
    calls.clear()
    monkeypatch.setattr(linear, "vendor_agrees", lambda *shape: shape[1] != 56)  # three agree, and one does not
    assert same(x)
    assert calls == [("cuBLAS", 320, False)] * 3


def test_an_engines_numbers_of_rows_need_no_copies():
    from rlloop.numerics.kernels.triton.linear import paddings
    from rlloop.rollout.engine.graph_sizes import rounded

    for rows in range(65, 513):
        steps = rounded(rows, finely=True)
        assert next(iter(paddings(steps))) == steps
        assert next(iter(paddings(rows))) == steps


def test_rows_are_padded_to_no_shape_of_many_rows(calls, monkeypatch):
    from rlloop.numerics.kernels.triton import linear

    tried = []
    monkeypatch.setattr(linear, "vendor_agrees", lambda *shape: tried.append(shape[0]))
    x, weight, _ = drawn(960)
    linear.product(x, weight, None, torch.bfloat16)
    assert tried == [960, 992, 1024]


def test_an_engines_steps_of_more_rows_than_64_are_cublass(calls):
    from rlloop.numerics.kernels.triton.linear import product

    decodes = {each.rows for each in decode_forms(1024, [64], draws=True, finely=True)}
    prompts = {each.tokens for each in prompt_forms(256, 64, 1024, 2048)}
    rows = sorted(each for each in decodes | prompts if each > 64)
    assert len(rows) > 16
    for count in rows:
        x, weight, _ = drawn(count)
        product(x, weight, None, torch.bfloat16)
    assert calls == [("cuBLAS", count, False) for count in rows]


@pytest.mark.parametrize("which", range(3))
def test_with_a_bias_addresses_are_those_of_the_trial(calls, which):
    """cuBLAS takes a kernel by the bias, the shape and the alignment."""
    from rlloop.numerics.kernels.triton.linear import product

    tensors = list(drawn(256))
    moved = torch.empty(tensors[which].numel() + 256, dtype=torch.bfloat16)
    begin = -moved.data_ptr() % 256 // 2 + 8  # 16 bytes on
    tensors[which] = moved[begin : begin + tensors[which].numel()].view_as(tensors[which]).copy_(tensors[which])
    product(tensors[0], tensors[1], tensors[2], torch.bfloat16)
    assert calls == [("ours", 256, True)]


def test_float32_sums_with_a_bias_are_ours(calls):
    from rlloop.numerics.kernels.triton.linear import product

    product(*drawn(256), torch.float32)
    assert calls == [("ours", 256, True)]


@pytest.mark.parametrize("wrong", [None, 0, 255])
def test_a_shape_is_tried_in_parts(monkeypatch, wrong):
    """A trial never has more of our numbers than `COMPARED`, and a wrong row of any part ends it."""
    from rlloop.numerics.kernels.triton import linear

    made, cpu = [], torch.Generator()

    def chain(x, weight, bias, dtype, tiles=None):
        made.append(len(x))
        return (x.float()[:, None] * weight.float()).cumsum(-1)[..., -1].to(dtype)

    def vendor(x, weight, dtype, bias=None):
        out = chain(x, weight, bias, dtype)
        if wrong is not None:
            out[wrong] += 1
        return out

    monkeypatch.setattr(linear, "vendor", vendor)
    monkeypatch.setattr(linear, "chain", chain)
    monkeypatch.setattr(linear, "COMPARED", 100 * N)
    monkeypatch.setattr(linear, "TRIED_OUTPUTS", 1)
    monkeypatch.setattr(linear, "_agreed", {})
    monkeypatch.setattr(torch, "Generator", lambda device: cpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    agrees = linear.vendor_agrees(256, N, K, torch.bfloat16, torch.float32, 0)
    assert agrees == (wrong is None)
    assert made == ([256, 100] if wrong == 0 else [256, 100, 100, 56])


def test_a_gated_product_for_peers_stays_on_one_stream_in_a_recorded_step(monkeypatch):
    """Without a GPU there is no other stream, so to take one would raise an error."""
    from rlloop.numerics.kernels.triton import peers

    written, rows = [], graphs.MOST_TOKENS
    monkeypatch.setattr(peers, "few_rows_gated", lambda *products: None)
    monkeypatch.setattr(peers, "product", lambda x, *rest: x)
    monkeypatch.setattr(peers, "write", lambda x, at, stride, gate, first: written.append((len(x), len(gate), first)))
    x, weight, _ = drawn(rows)
    peers.gated_linear_into(x, weight, weight, x, torch.zeros(2, dtype=torch.int64))
    assert written == [(rows, rows, 0)]
