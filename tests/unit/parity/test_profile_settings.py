"""The settings of a profile over a whole model: engine and trainer agree under each, and where they do not share one,
it is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rlloop.cli.main import main
from rlloop.errors import ConfigError
from rlloop.models import Model, load_model, new_model
from rlloop.numerics.profile import NumericsProfile
from rlloop.parity.monitor import compare
from rlloop.parity_tool.sides import parse_profile
from rlloop.rollout import Engine
from rlloop.types import Example, RewardResult, Sample, SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.doctored import diagnosed, rescored

EVERY = NumericsProfile(residual_norm="float32", attention_splits="64", tp_segments="4", all_reduce="rounded_chain")
# knob -> (its value, the operation in which it shows first, where, and the type in which a small model shows it)
SHOWS = {
    "residual_norm": ("float32", "rms_norm", "post_attention_layernorm", "bfloat16"),
    "attention_splits": ("64", "attention", "model.layers.0", "float32"),
    "tp_segments": ("2", "linear", "self_attn.o_proj", "float32"),
    "all_reduce": ("rounded_chain", "linear", "self_attn.o_proj", "bfloat16"),
    "expert_combine": ("bf16_each", "combine", "model.layers.0", "bfloat16"),
    "router_logits": ("compute", "router_logits", "mlp.gate", "bfloat16"),
}


def samples_of(engine: Engine, length: int = 90) -> list[Sample]:
    prompts = [np.random.default_rng(i).integers(3, 97, length + i).tolist() for i in range(3)]
    params = [SamplingParams(max_tokens=8, temperature=0.8, seed=i, ignore_eos=True) for i in range(3)]
    return [
        Sample(f"1/{i}/0", Example(str(i), made.prompt_ids, "", {}), made, "", RewardResult(0.0), group=i)
        for i, made in enumerate(engine.generate(prompts, params))
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3_moe")
    make_checkpoint(made, "qwen3_moe", dtype=torch.bfloat16)
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v32", "qwen3_5_moe", "nemotron_h"])
def test_engine_and_trainer_agree_under_all_settings(tmp_path: Path, family: str, dtype: str) -> None:
    make_checkpoint(tmp_path, family)
    model = load_model(tmp_path, dtype=dtype, profile=EVERY)
    samples = samples_of(Engine(model, max_batch_tokens=32, page_size=8))
    assert compare(samples, rescored(model, samples)).equal
    plain = model.with_profile(NumericsProfile())
    result = compare(samples, rescored(plain, samples))
    assert 0 < result.metrics["parity/k3"] < (1e-8 if dtype == "float32" else 0.05)
    assert model.fingerprint() != plain.fingerprint()


@pytest.mark.parametrize("knob", SHOWS)
def test_the_doctor_names_the_setting(folder: Path, knob: str) -> None:
    value, op, where, dtype = SHOWS[knob]
    trainer = load_model(folder, dtype=dtype, profile=NumericsProfile(tp_segments="4"))
    engine = Engine(trainer.with_profile(dataclasses.replace(trainer.profile, **{knob: value})))
    details = diagnosed(engine, trainer, samples_of(engine)).details
    assert (details["knob"], details["op"]) == (knob, op)
    assert details["where"].endswith(where)


@pytest.mark.parametrize(
    ("dtype", "shown"), [("float32", {"attention_splits", "tp_segments"}), ("bfloat16", {"residual_norm"})]
)
def test_the_command_says_what_each_brings_alone(tmp_path: Path, folder: Path, dtype: str, shown: set[str]) -> None:
    settings = "residual_norm=float32,attention_splits=64,tp_segments=4,all_reduce=rounded_chain"
    sides = str(folder), f"{folder}@rlloop,{settings}"
    assert parse_profile(f"rlloop,{settings}") == EVERY
    out = tmp_path / "report"
    main(["parity", *sides, "--dtype", dtype, "--sequences", "3", "--length", "90", "-o", str(out)])
    report = json.loads((out / "parity.json").read_text())
    assert {knob["name"]: (knob["a"], knob["b"]) for knob in report["knobs"]} == {
        "residual_norm": ("rounded", "float32"),
        "attention_splits": ("default", "64"),
        "tp_segments": ("1", "4"),
        "all_reduce": ("fp32_tree", "rounded_chain"),  # alone it is nothing: one rank has nobody to add to
    }
    assert {knob["name"] for knob in report["knobs"] if knob["alone"] > 0} == shown
    assert report["first_difference"]["knob"] == ("attention_splits" if dtype == "float32" else "tp_segments")


def test_another_form_of_latent_attention_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "deepseek_v3")
    sides, out = (str(tmp_path / "model"), f"{tmp_path / 'model'}@rlloop,latent=expanded"), tmp_path / "report"
    main(["parity", *sides, "--sequences", "3", "--length", "24", "-o", str(out)])
    report = json.loads((out / "parity.json").read_text())
    first, (knob,) = report["first_difference"], report["knobs"]
    assert (first["knob"], first["where"]) == ("latent", "model.layers.0.self_attn.o_proj")
    assert (knob["name"], knob["left"]) == ("latent", 0.0)
    assert knob["alone"] > 0


def test_what_a_model_or_a_device_cannot_follow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"tp_segments is 8, and model.layers.0.self_attn.o_proj sums over 60 inputs"):
        new_model(
            {
                "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 9, "hidden_size": 16,
                "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 3,
                "head_dim": 20, "max_position_embeddings": 8,
            },
            seed=0,
            profile=NumericsProfile(tp_segments="8"),
        )  # fmt: skip
    model = load_model(folder)
    monkeypatch.setattr(Model, "device", torch.device("cuda"))
    model.with_profile(NumericsProfile(expert_combine="bf16_each"))
    for knob in ("residual_norm", "attention_splits", "tp_segments", "all_reduce"):
        value = getattr(EVERY, knob)
        with pytest.raises(ConfigError, match=f"{knob}={value}, whose kernels are for CPUs.*device=cpu"):
            model.with_profile(NumericsProfile(**{knob: value}))
