"""Memory of a rank by part, predicted from a model's configuration for each layout over a number of GPUs.

Weights, masters, optimizer, gradients and cache are counted; activations and logits are estimated from shapes, a
micro-batch as one sequence. Where trainer and engine have the same tp, pp and ep one compute copy serves both; an
engine of another layout has weights of its own.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rlloop.config.layout import World
from rlloop.errors import ConfigError
from rlloop.models import Model
from rlloop.models.adapter_weights import ALL, choose_targets
from rlloop.models.architecture import ModelConfig
from rlloop.models.checkpoint_names import TOWER
from rlloop.models.experts import Experts
from rlloop.models.parameters import ParameterStore
from rlloop.models.placement import check_placement
from rlloop.models.row_blocks import ROWS
from rlloop.parallel.collectives import Ranks
from rlloop.parallel.context import ParallelContext
from rlloop.parallel.layout import Layout, keys_of
from rlloop.rollout.engine.engine import DEFAULT_CACHE_BYTES, SAVED_STATES, STATE_BYTES
from rlloop.rollout.engine.kv_cache import bytes_per_token
from rlloop.rollout.engine.steps import LOGITS_AT_ONCE
from rlloop.trainer.offload import BLOCK_BYTES, BLOCKS
from rlloop.training import vision_memory as tower
from rlloop.training.latent_memory import Latents
from rlloop.training.recurrent_memory import Recurrence

GIB = 1 << 30
RUNNING = 512  # requests of an engine at a time
PCIE = 50e9  # bytes a second each way, of a GPU's 16 lanes of the fifth generation: assumed
RESERVED = 2 * GIB  # CUDA's and NCCL's own, and what the allocator cannot use: assumed
MICRO_BATCHES = 8  # of an update: sums of gradients in memory grow with their logarithm
# Parts that exist while the trainer works.
UPDATES = ("gradients", "kept", "selections", "features", "activations", "attention", "values")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that needs most, by part."""

    layout: Layout
    parts: dict[str, int]
    host: int = 0  # bytes in host memory, beside them
    sleeps: bool = False  # the engine's cache is given back while the trainer works

    @property
    def total(self) -> int:
        """Of a cache that sleeps, states among it, and of what an update takes, the larger counts."""
        update = sum(self.parts.get(name, 0) for name in UPDATES)
        asleep = sum(self.parts.get(name, 0) for name in ("cache", "states"))
        return sum(self.parts.values()) - (min(update, asleep) if self.sleeps else 0)

    def describe(self) -> str:
        breakdown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.parts.items())
        if not self.host:
            return breakdown
        return f"{breakdown}; in host memory {self.host / GIB:.1f}, {self.host / PCIE:.2f} s an update"


def layouts(config: ModelConfig, gpus: int, *, splits_sequences: bool = False) -> Iterator[Layout]:
    """Layouts of `gpus` ranks that the model can have, in a trainer and in an engine, without copies of the trainer.

    `splits_sequences`: those with cp as well, which an engine beside the trainer does not have.
    """
    degrees = [degree for degree in range(1, gpus + 1) if gpus % degree == 0]
    for tp, cp, pp in itertools.product(degrees, degrees if splits_sequences else [1], degrees):
        if gpus % (tp * cp * pp):
            continue
        for ep in degrees if config.mixture is not None else [1]:
            try:
                layout = Layout(dp_shard=gpus // (tp * cp * pp), cp=cp, tp=tp, pp=pp, ep=ep)
                check_placement(config, {"layout": layout})
            except ConfigError:
                continue
            yield layout


def preference(layout: Layout) -> tuple[int, ...]:
    """Sort key by traffic between ranks: whole weights first, then divided experts, layers, sequences, products."""
    return layout.tp, layout.cp, layout.pp, layout.ep


def predict(
    config: ModelConfig, layout: Layout, dtype: torch.dtype, tokens: int, offload: str = "none", *,
    lora: int = 0, trains: bool = True, keep_attention: bool = False, offload_activations: bool = False,
    sleeps: bool = False, freeze_tower: bool = False, image_tokens: int | None = None, critic: bool = False,
    engine: Layout | None = None,
) -> Memory:  # fmt: skip
    """Memory of the rank that needs most; `tp` ranks with copies of key-value heads may need a little more.

    All layers are made again in the backward pass; `keep_attention`: but for their attention. `offload_activations`:
    what is kept of them waits in host memory. `sleeps`: `rollout.sleep`. `freeze_tower`: `trainer.freeze_vision_tower`.
    `image_tokens`: those of `tokens` that stand for pictures, where the model sees; None: all.

    `lora`: the rank of an adapter of all projections that trains over frozen weights; 0: all weights train. Without
    `trains` the model is only scored and sampled. `critic`: `algorithm.critic` as well, which has and trains weights of
    its own, in turn with the policy. `engine`: `rollout.layout`, which fills the trainer's ranks once or several times;
    None: one that reads the trainer's weights.
    """
    # The last rank of a stage has most of what does not divide, and so has the last stage of layers of one kind.
    mixed = config.blocks is not None or config.delta is not None
    stages = range(layout.pp) if mixed else sorted({0, layout.pp - 1})
    ranks = {(stage + 1) * layout.world_size // layout.pp - 1 for stage in stages}
    if engine is not None:  # the last one's stages
        ranks |= {layout.world_size - 1 - stage * engine.world_size // engine.pp for stage in range(engine.pp)}
    sizes = max(
        (
            _parts(
                config, layout, rank, dtype, tokens, lora, trains, keep_attention, freeze_tower,
                tokens if image_tokens is None else image_tokens, critic, engine,
            )
            for rank in ranks
        ),
        key=lambda x: sum(x.values()),
    )  # fmt: skip
    moved = {"none": (), "moments": ("optimizer",), "masters": ("optimizer", "masters")}[offload]
    host = sum(sizes.pop(name) for name in moved)
    if host:
        sizes["blocks"] = (1 + critic) * BLOCKS * BLOCK_BYTES
    if offload_activations:
        host += sum(sizes.pop(name, 0) for name in ("kept", "attention"))
    return Memory(layout, sizes, host, sleeps)


@functools.lru_cache(maxsize=8)  # modes of one shape follow each other
def _model(config: ModelConfig, layout: Layout, rank: int) -> Model:
    with torch.device("meta"):
        return Model(config, None, _context(layout, rank))


def _parts(
    config: ModelConfig, layout: Layout, rank: int, dtype: torch.dtype, tokens: int, lora: int, trains: bool,
    keep_attention: bool, freeze_tower: bool, image_tokens: int, critic: bool, engine: Layout | None,
) -> dict[str, int]:  # fmt: skip
    model, wide = _model(config, layout, rank), torch.float32.itemsize
    sampled = model if engine is None else _model(config, engine, rank % engine.world_size)
    held = owned = 0
    for name, entry in ParameterStore(model).entries.items():
        module = model.get_submodule(name.rpartition(".")[0])
        owners = layout.dp_shard // layout.expert_leaves if isinstance(module, Experts) else layout.dp_shard
        held += entry.live.numel()
        if not (freeze_tower and name.startswith(TOWER)):
            owned += _most(entry.live.shape, owners)
    frozen, every = {"compute copy": held * dtype.itemsize}, owned
    if lora:
        adapted = owned = 0
        for shape, of_experts in _factors(model, lora):
            adapted += math.prod(shape)
            owned += _most(shape, layout.dp_shard // (layout.expert_leaves if of_experts else 1))
        frozen["adapter"] = adapted * dtype.itemsize
    levels = int(math.log2(MICRO_BATCHES))  # of float32 sums; one gradient more has not been added yet
    sampling = sampled.context.layout
    recurrence, cached = Recurrence.of(config, sampling.tp), max(1, bytes_per_token(sampled.cache_spec(), dtype))
    positions = min(config.max_positions * RUNNING, DEFAULT_CACHE_BYTES // cached)
    masters, modes = wide if dtype.itemsize < wide else 0, [lora, 0] if critic else [lora]
    pictures = min(image_tokens, -(-tokens // layout.cp)) if model.visual is not None else 0
    towers = [_tower(config, dtype, pictures, not (freeze_tower or mode)) for mode in modes]
    inputs, features, seeing = (max(each) for each in zip(*towers, strict=True))
    trained = {
        "masters": owned * masters,
        "optimizer": 2 * (owned + every * critic) * wide,  # the critic's is offloaded as well; its masters are not
        "gradients": max(owned, every * critic) * (levels * wide + dtype.itemsize),
        **_kept(config, layout, dtype, tokens, inputs, features),
        "activations": max(seeing, *(_activations(config, layout, dtype, tokens, mode) for mode in modes)),
        **({"attention": _attention(config, layout, dtype, tokens)} if keep_attention else {}),
    }
    if critic:
        trained["critic"] = held * dtype.itemsize + every * masters
        # Its head reads all last hidden states in float32, and their gradient is.
        trained["values"] = tokens * config.hidden_size * 2 * wide
    return {
        **frozen,
        **({} if engine is None else {"engine": _engine_weights(sampled, model, lora) * dtype.itemsize}),
        **(trained if trains else {}),
        "cache": positions * cached,
        **({} if recurrence is None else {"states": _states(recurrence, sampled)}),
        "logits": LOGITS_AT_ONCE["cuda"] * wide // sampling.tp,
        "reserved": RESERVED,
    }


def _factors(model: Model, rank: int) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Shapes of the factors that a model has of an adapter of this rank, and whether these are experts'."""
    for target in choose_targets(model.adapter_targets(), [ALL]).values():
        if target.weight is not None:
            for (first, *others), division in zip(target.shapes(rank), target.divisions, strict=True):
                yield (first if division is None else division.size, *others), target.experts is not None


def _engine_weights(sampled: Model, trained: Model, lora: int) -> int:
    """Numbers of an engine's weights that are not the trainer's on the same rank: `Model(weights_of=)` shares the
    others."""
    engine, trainer = sampled.context.layout, trained.context.layout
    agree = World.of(trainer, engine).stages_agree
    if agree and (engine.tp, engine.ep, engine.pp) == (trainer.tp, trainer.ep, trainer.pp):
        return 0
    trainer_entries = ParameterStore(trained).entries if agree else {}
    own = (
        entry.live.numel()
        for name, entry in ParameterStore(sampled).entries.items()
        if not (name in trainer_entries and entry.is_contiguous and trainer_entries[name].division is None)
    )
    return sum(own) + (sum(math.prod(shape) for shape, _ in _factors(sampled, lora)) if lora else 0)


def _most(shape: tuple[int, ...], owners: int) -> int:
    """Numbers of the rank with most rows (of dimension 0, which is never divided within a row)."""
    return -(-shape[0] // owners) * math.prod(shape[1:])


def _activations(config: ModelConfig, layout: Layout, dtype: torch.dtype, tokens: int, lora: int) -> int:
    """Estimate: what one layer keeps for its backward pass, and what attention's or a recurrence's backward makes of
    it, for the kind of layer that needs most."""
    width, mixture, rows = config.hidden_size, config.mixture, -(-tokens // layout.cp)
    # Queries and keys before and after norm and rotation, values, outputs, the gradients of all but the first. On an
    # H100 a token of the 0.6B shape took 36.4 KiB, between 262,144 and 524,288; this is 36.
    attended = 5 * (config.num_heads + config.num_kv_heads) * config.head_dim
    inner = min(rows, ROWS) * 3 * config.intermediate_size
    if mixture is not None:
        inner = max(inner, rows * mixture.routing.top_k * (3 * mixture.expert_size + width))
    mixers = [dtype.itemsize * rows * attended // layout.tp] if config.attention_layers else []
    if (latents := Latents.of(config, layout)) is not None:
        saved = rows * latents.saved(dtype.itemsize, lora) + (tokens - rows) * latents.gathered(dtype.itemsize)
        mixers = [saved + max(latents.backward(dtype.itemsize, tokens), latents.choosing(tokens))]
    if (recurrence := Recurrence.of(config, layout.tp)) is not None:
        of_token = recurrence.saved(dtype.itemsize) + recurrence.gradients()
        # Ranks along cp have all tokens of own heads, which is as much as own tokens of all heads.
        mixers.append(rows * of_token + recurrence.backward(rows))
    mixer, inner = max(mixers, default=0), dtype.itemsize * inner // layout.tp
    # A layer of one block has either.
    return dtype.itemsize * rows * 3 * width + (mixer + inner if config.blocks is None else max(mixer, inner))


def _states(recurrence: Recurrence, model: Model) -> int:
    """Bytes of a GPU engine's recurrent states: a row for each request that runs, and for each that is saved."""
    of_sequence = len(set(recurrence.layers) & set(model.stage.layers)) * recurrence.state()
    return min((RUNNING + SAVED_STATES) * of_sequence, STATE_BYTES)


def _tower(config: ModelConfig, dtype: torch.dtype, image_tokens: int, trains: bool) -> tuple[int, int, int]:
    """Bytes that a vision tower keeps for `image_tokens` features until its backward pass, of its blocks' inputs and of
    all else; and that it works in."""
    if config.vision is None:
        return 0, 0, 0
    vision, itemsize = config.vision, dtype.itemsize
    patches = image_tokens * vision.merge_size**2
    features = image_tokens * tower.features(vision, itemsize, trains)
    forward = tower.forward(vision, itemsize)
    if not trains:
        return 0, features, patches * forward
    block = tower.block(vision, itemsize) + tower.block_backward(vision, itemsize)
    kept = features + patches * tower.kept(vision, itemsize)
    return patches * tower.inputs(vision, itemsize), kept, patches * max(forward, block)


def _kept(
    config: ModelConfig, layout: Layout, dtype: torch.dtype, tokens: int, inputs: int, features: int
) -> dict[str, int]:
    """Bytes of layers' inputs, a tower's among them, which may wait in host memory; and of what may not: selections
    that several layers read, and a tower's features and mergers."""
    under_way, rows = min(layout.pp, MICRO_BATCHES), -(-tokens // layout.cp)  # micro-batches in a pipeline
    stream = tokens * dtype.itemsize // layout.cp * config.hidden_size * -(-config.num_layers // layout.pp)
    latents = Latents.of(config, layout)
    shared = 0 if latents is None else rows * latents.kept() * -(-latents.shared // layout.pp)
    beside = {"selections": shared, "features": features}
    return {"kept": under_way * (stream + inputs), **{name: under_way * size for name, size in beside.items() if size}}


def _attention(config: ModelConfig, layout: Layout, dtype: torch.dtype, tokens: int) -> int:
    """Bytes of attention's outputs, and of its log-sum-exps in float32, in all layers that have attention."""
    width = config.head_dim if config.latent is None else config.latent.kv_rank
    of_head = width * dtype.itemsize + torch.float32.itemsize
    layers = -(-len(config.attention_layers) // layout.pp) * min(layout.pp, MICRO_BATCHES)
    return tokens // layout.cp * layers * -(-config.num_heads // layout.tp) * of_head


def _context(layout: Layout, rank: int) -> ParallelContext:
    """A rank's context without communication, from which its shares are known."""
    at, leaves = layout.coordinates(rank), layout.expert_leaves
    groups = {axis: Ranks(getattr(layout, axis), at[axis]) for axis in at if getattr(layout, axis) > 1}
    ep = groups.get("tp", Ranks()) if layout.ep == 1 else Ranks(layout.ep, rank % layout.ep)
    groups |= {"ep": ep, "expert_shard": Ranks(layout.dp_shard // leaves, at["dp_shard"] // leaves)}
    return ParallelContext(torch.device("meta"), layout, rank, 0, groups)


def layout_keys(layout: Layout) -> str:
    """The axes above 1, as configuration keys."""
    return keys_of(layout) or "one rank"
