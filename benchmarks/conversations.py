"""Conversations with slow tools: the engine's busy time by the time in which some conversation waited for it.

`busy_share` is of wall time, in which the driving thread also waits: for environments, for Python's lock, for a core.
`busy_share_cpu` is of that thread's processor time, which other processes do not stretch. `busy_share_least` is what a
quiet machine has at least: the engine's steps by the processor time of all threads of this process together, as if none
ran beside another, and the waits before steps for environments that are about to reply.

    python benchmarks/conversations.py [CONVERSATIONS] [TURNS]
    python benchmarks/conversations.py run [STEPS]

The second trains the recipe `guess` with such tools, as it is and with `rollout.partial`, and compares the seconds of a
step and the share of the rollout's time in which the engine computed.

Tools take 0.1 to 5 seconds, most of them short (log-uniform by a seed). The same conversations in rounds, each of which
waits for its slowest tool, would take at least the sum of the rounds' slowest tools.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlloop import Engine, SamplingParams, load_model
from rlloop.cli.main import main as command
from rlloop.loop import conversations
from rlloop.loop.environments import Reply
from rlloop.loop.turns import SteppedTurns
from rlloop.parity.asked import Vocabulary
from rlloop.recipes.guess.task import Guess, NumberGuessing
from rlloop.types import Example

FASTEST, SLOWEST = 0.1, 5.0  # seconds of a tool


class Watched(SteppedTurns):
    """Measures the engine's steps, and the time with some prompt at the engine."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        # Seconds: wall, processor time of this thread, that of all threads and waits.
        self.busy, self.could = np.zeros(3), np.zeros(3)
        self._since: np.ndarray | None = None

    def submit(self, prompt_ids: list[int], sampling: SamplingParams) -> Any:
        if self._since is None:
            self._since = now()
        return super().submit(prompt_ids, sampling)

    def work(self) -> None:
        began = now()
        super().work()
        ended = now()
        self.busy += ended - began
        if not self.has_work and self._since is not None:
            self.could, self._since = self.could + ended - self._since, None


class Waiting(queue.SimpleQueue):
    """Adds up the seconds that were waited in vain, as asked for: other processes do not stretch them."""

    waited = 0.0

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        try:
            return super().get(block, timeout)
        except queue.Empty:
            Waiting.waited += timeout or 0.0
            raise


def now() -> np.ndarray:
    """Seconds of the wall clock, of this thread's processor time, and of all threads' with the waits."""
    return np.array([time.perf_counter(), time.thread_time(), time.process_time() + Waiting.waited])


def shares(engines: list[Watched]) -> dict[str, float]:
    busy, could = (np.sum([getattr(each, name) for each in engines], axis=0) for name in ("busy", "could"))
    wall, processor, _ = busy / could
    names = {"busy_share": wall, "busy_share_cpu": processor, "busy_share_least": busy[1] / could[2]}
    return {name: round(float(value), 3) for name, value in names.items()}


def tool_seconds(conversation: int, turn: int) -> float:
    rng = np.random.default_rng((conversation, turn))
    return float(np.exp(rng.uniform(np.log(FASTEST), np.log(SLOWEST))))


def main(count: int = 64, turns: int = 3) -> dict[str, float]:
    torch.set_num_threads(1)
    task = Guess(0, str(_model()), max_turns=turns)
    made: list[Watched] = []

    class Tool:
        def __init__(self, example: Example) -> None:
            self.conversation, self.turn = example.data["conversation"], 0

        async def step(self, message: str) -> Reply:
            self.turn += 1
            await asyncio.sleep(tool_seconds(self.conversation, self.turn))
            return Reply([{"role": "tool", "content": "what"}], done=self.turn == turns)

    def watched(engine: Any) -> Watched:
        made.append(Watched(engine))
        return made[-1]

    conversations.turns_of, conversations.SimpleQueue = watched, Waiting
    task.environment = Tool  # pyright: ignore[reportAttributeAccessIssue]
    model = load_model(task.model_folder())
    player = conversations.Conversations(task, Vocabulary(model.vocab_size, model.eos_token_ids), timeout=60.0)
    prompt = task.eval_examples(1)[0].prompt_ids
    examples = [Example(str(index), prompt, "", {"conversation": index}) for index in range(count)]
    sampling = [SamplingParams(128, min_tokens=128, seed=index) for index in range(count)]
    engine = Engine(model)
    engine.generate([prompt], SamplingParams(2, seed=0))  # compiles
    began = time.perf_counter()
    played = player.play(engine, examples, sampling)
    seconds = time.perf_counter() - began
    player.close()
    assert all(len(each.example.data["episode"]["conversation"]) == turns for each in played)
    waits = [[tool_seconds(index, turn) for turn in range(1, turns + 1)] for index in range(count)]
    [found] = made
    return {
        "conversations": count,
        "seconds": round(seconds, 2),
        "engine_busy": round(float(found.busy[0]), 2),
        "engine_could_be_busy": round(float(found.could[0]), 2),
        **shares(made),
        "slowest_conversation_tools": round(max(map(sum, waits)), 2),
        "rounds_tools": round(float(np.max(waits, axis=0).sum()), 2),
    }


class SlowGuessing(NumberGuessing):
    """The recipe's environment, as slow as the benchmark's tools."""

    async def step(self, message: str) -> Reply:  # pyright: ignore[reportIncompatibleMethodOverride]
        await asyncio.sleep(float(np.exp(random.uniform(np.log(FASTEST), np.log(SLOWEST)))))
        return super().step(message)


class SlowGuess(Guess):
    environment = SlowGuessing


def train(steps: int = 12) -> dict[str, dict[str, float]]:
    """Metrics of the steps after the first two, in which all conversations begin at once."""
    torch.set_num_threads(1)
    made: list[Watched] = []

    def watched(engine: Any) -> Watched:
        made.append(Watched(engine))
        return made[-1]

    conversations.turns_of, conversations.SimpleQueue = watched, Waiting
    target = f"task._target_={Path(__file__).stem}.SlowGuess"
    sizes = ["rollout.num_prompts=8", "rollout.group_size=4", "rollout.max_tokens=32", "rollout.min_tokens=32"]
    rest = ["eval.num_draws=1", "eval.every=0", "checkpoint.every=0", "algorithm.anchor=rollout"]
    rest.append(f"trainer.num_steps={steps}")
    found = {}
    for name, prompts in (("in step", 0), ("partial", 16)):
        made.clear()
        folder = Path(tempfile.mkdtemp()) / "run"
        partial = [f"rollout.partial.prompts={prompts}", "rollout.partial.max_version_lag=4"]
        where = [f"model.path={_model()}", f"run.dir={folder}"]
        given = ["train", "--config-name", "guess", target, *where, *sizes, *rest, *partial]
        assert command(given) == 0
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][3:]
        engines = made[1:][2:steps]  # the first is an evaluation's
        rollout = sum(record["time/rollout"] for record in records)
        found[name] = {
            "seconds_of_a_step": round(rollout / len(records), 2),
            "busy_of_rollout": round(sum(float(each.busy[0]) for each in engines) / rollout, 3),
            **shares(engines),
            "tokens_per_s": round(sum(record["parity/tokens"] for record in records) / rollout, 1),
            "tokens_different": sum(record["parity/tokens_different"] for record in records),
            "version_lag": round(float(np.mean([record["rollout/version_lag"] for record in records])), 2),
            "version_lag_max": max(record.get("rollout/version_lag_max", 0) for record in records),
            "groups_dropped": sum(record.get("rollout/groups_dropped", 0) for record in records),
        }
    return found


def _model() -> Path:
    from rlloop.recipes.custom.tiny import write_tiny

    folder = Path(tempfile.mkdtemp()) / "model"
    write_tiny(folder, ["guess", "to", "what", *map(str, range(1, 8))], hidden_size=64, num_layers=4)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="COUNT", help="CONVERSATIONS and TURNS, or `run` and STEPS")
    words = parser.parse_args().words
    measure, given = (train, words[1:]) if words[:1] == ["run"] else (main, words)
    print(json.dumps(measure(*map(int, given))))
