"""A failing, hanging or senseless reward is that sample's explicit outcome, and the others keep theirs."""

import asyncio
import base64
import gc
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest

from rlloop.errors import ConfigError
from rlloop.rewards import CodeReward, HttpReward, MathReward, Weighted
from rlloop.rewards.event_loop import POLL, EventLoop, OnThisLoop
from rlloop.rewards.http import post
from rlloop.rewards.runner import HOPELESS, Calls, RewardFailure, RewardRunner, _Worker, as_result
from rlloop.types import Example, RewardResult
from rlloop.web.clients import authorization
from tests.support.rewards_gone_wild import HANGS, RAISED, released, requests, wild
from tests.support.waiting import until

EVER = 30.0  # seconds


def moody(prompt, completion, example):
    if completion == "raise":
        raise RuntimeError("no such luck")
    if completion == "hang":
        time.sleep(EVER)
    if completion == "nan":
        return float("nan")
    if completion == "taken":
        return RewardResult(0.5, components={"std": 0.1})
    return "high" if completion == "text" else 0.25


async def moody_async(prompt, completion, example):
    if completion == "hang":
        await asyncio.sleep(EVER)
    return moody(prompt, completion, example)


@pytest.mark.parametrize("reward", [moody, moody_async])
def test_outcomes_are_explicit_and_in_order(reward):
    runner = RewardRunner(reward, timeout=2.0)
    outcomes = runner.score(requests("fine", "raise", "hang", "nan", "text", "taken", "fine"))
    runner.close()
    kinds = [outcome.kind if isinstance(outcome, RewardFailure) else outcome.reward for outcome in outcomes]
    assert kinds == [0.25, "error", "timeout", "invalid", "invalid", "invalid", 0.25]
    place = moody.__code__.co_firstlineno + 2
    assert outcomes[1].message == f"RuntimeError: no such luck (test_runner.py, line {place})"
    assert "'std', which is a metric's name" in outcomes[5].message


def test_the_loop_is_asked_whether_it_answers_ten_times_a_second_at_most(monkeypatch):
    began = time.monotonic()
    asked, loop = [], EventLoop()
    monkeypatch.setattr(loop, "_ask", lambda: asked.append(EventLoop._ask(loop)))
    while time.monotonic() < began + 0.15:  # an engine's step in between takes a millisecond
        loop.check(patience=5.0)
    assert len(asked) <= (time.monotonic() - began) / POLL
    loop.stop()


def test_a_reward_that_always_hangs_is_given_up_before_the_batch_has_taken_hours():
    def hang(prompt, completion, example):
        tried.append(completion)
        time.sleep(EVER)

    tried, runner = [], RewardRunner(hang, timeout=0.1)
    outcomes = runner.score(requests(*map(str, range(100))))
    until(lambda: sorted(tried) == list(map(str, range(HOPELESS))))  # a busy machine begins one after its time
    assert {outcome.kind for outcome in outcomes} == {"timeout"}
    assert len(outcomes) == 100
    assert outcomes[-1].message == f"not tried: the first {HOPELESS} took longer than 0.1 s"


@pytest.fixture
def held():
    """Release what hangs in `wild` after the test, and assert that no thread is left."""
    before = set(threading.enumerate())
    yield
    released.set()
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(240)
    released.clear()
    gc.collect()
    assert not any(thread.is_alive() for thread in left)


def tame(prompt, completion, example):
    if completion in RAISED:
        raise RAISED[completion]("of my own")
    return 1.0


@pytest.mark.parametrize("reward", [tame, wild])
@pytest.mark.parametrize("batched", [False, True])
def test_exits_and_interrupts_of_a_reward_are_that_samples(reward, batched):
    class Batched:
        batched = True

        def __call__(self, prompts, completions, examples):
            return [tame(*request) for request in zip(prompts, completions, examples, strict=True)]

    class BatchedAsync:
        batched = True

        async def __call__(self, prompts, completions, examples):
            return await asyncio.gather(*map(wild, prompts, completions, examples))

    whole = BatchedAsync() if reward is wild else Batched()
    runner = RewardRunner(whole if batched else reward, timeout=240)
    for kind, error in RAISED.items():
        nested = [f"{kind} nested"] if reward is wild else []
        *bad, good = runner.score(requests(kind, *nested, "fine"))
        assert {each.kind for each in bad} == {"error"}
        assert bad[0].message.startswith(error.__name__)
        if not batched:
            assert good == RewardResult(1.0, True)
        assert runner.score(requests("fine")) == [RewardResult(1.0, True)]
    runner.close()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("block", "blocked its event loop for longer than 2 s"),
        ("block nested", "blocked its event loop for longer than 2 s"),
        ("deaf", "took longer than 2 s"),
        ("deaf nested", "took longer than 2 s"),
        ("thread", "took longer than 2 s"),
    ],
)
def test_a_time_out_holds_whatever_an_async_reward_does(held, kind, message):
    runner, began = RewardRunner(wild, timeout=2.0, concurrency=2), time.monotonic()
    outcomes = runner.score(requests("fine", "fine", kind, *["fine"] * 4))
    late = [place for place, outcome in enumerate(outcomes) if isinstance(outcome, RewardFailure)]
    assert late == [2]
    assert (outcomes[2].kind, outcomes[2].message) == ("timeout", message)
    assert runner.score(requests("fine")) == [RewardResult(1.0, True)]
    runner.close()
    assert time.monotonic() - began < HANGS / 2


def test_a_reward_that_always_blocks_is_given_up(held):
    runner = RewardRunner(wild, timeout=0.1)
    outcomes = runner.score(requests(*["block"] * 40))
    assert {outcome.kind for outcome in outcomes} == {"timeout"}
    assert sum("not tried" in outcome.message for outcome in outcomes) == 40 - HOPELESS
    runner.close()


def test_what_never_ends_does_not_keep_the_process():
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.support.rewards_gone_wild import requests, wild
from rlloop.rewards.runner import RewardRunner
runner = RewardRunner(wild, timeout=0.2)
print([outcome.kind for outcome in runner.score(requests("block", "deaf", "thread"))])
runner.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout) == (0, "['timeout', 'timeout', 'timeout']\n"), done.stderr


def test_a_reward_that_belonged_to_a_blocked_loop_goes_on(held):
    parts = {"bound": {"_target_": f"{__name__}.Bound"}, "wild": {"_target_": f"{__name__}.wild"}}
    runner = RewardRunner(Weighted(parts), timeout=2.0)
    outcomes = runner.score(requests("fine", "fine", "block"))
    assert [isinstance(outcome, RewardResult) for outcome in outcomes] == [True, True, False]
    assert runner.score(requests("again", "and again")) == [RewardResult(2.0, True, {"bound": 1.0, "wild": 1.0})] * 2
    runner.close()


class Bound:
    """A semaphore of asyncio's belongs to the loop on which somebody first had to wait for it."""

    def __init__(self):
        self.turn = OnThisLoop(lambda: asyncio.Semaphore(1))

    async def __call__(self, prompt, completion, example):
        async with self.turn.get():
            await asyncio.sleep(0.01)
        return 1.0


def test_an_object_of_a_loop_is_never_another_loops():
    """A loop that was left behind may get its own at any moment, here before each line of `get`."""
    turn = OnThisLoop(asyncio.get_running_loop)

    async def own() -> bool:
        return turn.get() is asyncio.get_running_loop()

    def before_each_line(frame, event, _):
        if frame.f_code is not OnThisLoop.get.__code__:
            return None
        if event == "line":
            other = threading.Thread(target=asyncio.run, args=(own(),))
            other.start()
            other.join()
        return before_each_line

    tracer = sys.gettrace()
    sys.settrace(before_each_line)
    try:
        is_own = asyncio.run(own())
    finally:
        sys.settrace(tracer)
    assert is_own


def test_calls_that_begin_meanwhile_do_not_break_the_look_for_unfinished_ones():
    class Begins:
        def done(self) -> bool:
            calls._tasks[len(calls._tasks)] = task
            return False

    calls, task = Calls(moody_async, as_result, 1.0, 1), cast(Any, Begins())
    calls._tasks[0] = task
    assert calls.unfinished() == [0]


def test_a_request_s_time_begins_before_the_outcome_of_the_last_one_counts(monkeypatch):
    """Else the next one would seem late where the thread waits in between."""

    class Outcomes(list[Any]):
        def append(self, outcome):
            seen.append((worker.began, now))
            super().append(outcome)

    def reward() -> float:
        nonlocal now
        now += 1.0
        return now

    now, seen = 0.0, []
    monkeypatch.setattr("rlloop.rewards.runner.time", SimpleNamespace(monotonic=lambda: now))
    worker = _Worker(reward, as_result, [(), ()])
    worker.outcomes = Outcomes()
    worker.run()
    assert seen == [(1.0, 1.0), (2.0, 2.0)]


def test_what_an_interrupt_leaves_behind_is_cancelled():
    async def endless(prompt, completion, example):
        try:
            if completion == "b":
                await asyncio.sleep(0.2)  # the main thread waits by then
                os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.sleep(EVER)
        finally:
            ended.append(completion)

    def interrupt(number, frame):
        raise KeyboardInterrupt

    ended, runner = [], RewardRunner(endless)
    before = signal.signal(signal.SIGUSR1, interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.score(requests("a", "b"))
    signal.signal(signal.SIGUSR1, before)
    assert runner._loop is not None
    assert runner._loop.run(asyncio.sleep(0.05, "done"), EVER) == "done"
    assert ended == ["a", "b"]
    runner.close()


def test_batched_rewards_get_lists_and_must_return_one_value_each():
    class Lengths:
        batched = True

        def __call__(self, prompts, completions, examples):
            return [float(len(text)) for text in completions if text != "lost"]

    assert [o.reward for o in RewardRunner(Lengths()).score(requests("a", "bbb"))] == [1.0, 3.0]
    assert {o.kind for o in RewardRunner(Lengths()).score(requests("a", "lost"))} == {"invalid"}


def test_numbers_of_other_libraries_become_ones_that_a_record_can_hold():
    def batched(prompts, completions, examples):
        given = {"result": RewardResult(np.float32(0.5), np.bool_(True), {"x": np.float64(2)}), "two": np.ones(2)}
        return [given.get(text, np.float32(1)) for text in completions]

    batched.batched = True
    whole, pair, plain = RewardRunner(batched).score(requests("result", "two", "plain"))
    assert [type(each) for each in (whole.reward, whole.solved, whole.components["x"])] == [float, bool, float]
    assert (whole, plain) == (RewardResult(0.5, True, {"x": 2.0}), RewardResult(1.0, True))
    assert pair.kind == "error"
    array = lambda prompts, completions, examples: np.arange(len(prompts)) / 2  # noqa: E731
    array.batched = True
    assert [each.reward for each in RewardRunner(array).score(requests("a", "b"))] == [0.0, 0.5]


class OneAtATime:
    concurrency = 1

    async def __call__(self, prompt, completion, example):
        await asyncio.sleep(0.25)
        return 1.0


def test_waiting_for_a_turn_is_no_part_of_a_samples_time():
    parts = {"slow": {"_target_": f"{__name__}.OneAtATime"}, "any": {"_target_": f"{__name__}.moody"}}
    for reward in (OneAtATime(), Weighted(parts)):
        runner = RewardRunner(reward, timeout=2.0)
        outcomes = runner.score(requests(*["fine"] * 9))  # 2.25 s in all
        runner.close()
        assert [outcome.solved for outcome in outcomes] == [True] * 9
    assert RewardRunner(CodeReward(processes=3)).concurrency == 3
    assert RewardRunner(MathReward()).concurrency == 1
    assert RewardRunner(moody_async).concurrency == 64


def test_weighted_sum_records_every_part():
    reward = Weighted(
        {
            "moody": {"_target_": f"{__name__}.moody", "weight": 2.0},
            "late": {"_target_": f"{__name__}.moody_async"},
        }
    )
    runner = RewardRunner(reward)
    [good, bad] = runner.score(requests("fine", "raise"))
    runner.close()
    assert good == RewardResult(0.75, False, {"moody": 0.25, "late": 0.25})
    assert isinstance(bad, RewardFailure)
    with pytest.raises(ConfigError, match="solved_by is 'nobody'"):
        Weighted({"moody": {"_target_": f"{__name__}.moody"}}, solved_by="nobody")
    with pytest.raises(ConfigError, match=r"reward\.parts\.std has the name of the metric reward/std"):
        Weighted({"std": {"_target_": f"{__name__}.moody"}})
    for part, named in (
        ({"_target_": f"{__name__}.moody", "weight": "much"}, "reward.parts.a.weight is 'much'; it must be a number"),
        ({"_target_": f"{__name__}.moddy"}, "reward.parts.a._target_ is .*did you mean moody?"),
        ("moody", "reward.parts.a is 'moody'; it must be {_target_"),
    ):
        with pytest.raises(ConfigError, match=named):
            Weighted({"a": part})  # pyright: ignore[reportArgumentType]


def test_math_reward_judges_equivalence():
    runner = RewardRunner(MathReward(), timeout=240)
    outcomes = runner.score(requests("so it is $\\frac{2}{4}$", "$0.5$", "the answer is \\boxed{2}", "no idea"))
    broken = runner.score([("p", "$1$", Example("no-answer", [1], "", {}))])
    runner.close()
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0, 0.0, 0.0]
    assert outcomes[3].components == {"answered": 0.0}
    assert isinstance(broken[0], RewardFailure)


def test_a_math_worker_that_dies_or_is_given_up_is_replaced_and_one_that_is_signalled_goes_on():
    reward = MathReward()
    runner = RewardRunner(reward, timeout=240)

    def worker():
        assert reward._pool is not None
        [process] = reward._pool._processes.values()
        return process

    assert runner.score(requests("$0.5$"))[0].reward == 1.0
    first = worker()
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal or a scheduler, to every process of a run
        os.kill(first.pid, number)
    assert runner.score(requests("$0.5$"))[0].reward == 1.0
    assert worker() is first
    first.kill()
    first.join()
    until(lambda: reward._pool._broken)
    assert [outcome.reward for outcome in runner.score(requests("$0.5$", "$1$"))] == [1.0, 0.0]
    hasty = RewardRunner(reward, timeout=0.05)
    second = worker()
    os.kill(second.pid, signal.SIGSTOP)  # as if it computed for ever
    assert hasty.score(requests("$0.5$"))[0].kind == "timeout"
    assert reward._pool is None
    second.join()
    hasty.close()
    runner.close()


@pytest.fixture
def judge():
    """A real HTTP server that fails the first try of each key; yields its URL and the keys it saw."""
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            key = self.headers["idempotency-key"]
            seen.append(key)
            first = seen.count(key) == 1
            status = 503 if first else 400 if body["completion"] == "refused" else 200
            answer = json.dumps({"reward": len(body["completion"]), "solved": True, "components": None}).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/judge", seen
    server.shutdown()
    thread.join()
    server.server_close()


def test_http_reward_retries_with_one_key_a_sample(judge):
    url, seen = judge
    runner = RewardRunner(HttpReward(url, backoff=0.01))
    good, refused = runner.score(requests("abc", "refused"))
    runner.close()
    assert good == RewardResult(3.0, True)
    assert isinstance(refused, RewardFailure)
    assert "400" in refused.message
    assert len(seen) == 4
    assert len(set(seen)) == 2


def test_http_reward_refuses_what_cannot_work():
    with pytest.raises(ConfigError, match="must begin with http"):
        HttpReward("ftp://example")
    with pytest.raises(ConfigError, match="no address"):
        HttpReward("http://judge:port")
    with pytest.raises(ConfigError, match="environment variable is not set"):
        HttpReward("http://example", token_env="RLLOOP_NO_SUCH_VARIABLE")


def test_a_server_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # it does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/judge"
        runner = RewardRunner(HttpReward(url, retries=0))
        (failed,) = runner.score(requests("abc"))
        runner.close()
    assert isinstance(failed, RewardFailure)
    assert failed.message == f"ConnectError: {url}: All connection attempts failed"


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ("refused", "http://judge:7000/x: no route"),
        ("late", "http://judge:7000/x"),
        ("status", "Client error '400 Bad Request' for url 'http://judge:7000/x'"),
    ],
)
def test_a_server_that_fails_is_named(fails, says):
    def answer(request: httpx.Request) -> httpx.Response:
        if fails == "status":
            return httpx.Response(400)
        raise httpx.ConnectError("no route") if fails == "refused" else httpx.ReadTimeout("")

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            (await post(client, "http://judge:7000/x", content=b"")).raise_for_status()

    with pytest.raises(httpx.HTTPError) as failed:
        asyncio.run(ask())
    assert str(failed.value).splitlines()[0] == says


@pytest.mark.parametrize(
    "address",
    [
        "http://me:s3cret@judge/x", "https://me:s3/cret@judge/x", "HTTPS://me:s3cret@judge:port/x", "me:s3cret@judge",
        "http://me:s3?cret@judge/x", "Http:///me:s3cret@judge", "//me:s3cret@judge", "http://[me:s3/cret@judge",
    ],
)  # fmt: skip
def test_an_address_with_a_login_is_refused_and_not_told(address):
    with pytest.raises(ConfigError, match=r"reward.url has a login .* token_env: LOGIN beside url") as refused:
        HttpReward(address)
    assert "me:s3" not in str(refused.value)


@pytest.mark.parametrize(
    "address", ["http://judge/@me/x", "https://judge:7000/?of=me@here", "http://[::1]:7000/a@b", "http://judge#@"]
)
def test_an_at_sign_behind_the_host_is_no_login(address):
    HttpReward(address)


def test_the_command_of_the_error_makes_a_header(tmp_path):
    with pytest.raises(ConfigError) as refused:
        HttpReward("http://me@judge/x")
    command = str(refused.value).partition("and export ")[2].replace("user:password", "me:pa%dss" + "x" * 70)
    made = subprocess.run(["sh", "-c", f'{command}; printf %s "$LOGIN"'], capture_output=True, text=True, check=True)
    kind, code = made.stdout.split(" ")
    assert kind == "Basic"
    assert base64.b64decode(code, validate=True).decode() == "me:pa%dss" + "x" * 70


def test_a_login_is_sent_from_the_environment(monkeypatch):
    for name, value in (("LOGIN", "Basic bWU6cGFzcw=="), ("TOKEN", "abc")):
        monkeypatch.setenv(name, value)
    assert authorization("token_env", "LOGIN") == {"Authorization": "Basic bWU6cGFzcw=="}
    assert authorization("token_env", "TOKEN") == {"Authorization": "Bearer abc"}
    assert authorization("token_env", None) == {}
