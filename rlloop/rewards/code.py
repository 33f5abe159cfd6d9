"""A reward for code, which must pass tests in the sandbox."""

from __future__ import annotations

import asyncio
import os
import re
from typing import Any

from rlloop.errors import ConfigError
from rlloop.rewards.event_loop import OnThisLoop
from rlloop.rewards.examples import field_of
from rlloop.rewards.sandbox import Limits, interpreter, require_confinement, run_program, run_test
from rlloop.types import Example, RewardResult

FENCE = re.compile(r"```[ \t]*([\w+#-]*)[^\n`]*\n(.*?)```", re.DOTALL)  # after the language may stand attributes
NAMES = {
    "python": "python3?|py", "javascript": "javascript|js|node", "bash": "bash|sh|shell", "ruby": "ruby|rb",
}  # fmt: skip


def extract_code(completion: str, language: str = "python") -> str:
    """The last fenced code block of a completion that names `language` or none, or the whole completion if there is
    no such block."""
    named = re.compile(NAMES.get(language, re.escape(language)) + "|", re.IGNORECASE)
    blocks = [code for name, code in FENCE.findall(completion) if named.fullmatch(name)]
    return blocks[-1] if blocks else completion


class CodeReward:
    """The fraction of `example.data[tests_key]` that the completion's program passes (`partial=False`: 1 or 0).

    A test is either `{"input": str, "output": str}` (standard input and output, compared without trailing white space)
    or `{"assert": str}`: Python statements, or one expression that must be true. The latter run in a process of their
    own. They call the program's functions with plain data and get plain data back (None, bool, int, float, complex,
    str, bytes, list, tuple, dict, set, range); a name that a test neither defines nor imports is the program's. Objects
    of the program can be called, iterated and asked for attributes, but not compared. A test that passes anything else
    to the program (a lambda, an iterator) cannot be run: the sample is then rejected with the reason.

    `language`: python, bash, javascript, lua, perl, php or ruby, whose interpreter must be on the machine. Programs in
    another language than python have tests of input and output alone.

    Components: `passed`, `timeouts`. A program that crashes, loops or overflows fails its tests; that is not a failure
    of the reward. Raises ConfigError if this machine cannot confine programs.
    """

    def __init__(
        self,
        *,
        tests_key: str = "tests",
        partial: bool = True,
        seconds: float = 5.0,
        memory_mb: int = 512,
        output_bytes: int = 65536,
        processes: int | None = None,
        language: str = "python",
    ) -> None:
        if processes is not None and processes < 1:
            raise ConfigError(f"reward.processes is {processes}; it must be at least 1 (or null: one for each core)")
        interpreter(language)
        require_confinement(language)
        self.language = language
        self.tests_key, self.partial = tests_key, partial
        self.limits = Limits(seconds, memory_mb, output_bytes)
        self.concurrency = processes or os.cpu_count() or 1  # samples, and programs, at a time
        self._slots = OnThisLoop(lambda: asyncio.Semaphore(self.concurrency))

    def check_example(self, example: Example) -> None:
        field_of(example, self.tests_key, "tests_key")

    async def _passes(self, program: str, test: dict[str, Any]) -> tuple[bool, bool]:
        async with self._slots.get():
            if "assert" in test and self.language != "python":
                raise ValueError(f"the test {test['assert']!r:.80} is Python's, and reward.language is {self.language}")
            if "assert" in test:
                tested = await run_test(program, test["assert"], self.limits)
                if tested.verdict == "unsupported":
                    raise ValueError(f"the test {test['assert']!r:.200} cannot be run: {tested.why}")
                return tested.verdict == "passed", tested.verdict == "timeout"
            result = await run_program(program, test["input"], self.limits, language=self.language)
            good = result.status == "ok" and result.stdout.rstrip() == str(test["output"]).rstrip()
            return good, result.status == "timeout"

    async def __call__(self, prompt: str, completion: str, example: Example) -> RewardResult:
        tests = field_of(example, self.tests_key, "tests_key")
        if not tests:
            raise ValueError(f"example {example.id!r} has no tests under {self.tests_key!r}")
        program = extract_code(completion, self.language)
        outcomes = await asyncio.gather(*(self._passes(program, test) for test in tests))
        passed = sum(good for good, _ in outcomes) / len(tests)
        solved = passed == 1.0
        components = {"passed": passed, "timeouts": float(sum(late for _, late in outcomes))}
        return RewardResult(passed if self.partial else float(solved), solved, components)
