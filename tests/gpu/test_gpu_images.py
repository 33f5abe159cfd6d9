"""Models that read images on CUDA: the tower's operations, and engine and trainer with the same bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.utils import logging

from rlloop import Engine, SamplingParams, load_model, token_logprobs
from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.inputs import BytePatches, Image
from rlloop.models.vision import patches_on
from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import Ops, ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile
from rlloop.trainer import Trainer
from tests.support.image_models import FAMILIES, inputs, make_wide_image_checkpoint, theirs, wide_prompts
from tests.support.samples import as_sample, different
from tests.support.traffic import bits

logging.disable_progress_bar()

OURS, EXACT = ops_for(NumericsProfile()), ops_for(NumericsProfile.preset("reference"))
CUDA = torch.device("cuda")
TYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [  # float32 compiles slowly where heads are wide
    (20, torch.float32), (72, torch.float32), (64, torch.bfloat16), (72, torch.bfloat16), (128, torch.bfloat16),
    (72, torch.float16),
]  # fmt: skip
LENGTHS = [4, 130, 1500, 64, 1024]  # patches of images
ROWS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "gelu": (lambda ops, x: ops.gelu(x, False), [(1300, 75)]),
    "gelu_tanh": (lambda ops, x: ops.gelu(x, True), [(1300, 75)]),
    "layer_norm": (lambda ops, x, w, b: ops.layer_norm(x, w, b, 1e-6), [(1300, 1152), (1152,), (1152,)]),
    "layer_norm of squares": (lambda ops, x, w, b: ops.layer_norm(x, w, b, 1e-6), [(1300, 4608), (4608,), (4608,)]),
}


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(CUDA, dtype)


def attend(ops: Ops, lengths: list[int], *qkv: Tensor) -> Tensor:
    return ops.full_attention(*qkv, AttentionLayout.of_sequences(lengths, CUDA), 0.2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ROWS)
def test_a_row_and_its_gradient_know_no_other(name, dtype):
    work, shapes = ROWS[name]
    x, *rest = (drawn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    grad = drawn(*x.shape, dtype=dtype, seed=9)

    def made(rows: slice) -> list[Tensor]:
        leaf = x[rows].clone().requires_grad_()
        out = work(OURS, leaf, *rest)
        return [out.detach(), *torch.autograd.grad(out, leaf, grad[rows])]

    whole = made(slice(None))
    for rows in (slice(0, 1), slice(7, 8), slice(3, 20), slice(1000, 1300), slice(1, 1300)):
        assert all(same_bits(one, other[rows]) for one, other in zip(made(rows), whole, strict=True)), rows


@pytest.mark.parametrize(("width", "dtype"), HEADS)
def test_an_image_and_its_gradients_know_no_other(width, dtype):
    qkv = [drawn(sum(LENGTHS), 3, width, dtype=dtype, seed=seed) for seed in range(3)]
    grad = drawn(sum(LENGTHS), 3, width, dtype=dtype, seed=9)

    def made(ops: Ops, rows: slice, lengths: list[int]) -> list[Tensor]:
        leaves = [x[rows].clone().requires_grad_() for x in qkv]
        out = attend(ops, lengths, *leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad[rows])]

    whole, again = made(OURS, slice(None), LENGTHS), made(OURS, slice(None), LENGTHS)
    assert all(same_bits(one, other) for one, other in zip(whole, again, strict=True))
    begin, wrong = 0, []
    for length in LENGTHS:
        rows = slice(begin, begin + length)
        wrong += [
            (length, name)
            for name, one, other in zip(("out", "q", "k", "v"), made(OURS, rows, [length]), whole, strict=True)
            if not same_bits(one, other[rows])
        ]
        begin += length
    assert not wrong
    causal = OURS.attention(*qkv, AttentionLayout.of_sequences(LENGTHS, CUDA), 0.2)
    last = torch.tensor(LENGTHS, device=CUDA).cumsum(0) - 1
    assert same_bits(causal[last], whole[0][last])  # these queries read the same keys


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [40, 75, 288, 1152, 4608])
def test_a_norm_with_its_sum_has_the_bits_of_the_two(width, dtype):
    x, residual = (drawn(1300, width, dtype=dtype, seed=seed) for seed in range(2))
    weight, bias = (drawn(width, dtype=dtype, seed=seed) for seed in (2, 3))
    with torch.no_grad():
        normed, total = OURS.add_layer_norm(x, residual, weight, bias, 1e-6)
    assert same_bits(total, x + residual)
    assert same_bits(normed, OURS.layer_norm(x + residual, weight, bias, 1e-6))
    apart = OURS.add_layer_norm(x.requires_grad_(), residual, weight, bias, 1e-6)  # two launches, as it has a gradient
    assert same_bits(apart[0].detach(), normed)


@pytest.mark.parametrize(
    ("heads", "width", "dtype"), [(3, 20, torch.float32), (16, 72, torch.bfloat16), (3, 72, TYPES[2])]
)
def test_parts_of_wider_rows_have_the_bits_of_their_copies(heads, width, dtype):
    """Queries, keys and values as one product makes them, without a copy, and their gradients."""
    wide, tokens = drawn(sum(LENGTHS), 3 * heads * width, dtype=dtype), sum(LENGTHS)
    cos, sin = (drawn(tokens, width // 2, seed=seed) for seed in (1, 2))
    at, grad = torch.arange(tokens, device=CUDA), drawn(tokens, heads, width, dtype=dtype, seed=9)

    def made(copied: bool) -> list[Tensor]:
        leaf = wide.clone().requires_grad_()
        q, k, v = (x.contiguous() if copied else x for x in leaf.unflatten(-1, (3, heads, width)).unbind(1))
        out = attend(OURS, LENGTHS, OURS.rope(q, at, cos, sin), OURS.rope(k, at, cos, sin), v)
        return [out.detach(), *torch.autograd.grad(out, leaf, grad)]

    assert all(same_bits(one, other) for one, other in zip(made(False), made(True), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [LENGTHS, [1024, 1, 700], [2090, 64]])
@pytest.mark.parametrize(("heads", "width"), [(16, 72), (6, 72), (4, 64), (2, 80), (2, 128)])
def test_both_kernels_of_attention_agree_and_read_no_other_image(heads, width, lengths, dtype, monkeypatch):
    """The first image's numbers are not numbers; of a head narrower than a tile the next head's are read, too."""
    from rlloop.numerics.kernels.triton import attention, launch, prefill

    monkeypatch.setattr(prefill, "TOWER_ROWS", 0)
    tokens = sum(lengths)
    q, k = (drawn(tokens, heads, width, dtype=dtype, seed=seed) for seed in range(2))
    v = drawn(tokens, 3, heads, width, dtype=dtype, seed=2)[:, 2]  # a part of wider rows
    for each in (q, k, v):
        each[: lengths[0]] = torch.nan
    layout = AttentionLayout.of_sequences(lengths, CUDA)
    read, step = attention.value_rows(v)
    assert launch.gluon_runs(CUDA), "another GPU, or another Triton: there is one kernel only"
    assert prefill.takes(q, k, read, step, 1, max(lengths), causal=False)
    with torch.no_grad():
        whole = OURS.full_attention(q, k, v, layout, 0.2)
        monkeypatch.setattr(attention, "gluon_runs", lambda device: False)
        other = OURS.full_attention(q, k, v, layout, 0.2)
    assert whole[lengths[0] :].isfinite().all()
    assert same_bits(whole[lengths[0] :], other[lengths[0] :])


@pytest.mark.parametrize("dtype", TYPES)
def test_patches_that_the_device_looks_up_or_rounds_are_the_hosts(dtype):
    codes = np.random.default_rng(0).integers(0, 256, (24, 3, 256), dtype=np.uint8)
    numbers = np.random.default_rng(1).normal(size=(3, 256)).astype(np.float32)
    pixels = Image(BytePatches(codes, numbers, 2), 4, 6)
    other, plain = Image(BytePatches(codes[::-1], -numbers, 2), 4, 6), Image(pixels.patches, 4, 6)
    for images in ([pixels], [plain], [pixels, pixels, other, plain, pixels]):
        made = patches_on(images, CUDA, dtype)
        assert made.device.type == "cuda"
        assert same_bits(made.cpu(), torch.cat([torch.from_numpy(each.patches) for each in images]).to(dtype))


@pytest.mark.parametrize("name", [*ROWS, "full_attention"])
def test_values_and_gradients_are_the_references(name):
    work, shapes = ROWS.get(name) or (lambda ops, *qkv: attend(ops, [130, 1, 70], *qkv), [(201, 2, 72)] * 3)

    def made(ops: Ops, dtype: torch.dtype) -> list[Tensor]:
        leaves = [drawn(*shape, seed=seed).to(dtype).requires_grad_() for seed, shape in enumerate(shapes)]
        out = work(ops, *leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, drawn(*out.shape, seed=9).to(dtype))]

    errors = [
        float((mine - exact).norm() / exact.norm())
        for mine, exact in zip(made(OURS, torch.float32), made(EXACT, torch.float64), strict=True)
    ]
    print(f"{name}: errors {errors}")
    assert max(errors) < 2e-6
    coarse = [
        float((mine.double() - exact.double()).norm() / exact.double().norm())
        for mine, exact in zip(made(OURS, torch.bfloat16), made(EXACT, torch.bfloat16), strict=True)
    ]
    print(f"{name}: errors in bfloat16 {coarse}")
    assert max(coarse) < 2e-2


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_have_the_same_bits(tmp_path, family, dtype):
    make_wide_image_checkpoint(tmp_path, family, torch.bfloat16)
    model = load_model(tmp_path, dtype=dtype, device="cuda")
    asked = wide_prompts()
    sampling = [
        SamplingParams(12 + i % 5, seed=i, temperature=(1.0, 0.7, 0.0)[i % 3], ignore_eos=True)
        for i in range(len(asked))
    ]
    made, wrong = Engine(model).generate(asked, sampling), {}
    for name, settings in {
        "chunks": {"max_batch_tokens": 48, "page_size": 64, "prefix_caching": False}, "few": {"max_running": 3},
        "preempted": {"max_cache_tokens": 384, "max_batch_tokens": 96}, "one": {"max_running": 1},
    }.items():  # fmt: skip
        engine = Engine(model, **settings)
        again, stats = engine.generate(asked, sampling), engine.stats()
        wrong[name] = sum(bits(a) != bits(b) for a, b in zip(again, made, strict=True))
        assert name != "preempted" or min(stats.preemptions, stats.cached_tokens) > 0, stats
    pairs = [(prompt, each.token_ids) for prompt, each in zip(asked, made, strict=True)]
    for tokens in (None, 300):
        scored = token_logprobs(model, pairs, sampling=sampling, max_tokens=tokens)
        samples = [as_sample(i, each, 0.0) for i, each in enumerate(made)]
        wrong[f"trainer, {tokens}"] = different(samples, [s.detach().cpu().numpy() for s in scored])
    print(f"{family} {dtype}: differ {wrong}")
    assert not any(wrong.values()), wrong


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_transformers(tmp_path, family):
    reference = make_wide_image_checkpoint(tmp_path, family, torch.float32)
    model = load_model(tmp_path, device="cuda")
    mine, wanted = token_logprobs(model, inputs()), []
    for prompt, tokens in inputs():
        logits = theirs(reference, prompt, tokens).log_softmax(-1)
        wanted.append(logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0])
    away = max(float((a.cpu() - b).detach().abs().max()) for a, b in zip(mine, wanted, strict=True))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(len(row), generator=generator) for row in wanted]
    for rows in (mine, wanted):
        torch.cat([row * each.to(row.device) for row, each in zip(rows, weights, strict=True)]).sum().backward()
    named = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): parameter.grad
        for name, parameter in reference.named_parameters()
    }
    errors = {
        name: float((parameter.grad.cpu() - named[name]).norm() / named[name].norm())
        for name, parameter in model.named_parameters()
    }
    worst = max(errors, key=errors.__getitem__)
    print(f"{family}: logprobs {away:.1e}, gradients {errors[worst]:.1e} ({worst})")
    assert named.keys() == errors.keys()
    assert away < 3e-4
    assert errors[worst] < 5e-4


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_equals_engine_before_and_after_every_update(tmp_path, family):
    make_wide_image_checkpoint(tmp_path, family, torch.bfloat16)
    model = load_model(tmp_path, dtype="bfloat16", device="cuda")
    engine, trainer = Engine(model), Trainer(model, TrainerConfig(lr=3e-3, max_batch_tokens=1500))
    rng, asked = np.random.default_rng(0), wide_prompts()
    for step in range(2):
        sampling = [SamplingParams(16, seed=100 * step + i, ignore_eos=True) for i in range(len(asked))]
        samples = [as_sample(i, c, float(rng.normal())) for i, c in enumerate(engine.generate(asked, sampling))]
        result = trainer.forward_backward(samples, get_loss("grpo"))
        before = model.visual.pos_embed.weight.detach().clone()
        wrong, norm = different(samples, result.logprobs), trainer.optim_step()["loss/grad_norm"]
        print(f"{family}, step {step}: {wrong} tokens differ, gradient norm {norm}")
        assert wrong == 0
        assert norm > 0
        assert not torch.equal(model.visual.pos_embed.weight, before)
        assert different(samples, trainer.logprobs(samples)) > 50
        engine.set_version(step + 1)
