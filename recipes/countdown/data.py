"""Problems, worked traces and the held-out split. Everything is a function of its arguments. Imports no torch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

OPERATORS = ("+", "-", "*", "/")
HELD_OUT_PERCENT = 10


@dataclass(frozen=True, order=True)
class Problem:
    """Reach `target` with `numbers`, each used once."""

    numbers: tuple[int, ...]  # ascending
    target: int

    @property
    def id(self) -> str:
        """Example: `3-5-7-22`."""
        return "-".join(map(str, (*self.numbers, self.target)))

    @functools.cached_property
    def digest(self) -> int:
        return int.from_bytes(blake2b(self.id.encode(), digest_size=8).digest(), "big")

    @property
    def held_out(self) -> bool:
        """Never trained on, in any run: neither the seed nor the order of the numbers enters."""
        return self.digest % 100 < HELD_OUT_PERCENT


@dataclass(frozen=True)
class Demonstration:
    """A prompt and one of its worked solutions, as text."""

    prompt: str
    response: str


@functools.cache
def worked_traces(numbers: tuple[int, int, int]) -> dict[int, tuple[str, ...]]:
    """Every worked trace of three numbers, by the result it reaches. All values are whole and none is negative.

    Example: `worked_traces((3, 4, 5))[35]` holds `3 + 4 = 7 , 7 * 5 = 35` and `3 + 4 = 7 , 5 * 7 = 35` among others.
    """
    traces: dict[int, set[str]] = {}
    for a, b, c in set(itertools.permutations(numbers)):
        for first in OPERATORS:
            middle = _apply(a, first, b)
            if middle is None:
                continue
            for left, right in ((middle, c), (c, middle)):
                for second in OPERATORS:
                    result = _apply(left, second, right)
                    if result is not None:
                        trace = f"{a} {first} {b} = {middle} , {left} {second} {right} = {result}"
                        traces.setdefault(result, set()).add(trace)
    return {result: tuple(sorted(of_result)) for result, of_result in sorted(traces.items())}


def _apply(left: int, operator: str, right: int) -> int | None:
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right if left >= right else None
        case "*":
            return left * right
        case _:
            return left // right if right and left % right == 0 else None


@functools.cache
def all_problems(largest_number: int, largest_target: int) -> tuple[Problem, ...]:
    """Every solvable problem, ascending: three numbers from 1 to `largest_number`, a target up to `largest_target`."""
    return tuple(
        Problem(numbers, target)
        for numbers in itertools.combinations_with_replacement(range(1, largest_number + 1), 3)
        for target in worked_traces(numbers)
        if 1 <= target <= largest_target
    )


def training_problems(largest_number: int, largest_target: int) -> list[Problem]:
    return [problem for problem in all_problems(largest_number, largest_target) if not problem.held_out]


def held_out_problems(largest_number: int, largest_target: int) -> list[Problem]:
    """In the order of their digests, so that the first few are a fair sample."""
    held_out = [problem for problem in all_problems(largest_number, largest_target) if problem.held_out]
    return sorted(held_out, key=lambda problem: problem.digest)


def prompt_text(numbers: Sequence[int], target: int) -> str:
    """Example: `7 3 5 -> 22`. The numbers' order is part of the prompt, not of the problem."""
    return f"{' '.join(map(str, numbers))} -> {target}"


def shuffled(numbers: Sequence[int], rng: np.random.Generator) -> list[int]:
    return [numbers[index] for index in rng.permutation(len(numbers))]


def demonstrations(count: int, seed: int, largest_number: int, largest_target: int) -> list[Demonstration]:
    """`count` different training problems in random order, with one random worked solution each.

    Where there are fewer problems than `count`, they come round again with another solution drawn.
    """
    rng = np.random.default_rng((seed, 1))
    problems = training_problems(largest_number, largest_target)
    chosen = []
    while len(chosen) < count:
        for index in rng.permutation(len(problems))[: count - len(chosen)]:
            problem = problems[index]
            solutions = worked_traces(problem.numbers)[problem.target]
            response = solutions[rng.integers(len(solutions))]
            chosen.append(Demonstration(prompt_text(shuffled(problem.numbers, rng), problem.target), response))
    return chosen


def random_baseline(largest_number: int, largest_target: int) -> float:
    """The chance that a random valid expression solves a held-out problem: the exact mean, no draws needed.

    The expression is drawn evenly from all worked traces of the problem's numbers whose result is a possible target: it
    has every number once, true arithmetic and a plausible result, and knows nothing of the target.
    """
    chances = []
    for problem in held_out_problems(largest_number, largest_target):
        counts = {
            target: len(traces)
            for target, traces in worked_traces(problem.numbers).items()
            if 1 <= target <= largest_target
        }
        chances.append(counts[problem.target] / sum(counts.values()))
    return float(np.mean(chances))
