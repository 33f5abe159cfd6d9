"""Weights of past versions, to compare samples under the weights that sampled them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlloop.models import Model
from rlloop.models.fp8 import as_stored, from_stored
from rlloop.models.parameters import ParameterStore
from rlloop.models.shared_prompts import why_not_shared
from rlloop.trainer.batching import StepBatch, make_step_batch
from rlloop.trainer.leaves import all_leaves, forward, forwards, recomputed, short
from rlloop.trainer.master_weights import MasterWeights
from rlloop.trainer.moe import MoeTraining
from rlloop.trainer.neighbours import BesideEngines
from rlloop.types import Recomputed, Sample

FILE = "history.safetensors"


Kept = dict[str, Tensor]  # one version's weights, as a rank keeps them


class Past(Protocol):
    """The model of forwards under past weights, and how such weights are kept, put in place and stored."""

    model: Model

    def kept(self) -> Kept:
        """A copy of the trainer's current weights."""
        ...

    def under(self, kept: Kept) -> AbstractContextManager[object]:
        """Within, `model` computes with these weights. Collective."""
        ...

    def idle(self, batch: StepBatch) -> object:
        """An empty forward of a rank without a micro-batch, for the others' collectives."""
        ...

    def wholes(self, kept: Kept) -> Iterator[tuple[str, Tensor]]:
        """Whole weights, one at a time. Collective."""
        ...

    def of_wholes(self, wholes: Mapping[str, Tensor]) -> Kept:
        """The reverse of `wholes`, whose names are as stored (`models.fp8.as_stored`)."""
        ...


class Twin:
    """A second model, since an engine reads the weights of the first."""

    def __init__(self, model: Model) -> None:
        self._live, adapter = model, model.adapter
        if adapter is None:
            self.model = copy.deepcopy(model).requires_grad_(False)
        else:  # the frozen base is shared
            self.model = model.with_adapter(adapter.attached(adapter.targets))
        self._store = ParameterStore(self.model)

    def kept(self) -> Kept:
        return ParameterStore(self._live).snapshot()

    @contextmanager
    def under(self, kept: Kept) -> Iterator[None]:
        self._store.copy_from(kept)
        yield

    def idle(self, batch: StepBatch) -> object:
        return self.model.without_tokens()

    def wholes(self, kept: Kept) -> Iterator[tuple[str, Tensor]]:
        self._store.copy_from(kept)
        yield from self._store.wholes()

    def of_wholes(self, wholes: Mapping[str, Tensor]) -> Kept:
        entries = self._store.entries.items()
        self._store.copy_wholes((name, from_stored(name, wholes, entry.live)) for name, entry in entries)
        return self._store.snapshot()


class Sharded:
    """The trainer's own model, where its layers are sharded: its engine has other memory. Past weights take the place
    of the current ones meanwhile, and a rank keeps its own rows of them."""

    def __init__(self, model: Model, masters: MasterWeights) -> None:
        self.model, self._masters = model, masters

    def kept(self) -> Kept:
        return self._masters.rows()

    @contextmanager
    def under(self, kept: Kept) -> Iterator[None]:
        now = self._masters.rows()
        self._masters.write_rows(kept)
        try:
            yield
        finally:
            self._masters.write_rows(now)

    def idle(self, batch: StepBatch) -> object:
        return short(self.model, batch)

    def wholes(self, kept: Kept) -> Iterator[tuple[str, Tensor]]:
        masters = self._masters
        for name, entry in masters.parameters.entries.items():
            yield name, masters.gather(name, kept[name]) if name in masters.shards else entry.whole(kept[name])

    def of_wholes(self, wholes: Mapping[str, Tensor]) -> Kept:
        kept, device = Kept(), self.model.context.device
        for name, entry in self._masters.parameters.entries.items():
            part, shard = entry.part(wholes[name]), self._masters.shards.get(name)
            kept[name] = (part if shard is None else part[shard.begin : shard.end]).to(device, copy=True)
        return kept


class WeightHistory(BesideEngines):
    """Copies of the last versions of `model`'s weights, and the trainer's forward under them.

    For samples that are trained some steps after they were sampled: engine and trainer can only be compared under the
    weights that sampled. Versions up to `keep` back take `keep` + 2 times the memory of the weights (of `Sharded` a
    rank's share of them).
    """

    def __init__(
        self, model: Model, keep: int, max_batch_tokens: int, moe: MoeTraining, *, redraws: bool = True,
        past: Past | None = None,
    ) -> None:  # fmt: skip
        """`moe` and `redraws`: the trainer's. `past`: None for a `Twin`."""
        self._moe, self._redraws = moe, redraws
        self._keep, self._max_batch_tokens = keep, max_batch_tokens
        self._ranks, self._past = model.context.ranks("dp"), past or Twin(model)
        self._versions: dict[int, Kept] = {}

    def remember(self, version: int) -> None:
        """Copy the model's current weights as those of `version`, and drop versions older than `keep`."""
        self._versions[version] = self._past.kept()
        for old in [each for each in self._versions if each < version - self._keep]:
            del self._versions[old]

    @torch.no_grad()
    def recompute(self, samples: Sequence[Sample]) -> Recomputed:
        """[T] a sample: the trainer's recomputation of each token under the weights that sampled it."""
        self.put_neighbours_to_sleep()
        results: dict[int, Sequence[np.ndarray]] = {}
        versions = [sample.completion.token_versions for sample in samples]
        self._moe.begin()
        past, model = self._past, self._past.model
        shares = not self._moe.replay and why_not_shared(model, trains=False) is None
        for version in sorted({int(version) for each in versions for version in np.unique(each)}):
            indices = [i for i, each in enumerate(versions) if (each == version).any()]
            batch = make_step_batch(
                [samples[i] for i in indices],
                max_batch_tokens=self._max_batch_tokens,
                device=model.context.device,
                share=shares,
            )
            work = partial(forward, model, batch, moe=self._moe, redraws=self._redraws)
            with past.under(self._versions[version]):
                leaves = forwards(batch.micro_batches, self._ranks, work, partial(past.idle, batch))
            again = recomputed(batch, all_leaves(leaves, model))
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
        tensors, writes = dict[str, Tensor](), self._past.model.context.rank == 0
        for version, kept in self._versions.items():
            for name, whole in self._past.wholes(kept):
                if writes:
                    tensors |= as_stored(f"{version}/{name}", whole.to("cpu", copy=True))
        if writes:
            save_file(tensors, folder / FILE)

    def restore(self, folder: Path) -> None:
        """Read what `save` wrote, under any layout."""
        wholes: dict[int, dict[str, Tensor]] = {}
        for key, weight in load_file(folder / FILE).items():
            version, _, name = key.partition("/")
            wholes.setdefault(int(version), {})[name] = weight
        self._versions = {version: self._past.of_wholes(kept) for version, kept in wholes.items()}
