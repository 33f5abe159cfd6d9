"""Diagnosis under context parallelism: a rank has its own tokens, or its own heads of all tokens, and the engine has
all; and over the trainer's stages, of which each has its own layers. A planted fault is named with the operation, the
ranks and the token; without one, nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlloop import Engine, load_model
from rlloop.models.adapter_weights import Adapter
from rlloop.models.config import read_config
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from rlloop.parity.across_ranks import of_ranks
from rlloop.parity.first_difference import diagnose
from rlloop.parity.monitor import Finding, TokenDifference
from rlloop.types import Example, ModelInput, RewardResult, Sample, SamplingParams
from tests.support.adapters import random_adapter
from tests.support.checkpoints import make_checkpoint
from tests.support.image_models import image, make_image_checkpoint, prompt_with
from tests.support.planted_faults import faulty
from tests.support.ranks import run_ranks

PROMPT = [3, 10, 17, 24, 31]  # and 17 more are drawn, of which the last is not read: 10 and 11 tokens for 2 ranks
FAMILIES = ("qwen3", "gpt_oss", "deepseek_v32", "qwen3_5_moe", "nemotron_h")


def found(
    folder: Path, layout: Layout, op: str, rank: int | None, prompt: ModelInput | list[int], adapted: bool
) -> Finding:
    """All ranks' finding for a token that has other bits; the trainer's `op` is at fault on `rank`, or on none.

    `adapted`: both have an adapter.
    """
    context = join(torch.device("cpu"), layout)
    engine, trainer = load_model(folder), load_model(folder, context=context)
    if adapted:
        weights = random_adapter(engine, 0)
        engine, trainer = (each.with_adapter(Adapter(weights, each.adapter_targets())) for each in (engine, trainer))
    if rank == context.rank:
        trainer.ops = faulty(op)(trainer.profile).with_adapters(trainer.ops.adapters)
    sampling = SamplingParams(max_tokens=17, seed=3, ignore_eos=True)
    [made] = Engine(engine).generate([prompt], [sampling])
    sample = Sample("1/0/0", Example("0", made.prompt_ids, "", {}), made, "", RewardResult(0.0), group=0)
    token = TokenDifference("1/0/0", 16, len(prompt) + 16, made.token_ids[16], 0.0, "", 0.0, "")
    return of_ranks(context.ranks("world").gather_objects(diagnose(engine, trainer, sample, token)))


def findings(
    folder: Path,
    layout: Layout,
    faults: list[tuple[str, int | None]],
    prompt: ModelInput | None = None,
    adapted: bool = False,
) -> list[Finding]:
    return [found(folder, layout, op, rank, prompt or PROMPT, adapted) for op, rank in faults]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_differs_without_a_fault(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path / family, family)
    experts = family not in ("qwen3",)
    for ep in (1, 2) if experts else (1,):
        for [finding] in run_ranks(2, findings, tmp_path / family, Layout(cp=2, ep=ep), [("", None)]):
            assert finding.details["op"] is None, finding.text


def test_pictures_are_compared_by_patches_and_tokens(tmp_path: Path) -> None:
    make_image_checkpoint(tmp_path / "qwen3_vl", "qwen3_vl")
    prompt = prompt_with([20, 21], image(8, 6, 1), [22], image(4, 2, 2), [23])
    faults = [("", None), ("full_attention", 1), ("attention", 1)]
    [nothing, tower, text], _ = run_ranks(2, findings, tmp_path / "qwen3_vl", Layout(cp=2), faults, prompt)
    assert nothing.details["op"] is None, nothing.text
    assert "On rank 1 alone: The first operation that differs: full_attention at visual.blocks.0 " in tower.text
    assert "On rank 1 alone: The first operation that differs: attention at model.layers.0 " in text.text


CASES = {
    "qwen3": ("attention", "rms_norm", "silu_mul"),
    "deepseek_v32": ("sparse_attention", "rms_norm"),
    "qwen3_5_moe": ("causal_conv", "scan", "recurrent_gates", "attention", "combine"),
    "nemotron_h": ("causal_conv", "scan"),
}


@pytest.mark.parametrize("family", CASES)
def test_a_fault_of_one_rank_is_named_with_the_rank_and_the_token(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path / family, family)
    faults = [(op, rank) for op in CASES[family] for rank in (0, 1)]
    results, _ = run_ranks(2, findings, tmp_path / family, Layout(cp=2), faults)
    for (op, rank), finding in zip(faults, results, strict=True):
        assert finding.text.startswith(f"On rank {rank} alone: The first operation that differs: "), finding.text
        named = finding.details["op"]
        assert named == op or (op == "rms_norm" and named == "residual sum"), finding.text
        if op == "rms_norm":  # of single tokens: a rank has its own range of them
            assert finding.details["position"] == 10 * rank, finding.text


def test_a_fault_of_one_stage_is_named_with_its_rank(tmp_path: Path) -> None:
    """The logits differ on every rank."""
    make_checkpoint(tmp_path / "qwen3", "qwen3")
    faults = [("", None), ("attention", 0), ("attention", 1), ("logits", 1)]
    [nothing, *stages, head], _ = run_ranks(2, findings, tmp_path / "qwen3", Layout(pp=2), faults)
    assert nothing.details["op"] is None, nothing.text
    layers = read_config(tmp_path / "qwen3").num_layers
    for rank, finding in enumerate(stages):
        layer = rank * layers // 2
        assert (
            f"On rank {rank} alone: The first operation that differs: attention at model.layers.{layer} "
            in finding.text
        )
    assert head.text.startswith("On each of 2 ranks: The first operation that differs: logits at lm_head"), head.text


@pytest.mark.parametrize(
    ("family", "layout", "ops"),
    [
        ("qwen3", Layout(cp=2), ("linear", "attention")),
        ("deepseek_v32", Layout(cp=2), ("head_linear", "experts")),
        ("qwen3", Layout(pp=2), ("linear", "attention")),
        ("qwen3", Layout(dp_shard=2), ("linear", "logits")),
    ],
)
def test_a_fault_under_an_adapter_is_named_with_its_rank(
    tmp_path: Path, family: str, layout: Layout, ops: tuple[str, ...]
) -> None:
    make_checkpoint(tmp_path / family, family)
    faults = [("", None), *((op, 1) for op in ops)]
    [nothing, *results], _ = run_ranks(2, findings, tmp_path / family, layout, faults, None, True)
    assert nothing.details["op"] is None, nothing.text
    for op, finding in zip(ops, results, strict=True):
        assert finding.text.startswith(f"On rank 1 alone: The first operation that differs: {op} at "), finding.text
