"""Samples of prompts with pictures, for tests that train on them."""

from __future__ import annotations

from dataclasses import replace

from rlloop import Engine, SamplingParams
from rlloop.types import Sample
from tests.support.image_models import inputs
from tests.support.samples import as_sample


def sampled(engine: Engine, seed: int) -> list[Sample]:
    prompts = [prompt for prompt, _ in inputs()]
    made = engine.generate(prompts, SamplingParams(max_tokens=8, seed=seed, ignore_eos=True))
    samples = [as_sample(index, each, index % 2 - 0.5) for index, each in enumerate(made)]
    return [
        replace(each, example=replace(each.example, model_input=prompt))
        for each, prompt in zip(samples, prompts, strict=True)
    ]
