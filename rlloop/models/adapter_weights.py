"""Low-rank adapters (LoRA, arXiv:2106.09685): their targets and factors, and one adapter attached to a model.

A weight W [N, K] has A [r, K] and B [N, r]; it acts as W + scale B A with scale = alpha / r, though nothing is merged:
`rlloop.numerics.operators.adapted` has the definition. In memory B is kept as operations read it: B' is scale * B in
float32, rounded to the compute type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from rlloop.errors import ConfigError
from rlloop.models.experts import Experts
from rlloop.models.layers import Linear
from rlloop.models.stored_parameter import StoredParameter
from rlloop.numerics.layout import Factors
from rlloop.numerics.profile import NumericsProfile
from rlloop.parallel.division import Division

ALL, EXPERTS, HEAD = "all-linear", "experts", "lm_head"
A, B = "lora_A", "lora_B"
MOST_NAMES = 5  # in messages


@dataclass(frozen=True, eq=False)
class Target:
    """A weight that adapters can target: a matrix [N, K], or one for each expert. Sizes are the whole weight's.

    Over ranks, B is divided like the weight's rows, and A is whole on each; each rank has both factors of its experts.
    """

    name: str  # of the module, or of the experts' parameter: model.layers.0.mlp.experts.gate_up_proj
    weight: Tensor | None  # as this rank holds it; None: on another pipeline stage
    inputs: int
    outputs: int
    experts: int | None = None
    transposed: bool = False  # the weight is stored [K, N]
    heads: int | None = None  # whose rows are multiplied apart: kv_b_proj of absorbed latent attention
    division: Division | None = None  # of the outputs (or experts, or heads) over ranks

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of A and B: [r, K] and [N, r], with a first dimension of experts; B by head [H, N / H, r]."""
        groups = () if self.experts is None else (self.experts,)
        outputs = (self.outputs,) if self.heads is None else (self.heads, self.outputs // self.heads)
        return (*groups, rank, self.inputs), (*groups, *outputs, rank)

    @property
    def divisions(self) -> tuple[Division | None, Division | None]:
        """Divisions of the first dimension of A and of B over ranks."""
        return None if self.experts is None else self.division, self.division

    def own(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """This rank's parts of A and B."""
        down, up = (x if cut is None else cut.take(x, 0) for x, cut in zip(pair, self.divisions, strict=True))
        return down, up

    def factors(self, down: Tensor, up: Tensor, ranks: Tensor) -> Factors:
        """One adapter's factors in the form of a slot's."""
        return Factors(
            down.unsqueeze(0 if self.experts is None else 1),
            up.unsqueeze(0 if self.experts is None and self.heads is None else 1),
            ranks,
        )


def find_targets(
    model: nn.Module, head: Tensor | None, vocabulary: Division | None, heads: int | None
) -> dict[str, Target]:
    """The targets of a model by name, those that this rank has. `head`: its output projection or the parameter that has
    it, of which ranks have parts (`vocabulary`); None: another rank's. `heads`: of latent attention, else None."""
    targets: list[Target] = []
    for name, module in model.named_modules():
        if isinstance(module, Linear) and ".indexer." not in name and not name.startswith("visual."):
            (held, inputs), division = module.weight.shape, module.rows
            target = Target(name, module.weight, inputs, division.count if division else held, division=division)
            if heads is not None and "kv_b_proj" in name:
                of_heads = None if division is None else division.groups(target.outputs // heads)
                target = replace(target, heads=heads, division=of_heads)
            targets.append(target)
        elif isinstance(module, Experts):
            for kind in ("gate_up_proj" if module.gated else "up_proj", "down_proj"):
                weight: nn.Parameter = getattr(module, kind)
                swapped = module.clamp is not None
                _, *sizes = weight.shape
                inputs, outputs = sizes if swapped else reversed(sizes)
                targets.append(
                    Target(f"{name}.{kind}", weight, inputs, outputs, module.count, swapped, division=module.division)
                )
    if head is not None:
        outputs, inputs = head.shape
        targets.append(Target(HEAD, head, inputs, vocabulary.count if vocabulary else outputs, division=vocabulary))
    return {target.name: target for target in targets}


def choose_targets(targets: Mapping[str, Target], names: Sequence[str]) -> dict[str, Target]:
    """The targets that `names` name: `all-linear` (all but the unembedding), `experts` (the routed ones), `lm_head`, a
    module's name or its last part. Raises `ConfigError` for a name of none."""
    chosen: set[str] = set()
    for name in names:
        matches = {each for each, target in targets.items() if _matches(name, each, target)}
        if not matches:
            suffixes = sorted({each.rsplit(".", 1)[-1] for each, target in targets.items() if target.experts is None})
            experts = f", {EXPERTS}" if any(target.experts for target in targets.values()) else ""
            raise ConfigError(
                f"model.lora.targets names {name!r}, which this model does not have; it has {ALL}{experts}, "
                f"{', '.join(suffixes)}, and modules by their whole names"
            )
        chosen |= matches
    return {name: target for name, target in targets.items() if name in chosen}


def _matches(wanted: str, name: str, target: Target) -> bool:
    if wanted == ALL:
        return name != HEAD
    if target.experts is not None:
        return wanted in (EXPERTS, name) or (name.endswith(f".{wanted}") and wanted.startswith(f"{EXPERTS}."))
    return wanted == name or name.endswith(f".{wanted}")


def check_adapts(profile: NumericsProfile) -> None:
    """Raises `ConfigError` where adapters cannot be computed under this profile."""
    if others := [op for op in ("linear", "experts", "token_logprob") if getattr(profile, op) != "rlloop"]:
        raise ConfigError(f"adapters need the profile's {', '.join(others)} to be rlloop; leave it at the default")
    for name, value, needed in (("tp_segments", profile.tp_segments, "1"), ("latent", profile.latent, "absorbed")):
        if value != needed:
            raise ConfigError(f"adapters need profile.{name}={needed}, and it is {value}")


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """The factors of one adapter, whole on every rank: float32, on the host, B unscaled; shapes as `Target.shapes`."""

    factors: Mapping[str, tuple[Tensor, Tensor]]  # A and B by the target's name
    scales: Mapping[str, float]  # alpha / rank, by the target's name
    rank: int  # of the adapter; a target may have another
    alpha: float

    def rank_of(self, name: str) -> int:
        return self.factors[name][0].shape[-2]

    def check(self, targets: Mapping[str, Target], dtype: torch.dtype, where: str) -> None:
        """Raises `ConfigError` for factors of unknown targets, of other shapes, or not finite in `dtype`."""
        if not self.factors:
            raise ConfigError(f"{where} has no factors; an adapter needs A and B of one target at least")
        if unknown := sorted(self.factors.keys() - targets.keys()):
            raise ConfigError(
                f"{where} has factors of layers that this model does not have: {some(unknown)}; it was made for "
                "another base, or for layers that take no adapters here (embeddings, routers, indexers, image towers)"
            )
        for name, (down, up) in self.factors.items():
            shapes = targets[name].shapes(down.shape[-2])
            for letter, tensor, shape in zip("AB", (down, up), shapes, strict=True):
                if tuple(tensor.shape) != shape:
                    raise ConfigError(
                        f"{where}: {letter} of {name} has shape {list(tensor.shape)}; for this base and rank "
                        f"{down.shape[-2]} it must be {list(shape)}"
                    )
                rounded = tensor.to(dtype) if letter == "A" else scaled(tensor, self.scales[name], dtype)
                if not bool(rounded.isfinite().all()):
                    raise ConfigError(f"{where}: {letter} of {name} holds NaN or infinity (as {dtype})")


def scaled(up: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """B' of B, as operations read it."""
    return (up.float() * scale).to(dtype)


def fresh_weights(targets: Mapping[str, Target], rank: int, alpha: float, seed: int) -> AdapterWeights:
    """A new adapter: A uniform in ± 1 / sqrt(K), as PEFT has it, and B = 0, so that it computes what the base does.

    Raises `ConfigError` for a rank above the model's widest projection, which could add nothing."""
    widest = max((max(target.inputs, target.outputs) for target in targets.values()), default=rank)
    if rank > widest:
        raise ConfigError(f"the adapter's rank is {rank}; it must be at most {widest}, the model's widest projection")
    generator, factors = torch.Generator().manual_seed(seed), {}
    for name, target in targets.items():
        down, up = target.shapes(rank)
        drawn = torch.rand(down, generator=generator) * 2 - 1
        factors[name] = (drawn / math.sqrt(target.inputs), torch.zeros(up))
    return AdapterWeights(factors, dict.fromkeys(factors, alpha / rank), rank, alpha)


class Adapter:
    """An adapter on the model's device, in its type: A and B' as parameters that can train.

    Each rank has the parts that match its weights.
    """

    def __init__(self, weights: AdapterWeights, targets: Mapping[str, Target], name: str = "policy") -> None:
        self.name, self.scales, self.rank, self.alpha = name, weights.scales, weights.rank, weights.alpha
        self.exact = weights  # the values that it was made from
        self.targets = {each: targets[each] for each in weights.factors}
        self._factors: dict[int, Callable[[], Factors]] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._held = [each for each, target in self.targets.items() if target.weight is not None]
        for each in self._held:
            (down, up), weight = self.targets[each].own(weights.factors[each]), self.targets[each].weight
            assert weight is not None
            pair = (down.to(weight.dtype), scaled(up, self.scales[each], weight.dtype))
            # Experts' factors from PEFT's layout are transposed views, and gradients and masters are flat.
            flat = torch.contiguous_format
            a, b = (nn.Parameter(tensor.to(weight.device, copy=True, memory_format=flat)) for tensor in pair)
            self._parameters |= {parameter_name(each, A): a, parameter_name(each, B): b}
            ranks = torch.tensor([weights.rank_of(each)], device=weight.device)
            # New views in each forward: autograd runs older nodes later, so ranks would reach shared ones out of step.
            self._factors[id(weight)] = partial(self.targets[each].factors, a, b, ranks)

    def attached(self, targets: Mapping[str, Target]) -> Adapter:
        """A copy, with the live values, for a copy of the model that has these targets."""
        twin = Adapter(self.exact, targets, self.name)
        with torch.no_grad():
            for name, parameter in twin._parameters.items():
                parameter.copy_(self._parameters[name])
        return twin

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """A and B' of each target, as `model.layers.0.self_attn.q_proj.lora_A.weight`."""
        return self._parameters

    def entries(self) -> dict[str, StoredParameter]:
        """`named_parameters` with their whole shapes and divisions over ranks. Live values are `scale` of B, and A."""
        entries = {}
        for name in self._held:
            target, scales = self.targets[name], (1.0, self.scales[name])
            of_both = zip((A, B), target.shapes(self.exact.rank_of(name)), scales, target.divisions, strict=True)
            for letter, shape, scale, division in of_both:
                live = self._parameters[parameter_name(name, letter)]
                entries[parameter_name(name, letter)] = StoredParameter(
                    live, shape, live.requires_grad, scale, division=division
                )
        return entries

    def exact_state(self) -> dict[str, Tensor]:
        """Its original float32 values, by parameter name; B unscaled."""
        return self.state_of(self.exact)

    def state_of(self, weights: AdapterWeights) -> dict[str, Tensor]:
        """The values of `weights` by name of parameter."""
        return {
            parameter_name(name, letter): tensor
            for name, pair in weights.factors.items()
            for letter, tensor in zip((A, B), pair, strict=True)
        }

    def weights_of(self, state: Mapping[str, Tensor]) -> AdapterWeights:
        """An adapter of the same targets from float32 values, named as in `exact_state`."""
        factors = {
            name: tuple(state[parameter_name(name, letter)].detach().cpu() for letter in (A, B))
            for name in self.targets
        }
        return AdapterWeights(factors, self.scales, self.rank, self.alpha)  # type: ignore[arg-type]

    def live(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A and B' by the target's name, as this rank holds them."""
        return {
            name: (self._parameters[parameter_name(name, A)], self._parameters[parameter_name(name, B)])
            for name in self._held
        }

    @property
    def factors(self) -> Mapping[int, Callable[[], Factors]]:
        """Factors by the id of the weight, for `AdapterSlots`."""
        return self._factors


def parameter_name(target: str, letter: str) -> str:
    return f"{target}.{letter}.weight"


def some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
