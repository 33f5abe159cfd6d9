"""Train a model, serve it, and ask it over OpenAI's API.

    python examples/serving.py            # a minute or so on a laptop; nothing is downloaded. Needs rlloop[serve]

A small random model learns to write the letters a and b alone. `rlloop serve engine` serves its checkpoint, and the
answers of /v1/chat/completions show what it learned. The server's logprobs are those that the trainer computes, bit for
bit.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

import rlloop
from rlloop.recipes.custom.tiny import write_tiny


def share(completions: list[str], **columns: list) -> list[float]:
    """The share of a and b in each completion: a reward of TRL's signature."""
    return [sum(letter in "ab" for letter in text) / max(1, len(text)) for text in completions]


def main(steps: int = 40, folder: str | None = None) -> tuple[float, float]:
    """Returns the reward of the answers served before and after training."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(folder or scratch)
        write_tiny(root / "model")  # or any Hugging Face folder of a family that rlloop knows
        run = rlloop.GRPO(
            root / "model", share, [{"prompt": f"letter {number}"} for number in range(40)],
            rollout={"max_tokens": 8, "num_prompts": 8, "group_size": 8}, eval={"num_draws": 10},
            trainer={"num_steps": steps, "lr": 4e-3}, run={"dir": str(root / "run")},
        ).train()  # fmt: skip
        before, after = (ask(model) for model in (root / "model", run.best_checkpoint()))
        print(f"reward of the answers served: {before:.3f} before training, {after:.3f} after")
        return before, after


def ask(model: Path) -> float:
    with served(model) as url, httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client:
        answers = []
        for seed in range(10):
            question = {
                "model": "rlloop", "messages": [{"role": "user", "content": "letter 1"}], "max_tokens": 8, "seed": seed
            }  # fmt: skip
            reply = client.post("/v1/chat/completions", json=question).raise_for_status().json()
            answers.append(reply["choices"][0]["message"]["content"] or "")
        return sum(share(answers)) / len(answers)


@contextmanager
def served(model: Path) -> Iterator[str]:
    """The address of a server of `model`, on a free port of this machine, for as long as the block runs."""
    command = [sys.executable, "-m", "rlloop", "serve", "engine", "--model", str(model), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield next(line.split()[-1] for line in server.stdout if "http://" in line)
        finally:
            server.terminate()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
