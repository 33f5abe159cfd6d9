"""Packed weights of models that read images, beside their plain towers: the bits of the same weights written plainly,
engine against trainer, and an adapter that trains over them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlloop import Engine, load_model, token_logprobs
from rlloop.algorithms import get_loss
from rlloop.config.run import AlgorithmConfig, RunConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError, ModelError
from rlloop.launch.make import load
from rlloop.models.adapter_weights import Adapter
from rlloop.models.config import parse_config
from rlloop.numerics.packed import PackedWeight, is_packed
from rlloop.trainer import Trainer
from tests.support.adapters import random_adapter
from tests.support.family_checks import SAMPLING
from tests.support.image_models import FAMILIES, inputs
from tests.support.image_samples import sampled
from tests.support.packed_models import FILE, FORMATS, make_packed_images, packed_matrix
from tests.support.samples import different
from tests.support.traffic import bits

CASES = [*((family, kind) for family in FAMILIES for kind in ("fp8", "int4")), ("qwen3_vl", "nvfp4_compressed")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    family, kind = request.param
    return make_packed_images(tmp_path_factory.mktemp("model"), family, kind)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_bits_of_plain_weights_and_of_the_trainer_on_images(folders: tuple[Path, Path], dtype: str) -> None:
    packed, plain = (load_model(folder, dtype=dtype) for folder in folders)
    values = dict(plain.named_parameters())
    kept = set()
    for name, parameter in packed.named_parameters():
        if isinstance(parameter, PackedWeight):
            kept.add(name)
            assert not parameter.requires_grad
        own = parameter.dequantised() if isinstance(parameter, PackedWeight) else parameter
        assert torch.equal(own, values[name]), name
    assert kept == {
        name for name, x in values.items()
        if "_proj" in name and x.ndim > 1 and not name.startswith("visual.") and "in_proj_a" not in name
        and "in_proj_b" not in name
    }  # fmt: skip
    prompts = [prompt for prompt, _ in inputs()]
    made, expected = (Engine(each, max_batch_tokens=16).generate(prompts, SAMPLING) for each in (packed, plain))
    assert list(map(bits, made)) == list(map(bits, expected))
    for prompt, each, sampling in zip(prompts, made, SAMPLING, strict=False):
        (row,) = token_logprobs(packed, [(prompt, each.token_ids)], sampling=[sampling])
        assert each.logprobs.tobytes() == row.detach().numpy().tobytes()


def test_an_adapter_trains_over_them(folders: tuple[Path, Path]) -> None:
    """Two updates: no token differs, and not a byte of the base changes."""
    base = load_model(folders[0], dtype="bfloat16").requires_grad_(False)
    before = {name: _bytes(x) for name, x in base.named_parameters()}
    policy = base.with_adapter(Adapter(random_adapter(base, 0), base.adapter_targets()))
    trainer, engine = Trainer(policy, TrainerConfig(lr=1e-2)), Engine(policy)
    factors = {name: weight.clone() for name, weight in trainer.compute_copy()}
    for step in range(2):
        batch = sampled(engine, step)
        result = trainer.forward_backward(batch, get_loss("grpo"))
        assert different(batch, list(result.logprobs)) == 0
        assert trainer.optim_step()["loss/grad_norm"] > 0
        engine.set_version(step + 1)
    assert {name: _bytes(x) for name, x in base.named_parameters()} == before
    assert not any(torch.equal(weight, factors[name]) for name, weight in trainer.compute_copy())


def _bytes(x: torch.Tensor) -> list[bytes]:
    stored = (x.codes, x.scales, x.tensor_scale) if isinstance(x, PackedWeight) else (x.detach(),)
    return [each.contiguous().view(torch.uint8).numpy().tobytes() for each in stored if each is not None]


def test_they_are_frozen_as_those_of_texts(tmp_path: Path) -> None:
    packed, _ = make_packed_images(tmp_path, "qwen3_vl", "fp8")
    with pytest.raises(ConfigError, match=r"which are frozen: set model\.lora\.rank"):
        load(RunConfig(algorithm=AlgorithmConfig(loss="grpo", advantage="group_norm")), packed)
    with pytest.raises(ConfigError, match=r"quantize=fp8 trains weights, and those of .* are packed"):
        load_model(packed, dtype="bfloat16", quantize="fp8")


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_a_packed_weight_of_the_tower_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    packed, _ = make_packed_images(tmp_path, "qwen3_vl", kind)
    tensors = load_file(packed / FILE)
    name = "model.visual.blocks.1.mlp.linear_fc2"
    weight = tensors.pop(f"{name}.weight")
    rows, width = weight.shape[0], weight.shape[1] // 32 * 32
    parts, _ = packed_matrix(kind, (rows, width), torch.Generator().manual_seed(0))
    save_file({**tensors, **{name + ending: part for ending, part in parts.items()}}, packed / FILE)
    with pytest.raises(ModelError, match=rf"vision tower are packed, .*: {name}\.weight; store them in bfloat16"):
        load_model(packed)


def test_the_quantization_config_may_stand_in_text_config(tmp_path: Path) -> None:
    packed, _ = make_packed_images(tmp_path, "qwen3_vl", "fp8", under="text_config")
    assert is_packed(*load_model(packed).parameters())
    raw = json.loads((packed / "config.json").read_text())
    both = parse_config({**raw, "quantization_config": FORMATS["fp8"][1]})
    assert both.quantization == FORMATS["fp8"][1]
    with pytest.raises(ModelError, match=r"quantization_config is .*; supported is that of text_config"):
        parse_config({**raw, "quantization_config": FORMATS["int4"][1]})
