"""`rlloop doctor --model FOLDER --gpus N`: the layouts over N GPUs in which a model fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from rlloop.cli.machine_check import Line
from rlloop.config.trainer import MASTERS_STAY
from rlloop.errors import ConfigError, ModelError
from rlloop.models.architecture import ModelConfig
from rlloop.models.config import read_config
from rlloop.models.placement import check_placement
from rlloop.models.weight_reader import packed_parameters
from rlloop.parallel.layout import Layout, beside, keys_of
from rlloop.training.memory import DTYPES, GIB, MICRO_BATCHES, PCIE, UPDATES, layout_keys, layouts, predict, preference


def examine_model(
    folder: Path, gpus: int, dtype: str, tokens: int, memory: float | None, offload: str = "none", lora: int = 0,
    keep_attention: bool = False, offload_activations: bool = False, freeze_tower: bool = False,
    image_tokens: int | None = None, critic: bool = False, rollout: Sequence[str] | None = None,
    micro_batches: int = MICRO_BATCHES, shard: str = "optimizer",
) -> Iterator[Line]:  # fmt: skip
    """A line for each layout of `folder`'s model over `gpus` ranks, those that fit first.

    `tokens`: of a micro-batch. `memory`: GiB of a GPU; None: this machine's own. `offload`: `trainer.offload`. `lora`:
    the rank of an adapter of all projections, which trains over frozen weights; 0: all weights train.
    `keep_attention`: `trainer.checkpoint_keep_attention`; `offload_activations`: `trainer.checkpoint_offload`;
    `freeze_tower`: `trainer.freeze_vision_tower`. `image_tokens`: of `tokens`, those of pictures; None: all, where the
    model sees. `critic`: `algorithm.critic`, which rules out `pp`. `rollout`: degrees of `rollout.layout`, such as
    tp=2, for all of the layouts; None: the engine reads the trainer's weights. `micro_batches`: at most so many of an
    update. `shard`: `trainer.shard`; parameters rule out `pp`. Raises `ConfigError` where it has none, cannot offload,
    has no tower, cannot have `rollout` or would train packed weights, `ModelError` for a folder without a known
    config.json.
    """
    if offload == "masters" and dtype == "float32":
        raise ConfigError(MASTERS_STAY.format(dtype))
    config = read_config(folder)
    if config.quantization is not None and not lora:
        raise ConfigError(f"{folder} has packed weights, which are frozen; add --lora RANK, an adapter over them")
    for option, given in (("freeze-vision-tower", freeze_tower), ("image-tokens", image_tokens is not None)):
        if given and config.vision is None:
            raise ConfigError(f"--{option}: {config.architecture} has no vision tower; leave it out")
    pieces = shard == "parameters"
    if pieces and lora:
        raise ConfigError(
            "--shard parameters: weights that are frozen under an adapter stay whole; leave it or --lora out"
        )
    engine = None if rollout is None else _engine_layout(config, rollout, gpus)
    if memory is None and not torch.cuda.is_available():
        raise ConfigError("this machine has no GPU whose memory could be read; add --memory GIB, as in --memory 80")
    memory = memory or torch.cuda.get_device_properties(0).total_memory / GIB
    try:
        packed = packed_parameters(config, folder)
    except ModelError as error:
        packed = {}
        yield Line(None, "packed weights", f"counted as if they were plain, since it is unknown which are: {error}")
    every = (each for each in layouts(config, gpus, splits_sequences=True) if each.pp == 1 or not (critic or pieces))
    needs = [
        predict(
            config, layout, DTYPES[dtype], tokens, offload, lora=lora, keep_attention=keep_attention,
            offload_activations=offload_activations, sleeps=True, freeze_tower=freeze_tower,
            image_tokens=image_tokens, critic=critic, engine=engine, micro_batches=micro_batches,
            packed=packed, pieces=pieces,
        )
        for layout in every
    ]  # fmt: skip
    pictures = "" if config.vision is None else f" ({tokens if image_tokens is None else image_tokens} of pictures)"
    yield Line(
        None,
        f"{config.architecture} on {gpus} GPU{'s' * (gpus > 1)} of {memory:.0f} GiB",
        f"{dtype}, {f'an adapter of rank {lora} over frozen weights, ' if lora else ''}{'a critic, ' if critic else ''}"
        f"micro-batches of {tokens} tokens{pictures}, up to {micro_batches} an update, every layer checkpointed"
        f"{' but for its attention' if keep_attention else ''}; GiB of a rank:",
    )
    update = ", ".join(part for part in UPDATES if part in needs[0].parts)
    yield Line(
        None,
        "rollout.sleep",
        f"the engine gives its cache back while the trainer works: of it and of {update} the larger counts (on a GPU, "
        "by default)",
    )
    if offload != "none":
        yield Line(
            None,
            f"trainer.offload={offload}",
            f"in host memory; an update waits for all of it to come and go, at {PCIE / 1e9:g} GB/s each way (assumed)",
        )
    if offload_activations:
        yield Line(
            None,
            "trainer.checkpoint_offload=true",
            "what is kept of a micro-batch's layers waits in host memory as well, and comes back layer by layer",
        )
    fits = sorted((each for each in needs if each.total <= memory * GIB), key=lambda each: preference(each.layout))
    for each in fits:
        yield Line(True, f"{layout_keys(each.layout)}: {each.total / GIB:.1f}", each.describe())
    for each in sorted((each for each in needs if each not in fits), key=lambda each: each.total)[: 0 if fits else 3]:
        yield Line(False, f"{layout_keys(each.layout)}: {each.total / GIB:.1f}", each.describe())
    if fits:
        program = "rlloop" if gpus == 1 else f"torchrun --nproc-per-node {gpus} -m rlloop"
        settings = {  # that the prediction assumes
            "model.dtype": dtype, "model.lora.rank": lora, "trainer.max_batch_tokens": tokens,
            "trainer.checkpoint_layers": "all", "trainer.offload": offload != "none" and offload,
            "trainer.checkpoint_keep_attention": keep_attention, "trainer.checkpoint_offload": offload_activations,
            "trainer.freeze_vision_tower": freeze_tower, "trainer.shard": pieces and shard,
        }  # fmt: skip
        keys = [f"{key}={str(value).lower()}" for key, value in settings.items() if value]
        yield Line(
            None, "start", " ".join([program, "train ... device=cuda", *keys, _keys(fits[0].layout, engine)]).rstrip()
        )
        divided = next((each.layout for each in fits if each.layout.pp > 1 or each.layout.tp > 1), None)
        if divided is not None and engine is None and not pieces:
            yield Line(
                None,
                "tp, ep and pp",
                f"the engine's as well, so that it has no weights of its own: {_keys(divided)}; --rollout-layout "
                "counts those of another",
            )
        copy = fits[0].parts["compute copy"] / GIB
        yield Line(
            None,
            "publishing",
            f"to replicas or regions takes the compute copy once more, {copy:.1f} in the first of these layouts; with "
            "trainer.encode_on_device=false in host memory",
        )
    else:
        more = "" if offload == "masters" else "--offload, "
        more += "" if pieces or lora or gpus == 1 else "--shard parameters, "
        less = "or a smaller --tokens" if lora else "a smaller --tokens, or --lora RANK, an adapter over frozen weights"
        yield Line(
            False,
            "fits",
            f"no layout does; {more}more GPUs, {less}",
        )


def _keys(layout: Layout, engine: Layout | None = None) -> str:
    """The configuration keys of a layout for the trainer, and for its engine; None: one that reads its weights."""
    return f"{keys_of(layout, 'trainer.layout.')} {keys_of(engine or beside(layout), 'rollout.layout.')}".strip()


def _engine_layout(config: ModelConfig, degrees: Sequence[str], gpus: int) -> Layout:
    """One engine's layout. Raises `ConfigError` where `gpus` ranks do not hold whole engines, or the model not it."""
    found = {}
    for text in degrees:
        axis, _, degree = text.partition("=")
        if axis not in vars(Layout()) or not degree.isdecimal():
            raise ConfigError(f"--rollout-layout is {text!r}; it must be degrees of rollout.layout, such as tp=2")
        found[axis] = int(degree)
    layout = Layout(**{**found, "dp_replicate": 1})  # which counts whole engines
    if gpus % layout.world_size:
        fits = ", ".join(str(n) for n in range(1, gpus + 1) if gpus % n == 0)
        raise ConfigError(
            f"--rollout-layout has {layout.world_size} ranks, which must divide --gpus ({gpus}); give it one of {fits}"
        )
    check_placement(config, {"rollout.layout": layout})
    return layout
