"""Tokens on their way from the engine's thread to streams: all come, in order, by few wakes; and their texts."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rlloop.rollout.fleet.answering import Post
from rlloop.rollout.fleet.text import tokenizer_of
from tests.support.openai_model import write_model


def test_news_of_one_step_come_by_one_wake_and_none_is_lost():
    async def receive() -> int:
        loop, post, wakes = asyncio.get_running_loop(), Post(), 0
        queues = [asyncio.Queue() for _ in range(8)]
        wake = loop.call_soon_threadsafe

        def counted(*call):
            nonlocal wakes
            wakes += 1
            return wake(*call)

        loop.call_soon_threadsafe = counted  # pyright: ignore[reportAttributeAccessIssue]
        for at in range(5):
            post.send(queues[0], at)  # pyright: ignore[reportArgumentType]
        assert [await queues[0].get() for _ in range(5)] == list(range(5))
        assert wakes == 1  # the loop could not run in between

        def work() -> None:
            for at in range(2000):
                for queue in queues:
                    post.send(queue, at)  # pyright: ignore[reportArgumentType]

        thread = threading.Thread(target=work)
        thread.start()
        for queue in queues:
            assert [await asyncio.wait_for(queue.get(), 30) for _ in range(2000)] == list(range(2000))
        thread.join()
        return wakes

    assert asyncio.run(receive()) < 2000 * 8 / 2


@pytest.mark.parametrize("cleans", [False, True])
def test_a_tokenizer_decodes_as_transformers_does(tmp_path, cleans):
    from transformers import AutoTokenizer

    folder = write_model(tmp_path / "model")
    settings = folder / "tokenizer_config.json"
    changed = settings.read_text().rstrip().removesuffix("}").rstrip()
    settings.write_text(f'{changed}, "clean_up_tokenization_spaces": {str(cleans).lower()}}}')
    tokenizer, reference = tokenizer_of(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer is not None
    assert reference.clean_up_tokenization_spaces is cleans
    for ids in ([], [0], [5, 6, 7], list(range(60))):
        for skip in (False, True):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
