"""Sums of several terms, generated: demonstrations for SFT, problems for RL, and the reward.

    python -m rlloop.recipes.smollm2.problems data

writes data/demonstrations.jsonl and data/problems.jsonl. No problem is in both.
"""

from __future__ import annotations

import json
import re
import sys
from hashlib import blake2b
from pathlib import Path

import numpy as np

from rlloop.types import Example, RewardResult

ANSWER = re.compile(r"<answer>\s*(-?\d+)\s*</answer>")


def problem(rng: np.random.Generator, terms: int) -> dict[str, str]:
    """A row: its question, a worked solution, and the answer."""
    numbers = [int(n) for n in rng.integers(1, 60, terms)]
    signs = [str(sign) for sign in rng.choice(["+", "-"], terms - 1)]
    question, total, steps = str(numbers[0]), numbers[0], list[str]()
    for sign, number in zip(signs, numbers[1:], strict=True):
        question += f" {sign} {number}"
        after = total + number if sign == "+" else total - number
        steps.append(f"{total} {sign} {number} = {after}")
        total = after
    return {
        "prompt": f"What is {question}?",
        "completion": f"{'. '.join(steps)}. <answer>{total}</answer>",
        "answer": str(total),
    }


def write_problems(folder: Path, demonstrations: int = 2000, problems: int = 8000, seed: int = 0) -> None:
    """Half of the problems have two terms, half three. A hash of the question says in which file it belongs."""
    rng = np.random.default_rng(seed)
    wanted = {"demonstrations": demonstrations, "problems": problems}
    rows: dict[str, dict[str, dict[str, str]]] = {name: {} for name in wanted}
    while any(len(rows[name]) < count for name, count in wanted.items()):
        row = problem(rng, int(rng.integers(2, 4)))
        side = "demonstrations" if blake2b(row["prompt"].encode()).digest()[0] % 4 == 0 else "problems"
        if len(rows[side]) < wanted[side]:
            rows[side][row["prompt"]] = row
    folder.mkdir(parents=True, exist_ok=True)
    for name, by_prompt in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in by_prompt.values()))


def reward(prompt: str, completion: str, example: Example) -> RewardResult:
    """1 for the right answer in its tags, 0.1 for another number there, 0 without."""
    answers, known = ANSWER.findall(completion), str(example.data["answer"])
    expected = (ANSWER.findall(known) or [known])[-1]  # of a demonstration, the whole of it is known
    right = bool(answers) and answers[-1] == expected
    return RewardResult(1.0 if right else 0.1 * bool(answers), right, {"answered": float(bool(answers))})


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: python -m rlloop.recipes.smollm2.problems FOLDER", file=sys.stderr)
        return 2
    write_problems(Path(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
