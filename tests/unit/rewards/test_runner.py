"""A failing, hanging or senseless reward is that sample's explicit outcome, and the others keep theirs."""

import asyncio
import http.server
import json
import threading
import time

import pytest

from rlloop.errors import ConfigError
from rlloop.rewards import HttpReward, MathReward, Weighted
from rlloop.rewards.runner import HOPELESS, RewardFailure, RewardRunner
from rlloop.types import Example, RewardResult

EXAMPLE = Example("e", [1], "prompt", {"answer": "1/2"})


def requests(*completions):
    return [("prompt", completion, EXAMPLE) for completion in completions]


def moody(prompt, completion, example):
    if completion == "raise":
        raise RuntimeError("no such luck")
    if completion == "hang":
        time.sleep(5)
    if completion == "nan":
        return float("nan")
    return "high" if completion == "text" else 0.25


async def moody_async(prompt, completion, example):
    if completion == "hang":
        await asyncio.sleep(5)
    return moody(prompt, completion, example)


@pytest.mark.parametrize("reward", [moody, moody_async])
def test_outcomes_are_explicit_and_in_order(reward):
    runner = RewardRunner(reward, timeout=0.3)
    outcomes = runner.score(requests("fine", "raise", "hang", "nan", "text", "fine"))
    runner.close()
    kinds = [outcome.kind if isinstance(outcome, RewardFailure) else outcome.reward for outcome in outcomes]
    assert kinds == [0.25, "error", "timeout", "invalid", "invalid", 0.25]
    assert "RuntimeError: no such luck" in outcomes[1].message


def test_a_reward_that_always_hangs_is_given_up_before_the_batch_has_taken_hours():
    def hang(prompt, completion, example):
        tried.append(completion)
        time.sleep(30)

    tried, runner = [], RewardRunner(hang, timeout=0.01)
    outcomes = runner.score(requests(*map(str, range(100))))
    assert tried == list(map(str, range(HOPELESS)))
    assert {outcome.kind for outcome in outcomes} == {"timeout"}
    assert len(outcomes) == 100
    assert outcomes[-1].message == f"not tried: the first {HOPELESS} took longer than 0.01 s"


def test_batched_rewards_get_lists_and_must_return_one_value_each():
    class Lengths:
        batched = True

        def __call__(self, prompts, completions, examples):
            return [float(len(text)) for text in completions if text != "lost"]

    assert [o.reward for o in RewardRunner(Lengths()).score(requests("a", "bbb"))] == [1.0, 3.0]
    assert {o.kind for o in RewardRunner(Lengths()).score(requests("a", "lost"))} == {"invalid"}


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
    for part, named in (
        ({"_target_": f"{__name__}.moody", "weight": "much"}, "reward.parts.a.weight is 'much'; it must be a number"),
        ({"_target_": f"{__name__}.moddy"}, "reward.parts.a._target_ is .*did you mean moody?"),
        ("moody", "reward.parts.a is 'moody'; it must be {_target_"),
    ):
        with pytest.raises(ConfigError, match=named):
            Weighted({"a": part})  # pyright: ignore[reportArgumentType]


def test_math_reward_judges_equivalence():
    runner = RewardRunner(MathReward(), timeout=60)
    outcomes = runner.score(requests("so it is $\\frac{2}{4}$", "$0.5$", "the answer is \\boxed{2}", "no idea"))
    broken = runner.score([("p", "$1$", Example("no-answer", [1], "", {}))])
    runner.close()
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0, 0.0, 0.0]
    assert outcomes[3].components == {"answered": 0.0}
    assert isinstance(broken[0], RewardFailure)


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
            answer = json.dumps({"reward": len(body["completion"]), "components": {"length": 1.0}}).encode()
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
    assert good == RewardResult(3.0, True, {"length": 1.0})
    assert isinstance(refused, RewardFailure)
    assert "400" in refused.message
    assert len(seen) == 4
    assert len(set(seen)) == 2


def test_http_reward_refuses_what_cannot_work():
    with pytest.raises(ConfigError, match="must begin with http"):
        HttpReward("ftp://example")
    with pytest.raises(ConfigError, match="environment variable is not set"):
        HttpReward("http://example", token_env="RLLOOP_NO_SUCH_VARIABLE")
