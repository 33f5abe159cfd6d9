"""Chunks of the wire as inputs: each picture is prepared once, and limits hold before anything is decoded."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlloop.api import inputs
from rlloop.api.inputs import Chunks, InputReader, Picture
from rlloop.errors import ConfigError
from rlloop.models.vision_processor import ImageProcessor
from tests.support.pictures import picture

PAD = 9
VISION: Any = SimpleNamespace(patch_size=4, merge_size=2, temporal_patch_size=2, image_token_id=PAD)
WIDE = Picture(picture(24, 16), "png", 6)
TALL = Picture(picture(16, 32, 1, "jpeg"), "jpeg")


@pytest.fixture
def decoded(monkeypatch):
    """Pictures that were decoded."""
    seen, image = [], ImageProcessor.image
    monkeypatch.setattr(ImageProcessor, "image", lambda self, file: seen.append(file) or image(self, file))
    return seen


def reader(positions=64, most=24 * 24):
    return InputReader("Qwen3VL", ImageProcessor(VISION, 16 * 16, most), positions)


def test_a_picture_of_several_inputs_is_prepared_once(decoded):
    copy = Picture(bytes(bytearray(WIDE.data)), "png")
    first, second, third = reader().read(
        [Chunks("a", [[1, 2], WIDE, [3]]), Chunks("b", [copy, TALL, [4]]), Chunks("c", [[5]])]
    )
    assert sorted(decoded) == sorted([WIDE.data, TALL.data])
    assert first.token_ids == [1, 2, *[PAD] * 6, 3]
    assert second.token_ids == [*[PAD] * 14, 4]
    assert [(each.start, each.end) for each in second.contents] == [(0, 6), (6, 14)]
    assert first.contents[0].digest == second.contents[0].digest
    assert third.is_text


@pytest.mark.parametrize("size", [(24, 16), (16, 24), (7, 90), (300, 200), (16, 16)])
def test_placeholders_are_counted_without_decoding(decoded, size):
    file = picture(*size)
    processor = reader().read([Chunks("a", [Picture(file, "png"), [1]])])[0]
    expected = len(processor) - 1
    del decoded[:]
    for wrong in (expected - 1, expected + 1):
        with pytest.raises(ConfigError, match=f"a, chunk 0 is .*expected_tokens={wrong}, and .* {expected} tokens"):
            reader().read([Chunks("a", [Picture(file, "png", wrong)])])
    assert not decoded


def test_limits_hold_before_anything_is_decoded(decoded, monkeypatch):
    with pytest.raises(ConfigError, match="a has 13 tokens with its images; the model has 12 positions"):
        reader(positions=12).read([Chunks("a", [[1], WIDE, WIDE])])
    monkeypatch.setattr(inputs, "MOST_PIXELS", 24 * 16 + 1)
    with pytest.raises(ConfigError, match="b, chunk 0: the request's pictures have more than 385 pixels"):
        reader().read([Chunks("a", [WIDE]), Chunks("b", [TALL])])
    assert not decoded
    assert len(reader().read([Chunks("a", [WIDE]), Chunks("b", [WIDE])])) == 2


@pytest.mark.parametrize(
    ("chunk", "problem"),
    [
        (Picture(b"GIF89a", "gif"), "format 'gif', which is no png or jpeg"),
        (Picture(WIDE.data, "jpeg"), "format 'jpeg', and its data are no such file"),
        ([1, PAD], "token 9 at index 4 of the input"),
    ],
)
def test_what_is_no_image_is_refused(chunk, problem):
    with pytest.raises(ConfigError, match=problem):
        reader().read([Chunks("a", [[1, 2, 3], chunk])])


def test_a_sampled_placeholder_is_a_token_like_others():
    (made,) = reader().read([Chunks("a", [[1], WIDE, [2, PAD]], sampled=[range(7, 9)])])
    assert made.token_ids[-1] == PAD
    assert [(each.start, each.end) for each in made.contents] == [(1, 7)]


def test_a_text_model_reads_no_image():
    with pytest.raises(ConfigError, match="a, chunk 1 is an image, and Qwen3ForCausalLM reads text only"):
        InputReader("Qwen3ForCausalLM").read([Chunks("a", [[1], WIDE])])
