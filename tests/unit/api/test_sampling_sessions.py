"""Samples of a session: what stays in their log as it grows, and cursors of a poll for what is done."""

import asyncio
from pathlib import Path
from typing import Any

from rlloop.api import requests, sampling
from rlloop.api.core import Core, Settings
from rlloop.api.log import Command, CommandLog, Result, read_segment, segments
from rlloop.api.sampling import Samples, SamplingSession, Target
from tests.support.fake_training import FakeTraining

BODY = b"x" * 1000


async def opened(folder: Path) -> tuple[Core, Samples, SamplingSession]:
    service: Any = FakeTraining(folder)
    keys: Any = None
    core = Core(service, Settings(folder, "fake", folder), keys)
    core.loop = asyncio.get_running_loop()
    session = SamplingSession("s", Target("fake"))
    session.ready.set()
    return core, Samples(core, "client", folder / "samples", lambda session: None), session


async def send(samples: Samples, session: SamplingSession, number: int) -> Any:
    params = requests.decoded(b"{}", requests.Params)
    prompt = requests.decoded(b'{"chunks": [{"type": "encoded_text", "tokens": [1]}]}', requests.Input)
    asked = requests.Sample(prompt, params, sampling_session_id="s", seq_id=number)
    return (await samples.submit(session, asked, BODY, f"key-{number}"))[0]


def stored(folder: Path) -> tuple[int, int]:
    """Requests that have results, and those that do not."""
    [segment] = segments(folder / "samples")
    replay = read_segment(segment)
    return len(replay.results), len(replay.commands) - len(replay.results)


def counted(monkeypatch) -> list[int]:
    """Grows by one with each time that a log is written anew."""
    times, begin = list[int](), CommandLog._begin
    monkeypatch.setattr(CommandLog, "_begin", lambda *args: (times.append(1), begin(*args))[1])
    return times


def test_a_burst_of_results_drops_the_older_half_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "LOG_BYTES", 210_000)  # of about 1 KB for each

    async def run() -> None:
        core, samples, session = await opened(tmp_path)
        for future in [await send(samples, session, number) for number in range(180)]:
            await future.done.wait()
        core.service.gate.clear()  # type: ignore
        futures = [await send(samples, session, number) for number in range(180, 220)]
        core.service.gate.set()  # type: ignore
        for future in futures:
            await future.done.wait()
        await asyncio.sleep(0.5)
        core.service.close()
        core.close()

    asyncio.run(run())
    done, _ = stored(tmp_path)
    assert 90 <= done <= 150


def test_requests_that_wait_shrink_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "LOG_BYTES", 50_000)
    times = counted(monkeypatch)

    async def run() -> None:
        core, samples, session = await opened(tmp_path)
        for number in range(100):  # which are more than LOG_BYTES
            await asyncio.wrap_future(samples.log.append(Command(1000 + number, "asample", "key", BODY)))
        for number in range(30):
            await (await send(samples, session, number)).done.wait()
        await asyncio.sleep(0.2)
        core.service.close()
        core.close()

    asyncio.run(run())
    assert (stored(tmp_path), len(times)) == ((30, 100), 1)  # the log's own beginning


def test_what_a_log_has_at_a_restart_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "LOG_BYTES", 50_000)

    async def run() -> None:
        core, samples, session = await opened(tmp_path)
        for number in range(49):
            samples.log.append(Command(number, "asample", "key", b'{"prompt": {"chunks": []}, "sampling_params": {}}'))
            await asyncio.wrap_future(samples.log.append(Result(number, BODY)))
        await asyncio.wrap_future(samples.log.close())
        samples = Samples(core, "client", tmp_path / "samples", lambda session: None)
        assert samples.replay({}) == 49
        await (await send(samples, session, 1)).done.wait()
        await asyncio.sleep(0.2)
        core.service.close()
        core.close()

    asyncio.run(run())
    assert stored(tmp_path)[0] == 25


def test_a_cursor_of_before_a_restart_skips_nothing():
    async def run() -> None:
        before = SamplingSession("s", Target("fake"))
        before.note("s:0", 0)
        before.note("s:1", 1)
        ids, cursor = await before.done_since(0, 0, 0)
        assert ids == ["s:0", "s:1"]
        after = SamplingSession("s", Target("fake"))
        for number in (2, 0, 1, 3):  # in another order, and as many or more
            after.note(f"s:{number}", number)
        ids, newer = await after.done_since(0, cursor, 0)
        assert set(ids) == {"s:0", "s:1", "s:2", "s:3"}
        assert newer > cursor
        assert await after.done_since(0, newer, 0) == ([], newer)
        late = newer + 10**12  # of a clock that was set back
        after.note("s:4", 4)
        assert (await asyncio.wait_for(after.done_since(0, late, 60), 5))[0] == ["s:4"]

    asyncio.run(run())
