"""An environment of your own, in conversations of several turns, trained by `rlloop.train`.

    python examples/own_environment.py            # a minute or so on a laptop; nothing is downloaded

The policy has three tries to write the letter that its prompt names; the environment answers each miss with a hint.
A new `Hints` is made for each conversation, with the row of data as its example.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import rlloop
from rlloop.loop.environments import Reply
from rlloop.recipes.custom.tiny import write_tiny

LETTERS = "abc"


class Hints:
    """Reward: the share of the asked letter in the try that has it, less a tenth for each try before."""

    def __init__(self, example: rlloop.Example) -> None:
        self.letter, self.tries = example.data["letter"], 0

    def step(self, message: str) -> Reply:
        share = message.count(self.letter) / max(1, len(message))
        self.tries += 1
        if share > 0:
            return Reply(reward=share - 0.1 * (self.tries - 1), done=True, solved=share >= 0.5)
        return Reply([{"role": "tool", "content": f"write {self.letter}"}])


def main(steps: int = 60, folder: str | None = None) -> list[float]:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(folder or scratch)
        write_tiny(root / "model")  # or any Hugging Face folder of a family that rlloop knows
        rows = [{"prompt": f"{n}: {LETTERS[n % 3]}", "letter": LETTERS[n % 3]} for n in range(60)]
        (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run = rlloop.train(
            "custom",
            model={"path": root / "model"},
            data={"path": root / "rows.jsonl"},
            task={"environment": {"_target_": "own_environment.Hints"}, "max_turns": 3},
            reward={"_target_": "rlloop.rewards.episode.episode_reward"},
            rollout={"max_tokens": 4, "num_prompts": 8, "group_size": 8},
            trainer={"num_steps": steps, "lr": 4e-3},
            eval={"num_draws": 30},
            run={"dir": str(root / "run")},
        )
        assert sum(line["tokens_different"] for line in run.certificate) == 0
        return run.columns("reward/mean")["reward/mean"][1:]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
