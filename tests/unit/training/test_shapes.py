"""The catalogue of training shapes."""

import json

import pytest

from rlloop import resolve_training_profile
from rlloop.cli.main import main
from rlloop.cli.serve_api import take_shape
from rlloop.cli.serve_options import parse
from rlloop.errors import ConfigError
from rlloop.models.config import parse_config
from rlloop.models.families import FAMILIES
from rlloop.training.shapes import CATALOGUE, training_shapes

MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 300, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "tie_word_embeddings": True, "eos_token_id": 2,
}  # fmt: skip


def test_every_family_has_a_shape():
    models = [json.loads(file.read_text())["model"] for file in CATALOGUE.glob("*.json")]
    assert {parse_config(model).architecture for model in models} == FAMILIES.keys()


@pytest.mark.slow
def test_every_shape_fits_as_the_catalogue_has_it():
    assert [shape.training_shape for shape in training_shapes() if not shape.fits] == []
    measured = resolve_training_profile("qwen3-8b-h200-full")
    assert (measured.memory_source, measured.layout.dp_shard, measured.tokens_per_second) == ("measured", 2, 15174)


def test_a_shape_is_laid_over_the_accelerators_that_there_are():
    four, eight = (resolve_training_profile("qwen3-8b-full", gpus=gpus) for gpus in (4, 8))
    assert (four.accelerator_count, four.node_count, four.layout.world_size) == (4, 1, 4)
    assert four.fits
    assert eight.layout.dp_shard == 8
    assert eight.memory_gib["optimizer"] == pytest.approx(8.19 * 8 / 1.0737 / 8, rel=1e-2)  # 8 bytes a parameter
    assert eight.memory_gib["optimizer"] < four.memory_gib["optimizer"]
    lora, reference = (resolve_training_profile(f"qwen3-8b-{mode}") for mode in ("lora", "reference"))
    assert lora.memory_gib["optimizer"] < 1 < lora.memory_gib["compute copy"]
    assert reference.total_memory_gib < lora.total_memory_gib
    assert "optimizer" not in reference.memory_gib
    assert lora.max_supported_context_length == 40960


def test_mistakes_name_what_is_near():
    with pytest.raises(ConfigError, match="did you mean qwen3-8b-full"):
        resolve_training_profile("qwen3-8b-ful")
    with pytest.raises(ConfigError, match=r"qwen3-8b-full does not fit on 1 x NVIDIA_H100_80GB .*; take 4"):
        resolve_training_profile("qwen3-8b-full", gpus=1)
    with pytest.raises(ConfigError, match="gpus is 0; it must be a whole number"):
        resolve_training_profile("qwen3-8b-full", gpus=0)


def test_files_of_ones_own(tmp_path, capsys):
    file = tmp_path / "mine.json"
    shapes = {"full": {"accelerator_memory_gib": 16, "memory_source": "measured", "memory_gib": {"peak": 3.5}}}
    file.write_text(json.dumps({"model_name": "me/mine", "model": MODEL, "shapes": shapes}))
    shape = resolve_training_profile("mine-full", files=[file])
    assert (shape.total_memory_gib, shape.memory_source, shape.max_supported_context_length) == (3.5, "measured", 256)
    assert main(["shapes", "mine-full", "--file", str(file)]) == 0
    assert "memory (measured): 3.5 of 16 GiB: peak 3.5" in capsys.readouterr().out
    file.write_text(json.dumps({"model": MODEL, "shapes": {"full": {"gpu": 1}}}))
    with pytest.raises(ConfigError, match=r"shapes.full has 'gpu'; its keys are accelerator_count"):
        resolve_training_profile("mine-full", files=[file])
    file.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as a training shape"):
        resolve_training_profile("mine-full", files=[file])
    assert main(["shapes", "--gpus", "3"]) == 2


def test_a_server_takes_the_options_of_a_shape(tmp_path):
    """Of one accelerator, and of the model that it serves."""
    model, file = tmp_path / "config.json", tmp_path / "mine.json"
    lora = {"base_model_weight_precision": "float32", "max_batch_tokens": 512, "lora_rank": 4}
    shapes = {"lora": {**lora, "accelerator_type": "CPU"}, "full": lora, "reference": {"accelerator_count": 2}}
    file.write_text(json.dumps({"model": MODEL, "shapes": shapes}))
    model.write_text(json.dumps(MODEL))

    def options(shape):
        given = parse(["api", "--model", str(tmp_path), "--shape", shape, "--shape-file", str(file)])
        take_shape(given)
        return given.dtype, given.leaf_tokens, given.max_lora_rank, given.device, given.ray_gpus

    assert options("mine-lora") == ("float32", 512, 4, "cpu", 0.0)
    assert options("mine-full") == ("float32", 512, 64, "cuda", 1.0)
    with pytest.raises(ConfigError, match="takes 2 accelerators"):
        options("mine-reference")
    model.write_text(json.dumps({**MODEL, "hidden_size": 64}))
    with pytest.raises(ConfigError, match=r"of a model whose hidden_size is 48, and .* has 64"):
        options("mine-lora")
