"""Text as it comes: together it is what the tokenizer makes of all tokens, and stops do not depend on how it came."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlloop.rollout.fleet.text import HALF, PATIENCE, Detokenizer, Writer, tokenizer_of
from tests.support.openai_model import write_model

IDS = st.lists(st.integers(0, 31), max_size=60)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    found = tokenizer_of(write_model(tmp_path_factory.mktemp("text") / "model"))
    assert found is not None
    return found


def streamed(decode, ids, context=()) -> list[str]:
    detokenizer = Detokenizer(decode, context)
    return [*(detokenizer.feed([id]) for id in ids), detokenizer.end()]


@settings(max_examples=300, deadline=None)
@given(ids=IDS, skip=st.booleans())
def test_pieces_are_the_text_of_all_tokens(tokenizer, ids, skip):
    def decode(ids):
        return tokenizer.decode(ids, skip)

    assert "".join(streamed(decode, ids)) == decode(ids)
    detokenizer = Detokenizer(decode)
    assert detokenizer.feed(ids) + detokenizer.end() == decode(ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text("aé🙂 c", min_size=1, max_size=30))
def test_no_piece_has_half_a_character(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer.decode, ids)
    assert "".join(pieces) == text
    assert not any(HALF in piece for piece in pieces)
    split = len(ids) // 2
    while HALF in tokenizer.decode(ids[:split]):
        split -= 1
    assert "".join(streamed(tokenizer.decode, ids[split:], ids[:split])) == tokenizer.decode(ids[split:])


def test_bytes_that_become_no_character_are_not_waited_for(tokenizer):
    [_, tail] = tokenizer.encode("é")
    windows = []

    def decode(ids):
        windows.append(len(ids))
        return tokenizer.decode(ids)

    pieces = streamed(decode, [tail] * 500)
    assert "".join(pieces) == HALF * 500
    assert max(windows) <= 2 * PATIENCE
    special = tokenizer.encode("<|end|>")

    def skipping(ids):
        windows.append(len(ids))
        return tokenizer.decode(ids, True)

    windows.clear()
    assert "".join(streamed(skipping, special * 500)) == ""
    assert max(windows) <= 2


def cut(text: str, stops: list[str]) -> str:
    """By the definition: the stop that is complete first, letter by letter."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))]
    return text


@settings(max_examples=300, deadline=None)
@given(
    ids=IDS, stops=st.lists(st.text("abcd e", min_size=1, max_size=4), min_size=1, max_size=3), size=st.integers(1, 9)
)
def test_a_stop_is_found_wherever_tokens_begin_and_however_they_come(tokenizer, ids, stops, size):
    whole, parted = Writer(tokenizer.decode, stops), Writer(tokenizer.decode, stops)
    texts = [whole.write(ids) + whole.end()]
    texts.append("".join([parted.write(ids[at : at + size]) for at in range(0, len(ids), size)]) + parted.end())
    assert texts == [cut(tokenizer.decode(ids), stops)] * 2
    assert (whole.count, whole.stop) == (parted.count, parted.stop)
    if whole.stop is None:
        assert whole.count == len(ids)
    else:
        assert whole.stop in tokenizer.decode(ids[: whole.count])
        assert all(cut(tokenizer.decode(ids[:n]), stops) == tokenizer.decode(ids[:n]) for n in range(whole.count))
