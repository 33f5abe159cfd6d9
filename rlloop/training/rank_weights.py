"""A rank's weights in any layout, without a model of it: layers of one kind are made once, on no device."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Container, Iterator

import torch

from rlloop.models import Model
from rlloop.models.adapter_weights import ALL, Target, choose_targets
from rlloop.models.architecture import ModelConfig
from rlloop.models.experts import Experts
from rlloop.models.model_facts import ModelFacts
from rlloop.models.stages import Stage
from rlloop.models.stored_parameter import StoredParameter, entries_of
from rlloop.parallel.collectives import Ranks
from rlloop.parallel.context import ParallelContext
from rlloop.parallel.layout import Layout

Entries = tuple[tuple[str, StoredParameter, bool], ...]  # name, parameter, and whether it is experts'


class RankWeights(ModelFacts):
    """The parameters of one rank's model: those that `Model` has in that rank's context, without their memory."""

    def __init__(self, config: ModelConfig, layout: Layout, rank: int) -> None:
        at = layout.coordinates(rank)
        groups = {axis: Ranks(getattr(layout, axis), at[axis]) for axis in ("pp", "tp")}
        self.config, self.context = config, ParallelContext(torch.device("meta"), layout, rank, 0, groups)
        self._stage = Stage(config, self.context)
        self._shares = layout.tp, at["tp"], layout.ep, rank % layout.ep

    @property
    def stage(self) -> Stage:
        return self._stage

    @property
    def sees(self) -> bool:
        return self.config.vision is not None and self.stage.first

    def kinds(self) -> dict[int, int]:
        """The rank's layers, each with the first of the model's that has the same weights."""
        kinds = _kinds(self.config)
        return {layer: kinds[layer] for layer in self.stage.layers}

    def layer(self, kind: int) -> Entries:
        """The parameters of a layer, under their names within it."""
        return _entries(self.config, kind, *self._shares)[0]

    def others(self) -> Entries:
        """The parameters outside of layers, under their whole names."""
        ends = {0: self.stage.first, self.config.num_layers - 1: self.stage.last}
        each = [_entries(self.config, layer, *self._shares)[1] for layer, has in ends.items() if has]
        return tuple({entry[0]: entry for entries in each for entry in entries}.values())  # a tied weight once

    def entries(self) -> Iterator[tuple[str, StoredParameter]]:
        yield from ((name, entry) for name, entry, _ in self.others())
        for layer, kind in self.kinds().items():
            yield from ((f"{prefix(layer)}{name}", entry) for name, entry, _ in self.layer(kind))

    def distinct(self, names: Container[str]) -> Iterator[tuple[int, str, StoredParameter, bool]]:
        """The parameters with how many of the rank's layers have equal ones; one by one where some are among `names`.
        A name is that of the first."""
        yield from ((1, *each) for each in self.others())
        counts = Counter((kind, layer if names else kind) for layer, kind in self.kinds().items())
        for (kind, layer), count in counts.items():
            for name, entry, of_experts in self.layer(kind):
                yield count, f"{prefix(layer)}{name}", entry, of_experts

    def targets(self) -> Iterator[Target]:
        """The projections that an adapter with targets `all-linear` has factors for, layer by layer."""
        for kind in self.kinds().values():
            yield from _targets(self.config, kind, *self._shares)


def prefix(layer: int) -> str:
    return f"model.layers.{layer}."


@functools.lru_cache(maxsize=1024)
def _alone(config: ModelConfig, layer: int, tp: int, tp_rank: int, ep: int, ep_rank: int) -> Model:
    """A model of one layer: the stage of a pipeline that has as many."""
    groups = {"tp": Ranks(tp, tp_rank), "pp": Ranks(config.num_layers, layer)}
    groups["ep"] = groups["tp"] if ep == 1 else Ranks(ep, ep_rank)  # as `parallel.context.join`
    layout, device = Layout(dp_shard=ep, tp=tp, ep=ep), torch.device("meta")
    with device:
        return Model(config, None, ParallelContext(device, layout, 0, 0, groups))


@functools.lru_cache(maxsize=1024)
def _entries(config: ModelConfig, layer: int, *shares: int) -> tuple[Entries, Entries]:
    """Of the layer, and of what else its stage has."""
    model, start = _alone(config, layer, *shares), prefix(layer)
    experts = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Experts))
    every = [(name, entry, name.startswith(experts)) for name, entry in entries_of(model).items()]
    own = tuple((name.removeprefix(start), entry, flag) for name, entry, flag in every if name.startswith(start))
    return own, tuple(each for each in every if not each[0].startswith(start))


@functools.lru_cache(maxsize=1024)
def _targets(config: ModelConfig, layer: int, *shares: int) -> tuple[Target, ...]:
    return tuple(choose_targets(_alone(config, layer, *shares).own_targets(), [ALL]).values())


@functools.lru_cache(maxsize=8)
def _kinds(config: ModelConfig) -> list[int]:
    """Each layer's first of equal names and shapes."""
    first: dict[object, int] = {}
    every = [_entries(config, layer, 1, 0, 1, 0)[0] for layer in range(config.num_layers)]
    shapes = [tuple((name, entry.shape, experts) for name, entry, experts in entries) for entries in every]
    return [first.setdefault(each, layer) for layer, each in enumerate(shapes)]
