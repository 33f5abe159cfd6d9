"""Models that read images: values and gradients are transformers', and the trainer has the engine's bits."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.utils import logging

from rlloop import Engine, ModelInput, SamplingParams, load_model, token_logprobs
from rlloop.errors import ConfigError, ModelError
from rlloop.inputs import ContentSpan, Image
from rlloop.models import Model, new_model, save_model
from rlloop.models.config import parse_config
from rlloop.models.placement import check_placement
from rlloop.models.prompt_scores import score_prompt
from rlloop.models.vision_processor import FILE, ImageProcessor
from rlloop.numerics.profile import NumericsProfile
from rlloop.parallel.layout import Layout
from rlloop.parity.token_types import compare_prompt
from tests.support.family_checks import SAMPLING
from tests.support.image_models import (
    END,
    FAMILIES,
    PAD,
    START,
    add_processor,
    image,
    inputs,
    make_image_checkpoint,
    prompt_with,
    theirs,
)
from tests.support.wide_models import Wide

logging.disable_progress_bar()

LOGPROB_ERROR, GRADIENT_ERROR = 6e-5, 2e-5  # qwen3_5_moe: 1.6e-5 off float64 here, transformers 2.4e-5 on one processor
RECURRENT_GRADIENT_ERROR = 1e-4  # token by token here, in chunks there: decays of small gradients
TEXT = list(range(20, 31))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_image_checkpoint(path, dtype=torch.bfloat16)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder)


def of_tokens(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_transformers(tmp_path: Path, family: str) -> None:
    reference = make_image_checkpoint(tmp_path, family)
    ours, generator = load_model(tmp_path), torch.Generator().manual_seed(1)
    mine = token_logprobs(ours, inputs())
    wanted = [of_tokens(theirs(reference, prompt, tokens), tokens) for prompt, tokens in inputs()]
    assert max((a - b).abs().max() for a, b in zip(mine, wanted, strict=True)) < LOGPROB_ERROR
    weights = [torch.randn(len(row), generator=generator) for row in mine]
    for rows in (mine, wanted):
        torch.stack([(row * weight).sum() for row, weight in zip(rows, weights, strict=True)]).sum().backward()
    named = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): parameter.grad
        for name, parameter in reference.named_parameters()
    }
    assert named.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        assert named[name].norm() > 1e-3, f"{name} is not tested: its gradient vanishes"
        bound = RECURRENT_GRADIENT_ERROR if "linear_attn" in name else GRADIENT_ERROR
        assert (parameter.grad - named[name]).norm() / named[name].norm() < bound, name


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_in_float64_are_transformers(tmp_path: Path, family: str) -> None:
    made = make_image_checkpoint(tmp_path, family)
    reference = type(made).from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    ours = load_model(tmp_path, dtype="float64", profile=NumericsProfile.preset("reference"))
    prompt, tokens = inputs()[1]
    with torch.no_grad():
        (mine,) = token_logprobs(ours, [(prompt, tokens)])
        with Wide():
            wanted = of_tokens(theirs(reference, prompt, tokens), tokens)
    assert mine.dtype == torch.float64
    assert (mine - wanted).abs().max() < 1e-13


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5_moe"])
def test_a_saved_folder_has_the_sources_bytes(tmp_path: Path, family: str) -> None:
    make_image_checkpoint(tmp_path / "source", family)
    save_model(load_model(tmp_path / "source"), tmp_path / "saved")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "saved" / file).read_bytes() == (tmp_path / "source" / file).read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_recomputes_the_engines_bits(tmp_path: Path, family: str, dtype: str) -> None:
    make_image_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    ours = load_model(tmp_path, dtype=dtype)
    prompts = [prompt for prompt, _ in inputs()]
    made = Engine(ours, max_batch_tokens=16).generate(prompts, SAMPLING)
    assert sum(len(each.token_ids) for each in made) > 40
    pairs = [(prompt, each.token_ids) for prompt, each in zip(prompts, made, strict=True)]
    for each, row in zip(made, token_logprobs(ours, pairs, sampling=SAMPLING), strict=True):
        assert each.logprobs.tobytes() == row.detach().numpy().tobytes()


@pytest.mark.parametrize("settings", [{}, {"max_batch_tokens": 3}, {"page_size": 4, "max_cache_tokens": 128}], ids=str)
def test_no_other_request_page_or_chunk_changes_a_bit(model: Model, settings: dict) -> None:
    sampling = SamplingParams(max_tokens=8, seed=5, ignore_eos=True)
    prompts = [prompt for prompt, _ in inputs()]
    together = Engine(model, **settings).generate(prompts, sampling)
    for prompt, made in zip(prompts, together, strict=True):
        (alone,) = Engine(model).generate([prompt], sampling)
        assert (alone.token_ids, alone.logprobs.tobytes()) == (made.token_ids, made.logprobs.tobytes())


def test_features_of_an_image_know_no_other_image(model: Model) -> None:
    images = [image(4, 6), image(12, 10, 1), image(2, 2, 2), image(20, 14, 3)]  # up to five tiles of keys
    with torch.no_grad():
        together = model.see(images)
        for alone, beside in zip(images, together, strict=True):
            assert torch.equal(model.see([alone])[0], beside)
        stock = model.with_profile(NumericsProfile(linear="stock", attention="stock"))
        assert any(
            not torch.equal(stock.see([one])[0], beside) for one, beside in zip(images, stock.see(images), strict=True)
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_has_the_trainers_bits(tmp_path: Path, family: str) -> None:
    """Also after requests with the same prompt, and with states that these have saved."""
    make_image_checkpoint(tmp_path, family)
    ours = load_model(tmp_path)
    engine, prompts = Engine(ours, page_size=4, max_batch_tokens=16), [prompt for prompt, _ in inputs()]
    engine.generate(prompts, SamplingParams(max_tokens=2, seed=0))
    for prompt, made in zip(prompts, engine.prefill_logprobs(prompts), strict=True):
        assert made.tobytes() == score_prompt(ours, prompt).logprobs.tobytes()


def test_pages_of_two_images_with_equal_tokens_are_never_mixed(model: Model) -> None:
    engine, sampling = Engine(model, page_size=4), SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
    first, second = (prompt_with(TEXT, image(8, 8, seed), TEXT) for seed in (1, 2))
    assert first.token_ids == second.token_ids
    cached, made = [], []
    for prompt in (first, second, first):
        before = engine.stats().cached_tokens
        made += engine.generate([prompt], sampling)
        cached.append(engine.stats().cached_tokens - before)
    assert cached == [0, 12, 39]  # of 40 tokens: none, the text and the mark before the image, all but the last
    assert made[0].logprobs.tobytes() == made[2].logprobs.tobytes() != made[1].logprobs.tobytes()
    model.visual.pos_embed.weight.data.mul_(2)  # type: ignore[union-attr]
    try:
        engine.set_version(1)  # forgets pages and features
        (after,) = engine.generate([first], sampling)
        assert after.logprobs.tobytes() != made[0].logprobs.tobytes()
        assert (
            after.raw_logprobs.tobytes()
            == token_logprobs(model, [(first, after.token_ids)])[0].detach().numpy().tobytes()
        )
    finally:
        model.visual.pos_embed.weight.data.div_(2)  # type: ignore[union-attr]


def test_a_frozen_tower_has_no_gradient_and_the_text_the_same(folder: Path) -> None:
    whole, frozen = load_model(folder), load_model(folder)
    frozen.visual.requires_grad_(False)  # type: ignore[union-attr]
    for each in (whole, frozen):
        torch.cat(token_logprobs(each, inputs()[:2])).sum().backward()
    trained = dict(whole.named_parameters())
    for name, parameter in frozen.named_parameters():
        if name.startswith("visual."):
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, trained[name].grad)  # type: ignore[arg-type]


def test_recomputed_blocks_have_the_same_gradient(folder: Path) -> None:
    kept, recomputed = load_model(folder), load_model(folder)
    recomputed.checkpoint_layers = 1
    for each in (kept, recomputed):
        torch.cat(token_logprobs(each, inputs()[:2])).sum().backward()
    for (name, one), other in zip(kept.named_parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]


def test_positions_are_transformers(tmp_path: Path) -> None:
    reference = make_image_checkpoint(tmp_path)
    prompt = prompt_with(TEXT, image(4, 12), TEXT, image(6, 2), TEXT)
    kinds = torch.tensor([[int(token == PAD) for token in prompt.token_ids]])
    wanted, _ = reference.model.get_rope_index(
        torch.tensor([prompt.token_ids]), kinds, image_grid_thw=torch.tensor([[1, 4, 12], [1, 6, 2]])
    )
    assert torch.equal(torch.from_numpy(prompt.positions), wanted[:, 0])


def batch(**changes: object) -> dict[str, object]:
    made = {
        "input_ids": np.array([[5, START, PAD, PAD, END, 6]]), "mm_token_type_ids": np.array([[0, 0, 1, 1, 0, 0]]),
        "pixel_values": image(2, 4).patches, "image_grid_thw": np.array([[1, 2, 4]]),
    }  # fmt: skip
    return {**made, **changes}


def test_what_a_processor_returns_is_an_input() -> None:
    made = ModelInput.from_processor(batch())
    assert made == replace(prompt_with([5], image(2, 4), [6]), positions=made.positions)
    assert made.positions.tolist() == prompt_with([5], image(2, 4), [6]).positions.tolist()  # type: ignore[union-attr]
    assert ModelInput.from_processor({"input_ids": [[5, 6]]}) == ModelInput([5, 6])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mm_token_type_ids": np.array([[0, 0, 1, 0, 0, 0]])}, r"1 placeholder tokens for 1 images of 8 patches"),
        ({"mm_token_type_ids": np.array([[0, 1, 0, 1, 0, 0]])}, "must follow one another"),
        ({"mm_token_type_ids": None}, "no mm_token_type_ids"),
        ({"image_grid_thw": np.array([[2, 2, 2]])}, "of one frame"),
        ({"pixel_values": np.full((8, 96), np.nan)}, "NaN or infinite"),
        ({"pixel_values_videos": 0}, "has a video"),
        ({"input_ids": np.zeros((2, 6), int)}, "give one sample"),
    ],
)
def test_a_batch_that_is_no_input_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelInput.from_processor(batch(**changes))


def test_images_that_the_model_cannot_read_are_refused_before_sampling(model: Model) -> None:
    good = prompt_with(TEXT, image(4, 4), TEXT)
    (span,) = good.contents
    other_width = prompt_with(TEXT, image(4, 4, numbers=192), TEXT)
    other_merge = prompt_with(TEXT, image(4, 4), TEXT, merge=1)
    wrong_token = replace(good, token_ids=[7 if token == PAD else token for token in good.token_ids])
    absent = replace(good, contents=(ContentSpan(span.start, span.end, span.digest),))
    forged = replace(good, contents=(replace(span, digest="0" * 64),))
    flat = replace(good, positions=np.arange(len(good)))
    for prompt, message in (
        (other_width, "patches of 192 numbers; this model's have 96.*another model's processor"),
        (other_merge, "has 16 placeholders; .* there must be 4"),
        (wrong_token, "token 7 is inside an image's span; the placeholder of .* is 91"),
        (absent, "whose patches are missing"),
        (forged, "its span says 0000"),
        (flat, "needs positions of three axes"),
    ):
        with pytest.raises(ConfigError, match=message):
            Engine(model).generate([prompt], SamplingParams(max_tokens=1))
        with pytest.raises(ConfigError, match=message):
            token_logprobs(model, [(prompt, [5])])


@pytest.mark.parametrize("changes", [{"mean": (0.48, 0.46, 0.41)}, {"std": (0.5, 0.5, 0.27)}, {"factor": 1 / 127.5}])
def test_a_picture_of_another_models_processor_is_refused_before_sampling(
    tmp_path: Path, model: Model, changes: dict
) -> None:
    make_image_checkpoint(tmp_path, dtype=torch.bfloat16)
    add_processor(tmp_path)
    own, picture = ImageProcessor.of_folder(tmp_path), np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8)
    mine, theirs = own.image(picture), pickle.loads(pickle.dumps(replace(own, **changes).image(picture)))
    with_processor, asked = load_model(tmp_path), SamplingParams(max_tokens=3, seed=0)
    refused = own.prompt([5, PAD, 6], [theirs])
    for attempt in (
        lambda: Engine(with_processor).generate([refused], asked),
        lambda: token_logprobs(with_processor, [(refused, [5])]),
    ):
        with pytest.raises(ConfigError, match=r"bytes stand for .* makes bytes -1 to 1, .*another model's processor"):
            attempt()
    for kept in (np.float32, np.float16):  # the numbers alone, as other libraries' processors give them
        good, bad = (Image(each.patches.astype(kept), each.height, each.width) for each in (mine, theirs))
        with pytest.raises(ConfigError, match=r"patches are .* makes bytes -1 to 1, .*another model's processor"):
            Engine(with_processor).generate([own.prompt([5, PAD, 6], [bad])], asked)
        assert len(Engine(with_processor).generate([own.prompt([5, PAD, 6], [good])], asked)) == 1
    assert model.source_path is not None
    assert not (model.source_path / FILE).exists()
    assert len(Engine(model).generate([refused], asked)) == 1  # a folder without a processor refuses none


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_config": None}, "vision_config is null; supported is an object"),
        ({"vision_config.hidden_act": "silu"}, "vision_config.hidden_act is 'silu'"),
        ({"vision_config.window_size": 112}, "does not know what vision_config.window_size would change"),
        ({"vision_config.num_position_embeddings": 35}, "num_position_embeddings is 35; supported is a square"),
        ({"vision_config.deepstack_visual_indexes": [2, 0]}, "deepstack_visual_indexes is"),
        ({"vision_config.out_hidden_size": 40}, "out_hidden_size is 40; supported is the decoder's"),
        ({"vision_config.rope_parameters": {"rope_type": "yarn"}}, "vision_config.rope_parameters.rope_type"),
        ({"text_config.model_type": "qwen3"}, "text_config.model_type is 'qwen3'"),
        ({"text_config.rope_parameters": {"rope_type": "default", "mrope_section": [4, 4]}}, "mrope_section is"),
        ({"text_config.rope_parameters": {"rope_type": "default", "mrope_section": [2, 9, 1]}}, "mrope_section is"),
        ({"image_token_id": 97}, "image_token_id is 97"),
        ({"projector": 1}, "does not know what projector would change"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config of quant_method 'fp8', which is not"),
    ],
)  # fmt: skip
def test_each_key_is_read_or_refused(folder: Path, changes: dict, message: str) -> None:
    raw = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        *outer, last = name.split(".")
        (raw[outer[0]] if outer else raw)[last] = value
    with pytest.raises(ModelError, match=message):
        parse_config(raw)


def test_a_new_model_reads_images(folder: Path) -> None:
    made = new_model(json.loads((folder / "config.json").read_text()), seed=0)
    assert token_logprobs(made, inputs()[:1])[0].isfinite().all()


def test_adapters_are_the_decoders_alone(model: Model) -> None:
    assert model.adapter_targets()
    assert not any(name.startswith("visual.") for name in model.adapter_targets())


def test_a_pipelines_first_stage_has_the_layers_that_features_enter(model: Model) -> None:
    for layout in (Layout(dp_shard=2), Layout(tp=2), Layout(cp=2)):
        check_placement(model.config, {"trainer.layout": layout})
    with pytest.raises(ConfigError, match=r"features enter the first 2 layers, .*set trainer.layout.pp=1"):
        check_placement(model.config, {"trainer.layout": Layout(pp=2)})


def test_a_recurrent_models_prompt_is_scored_over_pages(tmp_path: Path) -> None:
    """Its states are saved by the names of pages, which a prompt that is only scored has, too."""
    make_image_checkpoint(tmp_path, "qwen3_5_moe")
    model, prompt = load_model(tmp_path), prompt_with(TEXT, image(8, 8), TEXT)
    engine = Engine(model, page_size=4, max_batch_tokens=16)
    for _ in range(2):
        [scored] = engine.prefill_logprobs([prompt])
        assert (scored == score_prompt(model, prompt).logprobs).all()


def test_another_order_of_sums_is_seen_on_both_types_of_token(tmp_path: Path) -> None:
    """The engine rounds each expert's product, the trainer their sum: with one definition the KL is 0."""
    make_image_checkpoint(tmp_path, "qwen3_vl_moe", dtype=torch.bfloat16, text={"num_experts_per_tok": 4})
    ours = load_model(tmp_path, dtype="bfloat16")
    other = ours.with_profile(NumericsProfile(expert_combine="bf16_each"))
    prompt = prompt_with(TEXT, image(8, 8), TEXT)
    mine = score_prompt(ours, prompt).logprobs
    same, apart = (
        compare_prompt(prompt, Engine(each, max_batch_tokens=16).prefill_logprobs([prompt])[0], mine)
        for each in (ours, other)
    )
    assert (same.difference, same.metrics["parity/k3_text"], same.metrics["parity/k3_image"]) == (None, 0, 0)
    assert min(apart.metrics["parity/k3_text"], apart.metrics["parity/k3_image"]) > 1e-5
    assert "of them of an image" in (apart.difference or "")
