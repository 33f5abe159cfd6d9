"""The sides that `rlloop parity` compares: definitions of a model, or recorded logprobs.

FOLDER                        rlloop's definition of a Hugging Face folder, under the profile `rlloop`
FOLDER@huggingface            the same under another preset; or with knobs of the profile changed:
FOLDER@rlloop,linear=stock,expert_combine=bf16_each
engine:FOLDER[@PROFILE]       sampled by the embedded engine: prefill, then decoding over a paged cache
transformers:FOLDER           transformers' own model, eager, on the CPU
RUN                           a run's folder: its last rollout, with the engine's logprobs
FILE.jsonl                    logprobs of another program, one sequence a line (docs/parity.md)
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from rlloop.errors import ConfigError
from rlloop.models import Model, RoutingRecord, load_model
from rlloop.models.logits_processing import warp_for
from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.profile import IMPLEMENTATIONS, SETTINGS, NumericsProfile, allows, choices
from rlloop.rollout import Engine
from rlloop.runs.folder import RolloutFile, read_config, read_rollouts, rollout_files
from rlloop.runs.rollouts import unpack_experts
from rlloop.types import SamplingParams

PROMPT, COMPLETION = "prompt", "completion"


@dataclass(frozen=True)
class Tokens:
    """A sequence to compare. All tokens are scored, the prompt's too, but for the first, which nothing predicts."""

    ids: list[int]
    prompt: int  # number of the prompt's tokens
    types: list[str] = field(default_factory=list)  # a label for each token; empty: prompt and completion
    sampling: SamplingParams | None = None  # the distribution to score under; then only the completion is compared
    starts: list[int] = field(default_factory=list)  # positions at which turns begin; empty: the prompt's end

    @property
    def turn_offsets(self) -> np.ndarray:
        """[tokens - 1]: for each token but the first, the number of tokens of its turn before it."""
        at, starts = np.arange(1, len(self.ids)), np.array([0, *(self.starts or [self.prompt])])
        begun = np.searchsorted(starts, at, side="right") - 1
        return np.where(begun > 0, at - starts[begun], 0)

    def label(self, position: int) -> str:
        return self.types[position] if self.types else PROMPT if position < self.prompt else COMPLETION


@dataclass(frozen=True)
class Scored:
    """One side's scores of one sequence, by position. NaN: no logprob."""

    logprobs: np.ndarray  # [tokens] float32; [0] is NaN
    top: np.ndarray | None = None  # [tokens] int64: the most likely token at each position; [0] is −1
    experts: np.ndarray | None = None  # [tokens, layers, k]


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
        model, ids = self.model, torch.tensor(sequence.ids)
        read, routes = ids[:-1], RoutingRecord()
        positions = torch.arange(len(read))
        hidden = model.hidden(read, positions, AttentionLayout.of_sequences([len(read)]), routes=routes)
        warp = warp_for([sequence.sampling], sequence.turn_offsets, model.eos_token_ids, counts=[len(read)])
        logprobs = model.ops.token_logprob(hidden, model.head, ids[1:], warp)[0].float().numpy()
        _refuse_nan(self.name, logprobs)
        if sequence.sampling is not None:
            logprobs[: sequence.prompt - 1] = np.nan
        top = model.ops.logits(hidden, model.head).argmax(-1).numpy()
        chosen = routes.chosen()
        return _scored(logprobs, top, None if chosen is None else chosen.numpy())


class Transformers(_Model):
    """transformers' own model, eager attention, one expert after the other."""

    def __init__(self, name: str, folder: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.name = name
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager", experts_implementation="eager"
        ).eval()

    def _score(self, sequence: Tokens) -> Scored:
        if sequence.sampling is not None and sequence.sampling.temperature != 1.0:
            raise ConfigError(f"{self.name} scores at temperature 1; the sequences were sampled at another")
        ids, chosen = torch.tensor([sequence.ids]), []
        gates = [module for name, module in self.model.named_modules() if name.endswith("mlp.gate")]
        hooks = [gate.register_forward_hook(lambda _, __, out: chosen.append(out[-1])) for gate in gates]
        logits = self.model(ids[:, :-1]).logits[0].float()
        for hook in hooks:
            hook.remove()
        logprobs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
        _refuse_nan(self.name, logprobs)
        experts = torch.stack(chosen, dim=1).numpy() if chosen else None
        return _scored(logprobs, logits.argmax(-1).numpy(), experts)


class Recorded:
    """Sequences with logprobs that were recorded when they were sampled or scored."""

    def __init__(self, name: str, sequences: list[Tokens], scored: list[Scored]) -> None:
        self.name, self._sequences, self._scored = name, sequences, scored

    def sequences(self) -> list[Tokens]:
        return self._sequences

    def score(self, sequences: Sequence[Tokens]) -> list[Scored]:
        if [each.ids for each in sequences] != [each.ids for each in self._sequences]:
            raise ConfigError(
                f"{self.name} has logprobs of its own sequences only, and the other side has other sequences; give the "
                "same token ids in the same order, or a model as the other side"
            )
        return self._scored


def _scored(logprobs: np.ndarray, top: np.ndarray, experts: np.ndarray | None) -> Scored:
    """Scores from the predictions for positions 1 and on."""
    return Scored(
        np.concatenate([[np.float32(np.nan)], logprobs]).astype(np.float32), np.concatenate([[-1], top]), experts
    )


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


def is_run(path: Path) -> bool:
    return path.is_dir() and (path / "rollouts").is_dir()


def model_folder(text: str) -> Path | None:
    """The model's folder that a side names; None for recorded logprobs."""
    path = text.removeprefix("engine:").removeprefix("transformers:")
    folder = Path(path if Path(path).exists() else path.partition("@")[0])
    return folder if (folder / "config.json").is_file() else None


def version_of(folder: Path, run: Path) -> int | None:
    """The version of a run's weights in `folder`: one of its checkpoints, or the model that it began with; else
    None."""
    folder = folder.resolve()
    if folder.parent == (run / "checkpoints").resolve():
        step = folder.name.removeprefix("step_")
        return int(step) if step.isdigit() else None
    began = (read_config(run).get("model") or {}).get("path") if (run / "config.yaml").is_file() else None
    return 0 if began is not None and Path(began).resolve() == folder else None


def sampled_versions(run: Path) -> dict[int, RolloutFile]:
    """Version of the weights -> the last file with completions that it sampled, by the rows' own word."""
    return {row["policy_version"]: file for file in rollout_files(run) for row in read_rollouts(file)[:1]}


def _definition(text: str, dtype: str) -> Model:
    folder, _, profile = text.partition("@") if not Path(text).exists() else (text, "", "")
    return load_model(folder, dtype=dtype, profile=parse_profile(profile or "rlloop"))


def parse_profile(text: str) -> NumericsProfile:
    """A preset with changed knobs: `huggingface`, or `rlloop,linear=stock,expert_combine=bf16_each`."""
    preset, *changes = text.split(",")
    if preset not in IMPLEMENTATIONS:
        raise ConfigError(f"profile {preset!r} is not known; presets are {', '.join(IMPLEMENTATIONS)}")
    profile, knobs = NumericsProfile.preset(preset), [*NumericsProfile.operations(), *SETTINGS]
    for change in changes:
        knob, _, value = change.partition("=")
        if knob not in knobs:
            raise ConfigError(f"profiles have no knob {knob!r}; knobs are {', '.join(knobs)}")
        if not allows(knob, value):
            raise ConfigError(f"{knob} is {value!r}; allowed are {choices(knob)}")
        try:
            profile = dataclasses.replace(profile, **{knob: value})
        except ValueError as error:  # a module that cannot be imported, or has none of the knob's operations
            raise ConfigError(str(error)) from error
    return profile


def _sampled(name: str, model: Model, prompts: Sequence[Tokens]) -> Recorded:
    """The engine continues each prompt to the length of its sequence, all in one batch."""
    sampling = [
        SamplingParams(max_tokens=max(1, len(each.ids) - each.prompt), seed=i, ignore_eos=True)
        for i, each in enumerate(prompts)
    ]
    completions = Engine(model).generate([each.ids[: each.prompt] for each in prompts], sampling)
    sequences, scored = [], []
    for completion in completions:
        ids, prompt = completion.prompt_ids + completion.token_ids, len(completion.prompt_ids)
        logprobs = np.full(len(ids), np.nan, np.float32)
        _refuse_nan(name, completion.raw_logprobs)
        logprobs[prompt:] = completion.raw_logprobs
        sequences.append(Tokens(ids, prompt))
        scored.append(Scored(logprobs, experts=completion.routed_experts))
    return Recorded(name, sequences, scored)


def read_run(path: Path, version: int | None = None) -> Recorded:
    """The completions that `version` of a run's weights sampled; None: of its last step. Raises `ConfigError` if there
    are none."""
    files = rollout_files(path)
    if not files:
        raise ConfigError(f"{path} has no rollouts yet")
    file = files[-1] if version is None else sampled_versions(path)[version]
    sequences, scored = [], []
    for row in read_rollouts(file):
        if not row["token_ids"] or "versions" in row or version not in (None, row["policy_version"]):
            continue
        ids, prompt = row["prompt_ids"] + row["token_ids"], len(row["prompt_ids"])
        turns = row.get("turns") or [(0, len(row["token_ids"]))]  # the policy's tokens; others are the environment's
        written = [prompt + offset for start, end in turns for offset in range(start, end)]
        logprobs = np.full(len(ids), np.nan, np.float32)
        logprobs[written] = [np.nan if value is None else value for value in row["logprobs"]]
        experts = None if "routed_experts" not in row else unpack_experts(row["routed_experts"])
        sampling = SamplingParams(**{**row["sampling"], "stop_token_ids": row["sampling"].get("stop_token_ids", ())})
        sequences.append(Tokens(ids, prompt, sampling=sampling, starts=[prompt + start for start, _ in turns]))
        scored.append(Scored(logprobs, experts=experts))
    if not sequences:
        raise ConfigError(f"{file} has no completion with a token in it")
    return Recorded(f"{path} ({file.name})", sequences, scored)


def read_logprobs(path: Path) -> Recorded:
    """Logprobs from a file with one JSON object a line: `prompt_ids`, `token_ids`, and `logprobs` of the completion's
    tokens or of all tokens (null for none). Optional: `token_types`, a label for each token of prompt and completion;
    `top_ids`, the most likely token at each logprob. Raises `ConfigError`."""
    sequences, scored = [], []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip():
            sequence, own = _parse(line, f"{path}, line {number}")
            sequences.append(sequence)
            scored.append(own)
    if not sequences:
        raise ConfigError(f"{path} has no sequences; give one JSON object a line")
    return Recorded(str(path), sequences, scored)


def _parse(line: str, where: str) -> tuple[Tokens, Scored]:
    try:
        row: dict[str, Any] = json.loads(line)
        prompt, completion, values = list(row["prompt_ids"]), list(row["token_ids"]), list(row["logprobs"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where}: {_reason(error)}; give an object with prompt_ids, token_ids and logprobs"
        ) from None
    ids, types, tops = prompt + completion, list(row.get("token_types", [])), row.get("top_ids")
    if len(values) not in (len(completion), len(ids)):
        raise ConfigError(
            f"{where}: logprobs has {len(values)} entries; give one for each token of the completion "
            f"({len(completion)}), or of prompt and completion ({len(ids)})"
        )
    if types and len(types) != len(ids):
        raise ConfigError(f"{where}: token_types has {len(types)} labels for {len(ids)} tokens")
    logprobs, skipped = np.full(len(ids), np.nan, np.float32), len(ids) - len(values)
    logprobs[skipped:] = [np.nan if value is None else value for value in values]
    logprobs[0] = np.nan
    top = None
    if tops is not None:
        top = np.full(len(ids), -1)
        top[skipped:] = [-1 if value is None else value for value in tops]
    return Tokens(ids, len(prompt), types), Scored(logprobs, top)


def _reason(error: Exception) -> str:
    return f"it has no {error.args[0]}" if isinstance(error, KeyError) else str(error)


def read_prompts(path: Path) -> list[Tokens]:
    """Sequences to score or to continue, from lines of `prompt_ids` and optional `token_ids` and `token_types`."""
    sequences = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip():
            try:
                row = json.loads(line)
                prompt, completion = list(row["prompt_ids"]), list(row.get("token_ids", []))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}, line {number}: {_reason(error)}; give an object with prompt_ids") from None
            sequences.append(Tokens(prompt + completion, len(prompt), list(row.get("token_types", []))))
    if not sequences:
        raise ConfigError(f"{path} has no sequences; give one JSON object a line")
    return sequences


def random_sequences(vocabulary: int, count: int, length: int, most: int) -> list[Tokens]:
    """Uniformly random tokens, half prompt, half completion: for models without a tokenizer. `most`: tokens of the
    longest."""
    rng = np.random.default_rng(0)
    lengths = [min(length + i, most) for i in range(count)]
    return [Tokens(rng.integers(0, vocabulary, size).tolist(), size // 2 or 1) for size in lengths]
