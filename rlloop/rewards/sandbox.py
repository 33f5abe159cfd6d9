"""Runs a Python program that a model wrote, in a process that can do nothing but compute and print.

The process has no network, starts no other process, signals none, reads no other's memory or environment, writes no
file, reads (where the kernel has Landlock) only the interpreter's own, and has limits on memory, processor time, wall
time and output. Linux on x86-64 or aarch64, without containers or privileges: an allow-list of system calls (seccomp),
resource limits, no capabilities, a user namespace and Landlock where the kernel grants them. Where neither these nor
the loss of root's capabilities keep the memory of the process that starts a program from it, none is run.

It bounds accidents and the tricks that a policy stumbles on; it is no wall against someone who attacks the kernel: for
that, put the grader into a virtual machine behind `HttpReward`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import platform
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rlloop.errors import ConfigError
from rlloop.rewards._sandbox_child import OUT_OF_MEMORY
from rlloop.rewards.seccomp import ARCHITECTURES, seccomp_filter

CHILD = Path(__file__).with_name("_sandbox_child.py")
REMEDY = (
    "One of these will do: user namespaces (in Docker a seccomp profile that allows `unshare`), a kernel with Landlock "
    "(5.13 or newer), rlloop run as root with its capabilities, or programs judged on another machine behind HttpReward"
)
STARTING = 60.0  # seconds that an interpreter may take to start, on a machine that has much to do
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


@dataclass(frozen=True)
class TestResult:
    """How a test of a program ended; `why` says why it did not pass."""

    __test__ = False  # none of pytest's

    verdict: Literal["passed", "failed", "timeout", "unsupported"]
    why: str = ""


@dataclass(frozen=True)
class Job:
    """What a sandboxed process is to do."""

    source: str
    stdin: str
    cpu_seconds: int
    memory_bytes: int
    filter: str  # seccomp's, in hexadecimal digits
    parent: int  # process id
    threads: int = 64
    judges: bool = False  # `source` is a test, of the program at the other end of `channel`
    channel: tuple[int, ...] = ()  # file descriptors to read and to write calls of a program's functions


class _Process:
    """A process that confines itself, then does its job."""

    def __init__(self, process: asyncio.subprocess.Process, control: asyncio.StreamReader, most: int) -> None:
        self.process, self.control = process, control
        assert process.stdout is not None
        assert process.stderr is not None
        # From the start: asyncio waits for the pipes of a dead process to be empty.
        self.outputs = asyncio.gather(*(self._read(pipe, most) for pipe in (process.stdout, process.stderr)))

    async def begun(self) -> None:
        """Wait until it is confined. Raises ConfigError where it cannot be."""
        async with asyncio.timeout(STARTING):
            said = (await self.control.readline()).decode()
        if said == "":
            raise RuntimeError(f"a sandboxed process ended before it began: {(await self.ended(1)).stderr}")
        if said != "confined\n":
            raise ConfigError(f"this machine cannot confine a program: {said}. {REMEDY}")

    async def _read(self, stream: asyncio.StreamReader, most: int) -> tuple[bytes, bool]:
        """What the process writes there, cut to `most` bytes, and whether it wrote more, which ends it."""
        data, more = bytearray(), False
        while piece := await stream.read(65536):
            if len(data) + len(piece) > most and not more:
                more = True
                self.kill()
            data += piece[: most - len(data)]
        return bytes(data), more

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended in between
            self.process.kill()

    async def ended(self, seconds: float) -> ProgramResult:
        """Wait for the end, `seconds` at most."""
        start, timed_out = time.monotonic(), False
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(self.outputs)
                await self.process.wait()
        except TimeoutError:
            timed_out = True
            self.kill()
        (out, more_out), (err, more_err) = await self.outputs
        code = await self.process.wait()
        status: Status
        if timed_out or code == -24:  # SIGXCPU
            status = "timeout"
        elif more_out or more_err:
            status = "output"
        elif code == OUT_OF_MEMORY or b"MemoryError" in err:
            status = "memory"
        else:
            status = "ok" if code == 0 else "error"
        stdout, stderr = (text.decode(errors="replace") for text in (out, err))
        return ProgramResult(status, stdout, stderr, time.monotonic() - start)


@contextlib.asynccontextmanager
async def _spawned(
    limits: Limits, source: str, stdin: str = "", *, judges: bool = False, channel: tuple[int, ...] = ()
) -> AsyncIterator[_Process]:
    """A sandboxed process, which ends here if not earlier."""
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        raise ConfigError(
            f"this machine ({sys.platform}, {platform.machine()}) cannot confine a program: that takes Linux on x86-64 "
            "or aarch64; judge programs on another machine, behind HttpReward"
        )
    job = Job(
        source,
        stdin,
        cpu_seconds=math.ceil(limits.seconds) + 1,
        memory_bytes=limits.memory_mb * 2**20,
        filter=_filter(platform.machine()),
        parent=os.getpid(),
        judges=judges,
        channel=channel,
    )
    read, write = os.pipe()
    control = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(control), os.fdopen(read, "rb")
    )
    with contextlib.closing(pipe):
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-B", str(CHILD), str(write)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd="/",
                env={"PYTHONHASHSEED": "0"},
                start_new_session=True,
                pass_fds=(write, *channel),
            )
        finally:
            os.close(write)
        spawned = _Process(process, control, limits.output_bytes)
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its exit status says why
                process.stdin.write(json.dumps(asdict(job)).encode())
                await process.stdin.drain()
                process.stdin.close()
            yield spawned
        finally:
            spawned.kill()
            await spawned.outputs
            await process.wait()


@functools.cache
def _filter(machine: str) -> str:
    return seccomp_filter(machine).hex()


async def run_program(source: str, stdin: str = "", limits: Limits | None = None) -> ProgramResult:
    """Runs `source` with `stdin` and waits for its end.

    Raises ConfigError where this machine cannot confine a process: it then runs nothing.
    """
    limits = limits or Limits()
    async with _spawned(limits, source, stdin) as process:
        await process.begun()
        return await process.ended(limits.seconds)


async def run_test(program: str, test: str, limits: Limits | None = None) -> TestResult:
    """Whether `test`, Python statements or one expression, holds for `program`: each in a sandboxed process of its own.

    All that the program can do for a test is to answer its calls with plain data (`rlloop.rewards._sandbox_calls` says
    which); that is compared where the program cannot reach. Raises ConfigError as `run_program` does.
    """
    limits = limits or Limits()
    async with contextlib.AsyncExitStack() as stack:
        pipes = [*os.pipe(), *os.pipe()]
        try:
            asked, ask, answered, answer = pipes
            begin = stack.enter_async_context
            processes = [
                await begin(_spawned(limits, program, channel=(asked, answer))),
                await begin(_spawned(limits, test, judges=True, channel=(answered, ask))),
            ]
        finally:
            for end in pipes:
                os.close(end)
        for process in processes:
            await process.begun()
        judge = processes[1]
        try:
            async with asyncio.timeout(limits.seconds):
                verdict = await judge.control.readline()
        except TimeoutError:
            return TestResult("timeout", f"took longer than {limits.seconds:g} s")
        if not verdict:
            return TestResult("failed", f"the test's process died: {(await judge.ended(1)).stderr[-500:]}")
        return TestResult(**json.loads(verdict))


@functools.cache
def require_confinement() -> None:
    """Raises ConfigError where programs could not be confined."""
    with ThreadPoolExecutor(1) as pool:  # the caller may have an event loop of its own
        pool.submit(asyncio.run, run_program("")).result()
