"""The weights of past versions, for comparing samples with the very weights that made them while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlloop.models import Model, score
from rlloop.models.parameters import ParameterStore
from rlloop.trainer.batching import make_step_batch
from rlloop.trainer.moe import MoeTraining
from rlloop.types import Recomputed, Sample

FILE = "history.safetensors"


class WeightHistory:
    """Copies of the last versions of `model`'s weights, and the trainer's forward over them.

    For samples that are trained some steps after they were made: whether engine and trainer agree can only be seen
    under the weights that made them. Those up to `keep` versions back take `keep` + 2 times the memory of the weights.
    """

    def __init__(
        self, model: Model, keep: int, max_batch_tokens: int, moe: MoeTraining, *, redraws: bool = True
    ) -> None:
        """`moe`, the trainer's, says whether to replay what the engine chose, and count where choices differ;
        `redraws` as the trainer's."""
        self._moe, self._redraws = moe, redraws
        self._live, self._keep, self._max_batch_tokens = model, keep, max_batch_tokens
        self._twin = copy.deepcopy(model).requires_grad_(False)
        self._versions: dict[int, dict[str, Tensor]] = {}

    def remember(self, version: int) -> None:
        """The model's weights are those of `version` now."""
        self._versions[version] = ParameterStore(self._live).snapshot()
        for old in [each for each in self._versions if each < version - self._keep]:
            del self._versions[old]

    @torch.no_grad()
    def recompute(self, samples: Sequence[Sample]) -> Recomputed:
        """[T] a sample: what the trainer would have computed with the weights that sampled it."""
        found: dict[int, tuple[np.ndarray, ...]] = {}
        self._moe.begin()
        watching: dict[str, Any] = {"replay": self._moe.replay, "watch": self._moe.watch}
        for version in sorted({sample.completion.policy_version for sample in samples}):
            places = [i for i, sample in enumerate(samples) if sample.completion.policy_version == version]
            ParameterStore(self._twin).copy_from(self._versions[version])
            batch = make_step_batch(
                [samples[i] for i in places],
                max_batch_tokens=self._max_batch_tokens,
                old_logprobs=None,
                device=self._twin.context.device,
            )
            watching["record"] = record = batch.redraw_record(self._redraws)
            parts = [score(self._twin, batch.rows[part.sequences], **watching)[0] for part in batch.micro_batches]
            made = batch.recomputed(torch.cat(parts), record)
            assert made.raw_logprobs is not None, "samples come from engines"
            assert made.redrawn is not None
            found |= dict(zip(places, zip(made.logprobs, made.raw_logprobs, made.redrawn, strict=True), strict=True))
        return Recomputed(*zip(*(found[i] for i in range(len(samples))), strict=True))

    def save(self, folder: Path) -> None:
        """Into a checkpoint: a resumed run has samples of these versions still to train."""
        tensors = {
            f"{version}/{name}": weight for version, kept in self._versions.items() for name, weight in kept.items()
        }
        save_file(tensors, folder / FILE)

    def restore(self, folder: Path) -> None:
        self._versions = {}
        for key, weight in load_file(folder / FILE).items():
            version, _, name = key.partition("/")
            self._versions.setdefault(int(version), {})[name] = weight.to(self._twin.context.device)
