"""Recorded logprobs as a side of `rlloop parity`: a run's completions, or a file of another program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlloop.errors import ConfigError
from rlloop.parity_tool.sequences import Scored, Tokens, reason
from rlloop.runs.folder import RolloutFile, read_config, read_rollouts, rollout_files
from rlloop.runs.images import ImageStore
from rlloop.runs.rollouts import unpack_experts
from rlloop.types import SamplingParams


class Recorded:
    """Sequences with logprobs that were recorded when they were sampled or scored."""

    def __init__(self, name: str, sequences: list[Tokens], scored: list[Scored]) -> None:
        self.name, self._sequences, self._scored = name, sequences, scored

    def sequences(self) -> list[Tokens]:
        return self._sequences

    def only(self, kept: Sequence[Tokens]) -> Recorded:
        """The same run with these of its sequences."""
        chosen = {id(each) for each in kept}
        pairs = [each for each in zip(self._sequences, self._scored, strict=True) if id(each[0]) in chosen]
        return Recorded(self.name, [each for each, _ in pairs], [own for _, own in pairs])

    def score(self, sequences: Sequence[Tokens]) -> list[Scored]:
        if [each.ids for each in sequences] != [each.ids for each in self._sequences]:
            raise ConfigError(
                f"{self.name} has logprobs of its own sequences only, and the other side has other sequences; give the "
                "same token ids in the same order, or a model as the other side"
            )
        return self._scored


def is_run(path: Path) -> bool:
    return path.is_dir() and (path / "rollouts").is_dir()


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
        spans = row.get("images")
        asked = ImageStore(path).read_by(row["prompt_ids"], row["token_ids"], spans) if spans else None
        starts = [prompt + start for start, _ in turns]
        sequences.append(Tokens(ids, prompt, sampling=sampling, starts=starts, model_input=asked))
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
        raise ConfigError(f"{where}: {reason(error)}; give an object with prompt_ids, token_ids and logprobs") from None
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
