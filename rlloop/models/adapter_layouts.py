"""Layouts of adapters' factors in PEFT folders: from the names, shapes and patterns of a file to targets and scales.

Three layouts of experts' factors are read: one pair for each expert and projection (`experts.3.up_proj.lora_A`), PEFT's
`target_parameters` (all experts in one matrix, [E r, K] and [N, r E]; this one is written), and three dimensions
([E or 1, r, K], as Tinker has them, where 1 is shared by all experts). A gate and an up of different A become one pair
of twice the rank; zeros in B remove the terms of the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlloop.errors import ConfigError
from rlloop.models.adapter_weights import Target, some
from rlloop.models.checkpoint_names import module_names

EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?:(?P<index>\d+)\.)?(?P<part>[a-z_0-9]+)")
PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
KINDS = ("gate_up_proj", "up_proj", "down_proj")  # the inner one of two that PEFT wraps comes first
Pair = tuple[Tensor, Tensor]


class Scaled(NamedTuple):
    """A pair and its scale."""

    pair: Pair
    scale: float


@dataclass(frozen=True)
class Declared:
    """Ranks and scales as adapter_config.json declares them, once it is checked."""

    rank: int
    alpha: float
    config: Mapping[str, Any]

    def scale(self, names: Sequence[str], rank: int, folder: Path) -> float:
        """alpha / rank of a module (or parameter) with one of these names. Raises `ConfigError` for another rank."""
        declared = self._of("rank_pattern", names, self.rank)
        if rank != declared:
            raise ConfigError(f"{folder}: {names[0]} has rank {rank}; adapter_config.json says {declared}")
        alpha = self._of("alpha_pattern", names, self.alpha)
        return float(alpha) / (declared**0.5 if self.config.get("use_rslora") else declared)

    def _of(self, key: str, names: Sequence[str], otherwise: float) -> float:
        matches = (
            value for pattern, value in self.config[key].items()
            if any(re.match(rf"(.*\.)?({pattern})$", name) for name in names)
        )  # fmt: skip
        return next(matches, otherwise)  # the first, as in PEFT


def read_factors(
    pairs: Mapping[str, Pair], declared: Declared, targets: Mapping[str, Target], architecture: str, folder: Path
) -> dict[str, Scaled]:
    """Factors by the target's name, in the shapes of `Target.shapes`; unknown modules under their own.

    Raises `ConfigError` for ranks other than declared, and for experts' factors that do not fit together.
    """
    names = {each: name for name in targets for each in module_names(name, architecture)}
    grouped = {
        theirs.rsplit(".", 1)[0]: name.rsplit(".", 1)[0]
        for theirs, name in names.items() if targets[name].experts is not None
    }  # fmt: skip
    factors: dict[str, Scaled] = {}
    of_experts: dict[str, dict[str, dict[int, Scaled]]] = {}  # experts -> projection -> expert: its pair
    for module, (down, up) in pairs.items():
        bare, found = module.replace(".base_layer", ""), dict[str, Scaled]()
        split = EXPERT.fullmatch(bare)
        if bare in grouped:
            target = _flat_target(grouped[bare], module, pairs, targets, declared, folder)
            count, kind = target.experts or 1, target.name.rsplit(".", 1)[-1]
            scale = declared.scale([f"{bare}.{kind}"], down.shape[0] // count, folder)
            pair = down.unflatten(0, (count, -1)), up.unflatten(1, (-1, count)).permute(2, 0, 1)
            found[target.name] = Scaled(pair, scale)
        elif split is not None and split["experts"] in grouped:
            if not (down.numel() or up.numel()):
                continue
            by_expert = of_experts.setdefault(grouped[split["experts"]], {}).setdefault(
                PARTS.get(split["part"], split["part"]), {}
            )
            scale = declared.scale([bare], down.shape[-2] if down.ndim > 1 else 0, folder)
            if split["index"] is not None:
                new = {int(split["index"]): Scaled((down, up), scale)}
            else:
                count = targets[f"{grouped[split['experts']]}.down_proj"].experts or 0
                new = dict(enumerate(Scaled(pair, scale) for pair in _each_expert(down, up, count, module, folder)))
            if twice := by_expert.keys() & new.keys():
                raise ConfigError(f"{folder} holds factors of {bare} (expert {min(twice)}) twice")
            by_expert |= new
        else:
            name = names.get(bare, bare)
            heads = targets[name].heads if name in targets else None
            scale = declared.scale([bare, f"{bare}.weight"], down.shape[0], folder)
            by_head = up.unflatten(0, (heads, -1)) if heads and up.shape[0] % heads == 0 else up
            found[name] = Scaled((down, by_head), scale)
        if twice := factors.keys() & found.keys():
            raise ConfigError(f"{folder} holds factors of {min(twice)} twice")
        factors |= found
    for experts, projections in of_experts.items():
        joined = _joined(experts, projections, targets, folder)
        if twice := factors.keys() & joined.keys():
            raise ConfigError(f"{folder} holds factors of {min(twice)} twice")
        factors |= joined
    return factors


def _flat_target(
    experts: str, module: str, pairs: Mapping[str, Pair], targets: Mapping[str, Target], declared: Declared,
    folder: Path,
) -> Target:  # fmt: skip
    """The target of one matrix of all experts: by its shape, or where two have that shape, as PEFT wraps them."""
    down, up = pairs[module]
    flat = [targets[name] for kind in KINDS if (name := f"{experts}.{kind}") in targets]
    fits = [each for each in flat if _fits_flat(each, down, up)]
    if not fits:
        raise ConfigError(
            f"{folder}: {module} has shapes {list(down.shape)} and {list(up.shape)}, which no experts here have"
        )
    if len(fits) == 1:
        return fits[0]
    if f"{module}.base_layer" in pairs or module.endswith(".base_layer"):
        return fits[0] if module.endswith(".base_layer") else fits[-1]
    listed = declared.config.get("target_parameters") or ()
    named = [each for each in fits if any(each.name.endswith(str(name).rsplit(".", 1)[-1]) for name in listed)]
    if len(named) != 1:
        raise ConfigError(
            f"{folder}: {module} fits {' and '.join(each.name for each in fits)} alike; name one in target_parameters"
        )
    return named[0]


def _fits_flat(target: Target, down: Tensor, up: Tensor) -> bool:
    if not down.ndim == up.ndim == 2 or (down.shape[1], up.shape[0]) != (target.inputs, target.outputs):
        return False
    return down.shape[0] == up.shape[1] and down.shape[0] % (target.experts or 1) == 0


def _each_expert(down: Tensor, up: Tensor, count: int, module: str, folder: Path) -> list[Pair]:
    """The pairs of factors with three dimensions, in which one expert may stand for all."""
    if not all(each.ndim == 3 and len(each) in (1, count) for each in (down, up)):
        raise ConfigError(
            f"{folder}: {module} has shapes {list(down.shape)} and {list(up.shape)}; A and B of these {count} experts "
            f"have three dimensions, the first of them {count}, or 1 for all"
        )
    a, b = (each.expand(count, *each.shape[1:]) for each in (down, up))
    return list(zip(a, b, strict=True))


def _joined(
    experts: str,
    projections: dict[str, dict[int, Scaled]],
    targets: Mapping[str, Target],
    folder: Path,
) -> dict[str, Scaled]:
    """Join pairs of single experts into factors of all experts; experts without a pair get zeros."""
    factors: dict[str, Scaled] = {}
    gated = f"{experts}.gate_up_proj" in targets
    for kind in ("gate_up_proj" if gated else "up_proj", "down_proj"):
        target = targets[f"{experts}.{kind}"]
        wanted = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
        present = {projection: projections.pop(projection) for projection in wanted if projection in projections}
        if not present:
            continue
        count = target.experts or 0
        if wrong := sorted(index for each in present.values() for index in each if index >= count):
            raise ConfigError(f"{folder}: {experts} has factors of expert {wrong[0]}; this base has {count}")
        scales = {each.scale for of_one in present.values() for each in of_one.values()}
        if len(scales) > 1:
            raise ConfigError(
                f"{folder}: {some(sorted(present))} of {experts} have several scales (alpha / rank, "
                f"{', '.join(f'{each:g}' for each in sorted(scales))}); they need one: scale B instead"
            )
        rank = next(iter(next(iter(present.values())).values())).pair[0].shape[0]
        downs, ups, width = [], [], target.outputs // len(wanted)
        for index, projection in enumerate(wanted):
            none = Scaled((torch.zeros(rank, target.inputs), torch.zeros(width, rank)), 0)
            pairs = [present.get(projection, {}).get(expert, none).pair for expert in range(count)]
            if any(a.shape != (rank, target.inputs) or b.shape != (width, rank) for a, b in pairs):
                raise ConfigError(
                    f"{folder}: factors of {experts}'s {projection} are not all [{rank}, {target.inputs}] and "
                    f"[{width}, {rank}]"
                )
            downs.append(torch.stack([a for a, _ in pairs]))
            placed = [
                torch.stack([b for _, b in pairs]) if at == index else torch.zeros(count, width, rank)
                for at in range(len(wanted))
            ]
            ups.append(torch.cat(placed, 1))
        same = all(torch.equal(each, downs[0]) for each in downs)
        pair = (downs[0], sum(ups[1:], ups[0])) if same else (torch.cat(downs, 1), torch.cat(ups, 2))
        factors[target.name] = Scaled(pair, scales.pop())
    if projections:
        raise ConfigError(
            f"{folder}: {experts} has factors of {some(sorted(projections))}, which these experts do not have"
        )
    return factors
