"""The sides that `rlloop parity` compares: definitions of a model, or recorded logprobs.

FOLDER                        rlloop's definition of a Hugging Face folder, under the profile `rlloop`
FOLDER@huggingface            the same under another preset; or with knobs of the profile changed:
FOLDER@rlloop,linear=stock,expert_combine=bf16_each
engine:FOLDER[@PROFILE]       sampled by the embedded engine: prefill, then decoding over a paged cache
transformers:FOLDER           transformers' own model, eager, on the CPU
RUN                           a run's folder: its last rollout, with the engine's logprobs
FILE.jsonl                    logprobs of another program, one sequence a line (docs/parity.md); text alone
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from rlloop.errors import ConfigError, did_you_mean
from rlloop.models import Model, RoutingRecord, load_model
from rlloop.models.config_reader import read_json
from rlloop.models.logits_processing import warp_for
from rlloop.models.vision import check_images, place_features
from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.profile import IMPLEMENTATIONS, SETTINGS, NumericsProfile, allows, choices
from rlloop.parity_tool.recorded import Recorded, is_run, read_logprobs, read_run
from rlloop.parity_tool.sequences import Scored, Tokens
from rlloop.rollout import Engine
from rlloop.types import ModelInput, SamplingParams


class Side(Protocol):
    """One of the two that are compared."""

    name: str

    def sequences(self) -> list[Tokens] | None:
        """The only sequences that it has scores of; None: it can score any."""
        ...

    def score(self, sequences: Sequence[Tokens]) -> list[Scored]: ...


class _Model:
    """A side that scores any sequence, one forward for each."""

    def sequences(self) -> None:
        return None

    @torch.no_grad()
    def score(self, sequences: Sequence[Tokens]) -> list[Scored]:
        return [self._score(sequence) for sequence in sequences]

    def _score(self, sequence: Tokens) -> Scored:
        raise NotImplementedError


class Definition(_Model):
    """rlloop's model under a profile, as the trainer computes it: one forward for each sequence."""

    def __init__(self, name: str, model: Model) -> None:
        self.name, self.model = name, model

    def with_profile(self, profile: NumericsProfile) -> Definition:
        return Definition(self.name, self.model.with_profile(profile))

    def _score(self, sequence: Tokens) -> Scored:
        model, ids, read = self.model, torch.tensor(sequence.ids), sequence.read
        check_images(read, model.config)
        count, routes = len(read), RoutingRecord()
        hidden = model.hidden(
            ids[:-1],
            torch.from_numpy(read.positions_at(0, count)),
            AttentionLayout.of_sequences([count]),
            routes=routes,
            images=place_features([(read, 0, count, 0)], model.see),
        )
        warp = warp_for([sequence.sampling], sequence.turn_offsets, model.eos_token_ids, counts=[count])
        logprobs = model.ops.token_logprob(hidden, model.head, ids[1:], warp)[0].float().numpy()
        _refuse_nan(self.name, logprobs)
        if sequence.sampling is not None:
            logprobs[: sequence.prompt - 1] = np.nan
        top = model.ops.logits(hidden, model.head).argmax(-1).numpy()
        chosen = routes.chosen()
        return Scored.of_predictions(logprobs, top, None if chosen is None else chosen.numpy())


class Transformers(_Model):
    """transformers' own model, eager attention, one expert after the other.

    It gets the patches that rlloop's processor cut: transformers' default one resizes to other pixels.
    """

    def __init__(self, name: str, folder: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.name = name
        reads_images = "vision_config" in read_json(folder / "config.json")
        auto = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
        self.model = auto.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager", experts_implementation="eager"
        ).eval()

    def logits(self, sequence: Tokens) -> torch.Tensor:
        """[tokens - 1, V] float32."""
        read, inputs = sequence.read, {}
        if images := read.images:
            kinds = torch.zeros(1, len(read), dtype=torch.int64)
            for span in read.contents:
                kinds[0, span.start : span.end] = 1
            inputs = {
                "pixel_values": torch.cat([torch.from_numpy(each.patches) for each in images]).to(self.model.dtype),
                "image_grid_thw": torch.tensor([[1, each.height, each.width] for each in images]),
                "mm_token_type_ids": kinds,
            }
        return self.model(torch.tensor([read.token_ids]), **inputs).logits[0].float()

    def _score(self, sequence: Tokens) -> Scored:
        if sequence.sampling is not None and sequence.sampling.temperature != 1.0:
            raise ConfigError(f"{self.name} scores at temperature 1; the sequences were sampled at another")
        ids, chosen = torch.tensor(sequence.ids), []
        gates = [module for name, module in self.model.named_modules() if name.endswith("mlp.gate")]
        hooks = [gate.register_forward_hook(lambda _, __, out: chosen.append(out[-1])) for gate in gates]
        logits = self.logits(sequence)
        for hook in hooks:
            hook.remove()
        logprobs = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()
        _refuse_nan(self.name, logprobs)
        experts = torch.stack(chosen, dim=1).numpy() if chosen else None
        return Scored.of_predictions(logprobs, logits.argmax(-1).numpy(), experts)


def _refuse_nan(name: str, logprobs: np.ndarray) -> None:
    """NaN means "no logprob", which is not compared, so a computed NaN is an error. Raises `ConfigError`."""
    if broken := int(np.isnan(logprobs).sum()):
        raise ConfigError(
            f"{name} computes NaN for {broken} of {len(logprobs)} tokens of a sequence: something overflows, or the "
            "weights have a NaN; check them, or choose another --dtype"
        )


# -------------------------------------------------------------------------------------------------------- reading


def open_side(text: str, dtype: str, prompts: Sequence[Tokens], version: int | None = None) -> Side:
    """The side that `text` names. `prompts`: those that an engine continues. `version`: of the weights that sampled the
    completions of a run. Raises `ConfigError` or `ModelError`."""
    kind, _, rest = text.partition(":")
    if kind == "transformers":
        return Transformers(text, Path(rest), dtype)
    if kind == "engine":
        return _sampled(text, _definition(rest, dtype), prompts)
    path = Path(text)
    if path.is_file():
        return read_logprobs(path)
    if is_run(path):
        return read_run(path, version)
    return Definition(text, _definition(text, dtype))


def model_folder(text: str) -> Path | None:
    """The model's folder that a side names; None for recorded logprobs."""
    path = text.removeprefix("engine:").removeprefix("transformers:")
    folder = Path(_split(path)[0])
    return folder if (folder / "config.json").is_file() else None


def _definition(text: str, dtype: str) -> Model:
    folder, profile = _split(text)
    return load_model(folder, dtype=dtype, profile=parse_profile(profile))


def _split(text: str) -> tuple[str, str]:
    """FOLDER[@PROFILE] at the last @, unless that is the folder's own."""
    folder, at, profile = text.rpartition("@")
    return (folder, profile or "rlloop") if at and not Path(text).exists() else (text, "rlloop")


def parse_profile(text: str) -> NumericsProfile:
    """A preset with changed knobs: `huggingface`, or `rlloop,linear=stock,expert_combine=bf16_each`."""
    preset, *changes = text.split(",")
    if preset not in IMPLEMENTATIONS:
        hint = did_you_mean(preset, IMPLEMENTATIONS)
        raise ConfigError(f"profile {preset!r} is not known; presets are {', '.join(IMPLEMENTATIONS)}{hint}")
    profile, knobs = NumericsProfile.preset(preset), [*NumericsProfile.operations(), *SETTINGS]
    for change in changes:
        knob, _, value = change.partition("=")
        if knob not in knobs:
            hint = did_you_mean(knob, knobs)
            raise ConfigError(f"profiles have no knob {knob!r}; knobs are {', '.join(knobs)}{hint}")
        if not allows(knob, value):
            raise ConfigError(f"{knob} is {value!r}; allowed are {choices(knob)}")
        try:
            profile = dataclasses.replace(profile, **{knob: value})
        except ValueError as error:  # a module that cannot be imported, or has none of the knob's operations
            raise ConfigError(str(error)) from error
    return profile


def _sampled(name: str, model: Model, prompts: Sequence[Tokens]) -> Recorded:
    """The engine continues each prompt to the length of its sequence, all in one batch.

    Of prompts with images it also scores the prompt, as its prefill computes it: completions are text. A sampled
    placeholder stands for no image, so a completion ends before it.
    """
    placeholder = None if model.config.vision is None else model.config.vision.image_token_id
    sampling = [
        SamplingParams(max_tokens=max(1, len(each.ids) - each.prompt), seed=i, ignore_eos=True)
        for i, each in enumerate(prompts)
    ]
    engine = Engine(model)
    completions = engine.generate([each.beginning for each in prompts], sampling)
    sequences, scored = [], []
    for each, completion in zip(prompts, completions, strict=True):
        made, prompt = completion.token_ids, len(completion.prompt_ids)
        made = made[: made.index(placeholder)] if placeholder in made else made
        ids = completion.prompt_ids + made
        logprobs = np.full(len(ids), np.nan, np.float32)
        _refuse_nan(name, completion.raw_logprobs)
        logprobs[prompt:] = completion.raw_logprobs[: len(made)]
        asked = each.beginning if isinstance(each.beginning, ModelInput) else None
        if asked is not None:
            [logprobs[1:prompt]] = engine.prefill_logprobs([asked])
            _refuse_nan(name, logprobs[1:prompt])
        sequences.append(Tokens(ids, prompt, model_input=asked))
        scored.append(Scored(logprobs, experts=completion.routed_experts))
    return Recorded(name, sequences, scored)
