"""Values and bits at the sizes of released models: long contexts, whole widths, hundreds of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlloop.models import new_model, redraw, token_logprobs
from rlloop.models.scoring import ScoreRow
from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile
from rlloop.rollout.engine.engine import Engine
from rlloop.types import Completion, SamplingParams
from tests.support.gpu_mixtures import RECURRENT, SIZES
from tests.support.gpu_models import CONFIG, drawn_on_gpu
from tests.support.traffic import bits

OURS = ops_for(NumericsProfile())
UNIT = 2.0**-8  # bfloat16's: a number is rounded by at most so much of itself
SEGMENT = 1024  # keys after which a softmax begins anew; a second pass joins the parts from the tenth on
HEADS = {  # H, G, D
    "Qwen3-8B": (32, 8, 128), "Qwen3-14B": (40, 8, 128), "Qwen3-0.6B": (16, 8, 128), "Qwen3-30B-A3B": (32, 4, 128),
    "gpt-oss": (64, 8, 64), "Qwen3.5-35B-A3B": (16, 2, 256),
}  # fmt: skip
LONG = [("Qwen3-8B", 16384), ("Qwen3-8B", 32768), *((name, 10000) for name in HEADS)]


def long_inputs(name: str, length: int) -> tuple[list[Tensor], float]:
    """(q, k, v, each [T, heads, D]; scale): scores are about 1, so that every segment has its share of the mass."""
    heads, groups, width = HEADS[name]
    generator = torch.Generator("cuda").manual_seed(length)
    shapes = [(length, n, width) for n in (heads, groups, groups)]
    return [torch.randn(s, generator=generator, device="cuda").bfloat16() for s in shapes], width**-0.5


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, step: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, outputs [rows, H, D], their noise) in float64, `step` rows at a time.

    Noise is what rounding to bfloat16 does to an output at most, as a standard deviation. A kernel rounds twice: each
    mass before it multiplies its value, and the output. A rounding is off by a uniform share, up to UNIT, of what is
    rounded: a standard deviation of UNIT / sqrt(3) or less. Masses of different keys are rounded independently, so
    noise^2 = UNIT^2 / 3 (sum of (w_j v_j)^2 + output^2). What float32 adds is a thousandth of that.
    """
    length, heads, width = q.shape
    groups = k.shape[1]
    keys, values = (x.double().transpose(0, 1).contiguous() for x in (k, v))  # [G, T, D]
    squares = values.square()
    for begin in range(0, length, step):
        end = min(begin + step, length)
        rows = q[begin:end].double().view(end - begin, groups, -1, width).permute(1, 2, 0, 3)  # [G, H / G, rows, D]
        scores = torch.matmul(rows.reshape(groups, -1, width), keys[:, :end].mT).mul_(scale)
        unseen = torch.ones(end - begin, end, dtype=torch.bool, device=q.device).triu_(begin + 1)
        scores.view(groups, -1, end - begin, end).masked_fill_(unseen, -torch.inf)
        weights = scores.softmax(-1)
        out, noise = torch.bmm(weights, values[:, :end]), torch.bmm(weights.square_(), squares[:, :end])
        noise = (noise + out.square()).mul_(1 / 3).sqrt_().mul_(UNIT)
        out, noise = (x.view(groups, -1, end - begin, width).permute(2, 0, 1, 3) for x in (out, noise))
        yield slice(begin, end), out.reshape(-1, heads, width), noise.reshape(-1, heads, width)


def largest_errors(made: Tensor, inputs: list[Tensor], scale: float, step: int = 256) -> tuple[float, float]:
    """In units of noise: (of the query where it is largest, the root mean square; the largest of any number)."""
    by_query = by_number = torch.zeros((), dtype=torch.float64, device=made.device)
    for rows, exact, noise in exact_attention(*inputs, scale=scale, step=step):
        error = (made[rows].double() - exact) / noise
        by_query = torch.maximum(by_query, error.square().mean((1, 2)).sqrt().max())
        by_number = torch.maximum(by_number, error.abs().max())
    return float(by_query), float(by_number)


@pytest.fixture(scope="module", params=LONG, ids=lambda each: f"{each[0]} {each[1]}")
def prefilled(request):
    (q, k, v), scale = long_inputs(*request.param)
    return [q, k, v], scale, OURS.attention(q, k, v, AttentionLayout.of_sequences([len(q)], "cuda"), scale)


def test_values_of_long_contexts_are_float64_s_rounded_twice(prefilled):
    """A segment that is left out is tens of units off."""
    inputs, scale, made = prefilled
    by_query, by_number = largest_errors(made, inputs, scale)
    print(f"{len(made)} tokens: root mean square of the worst query {by_query:.2f}, worst number {by_number:.2f}")
    assert 0.3 < by_query < 1.2
    assert by_number < 7  # of 134 million numbers


def in_pages(k: Tensor, v: Tensor, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same keys and values in scattered pages, NaN where nothing is: (k store, v store, first slot of each)."""
    count = -(-len(k) // page)
    starts = torch.randperm(count, generator=torch.Generator().manual_seed(1)).cuda() * page
    at = torch.arange(len(k), device="cuda")
    keys, values = (x.new_full((count * page, *x.shape[1:]), torch.nan) for x in (k, v))
    for store, x in ((keys, k), (values, v)):
        store[starts[at // page] + at % page] = x
    return keys, values, starts


@pytest.mark.parametrize("page", [16, 128])
def test_long_contexts_are_decoded_and_prefilled_in_chunks_to_the_same_bits(prefilled, page, monkeypatch):
    from rlloop.numerics.kernels.triton import attention

    (q, k, v), scale, whole = prefilled
    length = len(q)
    keys, values, starts = in_pages(k, v, page)
    segments = torch.arange(SEGMENT, length, SEGMENT)
    last = torch.cat([segments - 1, segments, segments + 1, torch.tensor([0, 63, length - 77, length - 2, length - 1])])
    last = last.unique().clamp(max=length - 1).cuda()

    def layout(counts: list[int], contexts: Tensor) -> AttentionLayout:
        return AttentionLayout(
            query_start=torch.tensor([0, *counts], device="cuda").cumsum(0), context=contexts,
            block_start=starts.expand(len(counts), -1), block_size=page, contiguous=False,
        )  # fmt: skip

    for gluon in (True, False):  # Hopper's kernels, and those of every GPU
        if not gluon:
            monkeypatch.setattr(attention, "gluon_runs", lambda device: False)
        decoded = OURS.attention(q[last], keys, values, layout([1] * len(last), last), scale)
        assert same_bits(decoded, whole[last]), f"decoded, gluon {gluon}"
        for begin, end in ((length - 300, length), (9 * SEGMENT - 5, 9 * SEGMENT + 60)):
            part = layout([end - begin], torch.tensor([begin], device="cuda"))
            assert same_bits(OURS.attention(q[begin:end], keys, values, part, scale), whole[begin:end]), (begin, gluon)
        mixed = torch.cat([torch.arange(9300, 9350, device="cuda"), last])  # a chunk beside decoding
        part = layout([50, *[1] * len(last)], torch.cat([mixed[:1], last]))
        assert same_bits(OURS.attention(q[mixed], keys, values, part, scale), whole[mixed]), f"mixed, gluon {gluon}"


QWEN3_8B = {  # its widths
    "vocab_size": 4096, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "rope_theta": 1000000.0, "initializer_range": 0.02,
}  # fmt: skip


@pytest.mark.parametrize("length", [16384, 32768])
def test_the_trainer_has_the_engine_s_bits_after_a_long_prompt(length):
    """Of a model with an 8B model's widths; what the engine sampled in 64 steps is predicted in one forward."""
    model = drawn_on_gpu(QWEN3_8B)
    rng = np.random.default_rng(length)
    prompts = [rng.integers(3, 4096, n).tolist() for n in (length, 100, length - 4097)]
    sampling = [SamplingParams(64, seed=i, ignore_eos=True) for i in range(len(prompts))]
    made = Engine(model, max_cache_tokens=2 * length + 4096).generate(prompts, sampling)
    with torch.no_grad():
        scored = token_logprobs(model, [(c.prompt_ids, c.token_ids) for c in made], max_tokens=length)
    different = [
        int((c.logprobs.view(np.int32) != row.cpu().numpy().view(np.int32)).sum())
        for c, row in zip(made, scored, strict=True)
    ]
    assert different == [0, 0, 0]
    assert all(c.logprobs.std() > 0.1 for c in made), "all tokens are alike: nothing was compared"
    row = ScoreRow(made[0].prompt_ids + made[0].token_ids, range(length, length + 64), sampling[0])
    assert redraw(model, [row])[0].token_ids.tolist() == made[0].token_ids


LONGEST = 262144
LONG_MODELS: dict[str, dict[str, Any]] = {
    "0.6B": {**CONFIG, "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 2, "initializer_range": 0.02},
    "recurrent": {**SIZES, "model_type": "qwen3_5_moe_text", **RECURRENT["qwen3_5_moe_text"]},
}  # fmt: skip


def check_chunks(config: dict[str, Any], length: int, sizes: tuple[int, int], device: str = "cuda") -> None:
    """A prompt prefilled in chunks of either size, the tokens sampled after it, and the trainer's one forward."""
    model = new_model({**config, "max_position_embeddings": length + 64}, seed=0, dtype="bfloat16").to(device)
    for name, weight in model.named_parameters():
        if name.endswith("q_norm.weight"):  # attention to few keys: what one of the many adds is not rounded away
            weight.data.add_(2)
    prompt = np.random.default_rng(0).integers(3, config["vocab_size"], length).tolist()
    read, sampled = list[np.ndarray](), list[Completion]()
    for size in sizes:
        engine = Engine(model, max_batch_tokens=size, max_cache_tokens=length + 128, prefix_caching=False)
        read += engine.prefill_logprobs([prompt])
        sampled += engine.generate([prompt], SamplingParams(32, seed=0, ignore_eos=True))
    assert read[0].std() > 0.1, "all tokens are alike: nothing was compared"
    assert read[0].tobytes() == read[1].tobytes()
    assert bits(sampled[0]) == bits(sampled[1])
    last = length - 512
    with torch.no_grad():
        (scored,) = token_logprobs(model, [(prompt[:last], prompt[last:] + sampled[0].token_ids)])
    assert np.concatenate([read[0][last - 1 :], sampled[0].logprobs]).tobytes() == scored.cpu().numpy().tobytes()


@pytest.mark.parametrize("name", LONG_MODELS)
def test_chunks_of_the_longest_prompt_have_the_trainer_s_bits(name):
    check_chunks(LONG_MODELS[name], LONGEST, (8192, 5000))


ROWS = [65, 96, 127, 200, 257, 511, 640, 1000, 1023]
WEIGHTS = {  # K, N
    "0.6B": [(1024, 2048), (1024, 1024), (2048, 1024), (1024, 3072), (3072, 1024)],
    "8B": [(4096, 4096), (4096, 1024), (4096, 12288), (12288, 4096)],
}
OUTPUT_HEADS = {"0.6B": (1024, 151936), "8B": (4096, 151936)}


def check_product(product, width: int, outputs: int, unit: float) -> None:
    """`unit`: of the outputs' type. Factors have outputs of about 1, so partial sums are up to 6 or so; each of K
    additions leaves off at most 2^-23 of one, and then the output is rounded."""
    generator = torch.Generator("cuda").manual_seed(width + outputs)
    x = torch.randn(max(ROWS), width, device="cuda", generator=generator).bfloat16()
    weight = (torch.randn(outputs, width, device="cuda", generator=generator) / width**0.5).bfloat16()
    whole = product(x, weight)
    for begin in range(0, outputs, 16384):
        exact = x.double() @ weight[begin : begin + 16384].double().T
        error = (whole[:, begin : begin + 16384].double() - exact).abs()
        assert (error <= unit * exact.abs() + 6 * width * 2.0**-23).all()
        assert exact.square().mean() > 0.5
    for rows in ROWS:
        assert same_bits(product(x[:rows], weight), whole[:rows]), f"the first {rows} rows"
        other = product(x[-rows:], weight)  # at other places
        assert same_bits(other, whole[-rows:]), f"the last {rows} rows"
        for row in (0, 64, rows // 2, rows - 1):
            assert same_bits(product(x[row : row + 1], weight), whole[row : row + 1]), f"row {row} alone"


@pytest.mark.parametrize("shape", WEIGHTS)
def test_products_of_hundreds_of_rows(shape):
    for width, outputs in WEIGHTS[shape]:
        check_product(OURS.linear, width, outputs, UNIT)


@pytest.mark.parametrize("shape", OUTPUT_HEADS)
def test_logits_of_hundreds_of_rows(shape):
    check_product(OURS.logits, *OUTPUT_HEADS[shape], 2.0**-24)


def test_products_of_hundreds_of_rows_that_share_a_launch():
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(rows: int, width: int) -> Tensor:
        return (torch.randn(rows, width, device="cuda", generator=generator) / width**0.5).bfloat16()

    for width, heads, groups, inner in ((1024, 2048, 1024, 3072), (4096, 4096, 1024, 12288)):
        q, k, v, gate, up = (draw(n, width) for n in (heads, groups, groups, inner, inner))
        x = draw(max(ROWS), width)
        with torch.inference_mode():
            assert OURS.fuses
            products = [OURS.linear(x, weight) for weight in (q, k, v)]
            gated = OURS.silu_mul(OURS.linear(x, gate), OURS.linear(x, up))
            for rows in ROWS:
                for together, alone in zip(OURS.qkv_linear(x[:rows], q, k, v), products, strict=True):
                    assert same_bits(together, alone[:rows]), f"{rows} rows"
                assert same_bits(OURS.gated_linear(x[:rows], gate, up), gated[:rows]), f"{rows} rows"
