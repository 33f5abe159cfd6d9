"""The reference profile against transformers, both in float64: what a config.json means, without rounding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from rlloop.errors import ModelError
from rlloop.models import read_state
from tests.support.checkpoints import EVERY, YARN_ROPE, make_checkpoint
from tests.support.wide_models import our_logprobs, their_logprobs

logging.disable_progress_bar()

ERROR = 1e-13  # measured: within 3e-14
# Keys that nothing is read from, or that can only be off: null is as good as none, but for transformers' types.
SAY_NOTHING = {
    "model_type", "use_cache", "attention_dropout", "output_router_logits", "router_aux_loss_coef",
    "router_jitter_noise", "num_nextn_predict_layers", "hidden_dropout", "residual_in_fp32", "chunk_size", "expand",
    "mamba_proj_bias", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "num_logits_to_keep",
    "rescale_prenorm_residual", "time_step_floor", "time_step_limit", "time_step_max", "use_mamba_kernels",
}  # fmt: skip
SAID_BY_OTHERS = {
    "deepseek_v32": {"mlp_bias"}, "glm_moe_dsa": {"mlp_bias"},  # false in any case
    "nemotron_h": {"attention_bias", "n_shared_experts", "tie_word_embeddings"},
}  # fmt: skip
CUT_YARN = {**EVERY["gpt_oss"][1]["rope_parameters"], "truncate": True}
UNWRITTEN = ("rope_theta", "rope_scaling", "partial_rotary_factor", "sliding_window", "rotary_dim", "mlp_layer_types")


@pytest.mark.parametrize("family", EVERY)
def test_logprobs_in_float64_are_transformers(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family)
    ours = our_logprobs(tmp_path)
    assert ours.dtype == torch.float64
    assert (ours - their_logprobs(tmp_path)).abs().max() < ERROR


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
@pytest.mark.parametrize("family", EVERY)
def test_null_means_what_it_means_to_transformers_or_is_refused(tmp_path: Path, family: str) -> None:
    rope = {"rope_parameters": {**YARN_ROPE, "mscale_all_dim": 0}} if family in ("qwen2", "deepseek_v3") else {}
    make_checkpoint(tmp_path, family, **rope)
    written = json.loads((tmp_path / "config.json").read_text())
    inner = written.get("rope_parameters") or {}
    outer = {*written, *UNWRITTEN} - {"rope_parameters"} - SAY_NOTHING - SAID_BY_OTHERS.get(family, set())
    outside = [key for key in outer if loads(tmp_path, {**written, key: None})]
    inside = [key for key in inner if loads(tmp_path, {**written, "rope_parameters": {**inner, key: None}})]
    assert len(outside) > 3
    for changed in (  # many at once, since each takes a model of transformers'
        {**written, **dict.fromkeys(outside)},
        {**written, "rope_parameters": None},
        {**written, "rope_parameters": {**inner, **dict.fromkeys(inside)}},
    ):
        assert loads(tmp_path, changed)
        assert (our_logprobs(tmp_path) - their_logprobs(tmp_path)).abs().max() < ERROR, changed


def loads(folder: Path, config: dict) -> bool:
    (folder / "config.json").write_text(json.dumps(config))
    try:
        read_state(folder)
    except ModelError:
        return False
    return True


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v3", {"norm_topk_prob": None}),
        ("deepseek_v3", {"rope_interleave": None}),
        ("gpt_oss", {"rope_parameters": {**CUT_YARN, "truncate": None}}),
        ("gpt_oss", {"rope_parameters": {}}),  # is no missing one
        ("minimax_m2", {"partial_rotary_factor": 1.0}),
        ("minimax_m2", {"partial_rotary_factor": None}),
        ("qwen3_5_moe", {"partial_rotary_factor": None}),
    ],
)
def test_a_value_that_means_another_model(tmp_path: Path, family: str, changes: dict) -> None:
    """rope_parameters written by transformers would win over what older files say outside."""
    make_checkpoint(tmp_path, family, **({"rope_parameters": CUT_YARN} if family == "gpt_oss" else {}))
    before = their_logprobs(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    if "partial_rotary_factor" in changes:
        written["rope_theta"] = written.pop("rope_parameters")["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps({**written, **changes}))
    theirs = their_logprobs(tmp_path)
    assert (theirs - before).abs().max() > 1e-3
    assert (our_logprobs(tmp_path) - theirs).abs().max() < ERROR
