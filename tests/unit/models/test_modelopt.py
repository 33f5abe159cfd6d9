"""FP8 weights by ModelOpt: their format may be in config.json, or only in hf_quant_config.json beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlloop import Engine, SamplingParams, load_model
from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ModelError
from rlloop.models.adapter_weights import Adapter
from rlloop.models.config import read_config
from rlloop.models.packed_config import MODELOPT, read_scheme, with_modelopt
from rlloop.numerics.packed import FP8, is_packed
from rlloop.trainer import Trainer
from tests.support.adapters import random_adapter
from tests.support.packed_models import FILE, FORMATS, make_packed
from tests.support.samples import as_sample, different
from tests.support.traffic import bits

SAMPLING = [SamplingParams(max_tokens=6, seed=seed, ignore_eos=True) for seed in range(2)]
BESIDE: dict[str, Any] = FORMATS["fp8_tensor"][1]
EIGHT = {"dynamic": False, "num_bits": 8, "type": "float"}
# As ModelOpt writes them into config.json: now, and in 2025 (of Qwen3-32B, in ai-dynamo/aiconfigurator, 095f58a).
NOW = {
    "quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt", "version": "0.45.0"},
    "ignore": ["lm_head"], "kv_cache_scheme": EIGHT,
    "config_groups": {"group_0": {"input_activations": EIGHT, "weights": EIGHT, "targets": ["Linear"]}},
}  # fmt: skip
OLDER = {
    "quant_algo": "FP8", "producer": {"name": "modelopt", "version": "0.31.0"}, "ignore": ["lm_head"],
    "kv_cache_scheme": "FP8", "config_groups": {"group_0": {"input_activations": EIGHT, "weights": EIGHT}},
}  # fmt: skip


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return make_packed(tmp_path, "fp8_tensor")


def with_quantization(folder: Path, quantization: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


@pytest.mark.parametrize("kind", ["fp8_tensor", "fp8_tensor_dense", "fp8_rows"])
def test_all_projections_stay_packed_and_an_adapter_trains_as_over_plain_ones(tmp_path: Path, kind: str) -> None:
    """Of Nemotron: Mamba's, attention's, the shared and the routed experts', those of latents, and a plain layer's."""
    folders, found = make_packed(tmp_path, kind), []
    for folder in folders:
        base = load_model(folder, dtype="bfloat16").requires_grad_(False)
        packed = {name for name, each in base.named_parameters() if is_packed(each)}
        projections = {name for name, _ in base.named_parameters() if "_proj" in name}
        assert packed == (projections if folder == folders[0] else set())
        policy = base.with_adapter(Adapter(random_adapter(base, 0), base.adapter_targets()))
        engine, trainer = Engine(policy), Trainer(policy, TrainerConfig(lr=1e-2))
        made = engine.generate([[5, 6, 7], [9, 8]], SAMPLING)
        samples = [as_sample(index, each, 1.0 - index) for index, each in enumerate(made)]
        assert different(samples, list(trainer.forward_backward(samples, get_loss("grpo")).logprobs)) == 0
        trainer.optim_step()
        engine.set_version(1)
        again = engine.generate([[5, 6, 7]], SAMPLING[:1])
        found.append((list(map(bits, made)), list(map(bits, again)), dict(trainer.compute_copy())))
    assert found[0][:2] == found[1][:2]
    assert all(torch.equal(each, found[1][2][name]) for name, each in found[0][2].items())


@pytest.mark.parametrize("given", [NOW, OLDER], ids=["now", "older"])
def test_either_file_names_the_format(folders, given: dict[str, Any]) -> None:
    folder = folders[0]
    beside = read_scheme(read_config(folder).quantization)
    assert beside.packing is FP8
    assert beside.left_out == ("inputs in 8 bits", "keys and values in 8 bits")
    assert read_scheme(given) == beside
    with_quantization(folder, given)
    assert read_config(folder).quantization == given  # the same in both
    (folder / MODELOPT).unlink()
    names = {name for name, each in load_model(folder).named_parameters() if is_packed(each)}
    assert "model.layers.0.mixer.in_proj.weight" in names


def test_files_that_name_different_formats_are_refused(folders) -> None:
    for other in (FORMATS["fp8"][1], FORMATS["nvfp4"][1], FORMATS["fp8_rows"][1]):
        with_quantization(folders[0], other)
        with pytest.raises(
            ModelError, match=r"names another format of weights than the hf_quant_config\.json beside it"
        ):
            load_model(folders[0])
    inner = {"text_config": {"quantization_config": FORMATS["fp8"][1]}}
    with pytest.raises(ModelError, match="names another format"):
        with_modelopt(inner, BESIDE)


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({}, "hf_quant_config.json: quantization is null; supported is an object"),
        ({**BESIDE, "extra": 1}, "hf_quant_config.json: rlloop does not know what extra"),
        ({"quantization": {"quant_algo": "FP8", "extra": 1}}, "hf_quant_config.json: .* what quantization.extra"),
        ({"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}},
         "hf_quant_config.json has a quantization of .*quant_algo 'MIXED_PRECISION', which is not read"),
        ({"quantization": {"quant_algo": "FP8_PB_WO"}}, "quant_algo 'FP8_PB_WO', which is not read"),
        ({"quantization": {"quant_algo": ["FP8"]}}, r"quant_algo \['FP8'\], which is not read"),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}}, "kv_cache_quant_algo is 'NVFP4'"),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": "lm_head"}}, "exclude_modules is 'lm_head'"),
    ],
)  # fmt: skip
def test_what_the_file_beside_may_not_say(folders, beside: dict[str, Any], message: str) -> None:
    (folders[0] / MODELOPT).write_text(json.dumps(beside))
    with pytest.raises(ModelError, match=message):
        read_config(folders[0])


def test_weights_are_plain_where_keys_and_values_alone_are_quantised(folders) -> None:
    for quantized in (
        {"quant_algo": None, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        {"quant_algo": None},
    ):
        (folders[1] / MODELOPT).write_text(json.dumps({"quantization": quantized}))
        assert read_config(folders[1]).quantization is None


def test_eight_bits_in_groups_of_other_numbers_are_refused() -> None:
    four = {"group_0": {"weights": {**EIGHT, "num_bits": 4}}}
    with pytest.raises(ModelError, match=r"group_0\.weights\.num_bits is 4; supported is 8"):
        read_scheme({**NOW, "config_groups": four})
    weights_alone = {"group_0": {"weights": EIGHT}}
    assert read_scheme({**NOW, "config_groups": weights_alone}).left_out == ("keys and values in 8 bits",)


def test_weights_in_8_bits_of_which_no_file_names_the_format(folders) -> None:
    (folders[0] / MODELOPT).unlink()
    with pytest.raises(ModelError, match=r"float8_e4m3fn, and neither config.json .* nor a hf_quant_config.json"):
        load_model(folders[0])


def test_scales_of_keys_and_values_and_of_rows_as_others_store_them(folders, tmp_path: Path) -> None:
    file = folders[0] / FILE
    before, tensors = load_model(folders[0]).state_dict(), load_file(file)
    caches = {f"backbone.layers.2.mixer.{name}_proj.{name}_scale": torch.tensor(0.5) for name in "kv"}
    one = {name: each.reshape(1) for name, each in tensors.items() if name.endswith(".weight_scale")}
    save_file({**tensors, **caches, **one}, file)
    assert all(torch.equal(each, before[name]) for name, each in load_model(folders[0]).state_dict().items())
    rows, _ = make_packed(tmp_path / "rows", "fp8_rows")
    before, tensors = load_model(rows).state_dict(), load_file(rows / FILE)
    column = {name: each[:, None].clone() for name, each in tensors.items() if name.endswith(".weight_scale")}
    save_file({**tensors, **column}, rows / FILE)
    assert all(torch.equal(each, before[name]) for name, each in load_model(rows).state_dict().items())
