"""A planted fault in each operation of a vision tower: found on a sample with images, and named by the doctor."""

from dataclasses import replace

import pytest
import torch

from rlloop import Engine, ModelInput, load_model
from rlloop.models import Model
from rlloop.parity.first_difference import diagnose
from rlloop.parity.monitor import compare
from rlloop.testing import plant_fault
from rlloop.types import Example, RewardResult, Sample, SamplingParams
from tests.support.doctored import diagnosed
from tests.support.image_models import image, make_image_checkpoint, prompt_with


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    long = {"intermediate_size": 640}  # sums that a stock product rounds otherwise
    make_image_checkpoint(folder, "qwen3_vl_moe", dtype=torch.bfloat16, vision=long)
    made = load_model(folder)
    for weight in made.parameters():  # far from uniform, so that a rounding anywhere reaches the logprobs
        weight.data.mul_(3.0 if weight.ndim > 1 else 1.0)
    return made


def sampled(engine: Engine) -> list[Sample]:
    prompts = [prompt_with([20, 21], image(8, 6, seed), [22 + seed], image(4, 2, seed), [23]) for seed in range(3)]
    params = SamplingParams(max_tokens=8, seed=0, ignore_eos=True)
    return [
        Sample(f"1/{i}/0", Example(str(i), made.prompt_ids, "", {}), made, "", RewardResult(0.0), group=i)
        for i, made in enumerate(engine.generate(prompts, params))
    ]


@pytest.mark.parametrize(
    ("knob", "op", "where"),
    [
        ("linear", "linear", "visual.blocks.0.mlp.linear_fc2"), ("indexer", "layer_norm", "visual.blocks.0.norm1"),
        ("attention", "full_attention", "visual.blocks.0"), ("activation", "gelu", "visual.blocks.0"),
        ("rms_norm", "rms_norm", "model.layers.0.input_layernorm"),
        ("experts", "experts", "model.layers.0.mlp.experts.gate_up_proj"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found_and_named(model: Model, knob: str, op: str, where: str) -> None:
    engine = Engine(model)
    plant_fault(engine, knob)
    finding = diagnosed(engine, model, sampled(engine))
    assert (finding.details["op"], finding.details["where"], finding.details["knob"]) == (op, where, knob)
    assert finding.details["unit"] == ("patch" if where.startswith("visual") else "token")
    assert ("of the prompt's images" in finding.text) == where.startswith("visual")


def test_without_a_fault_there_is_nothing_to_find_and_unknown_images_are_refused(model: Model) -> None:
    engine = Engine(model)
    plant_fault(engine, "linear")
    samples = sampled(engine)
    first = compare(samples, [made.completion.logprobs + 1 for made in samples]).first
    assert first is not None
    assert "no operation that differs" in diagnose(model, model, samples[0], first).text
    known = samples[0].completion
    assert known.model_input is not None
    contents = tuple(replace(span, image=None) for span in known.model_input.contents)
    lost = ModelInput(known.prompt_ids, known.model_input.positions, contents)
    finding = diagnose(model, model, replace(samples[0], completion=replace(known, model_input=lost)), first)
    assert "images that are not known here" in finding.text
    assert finding.details == {}
