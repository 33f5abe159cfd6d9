"""Peers that lie: answers of a malicious relay and of a malicious engine, made of true ones."""

from __future__ import annotations

import random

import msgspec
import numpy as np

from rlloop.rollout.fleet.wire import Answer, Ask, EngineState
from rlloop.sync.manifest import Head
from tests.support.chaos.proxy import Lie, Message


def lie(kind: str, number: int) -> Lie | None:
    """The liar of a kind of fault; None for faults of the network."""
    return {
        "false head": FalseHead,
        "false blobs": FalseBlobs,
        "false logprobs": lambda number: FalseAnswers(number, _logprobs),
        "false version": lambda number: FalseAnswers(number, _version),
        "false tokens": lambda number: FalseAnswers(number, _tokens),
        "replayed answers": Replayed,
    }.get(kind, lambda number: None)(number)


class FalseHead:
    """An old head as the newest, one that leads elsewhere, one of another run, and bytes that are none."""

    def __init__(self, number: int) -> None:
        self._dice, self._first = random.Random(number), b""

    def __call__(self, request: Message, answer: Message) -> Message:
        if request.path != "/latest":
            return answer
        self._first = self._first or answer.body
        head = Head.decode(answer.body)
        newest = msgspec.structs.replace(head.newest, sequence=head.newest.sequence + 1, base=head.newest.sequence)
        forged = self._dice.choice(
            [
                self._first,
                Head(head.run_id, (*head.chain, newest), head.shortcuts).encode(),
                Head(head.run_id, (msgspec.structs.replace(head.newest, base=None),)).encode(),
                Head("another-run", head.chain, head.shortcuts).encode(),
                answer.body[: len(answer.body) // 2],
                bytes(2 << 20),
            ]
        )
        return _redone(answer.with_header("etag", None), forged)


class FalseBlobs:
    """Other blobs, zeros, too much, and what would have to be unpacked."""

    def __init__(self, number: int) -> None:
        self._dice, self._seen = random.Random(number), list[bytes]()

    def __call__(self, request: Message, answer: Message) -> Message:
        if not request.path.startswith("/blobs/"):
            return answer
        self._seen.append(answer.body)
        if self._dice.random() < 0.2:
            return answer.with_header("content-encoding", "gzip")
        others = [self._dice.choice(self._seen), bytes(len(answer.body)), answer.body + bytes(1 << 20), b""]
        return _redone(answer, self._dice.choice(others))


class FalseAnswers:
    """Answers of which one completion is changed by `change`, and states that claim the same."""

    def __init__(self, number: int, change) -> None:
        self._dice, self._change = random.Random(number), change

    def __call__(self, request: Message, answer: Message) -> Message:
        if request.path == "/rlloop/state" and self._change is _version and self._dice.random() < 0.5:
            state = msgspec.msgpack.decode(answer.body, type=EngineState)
            claimed = msgspec.structs.replace(state, version=state.version + self._dice.choice((-1, 1)))
            return _redone(answer, msgspec.msgpack.encode(claimed))
        if request.path != "/rlloop/generate" or self._dice.random() < 0.5:
            return answer
        told = msgspec.msgpack.decode(answer.body, type=Answer)
        at = self._dice.randrange(len(told.completions))
        told.completions[at] = self._change(told.completions[at], self._dice)
        return _redone(answer, msgspec.msgpack.encode(told))


def _logprobs(made, dice: random.Random):
    """One bit of one logprob."""
    logprobs = np.frombuffer(made.logprobs, "<u4").copy()
    logprobs[dice.randrange(len(logprobs))] ^= 1 << dice.randrange(24)
    changed = logprobs.tobytes()
    return msgspec.structs.replace(made, logprobs=changed, raw_logprobs=changed)


def _version(made, dice: random.Random):
    return msgspec.structs.replace(made, policy_version=made.policy_version + dice.choice((-1, 1)))


def _tokens(made, dice: random.Random):
    tokens = np.frombuffer(made.token_ids, "<i4").copy()
    tokens[dice.randrange(len(tokens))] ^= 1
    return msgspec.structs.replace(made, token_ids=tokens.tobytes())


class Replayed:
    """Answers to earlier requests: as they are, or with seeds and versions of the present one."""

    def __init__(self, number: int) -> None:
        self._dice, self._seen = random.Random(number), list[Answer]()

    def __call__(self, request: Message, answer: Message) -> Message:
        if request.path != "/rlloop/generate":
            return answer
        ask = msgspec.msgpack.decode(request.body, type=Ask)
        told = msgspec.msgpack.decode(answer.body, type=Answer)
        fits = [each for each in self._seen if len(each.completions) == len(told.completions)]
        self._seen.append(told)
        if not fits or self._dice.random() < 0.3:
            return answer
        old = self._dice.choice(fits)
        if self._dice.random() < 0.7:
            pairs = zip(old.completions, ask.sampling, strict=True)
            again = [
                msgspec.structs.replace(made, seed=params.seed, policy_version=ask.highest) for made, params in pairs
            ]
            old = Answer(again, told.boot)
        return _redone(answer, msgspec.msgpack.encode(old))


def _redone(answer: Message, body: bytes) -> Message:
    """A liar computes its digests anew."""
    return answer.with_header("content-digest", None).with_body(body)
