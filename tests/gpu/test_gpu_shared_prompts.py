"""Shared prompts on a GPU: forwards have the bits of whole sequences, gradients are theirs and repeat themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.models import ScoreRow, load_model, score
from rlloop.models.shared_prompts import why_not_shared
from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile
from rlloop.trainer import Trainer, TrainSequence
from tests.support.checkpoints import EVERY, RECURRENT, make_checkpoint
from tests.support.image_models import FAMILIES as PICTURED
from tests.support.image_models import make_picture_groups, make_wide_image_checkpoint
from tests.support.shared_prefixes import whole_sequences
from tests.support.train_sequences import VOCAB, gradients, make_groups

OURS = ops_for(NumericsProfile())
FAMILIES = [[1088, 70, 1, 300], [77], [64, 64, 1000], [2048, 5, 65]]  # across parts of 1,024 keys
SHAPES = {"0.6B": (16, 8, 128), "narrow": (8, 2, 64), "one head of keys": (8, 1, 40)}  # H, G, D


def inputs(shape: tuple[int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    (heads, groups, width), total = shape, sum(map(sum, FAMILIES))
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(total, n, width, generator=generator).to("cuda", dtype) for n in (heads, groups, groups)]


def run(layout, leaves, rows, slopes, window):
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out = OURS.attention(*(x[rows] for x in leaves), layout, 0.1, None, window)
    return out.detach(), torch.autograd.grad(out, leaves, slopes[rows])


@pytest.mark.parametrize("window", [0, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention(shape: str, dtype: torch.dtype, window: int) -> None:
    rows, lengths = whole_sequences(FAMILIES, "cuda")
    leaves = inputs(SHAPES[shape], dtype)
    slopes = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)
    shared, whole = AttentionLayout.of_families(FAMILIES, "cuda"), AttentionLayout.of_sequences(lengths, "cuda")
    out, made = run(shared, leaves, slice(None), slopes, window)
    counts = torch.bincount(rows)[:, None, None]
    once = (slopes.float() / counts).to(dtype)
    again, exact = run(whole, leaves, rows, once, window)
    assert same_bits(out[rows], again)
    for mine, theirs in zip(made, exact, strict=True):
        limit = 2e-5 if dtype == torch.float32 else 1e-2
        assert (mine.float() - theirs.float()).norm() < limit * theirs.float().norm()
    _, repeated = run(shared, leaves, slice(None), slopes, window)
    assert all(same_bits(a, b) for a, b in zip(made, repeated, strict=True))


def test_wide_latents() -> None:
    rows, lengths = whole_sequences(FAMILIES, "cuda")
    q, k, _ = inputs((16, 1, 576), torch.bfloat16)
    shared, whole = AttentionLayout.of_families(FAMILIES, "cuda"), AttentionLayout.of_sequences(lengths, "cuda")
    slopes = torch.randn(len(q), 16, 512, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)

    def made(layout: AttentionLayout, rows: torch.Tensor | slice, slopes: torch.Tensor):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k)]
        queries, keys = (x[rows] for x in leaves)
        out = OURS.attention(queries, keys, keys[..., :512], layout, 0.05)
        return out.detach(), torch.autograd.grad(out, leaves, slopes[rows])

    counts = torch.bincount(rows)[:, None, None]
    (out, mine), (again, theirs) = made(shared, slice(None), slopes), made(whole, rows, (slopes / counts).bfloat16())
    assert same_bits(out[rows], again)
    for a, b in zip(mine, theirs, strict=True):
        assert (a.float() - b.float()).norm() < 1e-2 * b.float().norm()


def check_logprobs(folder: Path, batch: list[TrainSequence], device: str = "cuda") -> None:
    model = load_model(folder, dtype="bfloat16", device=device)
    rows = [ScoreRow(item.token_ids, item.predict, model_input=item.model_input) for item in batch]
    whole = score(model, rows)
    with torch.no_grad():
        assert all(same_bits(a, b.detach()) for a, b in zip(score(model, rows), whole, strict=True))
    if why_not_shared(model, trains=True) is None:
        shared = score(model, rows, share=True)
        assert all(same_bits(a.detach(), b.detach()) for a, b in zip(shared, whole, strict=True))


@pytest.mark.parametrize("family", EVERY)
def test_no_logprob_differs(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family, dtype=torch.bfloat16, vocab_size=VOCAB)
    check_logprobs(tmp_path, make_groups(((3, 140), (2, 70), (2, 64), (1, 90))))


def check_updates(folder: Path, batch: list[TrainSequence], device: str = "cuda") -> None:
    def update(share: bool) -> tuple[list[bytes], dict[str, torch.Tensor]]:
        trainer = Trainer(load_model(folder, dtype="bfloat16", device=device), TrainerConfig(share_prompts=share))
        result = trainer.forward_backward(batch, get_loss("grpo"))
        assert not share or result.metrics["trainer/shared_tokens"].value > 0
        return [np.asarray(each).tobytes() for each in result.logprobs], gradients(trainer)

    (logprobs, mine), (same, theirs), (_, again) = update(True), update(False), update(True)
    assert logprobs == same
    for name, grad in mine.items():
        assert same_bits(grad, again[name]), name
        assert (grad - theirs[name]).norm() < 3e-2 * theirs[name].norm(), name


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", *RECURRENT])
def test_updates(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family, dtype=torch.bfloat16, vocab_size=VOCAB)
    check_updates(tmp_path, make_groups())


@pytest.mark.parametrize("family", PICTURED)
def test_pictures(tmp_path: Path, family: str) -> None:
    """A picture goes on past the end of what is shared; its tower, too, has its gradients."""
    make_wide_image_checkpoint(tmp_path, family, torch.bfloat16)
    check_logprobs(tmp_path, make_picture_groups())
    check_updates(tmp_path, make_picture_groups())
