"""Conversations advance each on its own: the order in which turns and replies end changes no bit and delays nobody."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from _thread import interrupt_main
from concurrent.futures import Future
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from rlloop.loop.conversations import Conversations, SingleTurn
from rlloop.loop.environments import CLOSED, EnvironmentSteps, Reply
from rlloop.loop.turns import CALLS, LINGER, GeneratedTurns, OverlappedTurns, SteppedTurns, turns_of
from rlloop.parity.asked import Vocabulary
from rlloop.rewards.event_loop import EventLoop
from rlloop.rewards.runner import RewardFailure
from rlloop.rollout import Engine
from rlloop.rollout.engine.service import EngineService
from rlloop.testing import FakeEngine, FakePolicy, FakeTask
from rlloop.types import Completion, Example, SamplingParams
from tests.support.talks import KNOWN, Countdown, TalkTask
from tests.support.tiny_models import tiny_qwen3

EVER = 60.0  # seconds, as a time limit of what must not wait for it


class Generating:
    """An engine that takes whole batches alone."""

    def __init__(self, engine: Engine) -> None:
        self.policy_version, self.generate, self.fingerprint = 0, engine.generate, engine.fingerprint


class Overlapping(Generating):
    """An engine that computes in a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.service = EngineService(engine)
        self.begin = self.service.submit
        self.generate = lambda prompts, sampling: self.begin(prompts, sampling).result(EVER)  # by that thread, too


KINDS = {"stepped": (lambda engine: engine, SteppedTurns), "generated": (Generating, GeneratedTurns),
         "overlapped": (Overlapping, OverlappedTurns)}  # fmt: skip


@pytest.fixture(params=KINDS)
def engine(request):
    make, kind = KINDS[request.param]
    made = make(Engine(tiny_qwen3(40), page_size=4, max_batch_tokens=32))
    assert type(turns_of(made)) is kind
    yield made
    if isinstance(made, Overlapping):
        made.service.close()


def examples(*turns: int) -> list[Example]:
    return [Example(f"e{i}", [5 + i, 7, 9], "p", {"turns": count, "number": i}) for i, count in enumerate(turns)]


def play(environment: type, engine, asked: list[Example], timeout: float = EVER, concurrency: int = 64):
    class Task(TalkTask):
        pass

    Task.environment = environment
    conversations = Conversations(Task(40), Vocabulary(40, (2,)), timeout=timeout, concurrency=concurrency)
    params = [SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, seed=each.data["number"]) for each in asked]
    try:
        return conversations.play(engine, asked, params)
    finally:
        conversations.close()


def in_lock_step(engine: Engine, asked: list[Example]) -> list[list[Completion]]:
    """All conversations turn by turn together: each one's turns."""
    task, turns = TalkTask(40), {each.data["number"]: list[Completion]() for each in asked}
    ids, others = {each.data["number"]: each.prompt_ids for each in asked}, {}
    for each in asked:
        others[each.data["number"]] = Countdown(each)
    while ids:
        params = [SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, seed=number) for number in ids]
        for number, turn in zip(list(ids), engine.generate(list(ids.values()), params), strict=True):
            turns[number].append(turn)
            reply = others[number].step("")
            if reply.done or len(turns[number]) == task.max_turns:
                del ids[number]
            else:
                stop = turn.token_ids[-1] if turn.finish_reason == "stop" else None
                ids[number] = [*turn.prompt_ids, *turn.token_ids, *task.between(reply.messages, stop)]
    return list(turns.values())


@pytest.mark.parametrize("slice_tokens", [1, 4])
def test_turns_in_pieces_are_the_turns_that_they_would_have_been(engine, slice_tokens):
    asked = examples(3, 1, 2)
    params = [SamplingParams(6, min_tokens=3, temperature=0.8, top_p=0.9, seed=each.data["number"]) for each in asked]
    known, task = Vocabulary(40, (2,)), TalkTask(40)
    conversations, single = Conversations(task, known), SingleTurn(FakeTask(40), known)
    under_way, ahead = conversations.under_way(slice_tokens), single.under_way(slice_tokens)
    talks, alone = ([each.begin(*pair) for pair in zip(asked, params, strict=True)] for each in (under_way, ahead))
    under_way.advance(engine)
    ahead.advance(engine)
    whole = [*conversations.play(engine, asked, params), *single.play(engine, asked, params)]
    under_way.close()
    conversations.close()
    for talk, expected in zip([*talks, *alone], whole, strict=True):
        played = talk.played(task.decode)
        assert (played.broken, played.fault) == (None, None)
        assert played.text == expected.text
        made, other = played.completion, expected.completion
        for name in ("prompt_ids", "token_ids", "turns", "versions", "version_spans", "sampling", "finish_reason"):
            assert getattr(made, name) == getattr(other, name), name
        assert np.array_equal(made.logprobs.view("i4"), other.logprobs.view("i4"))
        assert played.example.data == expected.example.data


def test_a_turn_that_is_cut_goes_on_with_other_weights_after_its_last_token(engine):
    """Single turns: the first ends within a piece, and the second, which is longer, is cut there."""
    under_way = SingleTurn(FakeTask(40), Vocabulary(40, ())).under_way(2)
    under_way.version = 0
    short, long = (under_way.begin(examples(1)[0], SamplingParams(n, seed=4, ignore_eos=True)) for n in (2, 5))
    under_way.advance(engine, lambda: short.ended)
    assert (short.ended, long.ended, long.made) == (True, False, [0])
    if isinstance(engine, Engine):
        engine.set_version(3)
        under_way.version = 3
    under_way.advance(engine)
    made = long.played(str).completion
    if isinstance(engine, Engine):
        assert made.versions == (0, 3)
        assert made.version_spans == ((0, 2), (2, 5))
        assert made.token_versions.tolist() == [0, 0, 3, 3, 3]
        assert made.policy_version == 0
    assert made.sampling == SamplingParams(5, seed=4, ignore_eos=True)
    assert (len(made.token_ids), made.finish_reason, made.turns) == (5, "length", None)


class Backwards(Countdown):
    """A step ends once the conversation after this one has taken as many, as far as it goes."""

    steps: ClassVar[dict[int, int]] = {}
    turns: ClassVar[list[int]] = []
    changed = threading.Condition()

    def __init__(self, example: Example) -> None:
        super().__init__(example)
        self.number = example.data["number"]

    def step(self, message: str) -> Reply:
        with self.changed:
            mine, later = self.steps.get(self.number, 0) + 1, self.number + 1
            if later < len(self.turns):
                self.changed.wait_for(lambda: self.steps.get(later, 0) >= min(mine, self.turns[later]))
            self.steps[self.number] = mine
            self.changed.notify_all()
        return super().step(message)


def test_no_order_of_turns_changes_a_bit(engine):
    asked = examples(3, 1, 4, 2, 4, 3)
    Backwards.steps, Backwards.turns = {}, [each.data["turns"] for each in asked]
    expected = in_lock_step(Engine(tiny_qwen3(40), page_size=16), asked)
    played = play(Backwards, engine, asked)
    assert sum(map(len, expected)) == 17
    assert len({tuple(each.completion.token_ids) for each in played}) == 6
    for each, turns in zip(played, expected, strict=True):
        made, begin = each.completion, len(each.example.prompt_ids)
        last = turns[-1]
        assert (each.broken, each.fault) == (None, None)
        assert made.token_ids == [*last.prompt_ids, *last.token_ids][begin:]
        assert made.turns == tuple(
            (len(turn.prompt_ids) - begin, len(turn.prompt_ids) + len(turn.token_ids) - begin) for turn in turns
        )
        for name in ("logprobs", "raw_logprobs"):
            bits = np.concatenate([getattr(turn, name) for turn in turns]).view(np.int32)
            assert np.array_equal(getattr(made, name).view(np.int32), bits)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_tool_that_waits_for_ever_delays_no_other_conversation(engine, kind):
    """The first conversation's tool returns when all others have taken their last turn: waited for, none ever would."""
    ended: list[int] = []
    over = threading.Event()

    class Waiting(Countdown):
        def __init__(self, example):
            super().__init__(example)
            self.number = example.data["number"]

        def answer(self, message):
            reply = super().step(message)
            if reply.done and self.number:
                ended.append(self.number)
                if len(ended) == 3:
                    over.set()
            return reply

        def step(self, message):
            assert self.number or over.wait(EVER), "the others wait for this one"
            return self.answer(message)

    class AsyncWaiting(Waiting):
        async def step(self, message):  # pyright: ignore[reportIncompatibleMethodOverride]
            while self.number == 0 and not over.is_set():
                await asyncio.sleep(0.001)
            return self.answer(message)

    asked = examples(2, 4, 3, 4)
    played = play(Waiting if kind == "sync" else AsyncWaiting, engine, asked)
    assert [each.broken for each in played] == [None] * 4
    assert [each.example.data["episode"]["turns"] for each in played] == [2, 4, 3, 4]
    assert sorted(ended) == [1, 2, 3]


def test_a_turn_joins_the_batch_while_others_are_being_sampled():
    """The engine ends the first conversation's turn when the second one is over, three turns later."""

    class Slow(FakeEngine):
        def __init__(self):
            super().__init__(FakePolicy())
            self.requests, self.ids, self.idle, self.over = {}, iter(range(100)), 0, False

        has_work = property(lambda self: bool(self.requests))
        longest = 1000

        def add_request(self, prompt_ids, sampling, *, top_logprobs=0):
            self.requests[made := next(self.ids)] = self._complete(prompt_ids, sampling)
            return made

        def step(self):
            self.idle += 1
            time.sleep(0.001)
            assert self.idle < 20_000, "nothing joined the batch"
            done = [id for id, each in self.requests.items() if each.prompt_ids[0] != 5 or self.over]
            return [(id, self.requests.pop(id)) for id in done]

        def abort(self, request_id):
            return self.requests.pop(request_id, None)

        so_far = score = stats = None

    engine = Slow()

    class Over(Countdown):
        def step(self, message):
            reply = super().step(message)
            engine.over = engine.over or reply.done
            return reply

    slow, quick = play(Over, engine, examples(1, 3))
    assert quick.completion.turns is not None
    assert len(quick.completion.turns) == 3
    assert slow.broken is quick.broken is None


@pytest.mark.parametrize(("seconds", "linger"), [(0.004, 0.00008), (1.0, LINGER)])
def test_the_wait_before_a_step_is_a_small_share_of_the_last_one(seconds, linger, monkeypatch):
    clock = SimpleNamespace(monotonic=iter([10.0, 10.0 + seconds]).__next__)
    monkeypatch.setattr("rlloop.loop.turns.time", clock)
    turns = SteppedTurns(SimpleNamespace(has_work=False, step=list))  # pyright: ignore[reportArgumentType]
    assert turns.linger == 0.0
    turns.work()
    assert turns.linger == pytest.approx(linger)


class Elsewhere(FakeEngine):
    """Calls overlap; `work(call, prompts)` says when each of them ends."""

    def __init__(self, work) -> None:
        super().__init__(FakePolicy(40))
        self.work, self.calls = work, list[Future[list[Completion]]]()

    def begin(self, prompts, sampling):
        call: Future[list[Completion]] = Future()
        self.calls.append(call)
        number = len(self.calls)

        def run():
            self.work(number, prompts)
            call.set_result(self.generate(prompts, sampling))

        threading.Thread(target=run, daemon=True).start()
        return call


def test_a_turn_does_not_wait_for_a_call_that_others_are_in():
    """The first conversation's second turn ends when the second one is over, whose tool waits for it to begin."""
    begun, over = threading.Event(), threading.Event()

    def work(call, prompts):
        if call > 1 and 5 in [prompt[0] for prompt in prompts]:
            begun.set()
            assert over.wait(EVER), "the other's turn waits for this call"

    class Between(Countdown):
        def __init__(self, example):
            super().__init__(example)
            self.number = example.data["number"]

        def step(self, message):
            reply = super().step(message)
            if self.number:
                assert begun.wait(EVER)
                if reply.done:
                    over.set()
            return reply

    played = play(Between, Elsewhere(work), examples(2, 3))
    assert [each.broken for each in played] == [None, None]
    assert [each.example.data["episode"]["turns"] for each in played] == [2, 3]


def test_prompts_beyond_the_calls_in_flight_share_the_next_one():
    ends = threading.Event()
    engine = Elsewhere(lambda call, prompts: ends.wait(EVER))
    turns, made = turns_of(engine), []
    for call in range(CALLS + 2):
        assert not turns.has_work or call > CALLS
        made.append(turns.submit([5, 7], SamplingParams(max_tokens=2, seed=call)))
        assert turns.has_work == (call < CALLS)
        if turns.has_work:
            turns.work()
    ends.set()
    for each in made[:CALLS]:
        each.result(EVER)
    while not turns.has_work:  # as soon as a call is over
        time.sleep(0.001)
    turns.work()
    assert [len(each.result(EVER).prompt_ids) for each in made] == [2] * (CALLS + 2)
    assert len(engine.calls) == CALLS + 1


@pytest.fixture
def interrupts():
    """Python's own handler of SIGINT, which a shell's background process begins without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("where", ["engine", "tool"])
def test_an_interrupt_leaves_an_engine_and_environments_to_go_on_with(where, monkeypatch, interrupts):
    engine, asked = Engine(tiny_qwen3(40), page_size=4), examples(3, 1, 2)
    whole = play(Countdown, engine, asked)
    release, presses = threading.Event(), iter([True])

    class Pressed(Countdown):
        def step(self, message):
            if where == "tool":
                if next(presses, False):  # one that comes later would end the tests
                    interrupt_main()
                release.wait(EVER)
            return super().step(message)

    steps, step = iter(range(3)), engine.step

    def interrupted():
        if where == "engine" and next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            play(Pressed, engine, asked)
    release.set()
    assert not engine.has_work
    engine.set_version(1)  # refused while something is in flight
    again = play(Countdown, engine, asked)
    assert [each.completion.token_ids for each in again] == [each.completion.token_ids for each in whole]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_end_of_a_run_ends_a_batch_that_waits_for_its_tools(kind):
    """With a lag, a thread may sample the next step's batch when the run stops; no tool is to be waited for."""
    waits, release = threading.Event(), threading.Event()

    class Waiting(Countdown):
        def step(self, message):
            waits.set()
            release.wait(EVER)
            return super().step(message)

    class AsyncWaiting(Countdown):
        async def step(self, message):  # pyright: ignore[reportIncompatibleMethodOverride]
            waits.set()
            await asyncio.sleep(EVER)

    class Task(TalkTask):
        environment = Waiting if kind == "sync" else AsyncWaiting

    conversations, played = Conversations(Task(), KNOWN, timeout=EVER), []
    params = [SamplingParams(max_tokens=6, seed=seed) for seed in (0, 1)]
    batch = lambda: played.extend(conversations.play(FakeEngine(FakePolicy()), examples(2, 2), params))  # noqa: E731
    thread = threading.Thread(target=batch, daemon=True)
    thread.start()
    assert waits.wait(EVER)
    conversations.close()
    thread.join(EVER / 2)
    release.set()
    assert [each.broken for each in played] == ["environment error: the run has ended"] * 2


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_steps_that_start_while_a_run_ends_have_outcomes(kind, monkeypatch):
    """The run ends, in another thread, as the loop is about to be given a step: it must not be stopped by then."""

    class Slow(EventLoop):
        def start(self, work):
            begins.set()
            time.sleep(0.05)  # time for the other thread to stop this loop, if nothing kept it from that
            return super().start(work)

    class AsyncCountdown(Countdown):
        async def step(self, message):  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().step(message)

    begins, steps = threading.Event(), EnvironmentSteps()
    monkeypatch.setattr("rlloop.loop.environments.EventLoop", Slow)
    ends = threading.Thread(target=lambda: begins.wait(EVER) and steps.close(), daemon=True)
    ends.start()
    environment = (Countdown if kind == "sync" else AsyncCountdown)(examples(2)[0])
    outcomes = [steps.submit(environment, "") for _ in range(2)]
    ends.join(EVER)
    assert all(isinstance(each.result(EVER), Reply | RewardFailure) for each in outcomes)
    assert not steps.busy
    assert steps.submit(environment, "").result(0) == CLOSED


def test_an_error_of_the_engine_is_raised_and_nothing_stays_in_flight(engine):
    asked = [*examples(2, 2), Example("long", [40], "p", {"turns": 1, "number": 9})]  # no id of the vocabulary
    with pytest.raises(ValueError, match="40"):
        play(Countdown, engine, asked)
    assert [each.broken for each in play(Countdown, engine, asked[:2])] == [None, None]


class Blocking(Countdown):
    """An async step that blocks its event loop, where the example says so."""

    def __init__(self, example: Example) -> None:
        super().__init__(example)
        self.blocks, self.began = example.data.get("blocks"), 0

    async def step(self, message: str) -> Reply:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.began += 1
        if self.blocks:
            time.sleep(10.0)
        await asyncio.sleep(0.01)
        return super().step(message)


def test_a_step_that_blocks_the_event_loop_is_a_timeout_and_the_others_go_on():
    asked = examples(2, 2, 2, 2)
    asked[1].data["blocks"] = True
    played = play(Blocking, FakeEngine(FakePolicy(40)), asked, timeout=2.0)
    assert played[1].broken == "environment timeout: blocked its event loop for longer than 2 s"
    assert [each.broken for each in (played[0], *played[2:])] == [None] * 3


def test_where_every_step_blocks_the_rest_is_not_tried():
    asked = examples(*[1] * 16)
    for each in asked:
        each.data["blocks"] = True
    reasons = [each.broken or "" for each in play(Blocking, FakeEngine(FakePolicy(40)), asked, timeout=0.2)]
    blocked = reasons.count("environment timeout: blocked its event loop for longer than 0.2 s")
    assert 8 <= blocked < 16  # now and then a slow machine cannot tell who blocks, and blames two
    assert reasons.count(f"environment timeout: not tried: the first {blocked} took longer than 0.2 s") == 16 - blocked


@pytest.mark.parametrize("error", [StopIteration("no more"), SystemExit(3), KeyError("tool")])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_whatever_a_step_raises_is_the_reason(error, kind):
    class Raising(Countdown):
        def step(self, message):
            raise error

    class AsyncRaising(Countdown):
        async def step(self, message):  # pyright: ignore[reportIncompatibleMethodOverride]
            raise error

    [played] = play(Raising if kind == "sync" else AsyncRaising, FakeEngine(FakePolicy(40)), examples(1))
    if kind == "async" and isinstance(error, StopIteration):  # Python's own rule for coroutines
        assert played.broken == "environment error: RuntimeError: coroutine raised StopIteration"
    else:
        why = f"environment error: {type(error).__name__}: {error} (test_conversations.py, line "
        assert (played.broken or "").startswith(why)


def test_at_most_so_many_steps_run_at_a_time():
    running, most, lock, three = 0, 0, threading.Lock(), threading.Barrier(3, timeout=EVER)

    class Counted(Countdown):
        def step(self, message):
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            three.wait()
            time.sleep(0.01)
            with lock:
                running -= 1
            return super().step(message)

    played = play(Counted, FakeEngine(FakePolicy(40)), examples(*[1] * 9), concurrency=3)
    assert [each.broken for each in played] == [None] * 9
    assert most == 3


def test_the_first_fault_of_a_conversation_is_its_own():
    class Longer(FakeEngine):
        def _complete(self, prompt, params):
            made = super()._complete(prompt, params)
            late = params.seed == 0 and len(prompt) > 3
            return Completion(prompt[1:] if late else prompt, made.token_ids, made.logprobs, made.raw_logprobs, 0,
                              made.finish_reason, params)  # fmt: skip

    class Task(TalkTask):
        environment = Countdown

    conversations = Conversations(Task(), KNOWN)
    params = [SamplingParams(max_tokens=6, seed=seed) for seed in (0, 1)]
    wrong, right = conversations.play(Longer(FakePolicy()), examples(2, 2), params)
    conversations.close()
    assert wrong.fault is not None
    assert wrong.fault.startswith("its prompt is [7, 9, ")
    assert right.fault is None


def test_a_reply_with_an_images_placeholder_breaks_its_conversation_alone(engine):
    class Task(TalkTask):
        def between(self, messages, stop):
            return [*super().between(messages, stop), 31]

    known = Vocabulary(40, (2,), placeholders=(31, 32))
    for vocabulary, whole in ((known, [False, True]), (Vocabulary(40, (2,)), [True, True])):
        conversations = Conversations(Task(40), vocabulary)
        asked = examples(2, 1)  # the second ends before anything stands between two turns
        params = [SamplingParams(max_tokens=6, temperature=0.8, seed=each.data["number"]) for each in asked]
        played = conversations.play(engine, asked, params)
        conversations.close()
        assert [each.broken is None for each in played] == whole
        if whole[0] is False:
            assert "its reply has token 31, which stands for an image or a video" in played[0].broken
            assert len(played[0].completion.turns) == 1
