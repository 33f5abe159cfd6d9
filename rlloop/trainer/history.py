"""Weights of past versions, to compare samples under the weights that sampled them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlloop.models import Model
from rlloop.models.fp8 import as_stored, from_stored
from rlloop.models.parameters import ParameterStore
from rlloop.models.shared_prompts import why_not_shared
from rlloop.trainer.batching import make_step_batch
from rlloop.trainer.leaves import all_leaves, forward, forwards, recomputed
from rlloop.trainer.moe import MoeTraining
from rlloop.types import Recomputed, Sample

FILE = "history.safetensors"


class WeightHistory:
    """Copies of the last versions of `model`'s weights, and the trainer's forward under them.

    For samples that are trained some steps after they were sampled: engine and trainer can only be compared under the
    weights that sampled. Versions up to `keep` back take `keep` + 2 times the memory of the weights.
    """

    def __init__(
        self, model: Model, keep: int, max_batch_tokens: int, moe: MoeTraining, *, redraws: bool = True
    ) -> None:
        """`moe` and `redraws`: the trainer's."""
        self._moe, self._redraws = moe, redraws
        self._live, self._keep, self._max_batch_tokens = model, keep, max_batch_tokens
        self._ranks = model.context.ranks("dp")
        adapter = model.adapter
        if adapter is None:
            self._twin = copy.deepcopy(model).requires_grad_(False)
        else:  # the frozen base is shared
            self._twin = model.with_adapter(adapter.attached(adapter.targets))
        self._versions: dict[int, dict[str, Tensor]] = {}

    def remember(self, version: int) -> None:
        """Copy the model's current weights as those of `version`, and drop versions older than `keep`."""
        self._versions[version] = ParameterStore(self._live).snapshot()
        for old in [each for each in self._versions if each < version - self._keep]:
            del self._versions[old]

    @torch.no_grad()
    def recompute(self, samples: Sequence[Sample]) -> Recomputed:
        """[T] a sample: the trainer's recomputation of each token under the weights that sampled it."""
        results: dict[int, Sequence[np.ndarray]] = {}
        versions = [sample.completion.token_versions for sample in samples]
        self._moe.begin()
        shares = not self._moe.replay and why_not_shared(self._twin, trains=False) is None
        for version in sorted({int(version) for each in versions for version in np.unique(each)}):
            indices = [i for i, each in enumerate(versions) if (each == version).any()]
            ParameterStore(self._twin).copy_from(self._versions[version])
            batch = make_step_batch(
                [samples[i] for i in indices],
                max_batch_tokens=self._max_batch_tokens,
                device=self._twin.context.device,
                share=shares,
            )
            work = partial(forward, self._twin, batch, moe=self._moe, redraws=self._redraws)
            leaves = forwards(batch.micro_batches, self._ranks, work, self._twin.without_tokens)
            again = recomputed(batch, all_leaves(leaves, self._twin))
            assert again.raw_logprobs is not None, "samples come from engines"
            assert again.redrawn is not None
            arrays = zip(again.logprobs, again.raw_logprobs, again.redrawn, strict=True)
            for index, now in zip(indices, arrays, strict=True):
                here, others = versions[index] == version, results.get(index, now)
                results[index] = [np.where(here, mine, other) for mine, other in zip(now, others, strict=True)]
        self._moe.gather(self._ranks)
        return Recomputed(*zip(*(results[i] for i in range(len(samples))), strict=True))

    def save(self, folder: Path) -> None:
        """Write whole weights to a checkpoint, since a resumed run still trains samples of these versions. Collective;
        the first rank writes, and the file is independent of the layout."""
        store, tensors = ParameterStore(self._twin), dict[str, Tensor]()
        for version, kept in self._versions.items():
            store.copy_from(kept)
            for name, whole in store.wholes():
                if self._twin.context.rank == 0:
                    tensors |= as_stored(f"{version}/{name}", whole.to("cpu", copy=True))
        if self._twin.context.rank == 0:
            save_file(tensors, folder / FILE)

    def restore(self, folder: Path) -> None:
        """Read what `save` wrote, under any layout."""
        self._versions, store = {}, ParameterStore(self._twin)
        wholes: dict[int, dict[str, Tensor]] = {}
        for key, weight in load_file(folder / FILE).items():
            version, _, name = key.partition("/")
            wholes.setdefault(int(version), {})[name] = weight
        for version, kept in wholes.items():
            store.copy_wholes((name, from_stored(name, kept, entry.live)) for name, entry in store.entries.items())
            self._versions[version] = store.snapshot()
