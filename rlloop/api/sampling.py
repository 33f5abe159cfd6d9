"""Sampling sessions: the weights that a client samples from, and its requests, which survive a restart.

A request is on disk before it is acknowledged. After a restart, requests without a result are executed again, with the
same answer since seeds are derived from names; sequences of finished requests are restored, so that datums may name
them.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from rlloop.api import requests
from rlloop.api.calls import failed, failure
from rlloop.api.core import Core, Refused, log
from rlloop.api.futures import JSON, PROTOBUF, Future, Outcome
from rlloop.api.log import Command, CommandLog, Record, Result
from rlloop.api.schema import message
from rlloop.api.wire import encode_sample
from rlloop.errors import ConfigError, RlloopError
from rlloop.training.types import SampleResponse

LOG_BYTES = 64 << 20  # of a session's requests that have results, with those; beyond, the older half goes
CLONES = 1_000_000_000  # a copy of a client numbers its requests from a multiple of this


class Target(msgspec.Struct):
    """Weights of a sampling session: the base model, a checkpoint, or weights frozen by a command."""

    base_model: str
    path: str | None = None
    model_id: str | None = None  # of a command's
    inflight: bool = False  # follows the newest inflight save of that model


class SamplingSession:
    def __init__(self, sampling_id: str, target: Target) -> None:
        self.id, self.target = sampling_id, target
        self.ready = asyncio.Event()  # the service has the weights, or never will
        self.error: str | None = None
        self.clients = 1  # ids given to copies of the client
        # Cursors count on from the time in µs: those of before a restart are lower, and so name nothing here.
        self._first = time.time_ns() // 1000
        self._done: dict[int, tuple[int, list[str]]] = {}  # by copy: cursor of what was forgotten, requests done since
        self._news = asyncio.Event()

    def note(self, request_id: str, seq_id: int) -> None:
        """A request is done."""
        self._done.setdefault(seq_id // CLONES, (self._first, []))[1].append(request_id)
        self._news.set()
        self._news = asyncio.Event()

    async def done_since(self, copy: int, cursor: int, seconds: float) -> tuple[list[str], int]:
        """Requests of a copy of the client that are done after `cursor`, and the next cursor. Those before are
        forgotten. For a cursor of before a restart, or 0, all are new."""
        if cursor > self._end(copy):  # of before a restart, and the clock was set back
            cursor = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._end(copy) <= max(cursor, self._first):
                    await self._news.wait()
        forgotten, ids = self._done.get(copy, (self._first, []))
        cursor = max(cursor, forgotten)
        self._done[copy] = cursor, ids[cursor - forgotten :]
        return list(self._done[copy][1]), self._end(copy)

    def _end(self, copy: int) -> int:
        """The cursor after all that is done."""
        forgotten, ids = self._done.get(copy, (self._first, []))
        return forgotten + len(ids)


class Samples:
    """The sampling requests of one session."""

    def __init__(
        self, core: Core, client: str, folder: Path, sampler_of: Callable[[SamplingSession], str | None]
    ) -> None:
        """`sampler_of`: the service's name of what a sampling session samples from."""
        self.core, self.client, self._sampler_of = core, client, sampler_of
        self.log = CommandLog(folder, core.committer)
        self._count = 0
        self._finished, self._shrinking = 0, False  # bytes in the log of requests that have results, with those
        self._durable: dict[str, asyncio.Future[None]] = {}

    async def submit(
        self, session: SamplingSession, body: requests.Sample, raw: bytes, key: str
    ) -> tuple[Future, list[str]]:
        """Put a request on disk and begin it; returns its future and its sequences' ids. Raises `Refused`."""
        seq_id = body.seq_id
        if seq_id is None:
            raise Refused(422, "asample has a sampling_session_id and no seq_id; the two go together")
        if not 1 <= body.num_samples <= 4096:
            raise Refused(422, f"num_samples is {body.num_samples}; it must be 1 to 4096")
        request_id = f"{session.id}:{seq_id}"
        names = sequence_ids(request_id, body.num_samples)
        future = self.core.futures.get(request_id, self.client)
        if future is not None:
            if future.digest != _digest(raw):
                raise Refused(422, f"request {seq_id} of {session.id} came before, with another content")
            if request_id in self._durable:
                await asyncio.shield(self._durable[request_id])
            return future, names
        self.core.admit(self.client, len(raw))
        future = self.core.futures.add(request_id, self.client, "asample", len(raw), _digest(raw))
        durable = self._durable[request_id] = asyncio.get_running_loop().create_future()
        number, self._count = self._count, self._count + 1
        try:
            await asyncio.wrap_future(self.log.append(Command(number, "asample", key, raw)))
        except OSError as error:
            self.core.futures.discard(future)
            durable.set_exception(Refused(503, f"the log of samples cannot be written: {error}"))
            await durable
        finally:
            del self._durable[request_id]
        durable.set_result(None)
        self.core.task(self._run(session, number, seq_id, body, future))
        return future, names

    async def _run(
        self, session: SamplingSession, number: int, seq_id: int, body: requests.Sample, future: Future
    ) -> None:
        await session.ready.wait()
        settle = partial(self._settle, session, number, seq_id, future)
        if future.outcome is not None:  # cancelled
            settle(future.outcome)
            return
        if session.error is not None:
            settle(failed(session.error, "user"))
            return
        try:
            sample_future = await asyncio.get_running_loop().run_in_executor(
                self.core.threads, self._sample, session, body, future.request_id
            )
        except Exception as error:
            if not isinstance(error, RlloopError):
                log.error("a sample failed in the server", exc_info=error)
            settle(failure(error))
            return
        self.core.when_done(sample_future, encoded, settle)

    def _sample(self, session: SamplingSession, body: requests.Sample, request_id: str):
        targets = None
        if body.target_prompt_logprobs is not None:
            targets = body.target_prompt_logprobs.array("target_prompt_logprobs", fill=-1)
        if body.record_stability_info:
            raise ConfigError(
                "record_stability_info is for the loss stable_reinforce, whose definition is not published; "
                "train with another loss (tinker-cookbook's rl_loop: loss_fn=importance_sampling)"
            )
        return self.core.service.sample(
            body.prompt.read(self.core.settings.inputs),
            body.num_samples,
            body.sampling_params.sampling(),
            sampler=self._sampler_of(session),
            request=request_id,
            sequence_ids=sequence_ids(request_id, body.num_samples),
            include_prompt_logprobs=bool(body.prompt_logprobs),
            topk_prompt_logprobs=body.topk_prompt_logprobs,
            topk_sample_logprobs=body.topk_sample_logprobs,
            target_prompt_logprobs=targets,
            prompt_logprobs_last_n=body.prompt_logprobs_last_n,
            prompt_alt_tokens_k=body.prompt_alt_tokens_k,
        )

    def _settle(self, session: SamplingSession, number: int, seq_id: int, future: Future, outcome: Outcome) -> None:
        self.core.keep(self.log, Result(number, outcome.body, outcome.failed, outcome.raw))
        self.core.futures.resolve(future, outcome)
        session.note(future.request_id, seq_id)
        self._finished += future.nbytes + len(outcome.body) + len(outcome.raw)
        if self._finished > LOG_BYTES and not self._shrinking:  # each halves it again, and writes all that stays
            self._shrinking = True
            self.core.task(self._shrink())

    async def _shrink(self) -> None:
        """Drop the older half of the requests that have results."""
        gone = 0

        def newer(records: list[Record]) -> list[Record]:
            nonlocal gone
            kept = newer_half(records)
            gone = _nbytes(records) - _nbytes(kept)
            return kept

        try:
            with suppress(OSError):  # a full disk, which `keep` tells of; the next result tries again
                await asyncio.wrap_future(self.log.shrink(newer))
                self._finished -= gone
        finally:
            self._shrinking = False

    def replay(self, sessions: dict[str, SamplingSession]) -> int:
        """Requests of the log again: results are known, and what has none is made again. Returns their number."""
        replay = self.log.replay
        results = replay.results
        self._finished = _nbytes([record for record in replay.records if record.seq_id in results])
        for command in replay.commands:
            self._count = max(self._count, command.seq_id + 1)
            body = requests.decoded(command.body, requests.Sample)
            session = sessions.get(body.sampling_session_id or "")
            if session is None or body.seq_id is None:
                continue
            request_id = f"{session.id}:{body.seq_id}"
            if self.core.futures.get(request_id, self.client) is not None:
                continue
            size, digest = len(command.body), _digest(command.body)
            future = self.core.futures.add(request_id, self.client, "asample", size, digest)
            known = results.get(command.seq_id)
            if known is None:
                self.core.task(self._run(session, command.seq_id, body.seq_id, body, future))
                continue
            media = JSON if known.failed else PROTOBUF
            self.core.futures.resolve(future, Outcome(known.body, media, known.failed))
            session.note(request_id, body.seq_id)
            if not known.failed:
                task = self.core.task(self._know_again(session, body, request_id, known))
                for name in sequence_ids(request_id, body.num_samples):
                    self.core.restoring[name] = task
                    task.add_done_callback(lambda _, name=name: self.core.restoring.pop(name))
        return len(replay.commands)

    async def _know_again(
        self, session: SamplingSession, body: requests.Sample, request_id: str, known: Result
    ) -> None:
        """Tell the service what was sampled before the restart, so that provenance may name it."""
        try:  # first, since a datum may name the sequence as soon as the weights are there
            prompt = body.prompt.read(self.core.settings.inputs)
        except RlloopError as error:
            log.error("the prompt of %s cannot be read any more: %s", request_id, error)
            return
        prompt = replace(prompt, contents=prompt.named_contents())
        await session.ready.wait()
        if session.error is not None:
            return
        response = message("SampleResponse").FromString(known.body)
        raw, at = np.frombuffer(known.raw, "<f4"), 0
        for name, sequence in zip(sequence_ids(request_id, body.num_samples), response.sequences, strict=True):
            tokens = np.frombuffer(sequence.tokens, "<i4")
            logprobs, at = raw[at : at + len(tokens)].copy(), at + len(tokens)
            self.core.service.restore_sequence(
                name, prompt, tokens.tolist(), logprobs, sampler=self._sampler_of(session)
            )


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=16).digest()


def sequence_ids(request_id: str, count: int) -> list[str]:
    return [f"{request_id}:{index}" for index in range(count)]


def encoded(response: SampleResponse) -> Outcome:
    raw = b"".join(np.asarray(sequence.raw_logprobs, "<f4").tobytes() for sequence in response.sequences)
    return Outcome(encode_sample(response), PROTOBUF, raw=raw)


def _nbytes(records: list[Record]) -> int:
    """Size of what clients sent and what they get."""
    size = sum(len(record.body) for record in records if isinstance(record, Command | Result))
    return size + sum(len(record.raw) for record in records if isinstance(record, Result))


def newer_half(records: list[Record]) -> list[Record]:
    """The newer half of a log's requests with their results, and all requests without one."""
    done = sorted(record.seq_id for record in records if isinstance(record, Result))
    old = set(done[: len(done) // 2])
    return [record for record in records if isinstance(record, Command | Result) and record.seq_id not in old]
