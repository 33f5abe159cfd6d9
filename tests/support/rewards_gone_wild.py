"""Rewards that misbehave in every way, and requests for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from rlloop.types import Example

HANGS = 600.0  # seconds
EXAMPLE = Example("e", [1], "prompt", {"answer": "1/2"})


def requests(*completions):
    return [("prompt", completion, EXAMPLE) for completion in completions]


async def wild(prompt, completion, example):
    kind, _, nested = completion.partition(" ")
    if nested:
        return await asyncio.create_task(wild(prompt, kind, example))
    if kind in RAISED:
        raise RAISED[kind]("of my own")
    if kind == "block":
        released.wait(HANGS)
    while kind == "deaf" and not released.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)
    if kind == "thread":
        await asyncio.to_thread(released.wait, HANGS)
    await asyncio.sleep(0.01)
    return 1.0


class Stop(BaseException):
    pass


RAISED = {"exit": SystemExit, "interrupt": KeyboardInterrupt, "cancelled": asyncio.CancelledError, "stop": Stop}


released = threading.Event()
