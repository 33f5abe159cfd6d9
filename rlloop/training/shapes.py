"""Training shapes: a model, its training mode, accelerators, and memory per accelerator. A catalogue of files.

A file is JSON or TOML: `model_name`; `model`, the keys of its config.json; and `shapes`, a table by mode (`lora`,
`full`, `reference`: scored and sampled, not trained) of what differs from the defaults of `TrainingShapeProfile`. A
shape's id is the file's name with the mode: `qwen3-8b-lora`. Field names are those of Fireworks' profiles where they
mean the same.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rlloop.errors import ConfigError, did_you_mean
from rlloop.models.config import parse_config
from rlloop.parallel.layout import Layout
from rlloop.training.memory import DTYPES, GIB, layouts, predict, preference

CATALOGUE = Path(__file__).parent / "catalogue"
PER_NODE = 8
MODES = ("lora", "full", "reference")
MOST = 4096  # GPUs that are tried for one that fits


@dataclass(frozen=True, kw_only=True)
class TrainingShapeProfile:
    """One shape, with the layout and memory of a number of accelerators."""

    training_shape: str  # its id
    model_name: str
    model: dict[str, Any]  # keys of config.json
    trainer_mode: str  # lora, full, reference
    accelerator_type: str = "NVIDIA_H100_80GB"
    accelerator_memory_gib: float = 80.0
    accelerator_count: int = 1
    max_supported_context_length: int = 0  # tokens; 0: the model's own
    base_model_weight_precision: str = "bfloat16"
    lora_rank: int = 32
    max_batch_tokens: int = 16384  # of a micro-batch
    layout: Layout = field(default_factory=Layout)
    memory_gib: dict[str, float] = field(default_factory=dict)  # of the rank that needs most, by part
    memory_source: Literal["computed", "measured"] = "computed"
    tokens_per_second: float | None = None  # of training, where it was measured

    @property
    def node_count(self) -> int:
        return -(-self.accelerator_count // PER_NODE)

    @property
    def pipeline_parallelism(self) -> int:
        return self.layout.pp

    @property
    def total_memory_gib(self) -> float:
        return sum(self.memory_gib.values())

    @property
    def fits(self) -> bool:
        return self.total_memory_gib <= self.accelerator_memory_gib


def resolve_training_profile(
    shape_id: str, gpus: int | None = None, *, files: Sequence[str | Path] = ()
) -> TrainingShapeProfile:
    """A shape by its id, over `gpus` accelerators (None: as many as the catalogue says), in the layout that fits with
    the least traffic.

    `files`: shapes of your own, which come before the catalogue's. Raises `ConfigError` for an unknown id, naming near
    ones, for files that cannot be read, and where it does not fit.
    """
    known = _shapes(files)
    if shape_id not in known:
        hint = did_you_mean(shape_id.rpartition("/")[2], known, count=3, cutoff=0.4)  # of Qwen/Qwen3-8B, the model
        raise ConfigError(f"there is no training shape {shape_id!r}{hint}; rlloop shapes lists all {len(known)}")
    shape = known[shape_id]
    count = shape.accelerator_count if gpus is None else gpus
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST:
        raise ConfigError(f"gpus is {count!r}; it must be a whole number from 1 to {MOST}")
    over = _over(shape, count)
    if over is None or not over.fits:
        needs = "no layout of its adapters or experts" if over is None else f"{over.total_memory_gib:.0f} GiB each"
        enough = next((n for n in _counts(count) if (profile := _over(shape, n)) is not None and profile.fits), None)
        hint = "take a larger accelerator" if enough is None else f"take {enough}"
        raise ConfigError(
            f"{shape_id} does not fit on {count} x {shape.accelerator_type} of {shape.accelerator_memory_gib:g} GiB "
            f"(needs {needs}); {hint}, a smaller max_batch_tokens, or another shape"
        )
    return over


def training_shapes(files: Sequence[str | Path] = ()) -> list[TrainingShapeProfile]:
    """All shapes over as many accelerators as their files say."""
    profiles = []
    for shape in _shapes(files).values():
        profiles.append(_over(shape, shape.accelerator_count) or shape)
    return profiles


def _shapes(files: Sequence[str | Path]) -> dict[str, TrainingShapeProfile]:
    own = [shape for file in files for shape in _read(Path(file))]
    return {shape.training_shape: shape for shape in (*_built_in(), *own)}


@cache
def _built_in() -> tuple[TrainingShapeProfile, ...]:
    return tuple(shape for file in sorted(CATALOGUE.glob("*.json")) for shape in _read(file))


def _read(file: Path) -> Iterator[TrainingShapeProfile]:
    try:
        text = file.read_text()
        content = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a training shape's JSON or TOML: {error}") from error
    allowed = {each.name for each in fields(TrainingShapeProfile)} - {"training_shape", "model_name", "model"}
    shapes = content.get("shapes") if isinstance(content, dict) else None
    if not isinstance(shapes, dict) or not isinstance(content.get("model"), dict):
        raise ConfigError(f"{file} must have model_name, model (keys of config.json) and shapes (a table by mode)")
    for mode, shape in shapes.items():
        if mode not in MODES:
            raise ConfigError(f"{file}: shapes has {mode!r}; the modes are {', '.join(MODES)}")
        if unknown := sorted(shape.keys() - allowed):
            raise ConfigError(f"{file}: shapes.{mode} has {unknown[0]!r}; its keys are {', '.join(sorted(allowed))}")
        options = {"trainer_mode": mode, **shape, "layout": Layout(**shape.get("layout", {}))}
        if options.get("base_model_weight_precision", "bfloat16") not in DTYPES:
            raise ConfigError(f"{file}: base_model_weight_precision must be one of {', '.join(DTYPES)}")
        name = str(content.get("model_name", file.stem))
        shape_id = f"{file.stem}-{mode}"
        yield TrainingShapeProfile(training_shape=shape_id, model_name=name, model=content["model"], **options)


def _over(shape: TrainingShapeProfile, count: int) -> TrainingShapeProfile | None:
    """The shape over a number of accelerators: in the layout of least traffic that fits, or that of least memory."""
    config = parse_config(shape.model)
    context = shape.max_supported_context_length or config.max_positions
    lora = shape.lora_rank if shape.trainer_mode == "lora" else 0
    every = [shape.layout] if shape.layout.world_size == count else layouts(config, count)
    possible = [each for each in every if not lora or each.tp == each.pp == each.ep == 1]  # adapters: whole weights
    dtype, tokens, best = DTYPES[shape.base_model_weight_precision], shape.max_batch_tokens, None
    for layout in sorted(possible, key=preference):
        needs = predict(config, layout, dtype, tokens, lora=lora, trains=shape.trainer_mode != "reference")
        if best is None or needs.total < best.total:
            best = needs
        if best.total <= shape.accelerator_memory_gib * GIB:
            break
    if best is None:
        return None
    shape = replace(shape, accelerator_count=count, max_supported_context_length=context, layout=best.layout)
    if shape.memory_source == "measured" and shape.memory_gib:
        return shape
    return replace(shape, memory_gib={name: size / GIB for name, size in best.parts.items()})


def _counts(above: int) -> Iterator[int]:
    count = 1
    while count <= min(MOST, 8 * above):
        if count > above:
            yield count
        count *= 2
