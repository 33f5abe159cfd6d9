"""Prompts with pictures between engines and their clients: what arrives is what was sent, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from rlloop import ModelInput, SamplingParams
from rlloop.errors import ConfigError
from rlloop.inputs import BytePatches, ContentSpan, Image
from rlloop.rollout.fleet import wire
from rlloop.web.requests import parsed
from tests.support.image_models import PAD, image, inputs, prompt_with

TEXT = [20, 21, 22]
SAMPLING = SamplingParams(max_tokens=4, seed=1)


def of_bytes(height: int = 4, width: int = 6, seed: int = 0) -> Image:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (height * width, 3, 16), np.uint8)
    picture = rng.integers(0, 256, (height * 4, width * 4, 3), np.uint8)
    return Image(BytePatches(codes, rng.uniform(-1, 1, (3, 256)).astype(np.float32), 2), height, width, picture)


def sent(prompts: list[ModelInput | list[int]], **changes: Any) -> bytes:
    fields = {"sampling": [SAMPLING] * len(prompts), **wire.pack_prompts(prompts)}
    return msgspec.msgpack.encode(wire.Ask(**{**fields, **changes}))


def arrived(content: bytes) -> list[ModelInput | list[int]]:
    return list(parsed(content, wire.Ask, packed=True).asked)


def test_prompts_arrive_as_they_were_sent() -> None:
    talk = prompt_with(TEXT, of_bytes(), TEXT).followed_by([5, PAD, 6]).followed_by(prompt_with([7], image(2, 8), [8]))
    texts: list[ModelInput | list[int]] = [TEXT, ModelInput([7, 8]).followed_by([PAD])]
    prompts = [talk, *texts, prompt_with(of_bytes(2, 2, 1), TEXT, of_bytes()), *(each for each, _ in inputs())]
    there = arrived(sent(prompts))
    for mine, theirs in zip(prompts, there, strict=True):
        assert isinstance(theirs, ModelInput)
        mine = mine if isinstance(mine, ModelInput) else ModelInput(mine)
        count = len(mine) + 4
        assert (theirs.token_ids, theirs.contents, theirs.given) == (mine.token_ids, mine.contents, mine.given)
        assert np.array_equal(theirs.positions_at(0, count), mine.positions_at(0, count))
        assert theirs.content_key(0, count) == mine.content_key(0, count)
        for one, other in zip(mine.images, theirs.images, strict=True):
            assert (one.digest, one.height, one.width) == (other.digest, other.height, other.width)
            assert one.patches.tobytes() == other.patches.tobytes()
            assert (one.bytes is None) == (other.bytes is None)
    made = there[3].images[1].bytes  # type: ignore[union-attr]
    assert made is not None
    assert (made.codes.shape, made.frames) == ((24, 3, 16), 2)


def test_a_picture_comes_once_and_text_as_ever() -> None:
    shared = of_bytes(8, 8)
    once, often = sent([prompt_with(TEXT, shared)]), sent([prompt_with([place], shared, TEXT) for place in range(1, 9)])
    assert len(once) < len(often) < len(once) + 8 * 200 < 2 * len(once)
    assert shared.size == 64 * 48 + 3 * 256 * 4 < len(once) < shared.size + 500  # what parts of requests are counted by
    assert set(msgspec.msgpack.decode(sent([TEXT, ModelInput(TEXT)]))) == {"prompts", "sampling"}


def test_an_engine_that_knows_no_pictures_refuses_them() -> None:
    known = [each for each in msgspec.structs.fields(wire.Ask) if each.name not in ("pictures", "contents")]
    fields = [(each.name, each.type) if each.required else (each.name, each.type, each.default) for each in known]
    older = msgspec.defstruct("Ask", fields, forbid_unknown_fields=True)
    parsed(sent([TEXT]), older, packed=True)
    with pytest.raises(ConfigError, match="unknown field `pictures`"):
        parsed(sent([prompt_with(TEXT, of_bytes())]), older, packed=True)


def changed(prompt: ModelInput, **changes: Any) -> bytes:
    [picture] = wire.pack_prompts([prompt])["pictures"]
    return sent([prompt], pictures=[msgspec.structs.replace(picture, **changes)])


def test_pictures_that_are_not_what_was_sent_are_refused() -> None:
    bytes_, floats = prompt_with(TEXT, of_bytes()), prompt_with(TEXT, image(4, 6))
    codes, numbers = np.zeros((24, 3, 16), np.uint8), np.zeros((3, 256), np.float32)
    packed = {"codes": wire.pack_array(codes), "numbers": wire.pack_array(numbers)}
    digest, other = bytes_.images[0].digest, "0" * 64
    for content, message in (
        (changed(bytes_, patches=packed["codes"]), f"picture {digest[:12]} is another one, .*: it was damaged"),
        (changed(bytes_, numbers=packed["numbers"]), "is another one"),
        (changed(bytes_, frames=1), "is another one"),
        (changed(bytes_, height=6, width=4), "is another one"),
        (changed(bytes_, frames=1 << 40), r"`int` <= 16 - at `\$.pictures"),
        (changed(bytes_, height=-4, width=-6), r"`int` >= 1 - at `\$.pictures"),
        (changed(bytes_, height=5), "patches .24, 96. and a grid of 5 x 6"),
        (changed(bytes_, numbers=None), r"an array is \|u1, and must be <f4"),
        (changed(bytes_, numbers=wire.pack_array(numbers[:2])), r"\[2, 256\] numbers for bytes \[24, 3, 16\]"),
        (changed(bytes_, patches=((24, 3, 17), "|u1", codes.tobytes())), "cannot reshape"),
        (changed(bytes_, patches=((1 << 62, 9), "|u1", codes.tobytes())), "cannot be read"),
        (changed(bytes_, patches=((24,), "|u1", codes.tobytes()[:24])), "cannot be read"),
        (changed(floats, patches=((24, 96), "|O8", bytes(8 * 24 * 96))), r"an array is \|O8"),
        (changed(floats, patches=wire.pack_array(np.full((24, 96), np.nan, np.float32))), "NaN"),
        (changed(bytes_, patches=((1 << 40, 3, 0), "|u1", b""), height=1 << 20, width=1 << 20), "have 0 numbers"),
        (changed(bytes_, patches=((1, 3, 1 << 16), "|u1", bytes(3 << 16)), height=1, width=1), "have 393216"),
        (changed(floats, digest=other), "picture 000000000000 is another one"),
        (sent([bytes_], pictures=[]), f"has picture {digest[:12]}, which the request does not bring"),
        (sent([bytes_], contents=[]), "1 prompts came with 0 lists of pictures"),
        (sent([bytes_], contents=[[(4, 99, digest)]]), "spans must ascend within the 11 tokens"),
        (sent([bytes_], contents=[[(-4, 10, digest)]]), "spans must ascend"),
        (sent([bytes_], contents=[[(3, 9, digest), (4, 10, digest)]]), "spans must ascend"),
        (sent([bytes_], contents=[[(4, 9, digest)]]), "the prompt has 5 placeholder tokens for 1 images"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            arrived(content)


def test_what_an_engine_would_make_otherwise_does_not_leave() -> None:
    prompt = prompt_with(TEXT, of_bytes(), TEXT)
    assert prompt.positions is not None
    [span] = prompt.contents
    split = (ContentSpan(span.start, span.start + 3, span.digest, span.image), replace(span, start=span.start + 3))
    for bad, message in (
        (replace(prompt, positions=prompt.positions + 1), "prompt 1 has positions of its own, .*launch=local"),
        (replace(prompt, positions=None), "prompt 1 has positions of its own"),
        (ModelInput(TEXT, np.array([0, 2, 4])), "prompt 1 has positions of its own"),
        (replace(prompt, contents=prompt.named_contents()), "0 images"),
        (replace(prompt, contents=split), "placeholder tokens for 2 images|the whole of an image"),
        (replace(prompt, contents=(replace(span, digest="0" * 64),)), "must be the whole of an image"),
    ):
        with pytest.raises(ConfigError, match=message):
            wire.pack_prompts([TEXT, bad])


def test_pictures_of_many_prompts_are_cut_into_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, large = of_bytes(4, 4), of_bytes(4, 4, 1), of_bytes(20, 20)
    monkeypatch.setattr(wire, "MOST_PICTURES", 2 * one.size)
    prompts = [TEXT, *(prompt_with(TEXT, each) for each in (one, two, one, two, large, one)), TEXT]
    assert wire.parts_of(prompts) == [slice(0, 5), slice(5, 6), slice(6, 8)]
    assert wire.parts_of([TEXT] * 3) == [slice(0, 3)]
    assert wire.parts_of([prompt_with(large)]) == [slice(0, 1)]
