"""Kimi K2.5 as a text model: transformers' values, the engine's bits in the trainer, and files that keep the tower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from rlloop import Engine, load_model, token_logprobs
from rlloop.errors import ConfigError, ModelError
from rlloop.models import new_model, read_state, save_model
from rlloop.models.config import parse_config
from rlloop.models.vision_processor import ImageProcessor
from tests.support.family_checks import PROMPTS, SAMPLING, compare, logprobs_of, memorise, sequences
from tests.support.image_models import image, prompt_with
from tests.support.kimi_models import make_kimi_checkpoint

LOGPROB_ERROR, GRADIENT_ERROR = 2e-5, 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi")
    make_kimi_checkpoint(folder)
    return folder


def changed(folder: Path, where: str | None, **changes: object) -> dict[str, Any]:
    """The folder's config.json with other keys, at the top or in an object of it; ... takes one away."""
    raw = json.loads((folder / "config.json").read_text())
    part = raw if where is None else raw[where]
    part |= changes
    for name in [name for name, value in changes.items() if value is ...]:
        del part[name]
    return raw


def test_logprobs_and_gradients_are_transformers(tmp_path: Path) -> None:
    """Of the whole model that reads texts, and of its text model alone."""
    whole = make_kimi_checkpoint(tmp_path)
    ours = load_model(tmp_path)
    with torch.no_grad():
        wanted = [logprobs_of(whole, *pair) for pair in sequences()]
        mine = token_logprobs(ours, sequences())
    assert max((a - b).abs().max() for a, b in zip(mine, wanted, strict=True)) < LOGPROB_ERROR
    text = AutoModelForCausalLM.from_config(whole.config.get_text_config())
    theirs = {name.replace("model.language_model.", "model."): x for name, x in whole.state_dict().items()}
    text.load_state_dict({name: theirs[name] for name in text.state_dict()})
    error, gradients = compare(tmp_path, text.eval())
    assert error < LOGPROB_ERROR
    assert max(gradients.values()) < GRADIENT_ERROR


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trainer_recomputes_the_engines_bits(tmp_path: Path, dtype: str) -> None:
    make_kimi_checkpoint(tmp_path, dtype=torch.bfloat16)
    model = load_model(tmp_path, dtype=dtype)
    made = Engine(model, max_batch_tokens=32).generate(PROMPTS, SAMPLING)
    assert sum(len(each.token_ids) for each in made) > 40
    pairs = [(each.prompt_ids, each.token_ids) for each in made]
    for each, row in zip(made, token_logprobs(model, pairs, sampling=SAMPLING), strict=True):
        assert each.logprobs.tobytes() == row.detach().numpy().tobytes()


def test_it_learns(folder: Path) -> None:
    losses, moved = memorise(folder)
    assert losses[-1] < 0.05 * losses[0]
    assert all(change > 0 for name, change in moved.items() if "e_score" not in name)


def test_what_is_left_out_is_named_and_kept_in_the_files(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(folder)
    assert "projector and vision tower are left out: mm_projector.pre_norm.bias" in caplog.text
    save_model(model, tmp_path / "same")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "same" / file).read_bytes() == (folder / file).read_bytes()
    save_model({name: tensor * 0.75 for name, tensor in read_state(folder).items()}, tmp_path / "new", folder)
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "new"))
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name] * (0.75 if name.startswith("language_model.") else 1)), name
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "new", experts_implementation="eager")
    mine = token_logprobs(load_model(tmp_path / "new"), sequences()[:3])
    for row, pair in zip(mine, sequences(), strict=False):
        assert (row - logprobs_of(theirs, *pair)).abs().max() < LOGPROB_ERROR


def test_a_new_model_is_saved_under_the_released_names(tmp_path: Path, folder: Path) -> None:
    model = new_model(changed(folder, None), 7)
    save_model(model, tmp_path / "new")
    names = load_file(tmp_path / "new" / "model.safetensors").keys()
    assert names == {name for name in load_file(folder / "model.safetensors") if name.startswith("language_model.")}
    again = load_model(tmp_path / "new").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_images_are_refused_by_name(folder: Path) -> None:
    model = load_model(folder)
    with pytest.raises(ConfigError, match="KimiK25ForConditionalGeneration reads text only"):
        Engine(model).generate([prompt_with([5], image(2, 2))], SAMPLING[0])
    with pytest.raises(ModelError, match="which reads text only"):
        ImageProcessor.of_folder(folder)
    assert ImageProcessor.if_any(folder) is None


@pytest.mark.parametrize(
    ("where", "changes", "message"),
    [
        (None, {"an_unknown_key": 1}, "what an_unknown_key would change"),
        ("text_config", {"an_unknown_key": 1}, "what an_unknown_key would change"),
        ("vision_config", {"an_unknown_key": 1}, "what vision_config.an_unknown_key would change"),
        ("vision_config", {"rope_parameters": {"a": 1}}, "what vision_config.rope_parameters.a would change"),
        (None, {"vision_config": 3}, "vision_config is 3; supported is an object"),
        ("vision_config", {"patch_size": "14"}, "vision_config.patch_size is '14'; supported is a positive whole"),
        ("vision_config", {"merge_kernel_size": [2]}, r"merge_kernel_size is \[2\]; supported is two positive whole"),
        ("vision_config", {"hidden_act": "relu"}, "vision_config.hidden_act is 'relu'; supported is \"gelu_pytorch"),
        ("vision_config", {"merge_type": "other"}, "vision_config.merge_type is 'other'; supported is \"sd2_tpool\""),
        ("vision_config", {"projector_ln_eps": -1}, "vision_config.projector_ln_eps is -1; supported is a positive"),
        ("vision_config", {"num_attention_heads": 3}, "num_attention_heads is 3; supported is a divisor of hidden_"),
        ("vision_config", {"mm_hidden_size": 64}, "vision_config.mm_hidden_size is 64; supported is 32"),
        ("vision_config", {"vt_hidden_size": 64}, "vision_config.hidden_size is 32; supported is 64"),
        ("vision_config", {"text_hidden_size": 8}, "vision_config.text_hidden_size is 8; supported is"),
        ("vision_config", {"rope_parameters": {"rope_theta": 0}}, "vision_config.rope_parameters.rope_theta is 0"),
        (None, {"projection_hidden_size": 8}, r"vision_config.hidden_size is 32; supported is projection_hidden_size"),
        (None, {"text_config": None}, "text_config is null; supported is an object"),
        ("text_config", {"model_type": "llama"}, "text_config.model_type is 'llama'; supported is \"deepseek_v3\""),
        ("text_config", {"tie_word_embeddings": True}, "text_config.tie_word_embeddings is True"),
        (None, {"tie_word_embeddings": ...}, "tie_word_embeddings is True; supported is false"),
        (None, {"quantization_config": {"quant_method": "awq"}}, "quantization_config of quant_method 'awq'"),
        ("text_config", {"quantization_config": {"quant_method": "awq"}}, "quantization_config of quant_method 'awq'"),
    ],
    ids=str,
)
def test_each_key_is_read_or_refused(folder: Path, where: str | None, changes: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(changed(folder, where, **changes))


def test_transformers_own_names_of_architecture_and_text_model(folder: Path) -> None:
    wanted = parse_config(changed(folder, None))
    theirs = changed(folder, "text_config", model_type="deepseek_v3", architectures=...)
    assert parse_config({**theirs, "architectures": ["Kimi_K25ForConditionalGeneration"]}) == wanted
    assert parse_config(changed(folder, None, architectures=...)) == wanted


def test_two_formats_of_packed_weights_are_refused(folder: Path) -> None:
    raw = changed(folder, "text_config", quantization_config={"quant_method": "mxfp4"})
    assert parse_config({**raw, "quantization_config": {"quant_method": "mxfp4"}}).quantization is not None
    with pytest.raises(ModelError, match="supported is that of text_config, or one of the two"):
        parse_config({**raw, "quantization_config": {"quant_method": "fp8"}})
