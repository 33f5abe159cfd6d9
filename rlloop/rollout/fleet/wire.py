"""The wire format between engine servers and their clients: msgpack, float32 as bytes, so that every bit arrives.

POST /rlloop/generate   Ask -> Answer

Content carries a digest (RFC 9530), since plain HTTP may deliver flipped bits; damaged content is sent again. Each
picture of an `Ask` comes once, with its own digest; an engine that does not know a field refuses the request.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from rlloop.errors import UNREADABLE, ConfigError, RlloopError, readable
from rlloop.inputs import BytePatches, ContentSpan, Image, as_model_input
from rlloop.rollout.errors import BadAnswer
from rlloop.types import WHOLE, Completion, FinishReason, ModelInput, SamplingParams

CONTENT_TYPE = "application/msgpack"
LARGEST = 1e-3  # of a logprob: rounding may bring one a little above 0
DIGEST = "content-digest"
MOST_PROMPTS = 1 << 14  # of one request: a third of a second of a core, to check
MOST_PICTURES = 32 << 20  # bytes of the pictures that a client puts into one request of several prompts
MOST_FRAMES = 16  # that a picture's bytes may be repeated
MOST_NUMBERS = 1 << 16  # of a patch: some of them are held at a time, to be hashed

T = TypeVar("T")
Array = tuple[tuple[int, ...], str, bytes]  # shape, type, content
Count = Annotated[int, msgspec.Meta(ge=1)]


class Picture(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """An `Image` as it is held, without what people look at."""

    digest: str
    height: Count  # in patches, as the width
    width: Count
    patches: Array  # float32, or `BytePatches.codes`
    numbers: Array | None = None  # `BytePatches.numbers`; None: the patches are the numbers
    frames: Annotated[Count, msgspec.Meta(le=MOST_FRAMES)] = 1

    @classmethod
    def of(cls, image: Image) -> Picture:
        if (made := image.bytes) is None:
            return cls(image.digest, image.height, image.width, _pack(image.patches))
        return cls(image.digest, image.height, image.width, _pack(made.codes), _pack(made.numbers), made.frames)

    def image(self) -> Image:
        """Raises `ConfigError` for arrays that are no picture, and for another picture than the digest's."""
        try:
            if self.numbers is None:
                patches = _held(self.patches, "<f4")
            else:
                patches = BytePatches(_held(self.patches, "|u1"), _held(self.numbers, "<f4"), self.frames)
                if patches.numbers.shape != (patches.codes.shape[1], 256):
                    raise ValueError(f"{list(patches.numbers.shape)} numbers for bytes {list(patches.codes.shape)}")
            image = Image(patches, self.height, self.width)
            if not 0 < image.shape[1] <= MOST_NUMBERS:  # patches of none may be any number, and without end to hash
                raise ValueError(f"its patches have {image.shape[1]} numbers, and may have 1 to {MOST_NUMBERS}")
        except (ValueError, IndexError, OverflowError) as error:
            raise ConfigError(f"picture {self.digest:.12} cannot be read: {error}") from None
        if image.digest != self.digest:
            raise ConfigError(
                f"picture {self.digest:.12} is another one, {image.digest:.12}: it was damaged or changed"
            )
        return image


class Ask(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Continue every prompt with weights of one version from `lowest` to `highest` (None: any)."""

    prompts: Annotated[list[list[int]], msgspec.Meta(max_length=MOST_PROMPTS)]
    sampling: list[SamplingParams]  # one each
    lowest: int | None = None
    highest: int | None = None
    holder: str = ""  # the asking run, and its term: see Lease
    term: int = 0
    adapters: list[str | None] | None = None  # names, one each; None: the model as it is
    given: list[int | None] | None = None  # `ModelInput.given` of each; None: all tokens of all prompts were given
    pictures: list[Picture] = []  # of all prompts, each once
    contents: list[list[tuple[int, int, str]]] | None = None  # start, end and digest of each prompt's; None: all text

    @property
    def asked(self) -> Sequence[ModelInput | list[int]]:
        """The engine's inputs, made anew. Positions are those of `ModelInput.with_images`.

        Raises `ConfigError` for `given` and `contents` of another length, and for pictures that are not what their
        digests say, or do not fit the prompts. Hashing pictures takes time: not for an event loop.
        """
        if self.given is None and self.contents is None:
            return self.prompts
        count = len(self.prompts)
        given = [None] * count if self.given is None else self.given
        contents = [[]] * count if self.contents is None else self.contents
        for what, each in (("numbers of given tokens", given), ("lists of pictures", contents)):
            if len(each) != count:
                raise ConfigError(f"{count} prompts came with {len(each)} {what}")
        images = {picture.digest: picture.image() for picture in self.pictures}
        made = list[ModelInput]()
        for ids, tokens, spans in zip(self.prompts, given, contents, strict=True):
            if missing := [digest for _, _, digest in spans if digest not in images]:
                raise ConfigError(f"a prompt has picture {missing[0]:.12}, which the request does not bring")
            own = tuple(ContentSpan(start, end, digest, images[digest]) for start, end, digest in spans)
            bare = ModelInput(ids, contents=own, given=tokens)
            made.append(bare.placed() if own else bare)
        return made


class Lease(msgspec.Struct, forbid_unknown_fields=True):
    """Fencing: `holder`'s process number `term` takes over the engine; earlier terms are refused from then on."""

    holder: str
    term: int


class Made(msgspec.Struct, array_like=True):
    """A completion without its prompt, which the asker knows."""

    token_ids: bytes  # int32, little-endian, as all numbers here
    logprobs: bytes  # float32
    raw_logprobs: bytes  # float32
    policy_version: int
    finish_reason: FinishReason
    seed: int
    routed_experts: Array | None = None
    selected: Array | None = None


class Answer(msgspec.Struct):
    completions: list[Made]
    boot: str  # identifies the engine's process, so that an earlier one's answers are recognised


class Progress(msgspec.Struct):
    """Costs of the replica's last change of version; times in seconds."""

    version: int
    wire_bytes: int = 0
    fetch_seconds: float = 0.0
    stage_seconds: float = 0.0
    verify_seconds: float = 0.0
    drain_seconds: float = 0.0
    pause_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, self.seconds().values())):
            raise ValueError("a time is no number")

    @classmethod
    def of(cls, version: int, metrics: Mapping[str, float]) -> Progress:
        """The progress at `version`, by a replica's sync/* metrics."""
        seconds = {name: metrics.get(f"sync/{name}", 0.0) for name in cls.__struct_fields__ if name.endswith("seconds")}
        return cls(version, int(metrics.get("sync/wire_bytes", 0)), **seconds)

    def seconds(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__struct_fields__ if name.endswith("_seconds")}


class EngineState(msgspec.Struct):
    """The body of `GET /rlloop/state`."""

    boot: str
    name: str
    region: str
    status: Literal["ready", "behind", "failed"]
    version: int
    load: int
    fingerprint: dict[str, Any]
    weights: Progress | None = None
    error: str = ""
    paused: bool = False
    run_id: str = ""  # the run whose weights it has; "": none that was published
    follows: str = ""  # the only run whose weights it takes; "": any
    longest: int = 0  # tokens that a prompt and its completion may have together; 0: not told


def digest_of(content: bytes) -> dict[str, str]:
    """The header with the content's digest."""
    return {DIGEST: f"sha-256=:{base64.b64encode(hashlib.sha256(content).digest()).decode()}:"}


def arrived(headers: Mapping[str, str], content: bytes) -> bool:
    """False if `headers` has a digest that does not match the content."""
    return headers.get(DIGEST) in (None, *digest_of(content).values())


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raises any error inside as `BadAnswer`: the answer is at fault."""
    try:
        yield
    except RlloopError:
        raise
    except Exception as error:  # invalid UTF-8, numbers above 64 bits, arrays of unexpected types, ...
        raise BadAnswer(f"{what} cannot be read: {type(error).__name__} {error}") from None


def decode(content: bytes, kind: type[T], what: str) -> T:
    """Raises `BadAnswer`."""
    with reading(what):
        return msgspec.msgpack.decode(content, type=readable(kind))


def pack(completion: Completion) -> Made:
    seed = completion.sampling.seed
    assert seed is not None
    return Made(
        np.asarray(completion.token_ids, "<i4").tobytes(),
        np.asarray(completion.logprobs, "<f4").tobytes(),
        np.asarray(completion.raw_logprobs, "<f4").tobytes(),
        completion.policy_version,
        completion.finish_reason,
        seed,
        pack_array(completion.routed_experts),
        pack_array(completion.selected),
    )


def pack_array(array: np.ndarray | None) -> Array | None:
    return None if array is None else _pack(array)


def _pack(array: np.ndarray) -> Array:
    return array.shape, array.dtype.str, np.ascontiguousarray(array).tobytes()


def _held(packed: Array, kind: str) -> np.ndarray:
    """Raises `ValueError`."""
    shape, given, content = packed
    if given != kind:
        raise ValueError(f"an array is {given:.20}, and must be {kind}")
    return np.frombuffer(content, kind).reshape(shape).copy()


def pack_prompts(prompts: Sequence[ModelInput | list[int]]) -> dict[str, Any]:
    """The fields of an `Ask` that have the prompts. Raises `ConfigError` for positions that are not those of text or of
    `ModelInput.with_images`, which the engine makes, and for contents without their images."""
    inputs, images = [as_model_input(prompt) for prompt in prompts], dict[str, Image]()
    for index, each in enumerate(inputs):
        made, count = each.placed() if each.contents else ModelInput(each.token_ids), len(each)
        if made.content_key(0, count) != each.content_key(0, count):
            raise ConfigError(
                f"prompt {index} has positions of its own, which engines over HTTP do not take: set launch=local, or "
                "launch=ray without fleet=regions"
            )
        images |= {image.digest: image for image in each.images}
    given = [each.given for each in inputs]
    contents = [[(span.start, span.end, span.digest) for span in each.contents] for each in inputs]
    return {
        "prompts": [each.token_ids for each in inputs],
        "given": given if any(given) else None,
        "pictures": [Picture.of(image) for image in images.values()],
        "contents": contents if images else None,
    }


def parts_of(prompts: Sequence[ModelInput | list[int]]) -> list[slice]:
    """Cuts prompts into requests whose pictures have at most `MOST_PICTURES` bytes; one prompt may have more."""
    starts, held, total = [0], set[str](), 0
    for index, prompt in enumerate(prompts):
        own = {each.digest: each.size for each in prompt.images} if isinstance(prompt, ModelInput) else {}
        more = sum(size for digest, size in own.items() if digest not in held)
        if held and total + more > MOST_PICTURES:
            starts.append(index)
            held, total, more = set(), 0, sum(own.values())
        held |= own.keys()
        total += more
    return [slice(start, end) for start, end in pairwise([*starts, len(prompts)])]


def unpack(ask: Ask, answer: Answer, vocabulary: int | None = None) -> list[Completion]:
    """The completions. Raises `BadAnswer` if the answer does not fit `ask`. `vocabulary`: the vocabulary size, if
    known."""
    if len(answer.completions) != len(ask.prompts):
        raise BadAnswer(f"{len(ask.prompts)} prompts were answered by {len(answer.completions)} completions")
    return [
        _unpack(prompt, params, packed, ask, vocabulary or 1 << 31)
        for prompt, params, packed in zip(ask.prompts, ask.sampling, answer.completions, strict=True)
    ]


def _unpack(prompt: list[int], params: SamplingParams, packed: Made, ask: Ask, vocabulary: int) -> Completion:
    lowest = packed.policy_version if ask.lowest is None else ask.lowest
    highest = packed.policy_version if ask.highest is None else ask.highest
    if not lowest <= packed.policy_version <= highest:
        raise BadAnswer(f"asked for version {lowest} to {highest}, answered from {packed.policy_version}")
    if packed.seed != params.seed and (params.seed is not None or not 0 <= packed.seed < 1 << 63):
        raise BadAnswer(f"asked with seed {params.seed}, answered with {packed.seed}")
    with reading("an array of a completion"):
        tokens, logprobs, raw = (
            np.frombuffer(content, kind).astype(np.dtype(kind).newbyteorder("="))
            for content, kind in ((packed.token_ids, "<i4"), (packed.logprobs, "<f4"), (packed.raw_logprobs, "<f4"))
        )
    least = {"abort": 0, "stop": max(1, params.min_tokens), "length": params.max_tokens}[packed.finish_reason]
    if not least <= len(tokens) == len(logprobs) == len(raw) <= params.max_tokens:
        raise BadAnswer(
            f"{len(tokens)} tokens with {len(logprobs)} and {len(raw)} logprobs, of {least} to {params.max_tokens}"
        )
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise BadAnswer(f"tokens {tokens.min()} to {tokens.max()}, of a vocabulary of {vocabulary}")
    if not (logprobs <= LARGEST).all() or not (
        (raw <= LARGEST).all() or np.isnan(raw).all()
    ):  # it may tell no raw ones
        raise BadAnswer("a logprob is above 0, or not a number")
    read = len(prompt) + len(tokens) - 1 if packed.finish_reason in WHOLE else None
    return Completion(
        prompt_ids=prompt,
        token_ids=tokens.tolist(),
        logprobs=logprobs,
        raw_logprobs=raw,
        policy_version=packed.policy_version,
        finish_reason=packed.finish_reason,
        sampling=params if params.seed is not None else dataclasses.replace(params, seed=packed.seed),
        routed_experts=unpack_array(packed.routed_experts, read),
        selected=unpack_array(packed.selected, read),
    )


def unpack_array(packed: Array | None, rows: int | None = None) -> np.ndarray | None:
    """Raises `BadAnswer`. `rows`: how many it must have, where that is known."""
    if packed is None:
        return None
    shape, kind, content = packed
    with reading("what a model chose"):
        array = np.frombuffer(content, kind).reshape(shape).copy()
    if array.dtype.kind not in "iu" or (rows is not None and array.shape[:1] != (rows,)):
        raise BadAnswer(f"a model's choices for {rows} tokens are {array.dtype.str} of shape {array.shape}")
    return array


def error_of(body: bytes) -> Mapping[str, Any]:
    """The error message in a refusal's body; empty if it is not rlloop's."""
    try:
        content = msgspec.json.decode(body)
    except UNREADABLE:
        return {}
    error = content.get("error") if isinstance(content, dict) else None
    return error if isinstance(error, dict) else {}
