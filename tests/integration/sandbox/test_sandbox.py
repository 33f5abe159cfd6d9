"""Operations that the sandbox forbids, and its survival of every attempt."""

import asyncio
import ctypes
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlloop.errors import ConfigError
from rlloop.rewards import sandbox
from rlloop.rewards.code import CodeReward, extract_code
from rlloop.rewards.sandbox import Limits, run_program
from rlloop.types import Example
from tests.support.waiting import until

LIMITS = Limits(seconds=20.0, memory_mb=256, output_bytes=4096)


def run(source, stdin="", limits=LIMITS):
    return asyncio.run(run_program(source, stdin, limits))


def test_a_program_reads_prints_and_imports_the_standard_library():
    result = run("import math, heapq, re, fractions\nprint(int(input()) + math.isqrt(16))", "38\n")
    assert (result.status, result.stdout) == ("ok", "42\n")


@pytest.mark.parametrize(
    "source",
    ["print(open(0).read())", "import sys; print(sys.stdin.read())", "import os; print(os.read(0, 99).decode())",
     "import sys; print(sys.stdin.buffer.read().decode())", "import sys; print(*sys.stdin, sep='')", "print(input())",
     "import fileinput; print(*fileinput.input(), sep='')"],
)  # fmt: skip
def test_standard_input_comes_however_a_program_reads_it(source):
    assert run(source, "ä 1 2").stdout == "ä 1 2\n"


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("import os\nwhile True: os.fork()", "error"),
        ("import subprocess; subprocess.run(['true'])", "error"),
        ("import os; os.execv('/bin/true', ['true'])", "error"),
        ("9**9**9**9", "timeout"),
        ("while True: pass", "timeout"),
        ("import time; time.sleep(60)", "timeout"),
        ("x = bytearray(10 * 2**30)", "memory"),
        ("x = []\nwhile True: x.append(bytearray(2**20))", "memory"),
        ("while True: print('x' * 1000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
        ("import sys; sys.exit(3)", "error"),
        ("def (", "error"),
    ],
)
def test_what_ends_a_program(source, status):
    start = time.monotonic()
    limits = dataclasses.replace(LIMITS, seconds=0.5) if status == "timeout" else LIMITS
    assert run(source, limits=limits).status == status
    assert time.monotonic() - start < LIMITS.seconds + 5


@pytest.mark.parametrize(
    "source",
    [
        "import socket; socket.socket()",
        "import os; os.kill(os.getppid(), 9)",
        "import os; open(f'/proc/{os.getppid()}/environ').read()",
        "open('/tmp/rlloop-escape', 'w')",
        "import os; os.mkdir('/tmp/rlloop-escape')",
        "import os; os.unlink(__import__('sys').executable)",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (10**6, 10**6))",
    ],
)
def test_what_is_denied(source):
    result = run(source)
    assert result.status == "error"
    assert "PermissionError" in result.stderr or "not allowed" in result.stderr
    assert not os.path.exists("/tmp/rlloop-escape")  # noqa: PTH110


def test_a_program_has_64_threads_at_most_and_may_have_so_many():
    tasks = "import threading, time\nthreading.stack_size(65536)\nend = threading.Event()\n"
    some = f"{tasks}for _ in range(60): threading.Thread(target=end.wait).start()\nend.set(); print('done')"
    assert run(some).stdout == "done\n"
    more = """
import ctypes
libc = ctypes.CDLL(None)
stack = ctypes.create_string_buffer(1 << 16)
started = 0
while started < 1000 and libc.clone(libc.pause, ctypes.byref(stack, 60000), 0x10f00, None) > 0:
    started += 1
print(started, flush=True)
__import__('os')._exit(0)
"""
    assert int(run(more).stdout) < 64


def test_a_program_ends_with_a_killed_trainer_whatever_it_tries():
    """It resets its signal of a parent's death, ignores every signal, and ends its first thread."""
    program = """
import ctypes, signal, threading, time
libc = ctypes.CDLL(None)
libc.prctl(1, 0, 0, 0, 0)
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
threading.Thread(target=time.sleep, args=(100,)).start()
libc.syscall(60 if __import__('os').uname().machine == 'x86_64' else 93, 0)
"""
    trainer = "import asyncio, sys\nfrom rlloop.rewards.sandbox import *\n"
    trainer += "asyncio.run(run_program(sys.argv[1], limits=Limits(seconds=60.0)))"
    with subprocess.Popen([sys.executable, "-c", trainer, program]) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (found := children.read_text().split()) or state(found[0]) != "Z":  # its first thread has ended
            time.sleep(0.01)
        process.kill()
    until(lambda: state(found[0]) is None)


def state(pid):
    """Of the first thread of a process that has others, too; None: all of it is gone."""
    tasks = Path(f"/proc/{pid}/task")
    try:
        alive = len(list(tasks.iterdir()))
        first = (tasks / pid / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if first == "Z" and alive == 1 else first


def test_a_program_reads_the_interpreters_files_and_no_others(tmp_path):
    (tmp_path / "answers").write_text("hush")
    result = run(f"import colorsys, datetime, sqlite3, zoneinfo\nprint(open({str(tmp_path / 'answers')!r}).read())")
    if landlock():
        assert (result.status, result.stdout) == ("error", "")
        assert "PermissionError" in result.stderr
    else:
        assert result.stdout == "hush\n"


def landlock():
    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) > 0


def test_the_environment_stays_outside(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    assert "hush" not in run("import os; print(dict(os.environ))").stdout


def test_impossible_limits_are_refused():
    with pytest.raises(ConfigError, match="memory_mb is 1; it must be at least 64"):
        Limits(memory_mb=1)


def test_a_machine_that_cannot_confine_programs_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "riscv64")
    sandbox.require_confinement.cache_clear()
    with pytest.raises(ConfigError, match=r"\(linux, riscv64\) cannot confine a program: .* behind HttpReward"):
        CodeReward()


def test_code_reward_counts_tests_and_survives_hostile_programs():
    reward = CodeReward(seconds=4.0)
    tests = [{"input": "1 2", "output": "3"}, {"input": "5 6", "output": "11"}]
    example = Example("sum", [1], "add", {"tests": tests})

    async def score(*programs):
        return await asyncio.gather(*(reward("", program, example) for program in programs))

    good, half, loop, bomb = asyncio.run(
        score(
            "Sure:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nDone.",
            "print(3)",
            "while True: pass",
            "import os\nwhile True: os.fork()",
        )
    )
    assert (good.reward, good.solved) == (1.0, True)
    assert (half.reward, half.solved) == (0.5, False)
    assert (loop.reward, loop.components["timeouts"]) == (0.0, 2.0)
    assert (bomb.reward, bomb.components["timeouts"]) == (0.0, 0.0)


def test_an_early_exit_does_not_pass_an_assertion():
    reward = CodeReward(seconds=20.0, partial=False)
    example = Example("f", [1], "", {"tests": [{"assert": "assert f(2) == 4"}]})

    async def score(program):
        return (await reward("", program, example)).reward

    assert asyncio.run(score("def f(x): return x * x")) == 1.0
    assert asyncio.run(score("def f(x): return x")) == 0.0
    assert asyncio.run(score("import sys; sys.exit(0)")) == 0.0


def test_the_last_fenced_block_is_the_program():
    assert extract_code("```python\na\n```\ntext\n```py\nb\n```") == "b\n"
    assert extract_code("```Python\na\n```") == extract_code("```python3\na\n```") == "a\n"
    assert extract_code("print(1)") == "print(1)"
    for opening in ("``` python", "```python title=a.py", "```python\r"):
        assert extract_code(f"{opening}\nprint(1)\n```\nThis prints:\n```text\n1\n```") == "print(1)\n"
