"""Inputs of models: token ids, their positions, and images. Imports numpy, but no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from math import isqrt
from typing import Any

import numpy as np

from rlloop.errors import ConfigError

HASHED_AT_ONCE = 32  # patches


@dataclass(frozen=True, eq=False)
class BytePatches:
    """Patches as a picture's bytes: an eighth of the memory of their numbers, of which there are 256 a channel."""

    codes: np.ndarray  # [P, C, N] uint8: a patch's pixels, by channel
    numbers: np.ndarray  # [C, 256] float32: what each byte stands for
    frames: int  # how often in succession a channel's pixels are repeated

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of `decoded`."""
        count, channels, pixels = self.codes.shape
        return count, channels * self.frames * pixels

    def decoded(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        """[n, C * frames * N] float32: the numbers of patches `begin` up to `end`."""
        codes = self.codes[begin:end]
        frames = np.empty((*codes.shape[:2], self.frames, codes.shape[2]), np.float32)
        for channel, numbers in enumerate(self.numbers):  # each operation lets other threads run
            frames[:, channel] = numbers.take(codes[:, channel], mode="clip")[:, None]
        return frames.reshape(len(codes), -1)


class Image:
    """An image after the model's processor: resized, normalised, and cut into patches in the vision tower's order.

    Equal patches and grids have equal digests. It is not to be changed.
    """

    def __init__(
        self, patches: np.ndarray | BytePatches, height: int, width: int, picture: np.ndarray | None = None
    ) -> None:
        """`patches` [height * width, numbers of a patch] float32, and the size of the grid in patches. `picture`
        [H, W, 3] uint8: for display."""
        self.height, self.width, self.picture = height, width, picture
        if not isinstance(patches, BytePatches):
            patches = np.ascontiguousarray(patches, np.float32)
        self._patches, self.shape = patches, patches.shape
        if len(self.shape) != 2 or self.shape[0] != height * width or not self.shape[0]:
            raise ConfigError(
                f"an image has patches {list(self.shape)} and a grid of {height} x {width}; it needs one row a patch"
            )
        if not np.isfinite(patches.numbers if isinstance(patches, BytePatches) else patches).all():
            raise ConfigError("an image has patches that are NaN or infinite")

    def __repr__(self) -> str:
        return f"Image({self.height} x {self.width} patches of {self.shape[1]} numbers)"

    @property
    def bytes(self) -> BytePatches | None:
        """The patches as bytes; None: only their numbers are known."""
        return self._patches if isinstance(self._patches, BytePatches) else None

    @property
    def size(self) -> int:
        """Bytes of the patches as they are held and sent, with what their bytes stand for."""
        own = self._patches
        return own.codes.nbytes + own.numbers.nbytes if isinstance(own, BytePatches) else own.nbytes

    @property
    def patches(self) -> np.ndarray:
        """[height * width, numbers of a patch] float32. From bytes they are made anew, and not kept."""
        return self._patches.decoded() if isinstance(self._patches, BytePatches) else self._patches

    @cached_property
    def digest(self) -> str:
        """SHA-256 of grid and patches, as hexadecimal."""
        hashed = sha256(b"%d %d " % (self.height, self.width))
        if isinstance(self._patches, BytePatches):  # in pieces that stay in a processor's cache
            for begin in range(0, self.shape[0], HASHED_AT_ONCE):
                hashed.update(self._patches.decoded(begin, begin + HASHED_AT_ONCE).data)
        else:
            hashed.update(self._patches.data)
        return hashed.hexdigest()


@dataclass(frozen=True)
class ContentSpan:
    """Placeholder tokens [start, end) that stand for content other than text, such as an image."""

    start: int
    end: int
    digest: str  # of the content, by which caches distinguish equal placeholders
    image: Image | None = field(default=None, compare=False, repr=False)  # None: the content is not available


@dataclass(frozen=True)
class ModelInput:
    """Input of a model: token ids, their positions for the rope, and the content of placeholder tokens.

    A plain `list[int]` is accepted wherever a `ModelInput` is: text at positions 0, 1, 2, ... Tokens after an input
    continue from its largest position + 1. Attention masks, cache slots and random numbers use a token's index instead.

    Raises `ConfigError` for positions whose length is not that of the tokens, and for spans outside the tokens.

    Example: `ModelInput.from_ids([4, 6, 8])`.
    """

    token_ids: list[int]  # [T]
    positions: np.ndarray | None = None  # [T] or [axes, T] int64; None: 0 to T - 1
    contents: tuple[ContentSpan, ...] = ()  # ascending; none in a text
    # Tokens that were given; those after may be a policy's own, which may be placeholders. None: all were given.
    given: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        if self.positions is not None:
            positions = np.asarray(self.positions)
            if positions.ndim not in (1, 2) or positions.shape[-1] != count or positions.dtype.kind not in "iu":
                raise ConfigError(
                    f"ModelInput.positions is {positions.dtype} {list(positions.shape)}; "
                    f"it must be whole numbers, [{count}] or [axes, {count}]: one for each token"
                )
            ends = [int(positions.min()), int(positions.max())] if positions.size else []
            if odd := [each for each in ends if not 0 <= each < 1 << 63]:
                raise ConfigError(f"ModelInput.positions has {odd[0]}; positions begin at 0, and have 64 bits")
            object.__setattr__(self, "positions", positions.astype(np.int64, copy=False))
        ends = [0, *(end for span in self.contents for end in (span.start, span.end)), count]
        if ends != sorted(ends):
            raise ConfigError(
                f"ModelInput.contents is {self.contents!r:.80}; spans must ascend within the {count} tokens"
            )

    @classmethod
    def from_ids(cls, token_ids: Sequence[int]) -> ModelInput:
        """Text, at positions 0, 1, 2, ..."""
        return cls(list(token_ids))

    @classmethod
    def from_processor(cls, batch: Mapping[str, Any]) -> ModelInput:
        """One sample of a Hugging Face processor: `input_ids`, `mm_token_type_ids` [1, T], `pixel_values` [P, N] and
        `image_grid_thw` [images, 3], as arrays or tensors. Text alone needs the first only.

        Raises `ConfigError` for several samples, videos, and placeholders that do not match the images.
        """
        if "pixel_values_videos" in batch:
            raise ConfigError("the processor's batch has a video (pixel_values_videos); rlloop reads images")
        ids = np.asarray(batch["input_ids"])
        if ids.ndim != 2 or len(ids) != 1:
            raise ConfigError(f"the processor's input_ids have shape {list(ids.shape)}; give one sample, [1, T]")
        token_ids = ids[0].tolist()
        if batch.get("pixel_values") is None:
            return cls(token_ids)
        if batch.get("mm_token_type_ids") is None:
            raise ConfigError("the processor's batch has images and no mm_token_type_ids, which give their places")
        marked = np.asarray(batch["mm_token_type_ids"])[0] == 1
        grids, pixels = np.asarray(batch["image_grid_thw"]), np.asarray(batch["pixel_values"], np.float32)
        counts = grids.prod(-1)
        if (grids[:, 0] != 1).any() or counts.sum() != len(pixels):
            raise ConfigError(f"image_grid_thw is {grids.tolist()} for {len(pixels)} patches of images of one frame")
        per_image = np.split(pixels, np.cumsum(counts)[:-1])
        images = [Image(patches, int(h), int(w)) for patches, (_, h, w) in zip(per_image, grids, strict=True)]
        return cls.with_images(token_ids, np.flatnonzero(marked).tolist(), images)

    @classmethod
    def with_images(cls, token_ids: Sequence[int], placeholders: Sequence[int], images: Sequence[Image]) -> ModelInput:
        """Images in a text, each at as many consecutive `placeholders` (ascending indices) as it has features.

        Positions have three axes, of time, height and width (Qwen2-VL's MRoPE, arXiv:2409.12191): an image stands at
        one time, its rows and columns count from there, and the text goes on after the largest of them. Raises
        `ConfigError` where the placeholders do not match the images.
        """
        patches = sum(image.shape[0] for image in images)
        merge = isqrt(patches // max(len(placeholders), 1))
        if not images or merge**2 * len(placeholders) != patches:
            raise ConfigError(
                f"the prompt has {len(placeholders)} placeholder tokens for {len(images)} images of {patches} patches; "
                "their number must be that of the images' features"
            )
        positions, spans = np.arange(len(token_ids)) + np.zeros((3, 1), np.int64), []
        taken = shift = done = 0
        for index, image in enumerate(images):
            rows, columns = image.height // merge, image.width // merge
            start, count = placeholders[taken] if taken < len(placeholders) else -1, rows * columns
            own = list(placeholders[taken : taken + count])
            if image.height % merge or image.width % merge or own != list(range(start, start + count)):
                raise ConfigError(
                    f"image {index} has {image.height} x {image.width} patches, and {merge} x {merge} of them are a "
                    f"feature; its {count} placeholder tokens must follow one another"
                )
            first = start + shift
            positions[:, done:start] += shift
            positions[0, start : start + count] = first
            positions[1, start : start + count] = first + np.repeat(np.arange(rows), columns)
            positions[2, start : start + count] = first + np.tile(np.arange(columns), rows)
            shift += max(rows, columns) - count
            done = start + count
            spans.append(ContentSpan(start, start + count, image.digest, image))
            taken += count
        positions[:, done:] += shift
        return cls(list(token_ids), positions, tuple(spans))

    def placed(self) -> ModelInput:
        """Its tokens and images at the positions of `with_images`. Raises `ConfigError` as that does, and for contents
        that are not whole images."""
        indices = [index for span in self.contents for index in range(span.start, span.end)]
        made = self.with_images(self.token_ids, indices, self.images)
        if made.contents != self.contents:
            raise ConfigError(f"ModelInput.contents is {self.contents!r:.80}; each must be the whole of an image")
        return replace(made, given=self.given)

    from_ints = from_ids  # as Tinker's types name it

    def to_ints(self) -> list[int]:
        return self.token_ids

    @property
    def length(self) -> int:
        return len(self)

    def __len__(self) -> int:
        return len(self.token_ids)

    def followed_by(self, more: Sequence[int] | ModelInput) -> ModelInput:
        """This input followed by a conversation's further turns: text, or an input with images."""
        count, given = len(self), len(self) if self.given is None else self.given
        token_ids = more.token_ids if isinstance(more, ModelInput) else more
        positions = None if self.positions is None else self.positions_at(0, count + len(token_ids))
        contents = self.contents
        if isinstance(more, ModelInput) and not more.is_text:
            known, begin = self.positions_at(0, count), count + self.shift
            following = more.positions_at(0, len(more)) + begin
            axes = max(known.shape[:-1], following.shape[:-1], key=len)
            both = (np.broadcast_to(each, (*axes, each.shape[-1])) for each in (known, following))
            positions = np.concatenate(list(both), axis=-1)
            contents += tuple(replace(span, start=span.start + count, end=span.end + count) for span in more.contents)
        return ModelInput([*self.token_ids, *token_ids], positions, contents, given)

    def first(self, count: int) -> ModelInput:
        """Its first `count` tokens, which end within no image."""
        positions = None if self.positions is None else self.positions[..., :count]
        given = None if self.given is None else min(count, self.given)
        contents = tuple(span for span in self.contents if span.end <= count)
        return ModelInput(self.token_ids[:count], positions, contents, given)

    @property
    def images(self) -> list[Image]:
        return [span.image for span in self.contents if span.image is not None]

    def named_contents(self) -> tuple[ContentSpan, ...]:
        """The contents by their digests alone, for records that need not hold them."""
        return tuple(ContentSpan(span.start, span.end, span.digest) for span in self.contents)

    @property
    def is_text(self) -> bool:
        """True for text at positions 0, 1, 2, ..., which token ids alone describe."""
        return self.positions is None and not self.contents

    @cached_property
    def shift(self) -> int:
        """A token's position less its index, for all tokens after the input."""
        count = len(self)
        return int(self.positions_at(count, count + 1).max()) - count

    def positions_at(self, begin: int, end: int) -> np.ndarray:
        """[n] or [axes, n] int64: positions of tokens `begin` to `end`, including tokens that follow the input."""
        if self.positions is None:
            return np.arange(begin, end)
        known = self.positions[..., begin:end]
        if end <= len(self):
            return known.copy()
        following = np.arange(max(begin, len(self)), end) - len(self) + self.positions.max(initial=-1) + 1
        return np.concatenate([known, np.broadcast_to(following, (*known.shape[:-1], len(following)))], axis=-1)

    def content_key(self, begin: int, end: int) -> bytes:
        """Cache key of tokens `begin` to `end` besides their ids: positions and content digests; b"" for text.

        A cache of keys and values must combine it with the keys of all earlier tokens.
        """
        if self.is_text:
            return b""
        first = bisect_right(self.contents, begin, key=lambda each: each.end)
        last = bisect_left(self.contents, end, key=lambda each: each.start)
        spans = [(each.start, each.end, each.digest) for each in self.contents[first:last]]
        positions = self.positions_at(begin, end)
        if not spans and (positions == np.arange(begin, end)).all():
            return b""
        return repr((positions.shape, spans)).encode() + np.ascontiguousarray(positions, np.int64).tobytes()


def as_model_input(prompt: ModelInput | Sequence[int]) -> ModelInput:
    """A list of token ids as a `ModelInput`. Engines and scoring check the ids."""
    return prompt if isinstance(prompt, ModelInput) else ModelInput.from_ids(prompt)
