"""Vision towers: features of an image's patches, which replace its placeholder tokens.

Every patch attends to all patches of its own image, in tiles that begin with the image; so an image's features do not
depend on the images beside it. Shapes: P patches of all images, D hidden width, F features (P / merge_size^2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlloop.errors import ConfigError
from rlloop.inputs import BytePatches, Image, ModelInput, as_model_input
from rlloop.models.architecture import ModelConfig, VisionConfig
from rlloop.models.layers import Linear, Weight
from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.operators.parameters import embedding
from rlloop.numerics.ops import Ops
from rlloop.numerics.transfer import on_device

EPS = 1e-6  # of the tower's norms
COMPARED = 64  # patches of an image, with the numbers of the model's processor


@dataclass(frozen=True)
class PlacedFeatures:
    """Image features of one forward, and the flat tokens that they replace."""

    rows: Tensor  # [N] int64
    features: Tensor  # [1 + L, N, D]: embeddings, then what the decoder's first L layers add

    def part(self, begin: int, end: int) -> PlacedFeatures | None:
        """The features of the flat tokens `begin` up to `end`, placed among these; None without any."""
        here = (self.rows >= begin) & (self.rows < end)
        return PlacedFeatures(self.rows[here] - begin, self.features[:, here]) if here.any() else None

    def embedded(self, stream: Tensor) -> Tensor:
        return stream.index_copy(0, self.rows, self.features[0])

    def added(self, layer: int, delta: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's features to (delta, stream) at image tokens; each sum is rounded once.

        Text tokens keep the two terms apart, for the next norm to add.
        """
        if layer + 1 >= len(self.features):
            return delta, stream
        total = delta[self.rows] + stream[self.rows] + self.features[layer + 1]
        return delta.index_fill(0, self.rows, 0), stream.index_copy(0, self.rows, total)


def place_features(
    segments: Iterable[tuple[ModelInput | None, int, int, int]], see: Callable[[list[Image]], list[Tensor]]
) -> PlacedFeatures | None:
    """Compute and place the features of all images in a forward; None without images.

    Each segment is (input, begin, end, at): its tokens `begin` to `end` are the flat tokens from `at` on. `see` makes
    the features of distinct images (`Model.see`).
    """
    uses = [
        (span.image, max(span.start, begin), min(span.end, end), span.start, at - begin)
        for model_input, begin, end, at in segments
        if model_input is not None
        for span in model_input.contents
        if span.image is not None and span.start < end and begin < span.end
    ]
    if not uses:
        return None
    distinct = {image.digest: image for image, *_ in uses}
    seen = dict(zip(distinct, see(list(distinct.values())), strict=True))
    pieces = [seen[image.digest][:, first - start : last - start] for image, first, last, start, _ in uses]
    rows = torch.cat([torch.arange(first + shift, last + shift) for _, first, last, _, shift in uses])
    features = torch.cat(pieces, dim=1)
    return PlacedFeatures(rows.to(features.device), features)


@dataclass(frozen=True)
class TowerStep:
    """Inputs shared by all layers of the vision tower."""

    layout: AttentionLayout  # one sequence an image
    rope: tuple[Tensor, Tensor]  # cos and sin of each patch [P, head_dim / 2]
    places: Tensor  # [P] int64: rows of these tables
    ops: Ops
    unread: bool = False  # as `layers.Step`'s


class Biased(Weight):
    """A weight with a bias for each of its rows."""

    def __init__(self, *shape: int) -> None:
        super().__init__(*shape)
        self.bias = nn.Parameter(torch.empty(shape[0]))


class LayerNorm(Biased):
    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, EPS)

    def of_sum(self, delta: Tensor, stream: Tensor | None, ops: Ops) -> tuple[Tensor, Tensor]:
        """(the norm of delta + stream, that sum)."""
        if stream is None:
            return self(delta, ops), delta
        return ops.add_layer_norm(delta, stream, self.weight, self.bias, EPS)


class VisionAttention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads, self.scale = config.num_heads, config.head_dim**-0.5
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, True)
        self.proj = Linear(config.hidden_size, config.hidden_size, True)

    def forward(self, x: Tensor, step: TowerStep) -> Tensor:
        q, k, v = self.qkv(x, step.ops).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q, k = (step.ops.rope(tensor, step.places, *step.rope) for tensor in (q, k))
        return self.proj(step.ops.full_attention(q, k, v, step.layout, self.scale).flatten(1), step.ops)


class VisionMlp(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = Linear(config.hidden_size, config.intermediate_size, True)
        self.linear_fc2 = Linear(config.intermediate_size, config.hidden_size, True)

    def forward(self, x: Tensor, step: TowerStep) -> Tensor:
        ops = step.ops
        return self.linear_fc2.whole(ops.gelu(self.linear_fc1(x, ops), True), ops, unread=step.unread)


class VisionBlock(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(config.hidden_size), LayerNorm(config.hidden_size)
        self.attn, self.mlp = VisionAttention(config), VisionMlp(config)

    def forward(self, delta: Tensor, stream: Tensor | None, step: TowerStep) -> tuple[Tensor, Tensor]:
        """The sum of delta and stream is this block's input, and that of the two results its output."""
        normed, stream = self.norm1.of_sum(delta, stream, step.ops)
        normed, stream = self.norm2.of_sum(self.attn(normed, step), stream, step.ops)
        return self.mlp(normed, step), stream


class Merger(nn.Module):
    """Merges each square of patches into one feature. `after`: the norm is over the merged square, not each patch."""

    def __init__(self, config: VisionConfig, after: bool) -> None:
        super().__init__()
        self.together, self.after = config.merge_size**2, after
        width = config.hidden_size * self.together
        self.norm = LayerNorm(width if after else config.hidden_size)
        self.linear_fc1, self.linear_fc2 = Linear(width, width, True), Linear(width, config.out_size, True)

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """[P, D] -> [F, out]."""
        if not self.after:
            x = self.norm(x, ops)
        x = x.reshape(len(x) // self.together, -1)
        if self.after:
            x = self.norm(x, ops)
        return self.linear_fc2(ops.gelu(self.linear_fc1(x, ops), False), ops)


class Patches(nn.Module):
    """Patch embedding: a convolution in the checkpoint, computed as one product since patches do not overlap."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.temporal_patch_size, config.patch_size, config.patch_size
        self.proj = Biased(config.hidden_size, config.channels, *size)

    def forward(self, patches: Tensor, ops: Ops) -> Tensor:
        """[P, patch_width] -> [P, D]."""
        return ops.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class Tower(nn.Module):
    """A vision tower under Hugging Face's names, without their `model.visual.`"""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = Patches(config)
        self.pos_embed = Weight(config.side**2, config.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.merger = Merger(config, after=False)
        self.deepstack_merger_list = nn.ModuleList(Merger(config, after=True) for _ in config.deepstack)

    @property
    def trains(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())

    def forward(self, images: Sequence[Image], ops: Ops, run: Callable[..., Any]) -> list[Tensor]:
        """Features [1 + L, F, out] of each image. `run(index, block, *args)` calls a block."""
        weight, config = self.pos_embed.weight, self.config
        grids = [_grid(image.height, image.width, config, weight.device) for image in images]
        cos, sin = (torch.cat(tables) for tables in zip(*(grid.rope for grid in grids), strict=True))
        lengths = [image.shape[0] for image in images]
        positions = torch.arange(sum(lengths), device=weight.device)
        layout = AttentionLayout.of_sequences(lengths, weight.device)
        step = TowerStep(layout, (cos, sin), positions, ops)
        patches = patches_on(images, weight.device, weight.dtype)
        delta, stream = self.patch_embed(patches, ops) + self._positions(grids, weight), None
        deep = {}
        for index, block in enumerate(self.blocks):
            delta, stream = run(index, block, delta, stream, step)
            if index in config.deepstack:
                delta, stream = delta + stream, None
                deep[index] = self.deepstack_merger_list[config.deepstack.index(index)](delta, ops)
        last = delta if stream is None else delta + stream
        features = torch.stack([self.merger(last, ops), *(deep[index] for index in config.deepstack)])
        return list(features.split([length // config.merge_size**2 for length in lengths], dim=1))

    def _positions(self, grids: Sequence[_Grid], weight: Tensor) -> Tensor:
        """[P, D]: bilinear interpolation of four learned positions for each patch, in float32, rounded once."""
        corners = torch.cat([grid.corners for grid in grids])
        shares = torch.cat([grid.shares for grid in grids])
        near = embedding(corners.flatten(), weight).unflatten(0, (-1, 4))
        a, b, c, d = (near * shares[..., None]).unbind(1)
        return (a + b + c + d).to(weight.dtype)


def patches_on(images: Sequence[Image], device: torch.device, dtype: torch.dtype) -> Tensor:
    """[P, patch_width] of all images, rounded once where the tower is: what the host would round has the same bits.

    A GPU gets bytes where an image has them, and looks up their numbers, at once for all pictures of one processor: an
    eighth of what the host would write, read and send.
    """
    if device.type == "cpu":
        return torch.cat([torch.from_numpy(image.patches).to(dtype) for image in images])
    parts = []
    for table, some in groupby(images, _table):
        if table is None:
            parts += [torch.from_numpy(image.patches).to(device).to(dtype) for image in some]
        else:
            parts.append(looked_up([image.bytes for image in some if image.bytes is not None], device, dtype))
    return torch.cat(parts)


def _table(image: Image) -> tuple[bytes, int] | None:
    """Key of the table that an image's bytes index; None for an image without bytes."""
    return None if image.bytes is None else (image.bytes.numbers.tobytes(), image.bytes.frames)


def looked_up(patches: Sequence[BytePatches], device: torch.device, dtype: torch.dtype) -> Tensor:
    """`decoded()` of patches whose bytes stand for the same numbers, in another type, made on the device."""
    numbers, frames = patches[0].numbers, patches[0].frames
    values = torch.from_numpy(numbers).to(dtype).to(device).flatten()
    begins = 256 * torch.arange(len(numbers), device=device)[:, None]
    codes = torch.cat([on_device(each.codes, device) for each in patches])
    return values[codes + begins][:, :, None].expand(-1, -1, frames, -1).flatten(1)


@dataclass(frozen=True)
class _Grid:
    """Position data that depend on an image's shape alone, in patch order."""

    corners: Tensor  # [P, 4] int64 rows of the table of positions
    shares: Tensor  # [P, 4] float32
    rope: tuple[Tensor, Tensor]  # cos and sin [P, head_dim / 2] float32


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # so that autograd may save the cached tensors
def _grid(height: int, width: int, config: VisionConfig, device: torch.device) -> _Grid:
    """Patches are ordered row by row within squares of `merge_size`, and squares row by row; corners are aligned.

    Made on the host, whose cosines may have other bits than a GPU's.
    """
    merge, side = config.merge_size, config.side
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    squares = (height // merge, merge, width // merge, merge)
    row, column = (x.reshape(squares).transpose(1, 2).flatten() for x in (rows, columns))

    def between(at: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """([P, 2] lines of the table on both sides, [P, 2] shares)."""
        coordinate = at.float() * (side - 1) / max(count - 1, 1)
        before = coordinate.floor()
        lines = torch.stack((before, before + 1), -1)
        shares = (1 - (coordinate[:, None] - lines).abs()).clamp(min=0)
        return lines.long().clamp(max=side - 1), shares

    (low, by_row), (left, by_column) = between(row, height), between(column, width)
    corners = (low[:, :, None] * side + left[:, None]).flatten(1)
    shares = (by_row[:, :, None] * by_column[:, None]).flatten(1)
    quarter = config.head_dim // 2
    frequency = 1.0 / config.rope_theta ** (torch.arange(0, quarter, 2).float() / quarter)
    angle = torch.cat((row.float()[:, None] * frequency, column.float()[:, None] * frequency), -1)
    return _Grid(corners.to(device), shares.to(device), (angle.cos().to(device), angle.sin().to(device)))


def check_images(prompt: ModelInput | Sequence[int], config: ModelConfig, given: int | None = None) -> None:
    """Raises `ConfigError` for images that the model cannot read, and for placeholders that do not match them.

    `given`: tokens that no policy sampled, in which no placeholder may stand without its image; None: the input's own.
    """
    if config.vision is None and not isinstance(prompt, ModelInput):
        return
    model_input = as_model_input(prompt)
    for span in model_input.contents:
        image, vision = span.image, config.vision
        if vision is None:
            if image is not None:
                raise ConfigError(f"a prompt has an image, and {config.architecture} reads text only")
            continue
        if image is None:
            raise ConfigError(
                f"tokens {span.start} to {span.end - 1} stand for content {span.digest:.12} whose patches are missing; "
                "give them (ModelInput.from_processor)"
            )
        if image.digest != span.digest:
            raise ConfigError(f"an image has the digest {image.digest:.12}, and its span says {span.digest:.12}")
        if image.shape[1] != vision.patch_width:
            raise ConfigError(
                f"an image has patches of {image.shape[1]} numbers; this model's have {vision.patch_width} "
                f"({vision.channels} channels, {vision.temporal_patch_size} frames, {vision.patch_size} x "
                f"{vision.patch_size} pixels). It was made by another model's processor"
            )
        _check_numbers(image, vision)
        merge, ids = vision.merge_size, model_input.token_ids[span.start : span.end]
        count = (image.height // merge) * (image.width // merge)
        if image.height % merge or image.width % merge or len(ids) != count:
            raise ConfigError(
                f"an image of {image.height} x {image.width} patches has {len(ids)} placeholders; this model merges "
                f"{merge} x {merge} patches into a feature, so there must be {count}"
            )
        if {*ids} != {vision.image_token_id}:
            other = next(each for each in ids if each != vision.image_token_id)
            raise ConfigError(
                f"token {other} is inside an image's span; the placeholder of {config.architecture} is "
                f"{vision.image_token_id} (image_token_id)"
            )
    if config.vision is not None and model_input.contents:
        positions = model_input.positions
        if positions is None or positions.ndim != 2 or len(positions) != 3:
            raise ConfigError(
                "a prompt with images needs positions of three axes (time, height, width), as ModelInput.with_images "
                "makes them"
            )
    if config.vision is not None:
        _check_outside(model_input, model_input.given if given is None else given, config)


def _check_outside(model_input: ModelInput, given: int | None, config: ModelConfig) -> None:
    """Raises `ConfigError` for a placeholder without an image among the `given` first tokens (None: all).

    The model would read its embedding, which training has given no meaning. A policy may sample one all the same.
    """
    assert config.vision is not None
    spans, ids = model_input.contents, model_input.token_ids[:given]
    for begin, end in zip([0, *(span.end for span in spans)], [*(span.start for span in spans), None], strict=True):
        outside = list(ids[begin:end])
        for name, token in config.vision.placeholders.items():
            if token not in outside:
                continue
            change = (
                "give its image (ImageProcessor.prompt, ModelInput.from_processor; over HTTP, chat completions), or "
            )
            if name == "video_token_id":  # rlloop reads no videos
                change = ""
            raise ConfigError(
                f"token {token} at index {begin + outside.index(token)} of a prompt is {config.architecture}'s "
                f"placeholder {name}, and no image stands there; {change}leave it out"
            )


def _check_numbers(image: Image, vision: VisionConfig) -> None:
    """Raises `ConfigError` for patches that the model's own processor makes of no picture.

    Of patches without bytes a few are compared, to a tenth of the step between two bytes: processors differ in their
    last bits, and other means or deviations lie elsewhere.
    """
    own, made = vision.numbers, image.bytes
    if own is None or vision.channels != len(own):
        return
    if made is not None:
        numbers, alike = made.numbers, np.array_equal(made.numbers, own)
    else:
        some = image.patches[:: max(1, image.shape[0] // COMPARED)].reshape(-1, len(own), image.shape[1] // len(own))
        numbers = np.stack((some.min((0, 2)), some.max((0, 2))), axis=1)
        bytes_ = (some - own[:, :1]) / (own[:, -1:] - own[:, :1]) * 255
        alike = bool(np.all(np.abs(bytes_ - bytes_.round().clip(0, 255)) < 0.1))
    if alike:
        return
    theirs, ours = (", ".join(f"{row[0]:.9g} to {row[-1]:.9g}" for row in each) for each in (numbers, own))
    raise ConfigError(
        f"an image's {'patches are' if made is None else 'bytes stand for'} {theirs} (by channel); the processor in "
        f"this model's folder makes bytes {ours}. It was made by another model's processor (image_mean, image_std or "
        "rescale_factor); make it with ImageProcessor.of_folder of this model's folder"
    )
