"""Memory of a rank by part, predicted from a model's configuration for each layout over a number of GPUs.

Weights, masters, optimizer, gradients and cache are counted; activations and logits are estimated from shapes, a
micro-batch as one sequence. Where trainer and engine have the same tp, pp and ep one compute copy serves both; an
engine of another layout has weights of its own.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlloop.config.layout import World
from rlloop.errors import ConfigError
from rlloop.models.architecture import ModelConfig
from rlloop.models.checkpoint_names import EMBEDDING, HEAD, TOWER
from rlloop.models.placement import check_placement
from rlloop.models.weight_reader import type_in_memory
from rlloop.numerics.packed import Packing
from rlloop.parallel.layout import Layout, beside, keys_of
from rlloop.rollout.engine.engine import DEFAULT_CACHE_BYTES, SAVED_STATES, STATE_BYTES
from rlloop.rollout.engine.kv_cache import bytes_per_token
from rlloop.rollout.engine.steps import LOGITS_AT_ONCE
from rlloop.trainer.gradients import IN_FLIGHT
from rlloop.trainer.offload import BLOCK_BYTES, BLOCKS
from rlloop.training import vision_memory
from rlloop.training.dense_memory import Heads, head_backward, mlp_backward
from rlloop.training.latent_memory import Latents
from rlloop.training.rank_weights import RankWeights
from rlloop.training.recurrent_memory import Recurrence

GIB = 1 << 30
RUNNING = 512  # requests of an engine at a time
PCIE = 50e9  # bytes a second each way, of a GPU's 16 lanes of the fifth generation: assumed
RESERVED = 2 * GIB  # CUDA's and NCCL's own, and what the allocator cannot use: assumed
MICRO_BATCHES = 8  # of an update: sums of gradients in memory grow with their logarithm
TOKEN_BYTES = 128  # ids, positions and targets 24, settings 40; results, their gradients, a loss's numbers: 16 float32
WORKSPACES = 2 * 32 << 20  # of cuBLAS on Hopper, for the threads of forwards and of backwards
# Parts that exist while the trainer works, and while the engine does; its logits stay in the pools of recorded graphs.
UPDATES = ("gradients", "layers", "kept", "selections", "features", "activations", "attention", "head", "values")
SAMPLES = ("cache", "states")
ENGINES = (*SAMPLES, "logits")
WAITING = "waiting"  # what `predict` moves to the host
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
        """Of a cache that sleeps, with states, and of what an update takes, the larger counts."""
        update, asleep = (sum(self.parts.get(name, 0) for name in names) for names in (UPDATES, SAMPLES))
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
    engine: Layout | None = None, micro_batches: int = MICRO_BATCHES, packed: Mapping[str, Packing] | None = None,
    pieces: bool = False,
) -> Memory:  # fmt: skip
    """Memory of the rank that needs most; `tp` ranks with copies of key-value heads may need a little more.

    All layers are made again in the backward pass; `keep_attention`: but for their attention. `offload_activations`:
    what is kept of them waits in host memory. `sleeps`: `rollout.sleep`. `freeze_tower`: `trainer.freeze_vision_tower`.
    `image_tokens`: those of `tokens` that stand for pictures, where the model sees; None: all.

    `lora`: the rank of an adapter of all projections that trains over frozen weights; 0: all weights train. Without
    `trains` the model is only scored and sampled. `critic`: `algorithm.critic` as well, which has and trains weights of
    its own, in turn with the policy. `engine`: `rollout.layout`, which fills the trainer's ranks once or several times;
    None: one that reads the trainer's weights. `micro_batches`: at most so many of an update. `packed`: weights that
    are loaded packed (`weight_reader.packed_parameters`), which do not train. `pieces`: `trainer.shard=parameters`,
    beside which the engine has all of its weights for itself.
    """
    pieces = pieces and layout.dp_shard > 1 and trains and not lora
    if pieces and engine is None:
        engine = beside(layout)
    # The last rank of a stage has most of what does not divide, and so has the last stage of layers of one kind.
    mixed = config.blocks is not None or config.delta is not None
    stages = range(layout.pp) if mixed else sorted({0, layout.pp - 1})
    ranks = {(stage + 1) * layout.world_size // layout.pp - 1 for stage in stages}
    if engine is not None:  # the last one's stages
        ranks |= {layout.world_size - 1 - stage * engine.world_size // engine.pp for stage in range(engine.pp)}
    sizes = max(
        (
            _parts(
                config, layout, rank, dtype, tokens, lora, trains, keep_attention, offload_activations, freeze_tower,
                tokens if image_tokens is None else image_tokens, critic, engine, micro_batches, packed or {}, pieces,
            )
            for rank in ranks
        ),
        key=lambda x: sum(x.values()),
    )  # fmt: skip
    moved = {"none": (), "moments": ("optimizer",), "masters": ("optimizer", "masters")}[offload]
    host = sum(sizes.pop(name) for name in moved)
    if host:
        sizes["blocks"] = (1 + critic) * BLOCKS * BLOCK_BYTES
    host += sizes.pop(WAITING, 0)
    return Memory(layout, sizes, host, sleeps)


def _parts(
    config: ModelConfig, layout: Layout, rank: int, dtype: torch.dtype, tokens: int, lora: int, trains: bool,
    keep_attention: bool, offload_activations: bool, freeze_tower: bool, image_tokens: int, critic: bool,
    engine: Layout | None, micro_batches: int, packed: Mapping[str, Packing], pieces: bool,
) -> dict[str, int]:  # fmt: skip
    model, wide = RankWeights(config, layout, rank), torch.float32.itemsize
    sampled = model if engine is None else RankWeights(config, engine, rank % engine.world_size)
    held = owned = unpacked = 0
    # Of each kind of layer of which a rank keeps rows: its numbers, and how many layers there are.
    cut, copies = collections.Counter[str](), dict[str, int]()
    for count, name, entry, of_experts in model.distinct(packed):
        owners = layout.dp_shard // layout.expert_leaves if of_experts else layout.dp_shard
        if pieces and name.startswith("model.layers."):
            held += count * _most(entry.live.shape, owners) * dtype.itemsize
            cut[name.split(".")[2]] += entry.live.numel()
            copies[name.split(".")[2]] = count
        else:
            held += count * _nbytes(name, entry.live, dtype, packed)
        if name in packed:
            unpacked = max(unpacked, entry.live.numel() * dtype.itemsize)
        elif not (freeze_tower and name.startswith(TOWER)):
            owned += count * _most(entry.live.shape, owners)
    frozen, every = {"compute copy": held}, owned
    if cut:  # one that computes, and the next
        whole = [numbers for kind, numbers in cut.most_common(2) for _ in range(copies[kind])]
        frozen["layers"] = sum(whole[:2]) * dtype.itemsize
    if packed:  # products of many rows, and all of a backward, make a whole weight plain for a moment
        frozen["unpacked"] = unpacked
    if lora:
        adapted = owned = 0
        for shape, of_experts in _factors(model, lora):
            adapted += math.prod(shape)
            owned += _most(shape, layout.dp_shard // (layout.expert_leaves if of_experts else 1))
        frozen["adapter"] = adapted * dtype.itemsize
    sampling = sampled.context.layout
    recurrence, cached = Recurrence.of(config, sampling.tp), max(1, bytes_per_token(sampled.cache_spec(), dtype))
    positions = min(config.max_positions * RUNNING, DEFAULT_CACHE_BYTES // cached)
    masters, modes = wide if dtype.itemsize < wide else 0, [lora, 0] if critic else [lora]
    pictures = min(image_tokens, -(-tokens // layout.cp)) if model.sees else 0
    towers = [_tower(config, dtype, pictures, not (freeze_tower or mode)) for mode in modes]
    inputs, features, seeing = (max(each) for each in zip(*towers, strict=True))
    first, last, gradients = model.stage.first, model.stage.last, max(owned, every * critic)
    head = _most((config.vocab_size // layout.tp, config.hidden_size), layout.dp_shard) if last and not lora else 0
    gradients += head if first and config.tied else 0  # a tied weight's two uses have sums of their own
    trained = {
        "masters": owned * masters,
        "optimizer": 2 * (owned + every * critic) * wide,  # the critic's is offloaded as well; its masters are not
        **_backward(
            config, layout, dtype, tokens, modes, gradients, head, last, (inputs, features, seeing), micro_batches,
            keep_attention, offload_activations, (EMBEDDING if config.tied else HEAD) in packed,
        ),
    }  # fmt: skip
    if critic:
        trained["critic"] = held + every * masters
        # Its head reads all last hidden states in float32, and their gradient is.
        trained["values"] = tokens * config.hidden_size * 2 * wide
    return {
        **frozen,
        **({} if engine is None else {"engine": _engine_weights(sampled, model, lora, dtype, packed, pieces)}),
        **(trained if trains else {}),
        "cache": positions * cached,
        **({} if recurrence is None else {"states": _states(recurrence, sampled)}),
        "logits": LOGITS_AT_ONCE["cuda"] * wide // sampling.tp,
        "tables": wide * config.max_positions * config.rope_dim + TOKEN_BYTES * tokens + WORKSPACES,
        "reserved": RESERVED,
    }


def _factors(model: RankWeights, rank: int) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Shapes of the factors that a model has of an adapter of this rank, and whether these are experts'."""
    for target in model.targets():
        for (first, *others), division in zip(target.shapes(rank), target.divisions, strict=True):
            yield (first if division is None else division.size, *others), target.experts is not None


def _nbytes(name: str, live: Tensor, dtype: torch.dtype, packed: Mapping[str, Packing]) -> int:
    """Bytes of a rank's part of a weight."""
    if name in packed:
        return packed[name].nbytes(tuple(live.shape))
    return live.numel() * (type_in_memory(name, dtype) or dtype).itemsize


def _engine_weights(
    sampled: RankWeights,
    trained: RankWeights,
    lora: int,
    dtype: torch.dtype,
    packed: Mapping[str, Packing],
    apart: bool,
) -> int:
    """Bytes of an engine's weights that are not the trainer's on the same rank: unless all are `apart`,
    `Model(weights_of=)` shares the others."""
    engine, trainer = sampled.context.layout, trained.context.layout
    agree = not apart and World.of(trainer, engine).stages_agree
    if agree and (engine.tp, engine.ep, engine.pp) == (trainer.tp, trainer.ep, trainer.pp):
        return 0
    trainer_entries = dict(trained.entries()) if agree else {}
    own = (
        _nbytes(name, entry.live, dtype, packed)
        for name, entry in sampled.entries()
        if not (name in trainer_entries and entry.is_contiguous and trainer_entries[name].division is None)
    )
    factors = sum(math.prod(shape) for shape, _ in _factors(sampled, lora)) if lora else 0
    return sum(own) + factors * dtype.itemsize


def _most(shape: tuple[int, ...], owners: int) -> int:
    """Numbers of the rank with most rows (of dimension 0, which is never divided within a row)."""
    return -(-shape[0] // owners) * math.prod(shape[1:])


def _backward(
    config: ModelConfig, layout: Layout, dtype: torch.dtype, tokens: int, modes: list[int], gradients: int, head: int,
    scores: bool, tower: tuple[int, int, int], micro_batches: int, keep_attention: bool, offload_activations: bool,
    head_packed: bool,
) -> dict[str, int]:  # fmt: skip
    """Bytes of what an update takes, by part, at the moment of a micro-batch's backward that takes most.

    While layers give their gradients, what they kept is freed. `gradients`: numbers that the rank sums, `head`: those
    of the head. `scores`: it has the head. `tower`: as `_tower`. With `offload_activations` what all layers but one
    keep waits in host memory (`WAITING`)."""
    inputs, features, seeing = tower
    wide, rows = torch.float32.itemsize, -(-tokens // layout.cp)
    leaf = wide if layout.cp > 1 else dtype.itemsize  # of one micro-batch; a sum of cp ranks' is float32
    sums = [sums_held(count, leaf) for count in range(micro_batches + 1)]
    before, after = gradients * max(sums[:-1]), gradients * max(sums[1:])
    whole, layer = _kept(config, layout, dtype, tokens, keep_attention)
    under_way = min(layout.pp, micro_batches)  # in a pipeline
    every = {name: under_way * (size + inputs * (name == "kept")) for name, size in whole.items()}
    few = {name: every[name] - whole[name] + size for name, size in layer.items()}
    waiting = {}
    if offload_activations:
        waiting, every, few = {WAITING: sum(every.values())}, layer, layer
    latents = Latents.of(config, layout)
    shared = 0 if latents is None else rows * latents.kept() * -(-latents.shared // layout.pp)
    beside = {"selections": under_way * shared, "features": under_way * features}
    activations = max(layer_activations(config, layout, dtype, tokens, mode) for mode in modes)
    if keep_attention and Recurrence.of(config) is None:  # of a recurrent layer nothing else is kept
        activations -= layer["attention"]  # the same tensors
    moves = layout.dp_shard * layout.dp_replicate > 1
    flying = min(IN_FLIGHT, gradients * layout.dp_shard * dtype.itemsize) if moves else 0
    before, after, scoring = before + flying, after + flying, 0
    if scores:
        scoring = head_backward(
            config.hidden_size, config.vocab_size, rows, dtype.itemsize, layout, head > 0, head_packed
        )
    of_layer = max(0, gradients - 2 * head) // -(-config.num_layers // layout.pp)  # without embedding and head
    moments = (  # the head, the last layer, the first or a tower, the update
        {"gradients": before, **every, **beside, "head": scoring},
        {"gradients": before + (head + of_layer) * leaf, **every, **beside, "activations": activations},
        {"gradients": after, **few, **beside, "activations": max(seeing, activations)},
        {"gradients": gradients * wide},
    )
    most = max(moments, key=lambda parts: sum(parts.values()))
    return {name: size for name, size in (most | waiting).items() if size}


def sums_held(count: int, leaf: int) -> int:
    """Bytes a number that a `TreeSum` of `count` micro-batches holds, of which one takes `leaf` bytes."""
    return (count & 1) * leaf + (count >> 1).bit_count() * torch.float32.itemsize


def layer_activations(config: ModelConfig, layout: Layout, dtype: torch.dtype, tokens: int, lora: int = 0) -> int:
    """Bytes of what one layer saves for its backward pass, but for its input, and of that pass where it holds most, for
    the kind of layer that needs most."""
    width, mixture, rows = config.hidden_size, config.mixture, -(-tokens // layout.cp)
    itemsize = dtype.itemsize
    mixers = list[tuple[int, int]]()  # bytes that are saved, and of the backward beside them
    if config.attention_layers:
        heads = Heads.of(config, layout)
        mixers = [(rows * heads.saved(itemsize), rows * heads.backward(itemsize))]
    if (latents := Latents.of(config, layout)) is not None:
        saved = rows * latents.saved(itemsize, lora) + (tokens - rows) * latents.gathered(itemsize)
        mixers = [(saved, max(latents.backward(itemsize, tokens), latents.choosing(tokens)))]
    if (recurrence := Recurrence.of(config, layout.tp)) is not None:
        # Ranks along cp have all tokens of own heads, which is as much as own tokens of all heads.
        work = rows * recurrence.gradients() + recurrence.backward(rows)
        mixers.append((rows * recurrence.saved(itemsize), work))
    each = itemsize * rows * width  # of a norm's result, a sum or a gradient
    saved, mixing = (max(found, default=0) for found in ([pair[0] for pair in mixers], map(sum, mixers)))
    dense = experts = 0
    if mixture is None or len(mixture.layers) < config.num_layers:
        dense = mlp_backward(width, config.intermediate_size, rows, itemsize, layout.tp, not lora)
    if mixture is not None:  # estimated: without gradients, and as if they lasted until the mixer's backward
        experts = itemsize * rows * mixture.routing.top_k * (3 * mixture.expert_size + width) // layout.tp
    if config.blocks is not None:  # a layer has one of these
        return 2 * each + max(mixing, dense, experts)
    return max(2 * each + mixing + experts, 4 * each + saved + dense)


def _states(recurrence: Recurrence, model: RankWeights) -> int:
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
    features = image_tokens * vision_memory.features(vision, itemsize, trains)
    forward = vision_memory.forward(vision, itemsize)
    if not trains:
        return 0, features, patches * forward
    block = vision_memory.block(vision, itemsize) + vision_memory.block_backward(vision, itemsize)
    kept = features + patches * vision_memory.kept(vision, itemsize)
    return patches * vision_memory.inputs(vision, itemsize), kept, patches * max(forward, block)


def _kept(
    config: ModelConfig, layout: Layout, dtype: torch.dtype, tokens: int, keep_attention: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of what a stage's layers keep of one micro-batch, and which of these are one layer's: its input, and, with
    `keep_attention`, attention's output and its log-sum-exps in float32."""
    rows, itemsize = -(-tokens // layout.cp), dtype.itemsize
    each = {"kept": rows * itemsize * config.hidden_size}
    layers = {"kept": -(-config.num_layers // layout.pp)}
    if keep_attention:
        width = config.head_dim if config.latent is None else config.latent.kv_rank
        each["attention"] = rows * -(-config.num_heads // layout.tp) * (width * itemsize + torch.float32.itemsize)
        layers["attention"] = -(-len(config.attention_layers) // layout.pp)
    return {name: size * layers[name] for name, size in each.items()}, each


def layout_keys(layout: Layout) -> str:
    """The axes above 1, as configuration keys."""
    return keys_of(layout) or "one rank"
