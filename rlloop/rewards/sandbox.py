"""Runs a Python program that a model wrote, in a process that can do nothing but compute and print.

The process has no network, starts no other process, writes no file, sees no environment variable, and has limits on
memory, processor time, wall time and output. Where rlloop runs as root it gives that up as well. The kernel's seccomp
filter and resource limits do this, without containers or privileges, on Linux (x86-64, aarch64). It bounds accidents
and the tricks that a policy stumbles on; it is no wall against someone who attacks the kernel: for that, put the grader
into a virtual machine behind `HttpReward`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlloop.errors import ConfigError
from rlloop.rewards._sandbox_child import OUT_OF_MEMORY, UNSUPPORTED

CHILD = Path(__file__).with_name("_sandbox_child.py")
Status = Literal["ok", "error", "timeout", "memory", "output"]


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    seconds: float = 5.0  # wall time; processor time is limited to the next whole second above
    memory_mb: int = 512  # address space
    output_bytes: int = 65536  # standard output and standard error, each

    def __post_init__(self) -> None:
        for name, least in (("seconds", 0.01), ("memory_mb", 64), ("output_bytes", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"sandbox limit {name} is {getattr(self, name)}; it must be at least {least}")


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended. `stdout` and `stderr` are cut at the output limit."""

    status: Status
    stdout: str
    stderr: str
    seconds: float


async def _read(process: asyncio.subprocess.Process, stream: asyncio.StreamReader, most: int) -> tuple[bytes, bool]:
    """What the process writes there, cut to `most` bytes, and whether it wrote more, which ends it."""
    data, more = bytearray(), False
    while piece := await stream.read(65536):
        if len(data) + len(piece) > most and not more:
            more = True
            _kill(process)
        # Read on to the end all the same: asyncio waits for the pipes of a dead process to be empty.
        data += piece[: most - len(data)]
    return bytes(data), more


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended in between
        process.kill()


async def run_program(source: str, stdin: str = "", limits: Limits | None = None) -> ProgramResult:
    """Runs `source` with `stdin` and waits for its end.

    Raises ConfigError where this machine cannot confine a process: it then runs nothing.
    """
    limits = limits or Limits()
    job = {
        "source": source,
        "stdin": stdin,
        "cpu_seconds": math.ceil(limits.seconds) + 1,
        "memory_bytes": limits.memory_mb * 2**20,
    }
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlloop-sandbox-", ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-B", str(CHILD)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=folder,
            env={"PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        readers = asyncio.gather(
            *(_read(process, pipe, limits.output_bytes) for pipe in (process.stdout, process.stderr))
        )
        timed_out = False
        try:
            async with asyncio.timeout(limits.seconds):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its exit status says why
                    process.stdin.write(json.dumps(job).encode())
                    await process.stdin.drain()
                    process.stdin.close()
                await asyncio.shield(readers)
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            _kill(process)
            (out, more_out), (err, more_err) = await readers
            code = await process.wait()
    status: Status
    if code == UNSUPPORTED:
        raise ConfigError("this machine cannot confine a program (Linux on x86-64 or aarch64 with seccomp is needed)")
    if timed_out or code == -24:  # SIGXCPU
        status = "timeout"
    elif more_out or more_err:
        status = "output"
    elif code == OUT_OF_MEMORY or b"MemoryError" in err:
        status = "memory"
    else:
        status = "ok" if code == 0 else "error"
    return ProgramResult(status, out.decode(errors="replace"), err.decode(errors="replace"), time.monotonic() - start)
