"""Engines that do something else than they say, under `parity.mode=require`: each is found, and by what it did."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from rlloop.algorithms import loss_for
from rlloop.config.model import ModelSection
from rlloop.config.numerics import ProfileConfig
from rlloop.config.rollout import EngineKind
from rlloop.config.run import (
    AlgorithmConfig,
    CheckpointConfig,
    EvalConfig,
    ParityConfig,
    ParityMode,
    RolloutConfig,
    RunConfig,
)
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ParityError
from rlloop.loop.loop import Loop
from rlloop.models import Model, token_logprobs
from rlloop.parity.asked import Vocabulary
from rlloop.parity.certificate import Certificate
from rlloop.parity.monitor import ParityMonitor
from rlloop.rollout import Engine
from rlloop.runs.folder import RunFolder, read_records, read_rollouts, rollout_files
from rlloop.sync.colocated import ColocatedSync
from rlloop.testing import FakeTask, fake_parts
from rlloop.trainer import Trainer
from rlloop.types import Completion, Example, SamplingParams
from tests.support.tiny_models import tiny_qwen3

VOCABULARY, EOS, MAX, DRAWS = 300, 2, 12, 9
WARPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k=1": {"top_k": 1},
    "top_p=0.005": {"top_p": 0.005},
    "T=1e-4": {"temperature": 1e-4},
    "warped": {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_tokens": 4},
}


@dataclass
class Asked:
    """Inputs available to a cheating engine."""

    prompts: list[list[int]]
    sampling: list[SamplingParams]
    model: Model
    other: Model  # other weights
    version: int

    def make(self, *, model: Model | None = None, prompts: list[list[int]] | None = None, **changed: Any) -> Made:
        """Honest completions of other parameters (`seed`: added to each), which say so."""
        shift = changed.pop("seed", 0)
        sampling = [dataclasses.replace(each, seed=(each.seed or 0) + shift, **changed) for each in self.sampling]
        engine = Engine(model or self.model)
        engine.set_version(self.version)
        return engine.generate(prompts or self.prompts, sampling)

    def claim(self, made: Made) -> Made:
        """The same tokens with the logprobs that they have under what was asked for, as the trainer computes them."""
        pairs = [(prompt, each.token_ids) for prompt, each in zip(self.prompts, made, strict=True)]
        with torch.no_grad():
            warped = token_logprobs(self.model, pairs, sampling=self.sampling)
            raw = token_logprobs(self.model, pairs)
        return [
            dataclasses.replace(
                each, prompt_ids=prompt, sampling=asked, logprobs=mine.numpy(), raw_logprobs=other.numpy()
            )
            for each, prompt, asked, mine, other in zip(made, self.prompts, self.sampling, warped, raw, strict=True)
        ]

    def draw(self, **changed: Any) -> Made:
        return self.claim(self.make(**changed))

    def best(self, count: int, worth: Callable[[Completion], float]) -> Made:
        tries = [self.draw(seed=shift) for shift in range(count)]
        return [max(each, key=worth) for each in zip(*tries, strict=True)]

    def cut(self, length: int, reason: Any, *more: int) -> Made:
        """The first tokens of each that has more, and then perhaps others."""
        return self.claim([
            dataclasses.replace(each, token_ids=[*each.token_ids[:length], *more], finish_reason=reason)
            if len(each.token_ids) > length else each
            for each in self.make()
        ])  # fmt: skip

    def hide(self, made: Made) -> Made:
        return [dataclasses.replace(each, prompt_ids=prompt) for each, prompt in zip(made, self.prompts, strict=True)]

    def edit(self, change: Callable[[Completion], dict[str, Any]]) -> Made:
        return [dataclasses.replace(each, **change(each)) for each in self.make()]


Made = list[Completion]
DRAW, BITS, RAW = "seeds draw", "other bits", "other raw bits"


def other_weights(asked: Asked) -> Made:
    """Tokens that the trainer would have drawn, too, with numbers of other weights."""
    made, other = asked.make(), asked.other
    pairs = [(each.prompt_ids, each.token_ids) for each in made]
    with torch.no_grad():
        raw = token_logprobs(other, pairs)
    return [dataclasses.replace(each, raw_logprobs=mine.numpy()) for each, mine in zip(made, raw, strict=True)]


def copied(asked: Asked) -> Made:
    """The first completion of each prompt for all of its group."""
    first = {tuple(each.prompt_ids): each for each in reversed(asked.make())}
    return asked.claim([first[tuple(prompt)] for prompt in asked.prompts])


def swapped(asked: Asked) -> Made:
    """The logprobs of two completions of one length."""
    made = asked.make()
    places = range(len(made))
    pairs = [(a, b) for a in places for b in places if a < b and len(made[a].token_ids) == len(made[b].token_ids)]
    a, b = pairs[0]
    given = {a: made[b], b: made[a]}
    return [
        dataclasses.replace(each, logprobs=given[at].logprobs, raw_logprobs=given[at].raw_logprobs)
        if at in given else each for at, each in enumerate(made)
    ]  # fmt: skip


def patched(asked: Asked) -> Made:
    """The last token but one of one completion."""
    made = asked.make()
    token_ids = list(made[3].token_ids)
    token_ids[-2] = 7 if token_ids[-2] != 7 else 8
    made[3] = dataclasses.replace(made[3], token_ids=token_ids)
    return asked.claim(made)


def one_bit(asked: Asked, name: str) -> Made:
    made = asked.make()
    array = getattr(made[5], name).copy()
    array.view(np.int32)[0] ^= 1
    made[5] = dataclasses.replace(made[5], **{name: array})
    return made


def likelihood(each: Completion) -> float:
    return float(each.raw_logprobs.mean())


def altered(asked: Asked) -> list[list[int]]:
    return [[*prompt[:-1], prompt[-1] + 1] for prompt in asked.prompts]


CHEATS: dict[str, tuple[str, Callable[[Asked], Made], str]] = {
    # name: (how it was asked to sample, what it does, what the run says)
    "other weights": ("plain", lambda a: a.make(model=a.other), BITS),
    "other weights, top_k=1": ("top_k=1", other_weights, RAW),
    "other weights, top_p=0.005": ("top_p=0.005", other_weights, RAW),
    "other weights, T=1e-4": ("T=1e-4", other_weights, RAW),
    "other weights and their tokens, top_k=1": ("top_k=1", lambda a: a.make(model=a.other), BITS),
    "other weights and their tokens, warped": ("warped", lambda a: a.make(model=a.other), BITS),
    "their tokens with the trainer's numbers": ("plain", lambda a: a.claim(a.make(model=a.other)), DRAW),
    "greedy": ("plain", lambda a: a.draw(temperature=0.0), DRAW),
    "greedy, warped": ("warped", lambda a: a.draw(temperature=0.0), DRAW),
    "greedy, said": ("plain", lambda a: a.make(temperature=0.0), "temperature=0.0, and asked for with temperature=1.0"),
    "colder": ("plain", lambda a: a.draw(temperature=0.8), DRAW),
    "hotter": ("plain", lambda a: a.draw(temperature=1.2), DRAW),
    "hotter, warped": ("warped", lambda a: a.claim(a.make(temperature=0.8)), DRAW),
    "hotter, said": ("plain", lambda a: a.make(temperature=1.2), "temperature=1.2"),
    "truncated by top_k": ("plain", lambda a: a.draw(top_k=5), DRAW),
    "truncated by top_p": ("plain", lambda a: a.draw(top_p=0.5), DRAW),
    "truncated by min_p": ("plain", lambda a: a.draw(min_p=0.2), DRAW),
    "truncated, said": ("plain", lambda a: a.make(top_k=5), "top_k=5, and asked for with top_k=0"),
    "other seeds": ("plain", lambda a: a.draw(seed=1), DRAW),
    "other seeds, said": ("plain", lambda a: a.make(seed=1), "made with seed="),
    "other seeds, warped": ("warped", lambda a: a.draw(seed=1), DRAW),
    "best of four by likelihood": ("plain", lambda a: a.best(4, likelihood), DRAW),
    "best of four by length": ("plain", lambda a: a.best(4, lambda each: len(each.token_ids)), DRAW),
    "worst of two": ("plain", lambda a: a.best(2, lambda each: -likelihood(each)), DRAW),
    "one completion for a whole group": ("plain", copied, DRAW),
    "one token changed": ("plain", patched, DRAW),
    "cut at 3, length": ("plain", lambda a: a.cut(3, "length"), "length after 3 tokens, and max_tokens is 12"),
    "one of them cut at 3": ("plain", lambda a: [a.cut(3, "length")[0], *a.make()[1:]], "length after 3 tokens"),
    "cut at 3, stop": ("plain", lambda a: a.cut(3, "stop"), "finish_reason is stop, and its last token is"),
    "cut at 3, a stop token appended": ("plain", lambda a: a.cut(3, "stop", EOS), DRAW),
    "cut at 3, a stop token appended, warped": ("warped", lambda a: a.cut(3, "stop", EOS), "min_tokens is 4"),
    "cut at 3, max_tokens changed": ("plain", lambda a: a.make(max_tokens=3), "max_tokens=3, and asked for with"),
    "nothing at all": ("plain", lambda a: a.cut(0, "stop"), "finish_reason is stop, and it has no token"),
    "on after the end": ("plain", lambda a: a.draw(ignore_eos=True, stop_token_ids=()), "ends a completion, and "),
    "longer than asked for": ("plain", lambda a: a.draw(max_tokens=20), "tokens, and max_tokens is 12"),
    "min_tokens ignored": ("warped", lambda a: a.cut(0, "stop", EOS), "min_tokens is 4"),
    "stop said for length": ("plain", lambda a: a.edit(lambda _: {"finish_reason": "stop"}), "finish_reason is stop"),
    "length said for stop": ("plain", lambda a: a.cut(3, "length", EOS), "length after 4 tokens"),
    "another prompt": ("plain", lambda a: a.make(prompts=altered(a)), "its prompt is"),
    "another prompt, hidden": ("plain", lambda a: a.hide(a.make(prompts=altered(a))), BITS),
    "another prompt, with the trainer's numbers": ("plain", lambda a: a.draw(prompts=altered(a)), DRAW),
    "a longer prompt": ("plain", lambda a: a.make(prompts=[[9, *p] for p in a.prompts]), "its prompt is"),
    "logprobs swapped between completions": ("plain", swapped, BITS),
    "logprobs of nothing": ("plain", lambda a: a.edit(lambda each: {"logprobs": np.zeros_like(each.logprobs)}), BITS),
    "logprobs at temperature 1": ("warped", lambda a: a.edit(lambda each: {"logprobs": each.raw_logprobs}), BITS),
    "raw logprobs warped": ("warped", lambda a: a.edit(lambda each: {"raw_logprobs": each.logprobs}), RAW),
    "one bit of a logprob": ("plain", lambda a: one_bit(a, "logprobs"), BITS),
    "one bit of a raw logprob": ("plain", lambda a: one_bit(a, "raw_logprobs"), RAW),
    "a token that does not exist": (
        "plain",
        lambda a: a.edit(lambda each: {"token_ids": [*each.token_ids[:-1], VOCABULARY]}),
        "token id 300 is not in the vocabulary",
    ),
    "a version that is past": ("plain", lambda a: a.edit(lambda each: {"policy_version": -1}), "of version -1"),
    "a version to come": ("plain", lambda a: a.edit(lambda each: {"policy_version": 1}), "of version 1"),
}  # fmt: skip


class Cheat:
    """An engine of the loop that answers by `trick`, and says the same of its arithmetic as an honest one."""

    def __init__(self, model: Model, trick: Callable[[Asked], Made], held_out: bool) -> None:
        """`held_out`: cheats there, not in training."""
        self.model, self.trick, self.held_out, self.policy_version = model, trick, held_out, 0
        self.other = tiny_qwen3(VOCABULARY)
        with torch.no_grad():
            for weight in self.other.parameters():
                weight.mul_(1.01)

    def set_version(self, version: int) -> None:
        self.policy_version = version

    def generate(self, prompts: list[list[int]], sampling: SamplingParams | list[SamplingParams]) -> Made:
        assert isinstance(sampling, list)
        asked = Asked(prompts, sampling, self.model, self.other, self.policy_version)
        return self.trick(asked) if (len(prompts) == DRAWS) == self.held_out else asked.make()

    def fingerprint(self) -> dict[str, Any]:
        return self.model.fingerprint()


class Prompts(FakeTask):
    def _example(self, name: str, index: int) -> Example:
        return dataclasses.replace(super()._example(name, index), prompt_ids=[5 + index, 40, 50])


def run(path: Any, trick: Callable[[Asked], Made], warp: str, held_out: bool = False, **parity: Any) -> None:
    """One step over a real model, with rewards that differ."""
    config = RunConfig(
        seed=5,
        algorithm=AlgorithmConfig(loss="grpo", advantage="group_norm"),
        trainer=TrainerConfig(num_steps=1),
        rollout=RolloutConfig(num_prompts=3, group_size=4, max_tokens=MAX, **WARPS[warp]),
        eval=EvalConfig(every=0, num_draws=DRAWS),
        checkpoint=CheckpointConfig(every=0),
        parity=ParityConfig(**parity),
    )
    model = tiny_qwen3(VOCABULARY)
    engine = Cheat(model, trick, held_out)
    with RunFolder(path) as folder:
        parts = fake_parts(
            folder.checkpoints,
            task=Prompts(VOCABULARY),
            engine=engine,
            trainer=Trainer(model, config.trainer, redraws=config.redraws),
            sync=ColocatedSync(engine),
            loss=loss_for(config.algorithm),
            vocabulary=Vocabulary(VOCABULARY, (EOS,)),
        )
        fingerprints = engine.fingerprint(), parts.trainer.fingerprint()
        monitor = ParityMonitor(config.parity, Certificate(folder.parity), *fingerprints)
        Loop(config, parts, folder, monitor).run(0)


@pytest.mark.parametrize("warp", WARPS)
def test_an_honest_engine_passes(tmp_path, warp):
    run(tmp_path, lambda asked: asked.make(), warp)
    record = list(read_records(tmp_path / "metrics.jsonl"))[1]
    assert record["parity/redrawn"] == record["parity/tokens"] > 50
    for name in ("tokens_different", "raw_different", "redrawn_different"):
        assert record[f"parity/{name}"] == 0
    assert record["rollout/faults"] == 0
    assert (record["parity/tokens_certain"] > 0.9) == (warp in ("top_k=1", "top_p=0.005", "T=1e-4"))


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_stops_the_run_and_is_named(tmp_path, name):
    warp, trick, said = CHEATS[name]
    with pytest.raises(ParityError) as stopped:
        run(tmp_path, trick, warp)
    assert said in str(stopped.value)
    assert "sequence 1/" in str(stopped.value)  # which one
    assert read_rollouts(rollout_files(tmp_path)[0])  # what it gave is kept


# Held-out prompts have one completion each, and those of these seeds are all of one length.
HONEST_THERE = {"one completion for a whole group", "best of four by length", "on after the end"}


@pytest.mark.parametrize("name", [name for name in CHEATS if CHEATS[name][0] == "plain" and name not in HONEST_THERE])
def test_a_cheat_in_an_evaluation_stops_the_run_too(tmp_path, name):
    _, trick, said = CHEATS[name]
    with pytest.raises(ParityError, match=r"^step 0: ") as stopped:
        run(tmp_path, trick, "plain", held_out=True)
    assert said in str(stopped.value)
    assert "sequence eval/" in str(stopped.value)
    report = json.loads((tmp_path / "parity_report.json").read_text())
    assert {row["uid"] for row in report["completions"]} <= {f"eval/{index}" for index in range(DRAWS)}
    assert report["completions"]  # what it gave is kept
    assert list(read_records(tmp_path / "metrics.jsonl")) == []


@pytest.mark.parametrize("name", ["greedy", "best of four by length", "cut at 3, a stop token appended"])
def test_nothing_but_the_draw_shows_them(tmp_path, name):
    warp, trick, _ = CHEATS[name]
    run(tmp_path, trick, warp, redraw=False)
    assert "parity/redrawn" not in list(read_records(tmp_path / "metrics.jsonl"))[1]


@pytest.mark.parametrize("name", ["greedy", "one of them cut at 3", "other weights, top_k=1"])
def test_observe_records_it(tmp_path, name):
    warp, trick, _ = CHEATS[name]
    run(tmp_path, trick, warp, mode=ParityMode.observe)
    record, (line,) = list(read_records(tmp_path / "metrics.jsonl"))[1], list(read_records(tmp_path / "parity.jsonl"))
    seen = {
        "greedy": record.get("parity/redrawn_different", 0) > 0.1 and line["redrawn_different"] > 0,
        "one of them cut at 3": record["rollout/faults"] == line["faults"] == record["ledger/rejected"] == 1,
        "other weights, top_k=1": record.get("parity/raw_different", 0) > 0.9 and line["raw_different"] > 0,
    }
    assert {each for each, found in seen.items() if found} == {name}


def test_who_draws_by_another_operation_is_not_drawn_again():
    whole = {"algorithm": AlgorithmConfig(loss="grpo", advantage="group_norm")}
    assert RunConfig(**whole).redraws
    observe = ParityConfig(mode=ParityMode.observe)
    for other in (
        {"parity": ParityConfig(redraw=False)},
        {"parity": observe, "rollout": RolloutConfig(engine=EngineKind.vllm_stock)},
        {"parity": observe, "model": ModelSection(profile=ProfileConfig(token_logprob="stock"))},
    ):
        assert not RunConfig(**whole, **other).redraws
