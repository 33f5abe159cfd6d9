"""Re-scoring: draws each token again by its seed, with its logprobs, under the stored weights that sampled it."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlloop.audit.history import History, Rollouts, Row
from rlloop.audit.parts import Parts
from rlloop.config.run import ParityMode
from rlloop.errors import RlloopError
from rlloop.parity.certificate import content_digest
from rlloop.runs.images import ImageStore
from rlloop.trainer.checkpoint import CheckpointStore, find_damage

if TYPE_CHECKING:
    from rlloop.models import Model

BATCH_TOKENS = 8192  # of one forward


class Rescored:
    """Compares tokens and logprobs bit for bit. For `parity.mode=require`; other modes do not promise equal bits."""

    name = "re-scored"

    def __init__(self, run: History, parts: Parts, most: int | None) -> None:
        """Checks an unpredictable sample of `most` completions among those whose weights are stored; None: all."""
        self.run, self.most = run, most
        store = CheckpointStore(run.path / "checkpoints")
        self.weights: dict[int, Path] = {step: store.root / f"step_{step}" for step in store.steps()}
        if parts.model is not None:
            self.weights[0] = parts.model
        self.no_model = parts.no_model
        self.obstacle = self._obstacle(parts)
        config = run.built  # without parity.redraw nothing was compared with draws: its tokens may be given ones
        self.draws = isinstance(config, str) or config.parity.redraw
        self.kept, self.out_of_reach, self.seen = list[Row](), 0, 0
        self.by_step, self.tokens = Counter[int](), 0
        self.rescored = set[str]()  # uids: a conversation may be of several versions
        self.elsewhere: list[str] = []  # differences under numerics that are not the run's
        self.unread: list[str] = []  # weights that could not be read
        self._random = random.SystemRandom()

    def _obstacle(self, parts: Parts) -> str | None:
        config = self.run.built
        if isinstance(config, str):
            return config
        if config.parity.mode is not ParityMode.require:
            return f"parity.mode={config.parity.mode} does not promise equal bits"
        return parts.no_kernels

    def check(self, step: Rollouts) -> list[str]:
        for row in step.rows:
            if not any(version in self.weights for version in row.versions or [row.policy_version]):
                self.out_of_reach += 1
                continue
            self.seen += 1
            if self.most is None or len(self.kept) < self.most:
                self.kept.append(row)
            elif (index := self._random.randrange(self.seen)) < self.most:
                self.kept[index] = row
        return []

    def finish(self) -> list[str]:
        config, problems = self.run.built, list[str]()
        if self.obstacle is not None or isinstance(config, str):
            return []
        from rlloop.audit.completions import as_sample
        from rlloop.models import load_model
        from rlloop.models.adapter_files import is_adapter, with_stored_adapter
        from rlloop.numerics.profile import Drift, NumericsProfile
        from rlloop.study.drifted import as_computed

        certified = {line.fingerprints.get("trainer") for line in self.run.lines} - {None}
        sampled = [(set(row.versions or [row.policy_version]), row) for row in self.kept]
        for version in sorted(set[int]().union(*(versions for versions, _ in sampled)) & self.weights.keys()):
            folder, rows = self.weights[version], [row for versions, row in sampled if version in versions]
            try:
                if version and (damage := find_damage(folder)) is not None:
                    raise ValueError(damage)
                profile = NumericsProfile(**vars(config.model.profile))
                adapter, base = config.model.lora.path, folder
                if is_adapter(folder):
                    adapter, base = folder, self.weights.get(0)
                if base is None:
                    raise ValueError("it is an adapter, and its base is not here")
                model = load_model(
                    base, dtype=config.model.dtype, device=config.device, profile=profile,
                    quantize=config.model.quantize,
                )  # fmt: skip
                if config.rollout.drift.both_sides:
                    model = as_computed(model, Drift(**vars(config.rollout.drift)), version)
                if adapter is not None:
                    model = with_stored_adapter(model, adapter)
            except (RlloopError, OSError, ValueError) as error:
                self.unread.append(f"{_name(version)} cannot be read: {error}")
                continue
            try:
                differences = _differences(model, version, rows, self.draws, ImageStore(self.run.path))
            except (RlloopError, ValueError, OverflowError) as error:
                problems.append(f"completions of {_name(version)} cannot be computed: {error}")
                continue
            self.by_step[version] = len(rows)
            self.rescored.update(row.uid for row in rows)
            self.tokens += sum(int((as_sample(row).completion.token_versions == version).sum()) for row in rows)
            if certified and content_digest(model.fingerprint()) not in certified:
                self.elsewhere += differences
            else:
                problems += differences
        return problems

    def summary(self) -> str:
        if self.obstacle is not None:
            return f"not done: {self.obstacle}"
        done = len(self.rescored)
        where = ", ".join(_name(version) for version in sorted(self.by_step))
        how = "drawn again" if self.draws else "scored again (parity.redraw is false: not drawn)"
        text = f"{done} completions, {self.tokens} tokens, {how} under {where}" if done else "none"
        beyond = self.out_of_reach + self.seen - done
        text += f"; {beyond} not" if beyond else ""
        if self.out_of_reach:
            text += f", {self.out_of_reach} of them for want of their weights: --replay trains these again"
        if self.no_model is not None:
            text += f" ({self.no_model})"
        for each in self.unread:
            text += f"; {each}"
        if self.elsewhere:
            text += (
                f"; {len(self.elsewhere)} differ, but this machine's numerics are not those that the run recorded "
                f"(fingerprints.json), so that says nothing of the run. First: {self.elsewhere[0]}"
            )
        return text


def _differences(model: Model, version: int, rows: list[Row], draws: bool, images: ImageStore) -> list[str]:
    """Completions whose logprobs or, with `draws`, tokens of `version` differ from the stored ones, drawn again with
    `model`."""
    from rlloop.audit.completions import as_sample
    from rlloop.models import ScoreRow, redraw

    problems = []
    samples = [as_sample(row, images) for row in rows]
    score_rows = []
    for sample in samples:
        completion = sample.completion
        ids = [*completion.prompt_ids, *completion.token_ids]
        score_rows.append(
            ScoreRow(
                ids,
                [len(completion.prompt_ids) + at for at in completion.written],
                completion.sampling,
                model_input=completion.model_input,
            )
        )
    for sample, drawn in zip(samples, redraw(model, score_rows, max_tokens=BATCH_TOKENS), strict=True):
        completion = sample.completion
        tokens = np.array([completion.token_ids[at] for at in completion.written], np.int64)
        name, here = _name(version), completion.token_versions == version
        if draws and (differ := int((tokens != drawn.token_ids)[here].sum())):
            problems.append(f"{sample.uid}: {differ} of {here.sum()} tokens are not what its seed draws from {name}")
        for field, stored, redrawn in (
            ("logprobs", completion.logprobs, drawn.logprobs),
            ("raw_logprobs", completion.raw_logprobs, drawn.raw_logprobs),
        ):
            if differ := int((stored.view(np.int32) != redrawn.view(np.int32))[here].sum()):
                problems.append(f"{sample.uid}: {differ} of {here.sum()} {field} are not the bits of {name}")
    return problems


def _name(version: int) -> str:
    return f"step_{version}" if version else "the weights that it began with"
