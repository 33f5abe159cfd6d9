"""Packed weights: the bits of the same weights written plainly, in engine and trainer, with adapters above."""

import json

import pytest
import torch

from rlloop import Engine, SamplingParams, load_adapter, load_model, token_logprobs
from rlloop.config.run import AlgorithmConfig, RunConfig
from rlloop.errors import ConfigError, ModelError
from rlloop.launch.make import load
from rlloop.models import save_model
from rlloop.models.adapter_files import save_adapter, with_stored_adapter
from rlloop.models.config import parse_config
from rlloop.models.packed_config import read_scheme
from rlloop.numerics.packed import MXFP4, PackedWeight, is_packed
from tests.support.adapters import random_adapter
from tests.support.packed_models import FORMATS, make_packed
from tests.support.traffic import bits

PROMPTS = [[5], list(range(3, 20)), [9, 8, 7]]
SAMPLING = [SamplingParams(max_tokens=6, seed=seed, ignore_eos=True) for seed in range(3)]


@pytest.fixture(scope="module", params=FORMATS)
def folders(request, tmp_path_factory):
    return make_packed(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_packed_weights_have_the_bits_of_plain_ones(folders, dtype):
    packed, plain = (load_model(folder, dtype=dtype) for folder in folders)
    kept = [each for each in packed.parameters() if is_packed(each)]
    assert len(kept) >= 4
    stored = [x.nbytes for each in kept for x in (each.codes, each.scales, each.tensor_scale) if x is not None]
    assert sum(stored) < 0.7 * 2 * sum(each.numel() for each in kept)
    assert not any(each.requires_grad for each in kept)
    values = dict(plain.named_parameters())
    for name, parameter in packed.named_parameters():
        own = parameter.dequantised() if isinstance(parameter, PackedWeight) else parameter
        assert torch.equal(own, values[name]), name
    made, expected = (Engine(model, max_batch_tokens=16).generate(PROMPTS, SAMPLING) for model in (packed, plain))
    assert list(map(bits, made)) == list(map(bits, expected))
    pairs = [(each.prompt_ids, each.token_ids) for each in made]
    for each, scored in zip(made, token_logprobs(packed, pairs), strict=True):
        assert each.raw_logprobs.tobytes() == scored.detach().numpy().tobytes()


def test_adapters_train_through_packed_weights(folders, tmp_path):
    gradients = []
    for folder in folders:
        model = load_model(folder, dtype="bfloat16").requires_grad_(False)
        save_adapter(model, random_adapter(model, 0, targets=("all-linear", "lm_head")), tmp_path / folder.name)
        load_adapter(model, tmp_path / folder.name, "a")
        view = with_stored_adapter(model, tmp_path / folder.name)
        (logprobs,) = token_logprobs(view, [(PROMPTS[1], [4, 5, 6])])
        logprobs.sum().backward()
        gradients.append((logprobs.detach(), [x.grad for x in view.adapter.named_parameters().values()]))
        (made,) = Engine(model).generate(PROMPTS[:1], SAMPLING[:1], adapters="a")
        (scored,) = token_logprobs(model, [(made.prompt_ids, made.token_ids)], adapter="a")
        assert made.raw_logprobs.tobytes() == scored.detach().numpy().tobytes()
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert len(gradients[0][1]) > 8
    for packed, plain in zip(gradients[0][1], gradients[1][1], strict=True):
        assert torch.equal(packed, plain)
        assert packed.any()


def test_mxfp4_is_what_transformers_makes_of_it():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 4), generator=generator, dtype=torch.uint8)
    ours = PackedWeight(blocks.flatten(-2), scales, MXFP4, transposed=True)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(ours.dequantised(), theirs)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "format 'float-quantized'"),
        ({**FORMATS["int4"][1], "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}}},
         r"config_groups\.group_0\.weights\.type is null; supported is \"int\""),
        ("mxfp4", "'mxfp4'"),
    ],
)  # fmt: skip
def test_other_formats_are_refused_by_name(tmp_path, quantization, message):
    packed, _ = make_packed(tmp_path, "nvfp4")
    config = json.loads((packed / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        parse_config({**config, "quantization_config": quantization})


def test_a_run_that_would_train_packed_weights_is_refused(tmp_path):
    """Not at its first checkpoint, which holds what trains."""
    packed, _ = make_packed(tmp_path, "nvfp4")
    config = RunConfig(algorithm=AlgorithmConfig(loss="grpo", advantage="group_norm"))
    with pytest.raises(ConfigError, match=r"which are frozen: set model\.lora\.rank"):
        load(config, packed)
    config.model.lora.rank = 2
    assert load(config, packed).adapter is not None


def test_parts_that_are_missing_or_of_another_type_and_saving(tmp_path):
    from safetensors.torch import load_file, save_file

    packed, _ = make_packed(tmp_path, "nvfp4")
    with pytest.raises(ValueError, match="packed weights are frozen"):
        save_model(load_model(packed), tmp_path / "copy")
    file, name = packed / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    save_file({key: x for key, x in tensors.items() if key != f"{name}_scale_2"}, file)
    with pytest.raises(ValueError, match=r"lacks .*up_proj.weight_scale_2"):
        load_model(packed)
    save_file({**tensors, f"{name}_scale": tensors[f"{name}_scale"].float()}, file)
    with pytest.raises(
        ValueError, match=r"up_proj.weight_scale is torch.float32 .* needs torch.float8_e4m3fn \[96, 4\]"
    ):
        load_model(packed)
    save_file({**tensors, name: tensors[name].long()}, file)
    with pytest.raises(ValueError, match=r"has type I64|does not know"):
        load_model(packed)


@pytest.mark.parametrize(
    ("kind", "ending", "change", "message"),
    [
        ("mxfp4", "down_proj_scales", lambda x: torch.cat([x, x]), r"\[16, 64, 3\]; .* needs torch.uint8 \[8, 64, 3\]"),
        ("nvfp4", "q_proj.weight_scale", lambda x: x.view(torch.uint8)[None].view(x.dtype), r"needs .* \[64, 4\]"),
        ("nvfp4", "q_proj.weight_scale_2", lambda x: torch.stack([x, x]), r"\[2\]; it must be one number"),
        ("nvfp4_compressed", "q_proj.weight_global_scale", lambda x: x * torch.inf, "must be finite"),
        ("fp8_tensor", "in_proj.weight_scale", lambda x: torch.stack([x, x]), r"\[2\]; FP8 .* needs .* \[1, 1\]"),
        ("fp8_rows", "q_proj.weight_scale", lambda x: x[:3], r"\[3\]; FP8 of 64 x 160 .* needs .* \[64, 1\]"),
        ("fp8", "o_proj.weight_scale_inv", lambda x: torch.cat([x, x]), r"\[2, 1\]; .* needs .* \[1, 1\]"),
        ("int4", "o_proj.weight_scale", lambda x: x.float() * 1.001, "values that bfloat16 does not have"),
        ("int4", "o_proj.weight_shape", lambda x: x + 1, r"weight_shape says \[65, 65\]"),
    ],
)
def test_parts_of_other_shapes_and_values(tmp_path, kind, ending, change, message):
    from safetensors.torch import load_file, save_file

    packed, _ = make_packed(tmp_path, kind)
    tensors = load_file(packed / "model.safetensors")
    name = next(name for name in tensors if name.endswith(ending))
    save_file({**tensors, name: change(tensors[name]).contiguous()}, packed / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load_model(packed)


INT4_GROUP = FORMATS["int4"][1]["config_groups"]["group_0"]
NVFP4_INPUTS = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}


def test_a_quantization_config_whose_groups_are_no_objects():
    for groups, place in (({"a": {"weights": 3}}, r"\.a\.weights"), ({"a": 3}, r"\.a"), ([3], ""), ({}, "")):
        with pytest.raises(ModelError, match=rf"config_groups{place} is .*; supported is an object"):
            read_scheme({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups})


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("fp8", {"activation_scheme": "static"}, 'activation_scheme is \'static\'; supported is "dynamic"'),
        ("fp8", {"expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
        ("fp8", {"scale_fmt": "e4m3"}, "scale_fmt is 'e4m3'"),
        ("fp8", {"kv_cache_scheme": {"num_bits": 8}}, "what quantization_config.kv_cache_scheme would change"),
        ("fp8", {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'; supported is a list"),
        ("mxfp4", {"activation_scheme": "dynamic"}, "what quantization_config.activation_scheme would change"),
        ("int4", {"ignore": [3]}, r"ignore is \[3\]; supported is a list of names"),
        ("int4", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is .*; supported is null"),
        ("int4", {"transform_config": {"config_groups": {}}}, r"transform_config is .*; supported is {}"),
        ("int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format is 'sparse-24-bitmask'"),
        ("int4", {"config_groups": {"a": {**INT4_GROUP, "input_activations": {"num_bits": 8}}}},
         r"a\.input_activations is .*; supported is null"),
        ("int4", {"config_groups": {"a": {**INT4_GROUP, "weights": {**INT4_GROUP["weights"], "actorder": "group"}}}},
         r"a\.weights\.actorder is 'group'"),
        ("int4", {"config_groups": {"a": INT4_GROUP, "b": {"weights": {**INT4_GROUP["weights"], "num_bits": 8}}}},
         r"b\.weights\.num_bits is 8; supported is 4"),
        ("nvfp4", {"config_groups": {"a": {"weights": {**NVFP4_INPUTS, "dynamic": True}}}}, r"dynamic is True"),
        ("nvfp4", {"config_groups": {"a": {"weights": NVFP4_INPUTS, "input_activations": {"num_bits": 8}}}},
         r"input_activations\.num_bits is 8; supported is 4"),
        ("nvfp4", {"kv_cache_quant_algo": "INT8"}, "kv_cache_quant_algo is 'INT8'"),
    ],
)  # fmt: skip
def test_settings_that_would_change_what_is_computed_are_refused_by_name(kind, changes, message):
    with pytest.raises(ModelError, match=message):
        read_scheme({**FORMATS[kind][1], **changes})


def test_what_transformers_writes_is_read():
    from transformers import FineGrainedFP8Config, Mxfp4Config

    for given, kind in ((FineGrainedFP8Config(), "fp8"), (Mxfp4Config(), "mxfp4")):
        assert read_scheme(json.loads(json.dumps(given.to_dict()))) == read_scheme(FORMATS[kind][1])


def test_zeros_that_are_stored_change_nothing():
    dense = {"format": "dense", "global_sparsity": 0.12, "ignore": ["lm_head"], "sparsity_structure": "unstructured"}
    for given in (dense, {}):
        config = {**FORMATS["int4"][1], "sparsity_config": given}
        assert read_scheme(config) == read_scheme(FORMATS["int4"][1])


def test_inputs_and_caches_that_releases_quantise_are_named_as_left_out(tmp_path, caplog):
    """As ModelOpt writes it, with scales of keys and values; other formats' releases quantise no cache."""
    from safetensors.torch import load_file, save_file

    settings = {
        "producer": {"name": "modelopt", "version": "0.41.0"}, "ignore": ["lm_head", "model.layers.0*"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "config_groups": {"group_0": {
            "input_activations": NVFP4_INPUTS, "weights": NVFP4_INPUTS, "targets": ["Linear"]}},
    }  # fmt: skip
    packed, _ = make_packed(tmp_path, "nvfp4")
    plain = load_model(packed).state_dict()
    assert "keys and values" not in caplog.text
    scales = {f"model.layers.0.self_attn.{name}_proj.{name}_scale": torch.tensor(0.5) for name in "kv"}
    save_file({**load_file(packed / "model.safetensors"), **scales}, packed / "model.safetensors")
    with pytest.raises(ModelError, match=r"k_proj\.k_scale"):
        load_model(packed)
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] |= settings
    (packed / "config.json").write_text(json.dumps(config))
    assert all(torch.equal(x, plain[name]) for name, x in load_model(packed).state_dict().items())
    assert "inputs in 4 bits and keys and values in 8 bits are left out" in caplog.text
    eight, four = ("inputs in 8 bits",), ("inputs in 4 bits",)
    for kind, left_out in {
        "fp8": eight, "fp8_tensor_dense": eight, "fp8_rows": eight, "nvfp4": four, "mxfp4": (), "int4": (),
        "nvfp4_compressed": (),
    }.items():  # fmt: skip
        assert read_scheme(FORMATS[kind][1]).left_out == left_out
