"""Weight sync for the collapse study: an engine with weights of its own, which drift from the trainer's as declared.

The engine's model is a copy. Each version rewrites it in place from the trainer's weights: rounded to a narrow dtype as
engines store it, or some steps old, or (a defect, not numerics) by adding differences that its dtype cannot hold.

Or, as a control, the trainer computes with the rounded weights too: then they are one model's, and nothing differs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlloop.errors import ConfigError
from rlloop.models import Model
from rlloop.models.parameters import ParameterStore
from rlloop.numerics.profile import Drift
from rlloop.study.drifted_ops import DriftedOps, drifted_ops
from rlloop.study.fp8 import fits
from rlloop.study.quantize import quantized
from rlloop.sync.colocated import Versioned
from rlloop.trainer.master_weights import Rounding

FILE = "drifted_sync.safetensors"
KEPT = ("embed_tokens", "lm_head", ".gate.", ".indexer.", "_bias")  # names of weights that engines do not quantise


class ModelEngine(Versioned, Protocol):
    @property
    def model(self) -> Model: ...


class DriftedSync:
    """Syncs `engine`, whose model is a `drifted_copy`, and others, which share the trainer's parameters.

    A stale engine has the version of the weights that it really holds, so that recorded versions are right.
    """

    def __init__(self, trained: Model, engine: ModelEngine, *others: Versioned) -> None:
        assert engine.model.profile.drift is not None
        self.drift: Drift = engine.model.profile.drift
        check_drift(self.drift, trained.device)
        self._trained, self._engine, self._others = trained, engine, others
        self._own = {name: entry.live for name, entry in ParameterStore(engine.model).entries.items()}
        self._published: dict[int, dict[str, Tensor]] = {}  # the trainer's last weights, by version

    @torch.no_grad()
    def publish(self, version: int) -> dict[str, float]:
        """Bring the engine to `version`, which samples step `version` + 1. Call with each version in turn; the same one
        again changes nothing. Returns `sync/weight_error`."""
        for other in self._others:
            other.set_version(version)
        now = ParameterStore(self._trained).snapshot()
        first, served = self.drift.from_step - 1, version
        drifting = version >= first
        model = self._engine.model
        model.ops = drifted_ops(model.profile if drifting else dataclasses.replace(model.profile, drift=None))
        if drifting and self.drift.lossy_sync and version > first:
            self._add(now, self._published[max(self._published)])
        else:
            if drifting:
                served = max(version - self.drift.stale_steps, min(self._published, default=version))
            source = now if served == version else self._published[served]
            for name, own in self._own.items():
                own.copy_(rounded(self.drift, name, source[name]) if drifting else source[name])
                multiplies_fp8 = self.drift.products == "fp8" and not _kept(name, own) and fits(own)
                if isinstance(model.ops, DriftedOps) and multiplies_fp8:
                    model.ops.narrow(own, source[name])
        self._published[version] = now
        for old in [each for each in self._published if each < version - self.drift.stale_steps]:
            del self._published[old]
        self._engine.set_version(served)
        return {"sync/weight_error": _error(self._own, now)}

    def save(self, folder: Path) -> None:
        """Save the engine's weights, and the trainer's last ones, which a resumed run cannot recompute."""
        state = {f"engine/{name}": own.detach() for name, own in self._own.items()}
        for version, weights in self._published.items():
            state |= {f"{version}/{name}": weight for name, weight in weights.items()}
        save_file(state, folder / FILE)

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        self._published = {}
        for key, tensor in load_file(folder / FILE).items():
            owner, _, name = key.partition("/")
            if owner == "engine":
                self._own[name].copy_(tensor)
            else:
                self._published.setdefault(int(owner), {})[name] = tensor

    def _add(self, now: dict[str, Tensor], before: dict[str, Tensor]) -> None:
        """w <- bf16(w + bf16(new − old)): an update below half a unit in w's last place is lost for good."""
        for name, own in self._own.items():
            difference = (now[name] - before[name]).bfloat16()
            own.copy_(own.bfloat16() + difference)


class RoundsWeights(Protocol):
    @property
    def masters(self) -> Mapping[str, Tensor]: ...

    def round_weights(self, rounding: Rounding) -> None: ...


class BothSidesSync:
    """Sync of engines that share the parameters of `trained`, which its trainer rounds from the drift's first step on.

    A checkpoint has the masters, and each version is rounded from them, so a resumed run needs no more.
    """

    def __init__(self, trained: Model, trainer: RoundsWeights, drift: Drift, *engines: Versioned) -> None:
        assert drift.both_sides
        self.drift, self._trained, self._trainer, self._engines = drift, trained, trainer, engines
        self._rounds = False

    @torch.no_grad()
    def publish(self, version: int) -> dict[str, float]:
        """As `DriftedSync.publish`; `sync/weight_error` is that of the trainer's own weights from its masters."""
        if version >= self.drift.from_step - 1 and not self._rounds:
            self._rounds = True
            self._trainer.round_weights(partial(rounded, self.drift))
        for engine in self._engines:
            engine.set_version(version)
        if not self._rounds:
            return {"sync/weight_error": 0.0}
        live = ParameterStore(self._trained).tensors()
        masters = {name: each.to(self._trained.device) for name, each in self._trainer.masters.items()}
        return {"sync/weight_error": _error({name: live[name] for name in masters}, masters)}


def rounded(drift: Drift, name: str, weight: Tensor) -> Tensor:
    """The weight as an engine with this drift stores it."""
    kind = "bf16" if drift.lossy_sync else drift.weights
    if kind == "none" or (kind != "bf16" and _kept(name, weight)):
        return weight
    return quantized(weight, kind, drift.granularity)


def as_computed(model: Model, drift: Drift, version: int) -> Model:
    """A view of `model`, masters of `version` as a checkpoint has them, as engine and trainer computed under a drift on
    both sides. Rounds the model's weights in place."""
    if version >= drift.from_step - 1:
        ParameterStore(model).copy_from(
            {name: rounded(drift, name, each) for name, each in ParameterStore(model).tensors().items()}
        )
    return both_sides_view(model, drift)


def both_sides_view(model: Model, drift: Drift) -> Model:
    """A view of `model` whose fingerprint says that its weights are rounded."""
    return model.with_profile(dataclasses.replace(model.profile, drift=drift), drifted_ops)


def _error(own: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> float:
    """Norm of the difference from the trainer's current weights, divided by their norm."""
    apart = torch.stack([(each - now[name]).double().square().sum() for name, each in own.items()]).sum()
    whole = torch.stack([weight.double().square().sum() for weight in now.values()]).sum()
    return float((apart / whole).sqrt())  # one synchronisation with the device, not one for each weight


def check_drift(drift: Drift, device: torch.device) -> None:
    """Raises `ConfigError` for a drift that a model on this device cannot have."""
    if drift.products == "fp8" and device.type != "cuda":
        raise ConfigError(
            "the drift has products=fp8, kernels of a GPU; leave it at none (the same roundings, and the profile's "
            f"products), or use device=cuda in place of {device.type}"
        )


def _kept(name: str, weight: Tensor) -> bool:
    return weight.ndim < 2 or any(pattern in name for pattern in KEPT)


def drifted_copy(model: Model) -> Model:
    """A copy of `model` with parameters of its own, for an engine that must not share the trainer's."""
    return copy.deepcopy(model).requires_grad_(False)
