"""OpenAI's own client, as it is, against an engine's server: what it may ask, what it gets, and to the bit."""

from __future__ import annotations

import asyncio
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from rlloop import Engine, SamplingParams, load_model, token_logprobs
from rlloop.chat import ChatTokenizer
from rlloop.models import Model
from rlloop.rollout.engine.service import EngineService
from rlloop.rollout.fleet.engine_server import EngineServer
from rlloop.rollout.fleet.openai_api import IDLE, IGNORED
from rlloop.rollout.fleet.text import HALF, Tokenizer, tokenizer_of
from rlloop.web.server import BackgroundServer, Listen
from tests.support.openai_model import without_template, write_model
from tests.support.stepper import Stepper
from tests.support.waiting import left_by_its_client, until

TOKEN = "a token of some length"
MESSAGES: Any = [{"role": "system", "content": "bad"}, {"role": "user", "content": "cab é"}]


@dataclass
class Running:
    model: Model
    tokenizer: Tokenizer
    folder: Any
    engine: Engine
    stepper: Stepper
    service: EngineService
    url: str
    client: openai.OpenAI
    http: httpx.Client

    def complete(self, prompt: Any, **asked: Any) -> Any:
        body = {"max_tokens": 12, "seed": 3} | asked
        own = ("ignore_eos", "stop_token_ids", "min_tokens", "include_stop_str_in_output", "prompt_logprobs", "top_k")
        own = (*own, "logprobs_mode", "skip_special_tokens", "return_token_ids", "min_p")
        body["extra_body"] = {name: body.pop(name) for name in own if name in body}
        return self.client.completions.create(model="rlloop", prompt=prompt, **body)

    def chat(self, messages: Any = MESSAGES, **asked: Any) -> Any:
        return self.client.chat.completions.create(model="rlloop", messages=messages, **asked)

    def local(self, prompt: list[int], **params: Any) -> Any:
        return Engine(self.model).generate([prompt], SamplingParams(**{"max_tokens": 12, "seed": 3} | params))[0]

    def idle(self) -> None:
        """Waits until nothing is in flight."""
        until(lambda: not self.service.load and not self.engine.has_work)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("openai") / "model")
    model, tokenizer = load_model(folder), tokenizer_of(folder)
    assert tokenizer is not None
    engine = Engine(model)
    stepper = Stepper(engine)
    service = EngineService(stepper, max_waiting=64)
    server = EngineServer(service, name="one", tokenizer=tokenizer)
    background = BackgroundServer(server.app, Listen(token=TOKEN, max_body=1 << 16))
    client = openai.OpenAI(base_url=f"{background.url}/v1", api_key=TOKEN, max_retries=0)
    http = httpx.Client(base_url=background.url, headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False)
    yield Running(model, tokenizer, folder, engine, stepper, service, background.url, client, http)
    client.close()
    http.close()
    background.close()
    service.close()


def bits(values: Any) -> bytes:
    return np.array(values, np.float32).tobytes()


class Joined:
    """The choices of a stream, put together."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.choices: dict[int, dict[str, Any]] = {}

    def add(self, event: Any) -> None:
        self.events.append(event)
        for part in event.choices:
            new = {"texts": [], "token_ids": [], "raw": [], "logprobs": [], "offsets": [], "reasons": []}
            choice = self.choices.setdefault(part.index, new)
            choice["texts"].append(part.text if hasattr(part, "text") else part.delta.content)
            choice["token_ids"] += part.token_ids
            choice["raw"] += part.raw_logprobs
            if part.logprobs is not None and hasattr(part, "text"):
                choice["logprobs"] += part.logprobs.token_logprobs
                choice["offsets"] += part.logprobs.text_offset
            elif part.logprobs is not None:
                choice["logprobs"] += [token.logprob for token in part.logprobs.content]
            choice["reasons"].append(part.finish_reason)

    @classmethod
    def of(cls, stream: Any) -> Joined:
        joined = cls()
        for event in stream:
            joined.add(event)
        return joined


# ------------------------------------------------------------------------------------------------ the same bits


def test_streamed_unstreamed_and_embedded_are_the_same_bits(running):
    prompts = ["abé🙂 cab", "h"]
    asked = {"n": 2, "max_tokens": 40, "temperature": 0.8, "top_p": 0.9, "logprobs": 0, "ignore_eos": True}
    whole = running.complete(prompts, **asked)
    joined = Joined.of(running.complete(prompts, **asked, stream=True, stream_options={"include_usage": True}))
    ids = [running.tokenizer.encode(prompt) for prompt in prompts]
    each = [
        SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=seed, ignore_eos=True) for seed in (3, 4, 3, 4)
    ]
    local = Engine(running.model).generate([ids[0], ids[0], ids[1], ids[1]], each)
    assert [choice.index for choice in whole.choices] == sorted(joined.choices) == [0, 1, 2, 3]
    for made, choice in zip(local, whole.choices, strict=True):
        streamed = joined.choices[choice.index]
        assert made.token_ids == choice.token_ids == streamed["token_ids"]
        assert bits(made.logprobs) == bits(choice.logprobs.token_logprobs) == bits(streamed["logprobs"])
        assert bits(made.raw_logprobs) == bits(choice.raw_logprobs) == bits(streamed["raw"])
        text = running.tokenizer.decode(made.token_ids, True)
        assert text == choice.text == "".join(streamed["texts"])
        assert choice.logprobs.text_offset == streamed["offsets"]
        assert (streamed["reasons"][-1], set(streamed["reasons"][:-1])) == (choice.finish_reason, {None})
        assert len(streamed["texts"]) >= 40, "a token did not come by itself"
    assert joined.events[-1].usage == whole.usage
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids[0]) + len(ids[1]), 160)
    assert all(event.usage is None for event in joined.events[:-1])
    assert "🙂" not in "".join(text for text in joined.choices[0]["texts"] if HALF in text)


def test_chat_has_the_bits_of_the_rendered_prompt(running):
    ids = ChatTokenizer(running.folder).prompt(MESSAGES)[1]
    [made] = Engine(running.model).generate([ids], SamplingParams(max_tokens=30, seed=5))
    asked = {"max_completion_tokens": 30, "seed": 5, "logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = running.chat(**asked)
    [choice] = whole.choices
    assert whole.prompt_token_ids == ids
    assert choice.token_ids == made.token_ids
    assert bits([token.logprob for token in choice.logprobs.content]) == bits(made.logprobs)
    written = made.token_ids[:-1] if made.finish_reason == "stop" else made.token_ids
    assert choice.message.role == "assistant"
    assert choice.message.content == running.tokenizer.decode(written, True)
    assert (choice.finish_reason, whole.usage.prompt_tokens) == (made.finish_reason, len(ids))
    joined = Joined.of(running.chat(**asked, stream=True))
    assert joined.choices[0]["token_ids"] == made.token_ids
    assert bits(joined.choices[0]["logprobs"]) == bits(made.logprobs)
    assert "".join(joined.choices[0]["texts"]) == choice.message.content
    roles = [event.choices[0].delta.role for event in joined.events]
    assert (roles[0], set(roles[1:])) == ("assistant", {None})


def test_the_client_that_does_not_wait(running):
    async def ask() -> tuple[Any, list[Any]]:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=TOKEN, max_retries=0) as client:
            shared: Any = {"model": "rlloop", "prompt": "ab", "seed": 3, "max_tokens": 12}
            stream, *others = await asyncio.gather(
                client.completions.create(**shared, stream=True), *(client.completions.create(**shared) for _ in "12")
            )
            return [event async for event in stream], others

    events, others = asyncio.run(ask())
    expected = running.local(running.tokenizer.encode("ab")).token_ids
    assert [made.choices[0].token_ids for made in others] == [expected] * 2
    assert [id for event in events for id in event.choices[0].token_ids] == expected


def test_the_first_token_is_there_before_the_second_is_made(running):
    running.idle()
    before = running.engine.stats().made_tokens
    for open_stream in (
        lambda: running.complete("ab", stream=True, ignore_eos=True, max_tokens=3),
        lambda: running.chat(stream=True, max_tokens=3, extra_body={"ignore_eos": True}),
    ):
        running.stepper.may(1)
        stream = open_stream()
        first = next(iter(stream))
        assert len(first.choices[0].token_ids) == 1
        assert running.engine.stats().made_tokens == before + 1
        assert running.engine.has_work
        running.stepper.may()
        rest = list(stream)
        assert sum(len(event.choices[0].token_ids) for event in rest) == 2
        before += 3


def test_a_choice_ends_with_its_last_token_and_not_after_it(running):
    """As vLLM's streams do: its benchmark client counts the time between events."""
    body = {"model": "rlloop", "prompt": "ab", "max_tokens": 5, "ignore_eos": True, "temperature": 1.0, "stream": True}
    body |= {"repetition_penalty": 1.0, "logprobs": None, "stream_options": {"include_usage": True}}  # its fields
    with running.http.stream("POST", "/v1/completions", json=body) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    *events, usage = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]"
    assert [len(event["choices"][0]["token_ids"]) for event in events] == [1] * 5
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 4 + ["length"]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 5)
    text = running.complete("ab", max_tokens=60, ignore_eos=True).choices[0].text[:6]
    stopped = Joined.of(running.complete("ab", stop=[text[3:]], max_tokens=60, ignore_eos=True, stream=True)).choices[0]
    assert len(stopped["texts"]) == len(stopped["token_ids"])
    assert stopped["reasons"][-1] == "stop"


def test_a_stream_that_is_closed_ends_its_work_in_the_engine(running):
    running.idle()
    running.stepper.may(1)
    stream = running.complete(["ab", "c"], n=2, stream=True, ignore_eos=True, max_tokens=400)
    next(iter(stream))
    stream.close()
    until(lambda: running.service._cancelled or not running.service.load)  # the server has seen it
    before = running.engine.stats().made_tokens
    running.stepper.may()
    running.idle()
    assert running.engine.stats().made_tokens - before <= 4, "more than the step that was on its way"


def test_a_client_that_leaves_before_the_first_token_leaves_nothing_behind(running):
    running.idle()
    for path, asked in (("completions", {"prompt": "ab", "stream": True}),
                        ("chat/completions", {"messages": MESSAGES, "stop": "x"})):  # fmt: skip
        running.stepper.may(0)
        body = json.dumps({"model": "rlloop", **asked}).encode()
        with left_by_its_client(running.url, f"/v1/{path}", body, f"Authorization: Bearer {TOKEN}"):
            until(lambda: running.service.load)
        until(lambda: running.service._cancelled or not running.service.load)  # the server has seen it
        before = running.engine.stats().made_tokens
        running.stepper.may()
        running.idle()
        assert running.engine.stats().made_tokens - before <= 1


def test_the_clients_own_helper_puts_a_chat_together(running):
    asked: Any = {"model": "rlloop", "messages": MESSAGES, "max_tokens": 20, "seed": 5}
    with running.client.chat.completions.stream(**asked) as stream:
        [choice] = stream.get_final_completion().choices
    assert choice.message.content == running.client.chat.completions.create(**asked).choices[0].message.content


def test_seeds_repeat_and_negative_ones_are_seeds(running):
    def made(**asked: Any) -> list[Any]:
        return running.complete("ab", ignore_eos=True, max_tokens=20, **asked).choices

    assert made(seed=-7)[0].token_ids == made(seed=-7)[0].token_ids != made(seed=7)[0].token_ids
    assert made(seed=-7)[0].seed == 2**63 - 7
    drawn = [*made(seed=-1, n=2), *made(seed=None)]  # as vLLM reads -1: none
    assert len({choice.seed for choice in drawn}) == 3
    assert made(seed=drawn[0].seed)[0].token_ids == drawn[0].token_ids
    near = made(seed=2**63 - 1, n=2)
    assert [choice.seed for choice in near] == [2**63 - 1, 0]


# ------------------------------------------------------------------------------------------------ stops


def stop_in(running, length: int, **params: Any) -> tuple[list[int], str, str]:
    """A completion's ids, its text, and a stop of so many characters in its midst, across tokens."""
    ids = running.local(running.tokenizer.encode("ab"), max_tokens=60, ignore_eos=True, **params).token_ids
    text = running.tokenizer.decode(ids, True)
    for at in range(len(text) // 2, len(text) - length):
        stop = text[at : at + length]
        if HALF not in stop and text.find(stop) == at:
            return ids, text, stop
    raise AssertionError("no stop string is in the text once")


def tokens_until(running, ids: list[int], stop: str) -> int:
    return next(count for count in range(len(ids)) if stop in running.tokenizer.decode(ids[:count], True))


@pytest.mark.parametrize("length", [1, 2, 3, 6])
def test_a_stop_string_ends_text_and_engine_where_the_text_has_it(running, length):
    ids, text, stop = stop_in(running, length)
    count = tokens_until(running, ids, stop)
    before = running.engine.stats().made_tokens
    asked = {"stop": [stop, "never in it"], "max_tokens": 60, "ignore_eos": True, "logprobs": 0}
    [whole] = running.complete("ab", **asked).choices
    assert running.engine.stats().made_tokens - before == count, "the engine went on"
    joined = Joined.of(running.complete("ab", **asked, stream=True)).choices[0]
    assert whole.text == "".join(joined["texts"]) == text[: text.find(stop)]
    assert whole.token_ids == joined["token_ids"] == ids[:count]
    assert len(whole.logprobs.token_logprobs) == len(whole.raw_logprobs) == count
    local = running.local(running.tokenizer.encode("ab"), max_tokens=60, ignore_eos=True)
    assert bits(local.logprobs[:count]) == bits(whole.logprobs.token_logprobs) == bits(joined["logprobs"])
    assert (whole.finish_reason, whole.stop_reason, joined["reasons"][-1]) == ("stop", stop, "stop")
    [kept] = running.complete("ab", **asked, include_stop_str_in_output=True).choices
    assert kept.text == whole.text + stop
    chat = running.chat(stop=stop, max_tokens=200, seed=3, extra_body={"ignore_eos": True})
    assert stop not in chat.choices[0].message.content
    running.idle()


def test_stops_wait_for_min_tokens_and_those_that_never_come_change_nothing(running):
    ids, text, stop = stop_in(running, 2)
    count = tokens_until(running, ids, stop)
    [late] = running.complete("ab", stop=stop, max_tokens=60, ignore_eos=True, min_tokens=count + 1).choices
    assert len(late.token_ids) > count  # its bits are others: min_tokens bans the end of sequence
    [none] = running.complete("ab", stop=[text + "x", "@"], max_tokens=60, ignore_eos=True).choices
    assert (none.text, none.token_ids, none.finish_reason, none.stop_reason) == (text, ids, "length", None)
    streamed = running.complete("ab", stop=[text + "x"], max_tokens=60, ignore_eos=True, stream=True)
    assert "".join(Joined.of(streamed).choices[0]["texts"]) == text  # all of it was held back till the end


def test_a_stop_ends_one_choice_and_the_others_go_on(running):
    _, _, stop = stop_in(running, 2)
    asked = {"n": 3, "max_tokens": 60, "ignore_eos": True}
    alone = running.complete("ab", **asked).choices
    stopped = running.complete("ab", **asked, stop=stop).choices
    assert stopped[0].finish_reason == "stop"
    for free, cut in zip(alone, stopped, strict=True):
        assert free.token_ids[: len(cut.token_ids)] == cut.token_ids
        assert cut.text == free.text.partition(stop)[0]
        assert (cut.finish_reason == "stop") == (stop in free.text)


def test_the_token_that_ended_a_choice_is_named_and_stays_out_of_its_text(running):
    ids, text, _ = stop_in(running, 1)
    last = next(id for place, id in enumerate(ids) if place > 5 and id not in ids[:place] and id > 5)
    asked = {"max_tokens": 60, "ignore_eos": True, "stop_token_ids": [last]}
    [choice] = running.complete("ab", **asked).choices
    assert (choice.finish_reason, choice.stop_reason, choice.token_ids[-1]) == ("stop", last, last)
    assert choice.text == running.tokenizer.decode(choice.token_ids[:-1], True)
    [kept] = running.complete("ab", **asked, include_stop_str_in_output=True).choices
    assert kept.text == running.tokenizer.decode(choice.token_ids, True)
    [special] = running.complete("ab", max_tokens=60, ignore_eos=True, skip_special_tokens=False).choices
    assert special.text == running.tokenizer.decode(ids) != text


# ------------------------------------------------------------------------------------------------ logprobs


def test_max_tokens_0_scores_a_prompt_with_the_trainers_bits(running):
    ids = running.tokenizer.encode("a bad cab é🙂, feeb")
    [expected] = (each.tolist() for each in token_logprobs(running.model, [(ids[:1], ids[1:])]))
    for prompt in (ids, running.tokenizer.decode(ids)):
        for stream in (False, True):
            made = running.complete(prompt, max_tokens=0, echo=True, logprobs=0, stream=stream)
            [choice] = next(iter(made)).choices if stream else made.choices
            assert choice.logprobs.token_logprobs[0] is None
            assert bits(choice.logprobs.token_logprobs[1:]) == bits(expected)
            assert choice.text == running.tokenizer.decode(ids)
            assert (choice.token_ids, choice.finish_reason) == ([], "length")
    assert running.complete(ids, max_tokens=0, echo=True).usage.completion_tokens == 0
    [choice] = running.complete(ids, max_tokens=0, prompt_logprobs=0).choices
    found = [{int(id): row["logprob"] for id, row in each.items()} for each in choice.prompt_logprobs[1:]]
    assert bits([row[id] for row, id in zip(found, ids[1:], strict=True)]) == bits(expected)
    with pytest.raises(openai.BadRequestError, match="ask for echo or prompt_logprobs"):
        running.complete(ids, max_tokens=0)


def test_echo_puts_the_prompt_before_the_completion(running):
    ids = running.tokenizer.encode("bad cab")
    local = running.local(ids, temperature=0.5)
    [prompt] = token_logprobs(running.model, [(ids[:1], ids[1:])])
    asked = {"echo": True, "logprobs": 2, "temperature": 0.5, "n": 2}
    both = running.complete("bad cab", **asked).choices
    for choice in both:
        assert choice.text.startswith("bad cab")
    logprobs = both[0].logprobs
    assert bits(logprobs.token_logprobs[1:]) == bits([*prompt.tolist(), *local.logprobs.tolist()])
    assert both[0].text == "bad cab" + running.complete("bad cab", temperature=0.5).choices[0].text
    places = [*logprobs.text_offset, len(both[0].text)]
    assert places == sorted(places)
    assert [both[0].text[a:b] for a, b in itertools.pairwise(places)][:7] == list("bad cab")
    assert len(logprobs.top_logprobs) == len(logprobs.tokens) == len(logprobs.token_logprobs)
    streamed = Joined.of(running.complete("bad cab", **asked, stream=True)).choices
    assert ["".join(streamed[i]["texts"]) for i in (0, 1)] == [choice.text for choice in both]
    assert streamed[0]["offsets"] == logprobs.text_offset


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_the_likeliest_tokens_have_the_trainers_bits(running, mode):
    ids = running.tokenizer.encode("ab")
    params = {"temperature": 0.7, "top_k": 3, "max_tokens": 6}
    local = running.local(ids, **params)
    chosen = local.raw_logprobs if mode == "raw_logprobs" else local.logprobs
    [whole] = running.complete(ids, **params, logprobs=5, logprobs_mode=mode).choices
    extra = {"top_k": 3, "logprobs_mode": mode, "ignore_eos": True}
    asked = {"max_tokens": 6, "temperature": 0.7, "logprobs": True, "top_logprobs": 20, "extra_body": extra}
    [chat] = running.chat(**asked).choices
    assert bits(whole.logprobs.token_logprobs) == bits(chosen)
    names = {running.tokenizer.decode([id]): id for id in reversed(range(len(running.model.head)))}
    for place, row in enumerate(whole.logprobs.top_logprobs):
        assert len(row) == 3 if mode == "processed_logprobs" else len(row) >= 5
        assert list(row.values())[:3] == sorted(row.values(), reverse=True)[:3]
        before = [*ids, *local.token_ids[:place]]
        sampling = None if mode == "raw_logprobs" else [local.sampling] * len(row)
        others = [(before, [names[name]]) for name in row if HALF not in name]
        scored = token_logprobs(running.model, others, sampling=sampling and sampling[: len(others)])
        assert bits([row[name] for name in row if HALF not in name]) == bits([each.tolist()[0] for each in scored])
    for token in chat.logprobs.content:
        found = [other.logprob for other in token.top_logprobs]
        assert len(found) == (3 if mode == "processed_logprobs" else 20)
        assert found == sorted(found, reverse=True)
        assert token.bytes in (None, list(token.token.encode()))
    streamed = list(running.complete(ids, **params, logprobs=5, logprobs_mode=mode, stream=True))
    rows = [row for event in streamed for row in event.choices[0].logprobs.top_logprobs]
    assert rows == whole.logprobs.top_logprobs


def test_the_server_may_be_told_to_give_raw_logprobs(running):
    server = EngineServer(running.service, name="raw", tokenizer=running.tokenizer, logprobs_mode="raw_logprobs")
    background = BackgroundServer(server.app, Listen())
    client = openai.OpenAI(base_url=f"{background.url}/v1", api_key="any", max_retries=0)
    asked: Any = {"model": "rlloop", "prompt": [6, 7], "temperature": 0.5, "seed": 3, "logprobs": 0, "max_tokens": 9}
    local = running.local([6, 7], temperature=0.5, max_tokens=9)
    raw = client.completions.create(**asked).choices[0].logprobs
    other = client.completions.create(**asked, extra_body={"logprobs_mode": "processed_logprobs"}).choices[0].logprobs
    assert (bits(raw.token_logprobs), bits(other.token_logprobs)) == (bits(local.raw_logprobs), bits(local.logprobs))
    client.close()
    background.close()


# ------------------------------------------------------------------------------------------------ fields and errors

TAKEN: dict[str, Any] = {
    **{name: values[0] for name, values in IDLE.items()},
    **dict.fromkeys(sorted(IGNORED), "some text"),
    "top_k": -1, "min_p": 0.0, "best_of": 1, "ignore_eos": False, "stop_token_ids": [], "min_tokens": 0, "stop": [],
    "include_stop_str_in_output": False, "add_special_tokens": True, "return_tokens_as_token_ids": True,
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_fields_that_change_nothing_are_taken(running, name):
    extra = {"extra_body": {name: TAKEN[name]}}
    plain: Any = {"model": "rlloop", "max_tokens": 4, "seed": 3}
    for create, prompt in (
        (running.client.completions.create, {"prompt": "ab"}),
        (running.client.chat.completions.create, {"messages": MESSAGES}),
    ):
        if name == "add_special_tokens" and "messages" in prompt:
            continue
        with_it, without = create(**plain, **prompt, **extra), create(**plain, **prompt)
        assert with_it.choices[0].token_ids == without.choices[0].token_ids


REFUSED: dict[str, Any] = {
    "presence_penalty": 0.5, "frequency_penalty": 1, "repetition_penalty": 1.1, "logit_bias": {"5": 1}, "suffix": "x",
    "best_of": 3, "use_beam_search": True, "store": True, "response_format": {"type": "json_object"},
    "stop": [""], "top_k": -2, "temperature": -1, "n": 0, "seed": 2**63, "beams": 1, "max_tokens": "many",
    "logprobs_mode": "some", "min_tokens": 100, "prompt_logprobs": 21,
    "stream_options": {"continuous_usage_stats": True},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_what_cannot_be_honoured_is_refused_by_name(running, name, path):
    about: Any = {"prompt": "ab"} if path == "completions" else {"messages": MESSAGES}
    body = {"model": "rlloop", "max_tokens": 4, **about, name: REFUSED[name]}
    with pytest.raises(openai.BadRequestError, match=name) as refused:
        running.client.post(f"/{path}", body=body, cast_to=dict)
    assert refused.value.param == name
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ([{"content": "x"}], "role None"),
        ([{"role": "user", "content": 5}], "content 5; it must be text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a" * 60}, {"type": "input_audio"}]}],
            r"messages\[0\] has the content {'type': 'input_audio'}; .* list of {\"type\": \"text\", \"text\": ...}$",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "has an image, and this engine takes text alone",
        ),
        ("hello", "Expected `array`"),
    ],
)
def test_messages_that_no_template_can_put(running, messages, message):
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        running.chat(messages)
    assert refused.value.param == "messages"


def test_messages_may_come_in_parts_and_arguments_reach_the_template(running):
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    asked = {"max_tokens": 8, "seed": 3}
    joined, one = (running.chat([{"role": "user", "content": each}], **asked) for each in (parts, "ab\nc"))
    assert joined.choices[0].token_ids == one.choices[0].token_ids
    assert running.chat(**asked, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices
    with pytest.raises(openai.BadRequestError, match="chat_template cannot be set"):
        running.chat(**asked, extra_body={"chat_template_kwargs": {"chat_template": "{{ 1 }}"}})


def test_without_a_limit_chat_has_the_room_that_there_is(running):
    ids = running.tokenizer.encode(running.tokenizer.render(MESSAGES, {}), False)
    made = running.chat(seed=1, extra_body={"ignore_eos": True})
    assert made.usage.total_tokens == running.engine.longest == 512
    assert made.usage.prompt_tokens == len(ids)
    for ask in (
        lambda: running.chat([{"role": "user", "content": "a" * 600}]),
        lambda: running.complete("a" * 500, max_tokens=20),
    ):
        with pytest.raises(openai.BadRequestError, match="has room for 512") as refused:
            ask()
        assert refused.value.code == "context_length_exceeded"


def test_chat_without_a_template_or_tokenizer_says_so(running, tmp_path):
    bare = write_model(tmp_path / "bare")
    without_template(bare)
    for tokenizer, lacks in ((tokenizer_of(bare), "chat template"), (None, "tokenizer")):
        background = BackgroundServer(EngineServer(running.service, name="two", tokenizer=tokenizer).app, Listen())
        client = openai.OpenAI(base_url=f"{background.url}/v1", api_key="any", max_retries=0)
        with pytest.raises(openai.BadRequestError, match=f"has no {lacks}; use /v1/completions"):
            client.chat.completions.create(model="rlloop", messages=MESSAGES)
        if tokenizer is None:
            asked: Any = {"model": "rlloop", "prompt": [6, 7], "max_tokens": 2}
            assert client.completions.create(**asked, logprobs=2).choices[0].text == ""
            for more in ({"stop": "a"}, {"prompt": "ab"}, {"echo": True}):
                with pytest.raises(openai.BadRequestError, match="has no tokenizer"):
                    client.completions.create(**asked | more)
        client.close()
        background.close()


TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def test_tools_reach_the_template_and_calls_come_back(running, tmp_path):
    """The model is random, so its text is put in place of what it writes; the template writes the tools' names."""
    folder = write_model(tmp_path / "tools")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["chat_template"] = "{% for t in tools %}{{ t.function.name }}{% endfor %}" + settings["chat_template"]
    path.write_text(json.dumps(settings))
    tokenizer = tokenizer_of(folder)

    skipped: list[bool] = []

    class Calling:
        has_template = True

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
            skipped.append(skip_special_tokens)
            return '<think>so</think>bad<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

    server = EngineServer(running.service, name="four", tokenizer=Calling())
    background = BackgroundServer(server.app, Listen())
    client = openai.OpenAI(base_url=f"{background.url}/v1", api_key="any", max_retries=0)
    asked: Any = {"model": "rlloop", "messages": MESSAGES, "max_tokens": 1, "seed": 1}
    extra = {"separate_reasoning": True, "return_token_ids": True, "ignore_eos": True}
    made = client.chat.completions.create(**asked, tools=TOOLS, extra_body=extra)
    [call] = made.choices[0].message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("add", '{"a":1}')
    assert made.choices[0].message.content == "bad"
    assert made.choices[0].message.model_extra == {"reasoning_content": "so"}
    assert not any(skipped), "the marks of calls may be special tokens"
    plain = client.chat.completions.create(**asked, tools=TOOLS, tool_choice="none", extra_body={"ignore_eos": True})
    assert (plain.choices[0].message.content or "").startswith("<think>")
    assert made.prompt_token_ids == tokenizer.encode(tokenizer.render(MESSAGES, {}, TOOLS), False)  # pyright: ignore
    assert tokenizer.render(MESSAGES, {}, TOOLS).startswith("add")  # pyright: ignore
    for more, name in (({"tool_choice": "required"}, "tool_choice"), ({"stream": True}, "stream")):
        with pytest.raises(openai.BadRequestError, match=f"{name} is"):
            client.chat.completions.create(**asked, tools=TOOLS, **more)
    client.close()
    background.close()


def test_models_are_listed_and_retrieved(running):
    [card] = running.client.models.list()
    assert running.client.models.retrieve("rlloop") == card
    assert (card.id, card.max_model_len, card.root) == ("rlloop", 512, "rlloop")  # no folder was named
    with pytest.raises(openai.NotFoundError) as unknown:
        running.client.models.retrieve("org/other")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")


def test_every_error_is_of_the_clients_own_kind(running):
    def raised(kind: type[openai.APIStatusError], ask: Any) -> Any:
        with pytest.raises(kind) as error:
            ask()
        assert isinstance(error.value.body, dict)
        assert error.value.body.keys() >= {"message", "type", "param", "code"}
        return error.value

    client = running.client
    stranger = client.with_options(api_key="another token, wrong")
    raised(openai.AuthenticationError, lambda: stranger.models.list())
    raised(openai.NotFoundError, lambda: client.chat.completions.create(model="gpt", messages=MESSAGES))
    assert raised(openai.NotFoundError, lambda: client.embeddings.create(model="rlloop", input="a")).code == "not_found"
    wrong = raised(openai.APIStatusError, lambda: client.get("/completions", cast_to=dict))
    assert (wrong.status_code, wrong.code, wrong.response.headers["allow"]) == (405, "method_not_allowed", "POST")
    assert raised(openai.APIStatusError, lambda: running.complete("a" * (1 << 17))).status_code == 413
    endless = running.http.post("/v1/completions", content=(b"x" * 4096 for _ in range(64)))
    assert (endless.status_code, endless.json()["error"]["code"]) == (413, "too_large")
    raised(openai.BadRequestError, lambda: running.complete([1 << 40]))
    for content in (b"\xff{}", b"{", b"[]", b'{"n": ' + b"9" * 5000 + b"}", b'{"a": ' + b"[" * 9000):
        reply = running.http.post("/v1/completions", content=content)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    running.idle()
    running.stepper.may(0)
    full = [running.service.submit([[6]] * 32, [SamplingParams(max_tokens=1)] * 32) for _ in "12"]
    raised(openai.RateLimitError, lambda: running.complete("ab"))
    running.stepper.may()
    assert all(len(answer.result()) == 32 for answer in full)


def test_an_engine_that_fails_is_a_500_and_in_a_stream_an_error(running, caplog):
    running.idle()
    running.stepper.fails = RuntimeError("the GPU is gone")
    with pytest.raises(openai.InternalServerError, match="the GPU is gone"):
        running.complete("ab")
    running.stepper.may(1)
    stream = iter(running.complete("ab", stream=True, ignore_eos=True))
    next(stream)
    running.stepper.fails = RuntimeError("the GPU is gone")
    running.stepper.may()
    with pytest.raises(openai.APIError, match="the GPU is gone"):
        list(stream)
    assert running.complete("ab").choices  # and it goes on


def test_what_a_pause_aborts_says_so(running):
    running.idle()
    running.stepper.may(0)
    asked = {"n": 2, "ignore_eos": True, "max_tokens": 50}
    joined = Joined()
    with ThreadPoolExecutor(3) as pool:
        streamed = pool.submit(lambda: list(running.complete("ab", **asked, stream=True)))
        whole = pool.submit(running.complete, "ab", **asked)
        until(lambda: running.service.load == 4)
        running.stepper.may(3)
        until(lambda: running.stepper.left == 0 and len(running.service._running) == 4)
        pausing = pool.submit(running.service.pause, "abort")
        until(lambda: running.service._halt or running.service.paused)  # it may have stopped before the first look
        running.stepper.may()
        for event in streamed.result(240):
            joined.add(event)
        pausing.result(240)
        running.service.resume()
        assert {choice.finish_reason for choice in whole.result(240).choices} == {"abort"}
    for choice in joined.choices.values():
        assert choice["reasons"][-1] == "abort"
        assert 0 < len(choice["token_ids"]) < 50
        assert "".join(choice["texts"]) == running.tokenizer.decode(choice["token_ids"], True)


def test_a_text_that_cannot_be_read_ends_its_own_request_alone(running):
    class Broken:
        has_template = False

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [6, 7]

        def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
            raise ValueError("no such token")

        def render(self, messages: Any, arguments: Any, tools: Any = ()) -> str:
            raise NotImplementedError

    background = BackgroundServer(EngineServer(running.service, name="three", tokenizer=Broken()).app, Listen())
    client = openai.OpenAI(base_url=f"{background.url}/v1", api_key="any", max_retries=0)
    before = running.complete("ab").choices[0].token_ids
    with pytest.raises(openai.InternalServerError, match="no such token"):
        client.completions.create(model="rlloop", prompt="ab", stop="x")
    assert running.complete("ab").choices[0].token_ids == before
    client.close()
    background.close()
