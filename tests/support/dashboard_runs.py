"""Run folders for the dashboard's tests, written by the same code that writes a run's; and a dashboard to show them."""

import contextlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from rlloop.inputs import Image, ModelInput
from rlloop.parity.certificate import Certificate, content_digest
from rlloop.parity.monitor import compare
from rlloop.runs.folder import RunFolder
from rlloop.runs.images import ImageStore
from rlloop.runs.rollouts import rollout_rows
from rlloop.types import Completion, Example, RewardResult, Sample, SamplingParams

CONFIG = {"seed": 0, "trainer": {"num_steps": 6, "lr": 1e-3}, "parity": {"mode": "observe"}, "run": {"dir": "x"}}


def make_sample(step: int, prompt: int, place: int, tokens: int, rng: np.random.Generator) -> Sample:
    logprobs = (-rng.exponential(size=tokens)).astype(np.float32)
    made = Completion(
        [1, 2, 3],
        rng.integers(4, 30, tokens).tolist(),
        logprobs,
        logprobs,
        step - 1,
        "stop" if place else "length",
        SamplingParams(max_tokens=16, seed=2**62 + place),
    )
    example = Example(f"p{prompt}", [1, 2, 3], f"question {prompt}", {})
    solved = bool(rng.integers(2))
    result = RewardResult(float(solved), solved, {"correct": float(solved), "form": 0.5})
    return Sample(
        f"{step}/{prompt}/{place}", example, made, f"answer {place}", result, group=prompt, advantage=0.5 - place
    )


class Writer:
    """One run, written a step at a time. `drift`: how far the trainer's logprobs are from the engine's."""

    def __init__(self, path: Path, *, drift: float = 0.0, config: dict[str, Any] | None = None, seed: int = 0) -> None:
        self.path, self.drift = path, drift
        self.rng = np.random.default_rng(seed)
        with RunFolder(path) as folder:
            folder.adopt(config or CONFIG)
            folder.note_fingerprints({content_digest({"a": 1}): {"a": 1}})
            folder.log("starting")
        self.step = -1

    def write(self, *, prompts: int = 3, group: int = 4, tokens: int = 5, extra: dict[str, Any] | None = None) -> None:
        """The next step's records; step 0's is an evaluation."""
        self.step += 1
        folder = RunFolder(self.path)
        with folder:
            metrics: dict[str, Any] = {"step": self.step}
            if self.step == 0:
                folder.metrics.append({**metrics, "eval/solved": 0.25})
                return
            samples = [
                make_sample(self.step, prompt, place, tokens, self.rng)
                for prompt in range(prompts)
                for place in range(group)
            ]
            trained, dropped = samples[:-group], samples[-group:]
            trainer = [
                (sample.completion.logprobs + self.drift * self.rng.normal(size=tokens)).astype(np.float32)
                for sample in trained
            ]
            found = compare(trained, trainer)
            certificate = Certificate(folder.parity)
            certificate.begin(
                {
                    "step": self.step,
                    "version": self.step - 1,
                    "tokens": found.tokens,
                    "tokens_different": found.tokens_different,
                    "engine": found.engine_digest,
                    "trainer": found.trainer_digest,
                    "fingerprints": {"engine": content_digest({"a": 1}), "trainer": content_digest({"a": 1})},
                }
            )
            certificate.seal()
            outcomes = ["trained"] * len(trained) + ["dropped: no signal in its group"] * len(dropped)
            rows = rollout_rows(samples, outcomes, [*trainer, *[None] * len(dropped)], content_digest({"a": 1}))
            folder.write_rollouts(self.step, rows)
            metrics |= found.metrics | {
                "reward/mean": float(np.mean([sample.result.reward for sample in samples])),
                "ledger/sampled": len(samples),
                "ledger/trained": len(trained),
                "ledger/dropped": len(dropped),
                "time/rollout": 0.25,
                "time/update": 0.5,
                "time/step": 1.0,
            }
            folder.metrics.append(metrics | (extra or {}))

    def finish(self) -> None:
        with RunFolder(self.path) as folder:
            folder.write_json("summary.json", {"status": "finished", "step": self.step})


def write_run(path: Path, steps: int, *, finished: bool = True, **options: Any) -> Writer:
    writer = Writer(path, **options)
    for _ in range(steps + 1):
        writer.write()
    if finished:
        writer.finish()
    return writer


WORDS = [
    "<|im_start|>", "<|im_end|>", "system", "user", "assistant", "be ", "brief", "what is ", "3 + 4", "7", "answer ",
    "<tool_call>", "</tool_call>", '{"name": ', '"add"}', "<tool_response>", "</tool_response>", "\n", "?",
]  # fmt: skip


def write_talk(path: Path) -> None:
    """A run of one step with one conversation: a call of a tool, its result, which is masked, and the answer."""
    Writer(path).write()
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))

    def ids(*words: str) -> list[int]:
        return [WORDS.index(word) for word in words]

    begin, end = ("\n", "<|im_start|>"), "<|im_end|>"
    call = ids("<tool_call>", '{"name": ', '"add"}', "</tool_call>", end)
    result = ids(*begin, "user", "\n", "<tool_response>", "7", "</tool_response>", end, *begin, "assistant", "\n")
    answer = ids("answer ", "7", end)
    turns = [[0, len(call)], [len(call) + len(result), len(call) + len(result) + len(answer)]]
    row = {
        "uid": "1/0/0", "example": "p0", "group": 0, "policy_version": 0, "engine": "e", "outcome": "trained",
        "reward": 1.0, "solved": True, "components": {"correct": 1.0}, "advantage": 0.5, "finish_reason": "stop",
        "prompt": "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nwhat is 3 + 4<|im_end|>\n"
        "<|im_start|>assistant\n",
        "text": "answer 7", "sampling": {"max_tokens": 16, "seed": 1}, "turns": turns,
        "prompt_ids": ids(
            begin[1], "system", "\n", "be ", "brief", end, *begin, "user", "\n", "what is ", "3 + 4", end, *begin,
            "assistant", "\n",
        ),
        "token_ids": call + result + answer, "logprobs": [-0.5] * (len(call) + len(answer)),
        "token_advantages": [0.5] * len(call) + [-0.25] * len(answer),
        "conversation": [
            {
                "tokens": turns[0], "text": "<tool_call> add", "read": [turns[0][1], turns[1][0]], "reward": 0.25,
                "messages": [{"role": "tool", "name": "add", "content": "7"}],
            },
            {"tokens": turns[1], "text": "answer 7", "reward": 0.75, "messages": []},
        ],
    }  # fmt: skip
    with RunFolder(path) as folder:
        folder.metrics.append({"step": 1, "reward/mean": 1.0})
        folder.write_rollouts(1, [row])


def write_pictures(path: Path, prompt: tuple[int, int, int], reply: tuple[int, int, int]) -> None:
    """A run of one step with two completions: one with a picture of the colour `prompt` in its prompt and one of the
    colour `reply` in its environment's reply, and one of text alone."""
    Writer(path).write()
    rng = np.random.default_rng(0)
    asked, shown = (_one_colour(colour) for colour in (prompt, reply))
    seen, text = (make_sample(1, 0, place, 2, rng) for place in range(2))
    begin, (first, last) = [1, 9, 9, 9, 9, 2], seen.completion.token_ids
    read = ModelInput.with_images([*begin, first, 9, 9, 9, 9, 3], [1, 2, 3, 4, 7, 8, 9, 10], [asked, shown])
    turns, ids = ((0, 1), (6, 7)), [*read.token_ids[len(begin) :], last]
    made = replace(seen.completion, prompt_ids=begin, token_ids=ids, turns=turns, model_input=read)
    seen = replace(seen, completion=made)
    message = {"role": "user", "content": "and this", "images": [shown.digest]}
    conversation = [{"text": "yes", "messages": [message]}, {"text": "answer 0", "messages": []}]
    seen.example.data["episode"] = {"conversation": conversation}
    with RunFolder(path) as folder:
        ImageStore(path).keep([asked, shown])
        folder.metrics.append({"step": 1, "reward/mean": 1.0})
        folder.write_rollouts(1, rollout_rows([seen, text], ["trained"] * 2, [None] * 2, "e"))


def _one_colour(colour: tuple[int, int, int]) -> Image:
    """16 patches of 4 features, with a picture of 32 x 24 pixels."""
    picture = np.full((24, 32, 3), colour, np.uint8)
    return Image(np.full((16, 3), colour, np.float32), 4, 4, picture)


@contextlib.contextmanager
def serving(*arguments):
    """(the process, its address without the token, the token)"""
    command = [sys.executable, "-m", "rlloop", "dashboard", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        head = ""
        while not (found := re.search(r"(http://127\.0\.0\.1:\d+)/\?token=(\S+)", head)):
            line = process.stdout.readline()
            assert line, process.communicate()
            head += line
        yield process, found[1], found[2]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Rollout indices of a test lie in a folder of its own, not in the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("RLLOOP_CACHE", str(folder))
    return folder / "dashboard"
