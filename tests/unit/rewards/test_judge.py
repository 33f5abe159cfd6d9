"""Judges: rubrics, pairs, retries, the cache and the budget, against an endpoint that answers as told."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlloop.errors import ConfigError
from rlloop.rewards import JudgeReward, PairwiseJudge
from rlloop.rewards.judge import last_object
from rlloop.rewards.runner import RewardFailure, RewardRunner
from rlloop.types import Example
from rlloop.web.server import BackgroundServer, Listen

PRICES = {"price_in": 2.0, "price_out": 10.0}


class Endpoint:
    """OpenAI's route; `answer` says what the judge replies to a question, a str or a status."""

    def __init__(self) -> None:
        self.answer: Callable[[str], str | int] = lambda _: "{}"
        self.bodies: list[dict] = []
        self.keys: list[str] = []
        app = Starlette(routes=[Route("/v1/chat/completions", self.complete, methods=["POST"])])
        self.server = BackgroundServer(app, Listen(token="t" * 20))
        self.url = f"{self.server.url}/v1"

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers["idempotency-key"])
        said = self.answer(body["messages"][-1]["content"])
        if isinstance(said, int):
            return Response(status_code=said)
        usage = {"prompt_tokens": 1000, "completion_tokens": 100}
        return JSONResponse({"choices": [{"message": {"content": said}}], "usage": usage})


@pytest.fixture(scope="module")
def served():
    endpoint = Endpoint()
    yield endpoint
    endpoint.server.close()


@pytest.fixture
def endpoint(served, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "t" * 20)
    served.bodies, served.keys = [], []
    return served


def judge(endpoint, **more):
    return {"url": endpoint.url, "model": "judge", "token_env": "JUDGE_TOKEN", "backoff": 0.001, **more}


def score(reward, *completions: str, ids=None) -> list:
    runner = RewardRunner(reward, timeout=240.0)
    examples = [Example(name, [], "", {"answer": "4"}) for name in ids or ["e"] * len(completions)]
    try:
        return runner.score([("2+2?", text, example) for text, example in zip(completions, examples, strict=True)])
    finally:
        runner.close()


RUBRICS = {"correct": {"text": "It is right.", "weight": 3}, "brief": {"text": "It is brief."}}


def test_a_reward_is_the_weighted_mean_of_the_rubrics(endpoint):
    endpoint.answer = lambda _: 'Let me think {"a": 1}. So: {"correct": 10, "brief": "5"} done'
    [result] = score(JudgeReward(judge=judge(endpoint, **PRICES), rubrics=RUBRICS, reference_key="answer"), "four")
    assert result.reward == pytest.approx((3 * 1.0 + 0.5) / 4)
    assert not result.solved
    assert result.components == {
        "correct": 1.0, "brief": 0.5, "judge_cost": pytest.approx(0.003), "judge_cached": 0.0,
    }  # fmt: skip
    [body] = endpoint.bodies
    assert "0 (not at all) to 10" in body["messages"][0]["content"]
    question = body["messages"][1]["content"]
    assert all(part in question for part in ("2+2?", "# A right answer\n4", "# Answer\nfour", "- brief: It is brief."))


def test_failures_are_tried_again_and_unreadable_answers_asked_for_anew(endpoint):
    replies = iter([503, "no idea", '{"correct": 11, "brief": 1}', '{"correct": 10, "brief": 10}'])
    endpoint.answer = lambda _: next(replies)
    reward = JudgeReward(judge=judge(endpoint, retries=2, **PRICES), rubrics=RUBRICS)
    [failed] = score(reward, "four")
    assert isinstance(failed, RewardFailure)
    assert "scored correct with 11, outside of 0 to 10" in failed.message
    assert endpoint.keys[0] == endpoint.keys[1] != endpoint.keys[2]  # the same question, then another
    assert "seed" not in endpoint.bodies[1] and endpoint.bodies[2]["seed"] == 1  # noqa: PT018
    assert score(reward, "five")[0].reward == 1.0
    endpoint.answer = lambda _: 400
    assert "400" in score(reward, "six")[0].message  # not tried again
    assert len(endpoint.bodies) == 5


def test_a_verdict_of_true_is_no_number(endpoint):
    replies = iter(['{"correct": true, "brief": 10}', '{"correct": 10, "brief": 10}'])
    endpoint.answer = lambda _: next(replies)
    assert score(JudgeReward(judge=judge(endpoint, retries=2), rubrics=RUBRICS), "four")[0].reward == 1.0
    assert len(endpoint.bodies) == 2


def test_answers_are_kept_across_runs(endpoint, tmp_path):
    endpoint.answer = lambda _: '{"correct": 10, "brief": 10}'
    settings = judge(endpoint, cache=str(tmp_path / "some/judge.sqlite"), **PRICES)
    first = score(JudgeReward(judge=settings, rubrics=RUBRICS), "four")[0]
    again = score(JudgeReward(judge=settings, rubrics=RUBRICS), "four")[0]
    assert (first.components["judge_cost"], again.components["judge_cost"]) == (pytest.approx(0.003), 0.0)
    assert (again.reward, again.components["judge_cached"]) == (1.0, 1.0)
    score(JudgeReward(judge={**settings, "temperature": 0.5}, rubrics=RUBRICS), "four")
    assert len(endpoint.bodies) == 2  # another temperature is another question


def test_the_budget_ends_the_questions(endpoint):
    endpoint.answer = lambda _: '{"correct": 10, "brief": 10}'
    reward = JudgeReward(judge=judge(endpoint, budget=0.003, **PRICES), rubrics=RUBRICS)
    assert score(reward, "a")[0].reward == 1.0
    assert "BudgetSpent: the judge has cost 0.003" in score(reward, "b")[0].message
    assert len(endpoint.bodies) == 1


def test_pairs_are_compared_in_both_orders(endpoint):
    def answer(question: str) -> str:
        if "Answer b\nbad" in question:
            return '{"better": "A"}'
        return '{"better": "B"}' if "Answer a\nbad" in question else '{"better": "A"}'  # else: whoever comes first

    endpoint.answer = answer
    reward = PairwiseJudge(judge=judge(endpoint), opponents=2)
    results = score(reward, "good", "bad", "fine", "fine", ids=["x", "x", "x", "x"])
    # "good" beats "bad" twice, and draws with "fine" by position; "fine" ties with itself without a question
    assert [result.reward for result in results] == [
        pytest.approx(4 / 6),
        0.0,
        pytest.approx(4 / 6),
        pytest.approx(4 / 6),
    ]
    assert [result.solved for result in results] == [True, False, True, True]
    seen = Counter(json.dumps(body["messages"][-1]["content"]) for body in endpoint.bodies)
    assert len(endpoint.bodies) == 10 and len(seen) <= 10  # noqa: PT018


def test_a_completion_without_others_is_compared_with_the_reference(endpoint):
    endpoint.answer = lambda question: '{"better": "A"}' if "Answer a\n4" in question else '{"better": "B"}'
    alone = score(PairwiseJudge(judge=judge(endpoint)), "five", "4", ids=["x", "y"])
    assert [result.reward for result in alone] == [0.5, 0.5]
    assert endpoint.bodies == []
    wrong, right = score(PairwiseJudge(judge=judge(endpoint), reference_key="answer"), "five", "4", ids=["x", "y"])
    assert (wrong.reward, wrong.solved, right.reward) == (0.0, False, 0.5)
    assert len(endpoint.bodies) == 2
    assert all("A right answer" not in body["messages"][-1]["content"] for body in endpoint.bodies)


def test_a_comparison_that_fails_rejects_its_two_alone(endpoint):
    endpoint.answer = lambda question: 400 if "bad" in question else '{"better": "tie"}'
    results = score(PairwiseJudge(judge=judge(endpoint)), "good", "bad", "fine", "best", ids=["x", "x", "y", "y"])
    assert [isinstance(each, RewardFailure) for each in results] == [True, True, False, False]
    assert results[2].reward == 0.5


@pytest.mark.parametrize(
    ("text", "found"),
    [("", None), ("{", None), ("no {json", None), ('{"a": {"b": 1}} {"c": 2', {"a": {"b": 1}}), ("```{}```", {})],
)
def test_the_last_object_of_a_text(text, found):
    assert last_object(text) == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"judge": {"url": "localhost", "model": "m"}, "rubrics": RUBRICS}, "reward.url is 'localhost'"),
        ({"judge": {"url": "http://me:password@x", "model": "m"}, "rubrics": RUBRICS}, "reward.url has a login"),
        ({"judge": {"url": "http://x"}, "rubrics": RUBRICS}, "reward.judge does not fit: .*'model'"),
        ({"judge": {"url": "http://x", "model": "m", "token_env": "NOT_SET"}, "rubrics": RUBRICS}, "NOT_SET"),
        ({"judge": {"url": "http://x", "model": "m", "budget": 1.0}, "rubrics": RUBRICS}, "null without price_in"),
        ({"judge": {"url": "http://x", "model": "m"}, "rubrics": {}}, "reward.rubrics is empty"),
        ({"judge": {"url": "http://x", "model": "m"}, "rubrics": {"a": {}}}, "it must have a text"),
    ],
)
def test_mistakes_are_named_before_anything_is_asked(arguments, message):
    with pytest.raises(ConfigError, match=message):
        JudgeReward(**arguments)
