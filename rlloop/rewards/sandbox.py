"""Sandbox for Python programs written by a model: a process that can only compute and print.

It has no network, cannot start or signal processes, cannot read other processes' memory or environment, writes no file,
reads only the interpreter's own files (if the kernel has Landlock), and has limits on memory, processor time, wall time
and output. It needs Linux on x86-64 or aarch64, but no container and no privileges: it uses an allow-list of system
calls (seccomp), resource limits, no capabilities, and a user namespace and Landlock if the kernel grants them. If none
of these keeps a program from reading the memory of the process that starts it, no program is run.

It stops accidents and the tricks that a policy stumbles on, not an attack on the kernel: for that, run the grader in a
virtual machine behind `HttpReward`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import platform
import shutil
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
    "(5.13 or newer), rlloop run as root with its capabilities, or programs run on another machine behind HttpReward"
)
# By language: an interpreter in one process, and the options before a program that is an argument.
INTERPRETERS = {
    "bash": ("bash", "--noprofile", "--norc", "-c"),
    "javascript": ("node", "--openssl-config=/dev/null", "--jitless", "-e"),
    "lua": ("lua", "-e"),
    "perl": ("perl", "-e"),
    "php": ("php", "-n", "-r"),
    "ruby": ("ruby", "-e"),
}
STARTING = 60.0  # seconds for an interpreter to start, on a busy machine
Status = Literal["ok", "error", "timeout", "memory", "output"]


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    seconds: float = 5.0  # wall time; processor time is limited to the next whole second
    memory_mb: int = 512  # address space
    output_bytes: int = 65536  # standard output and standard error, each

    def __post_init__(self) -> None:
        for name, least in (("seconds", 0.01), ("memory_mb", 64), ("output_bytes", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"sandbox limit {name} is {getattr(self, name)}; it must be at least {least}")


@dataclass(frozen=True)
class ProgramResult:
    """The end of a program. `stdout` and `stderr` are cut at the output limit."""

    status: Status
    stdout: str
    stderr: str
    seconds: float


@dataclass(frozen=True)
class TestResult:
    """The result of a program's test; `why` is the reason if it did not pass."""

    __test__ = False  # not a test of pytest's

    verdict: Literal["passed", "failed", "timeout", "unsupported"]
    why: str = ""


@dataclass(frozen=True)
class Job:
    """The task of a sandboxed process, as JSON on its standard input."""

    source: str
    stdin: str
    cpu_seconds: int
    memory_bytes: int
    filter: str  # seccomp's, in hexadecimal digits
    parent: int  # process id
    threads: int = 64
    is_test: bool = False  # `source` is a test of the program at the other end of `channel`
    channel: tuple[int, ...] = ()  # file descriptors, to read and to write, for calls of a program's functions
    command: tuple[str, ...] = ()  # of another language's interpreter, whose last argument `source` is


class _Process:
    """A process that confines itself and then does its job."""

    def __init__(self, process: asyncio.subprocess.Process, control: asyncio.StreamReader, most: int) -> None:
        self.process, self.control = process, control
        assert process.stdout is not None
        assert process.stderr is not None
        # Read from the start: asyncio waits until the pipes of a dead process are empty.
        self.outputs = asyncio.gather(*(self._read(pipe, most) for pipe in (process.stdout, process.stderr)))

    async def begun(self) -> None:
        """Wait until it is confined. Raises ConfigError if that is impossible on this machine."""
        async with asyncio.timeout(STARTING):
            answer = (await self.control.readline()).decode()
        if answer == "":
            raise RuntimeError(f"a sandboxed process ended before it began: {(await self.ended(1)).stderr}")
        if answer != "confined\n":
            raise ConfigError(f"this machine cannot confine a program: {answer}. {REMEDY}")

    async def _read(self, stream: asyncio.StreamReader, most: int) -> tuple[bytes, bool]:
        """The process's output, cut to `most` bytes, and True if there was more, for which the process is killed."""
        data, more = bytearray(), False
        while piece := await stream.read(65536):
            if len(data) + len(piece) > most and not more:
                more = True
                self.kill()
            data += piece[: most - len(data)]
        return bytes(data), more

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            self.process.kill()

    async def ended(self, seconds: float) -> ProgramResult:
        """Wait `seconds` at most for its end; then kill it."""
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
    limits: Limits,
    source: str,
    stdin: str = "",
    *,
    is_test: bool = False,
    channel: tuple[int, ...] = (),
    command: tuple[str, ...] = (),
) -> AsyncIterator[_Process]:
    """A sandboxed process, which is killed at the end of the context."""
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        raise ConfigError(
            f"this machine ({sys.platform}, {platform.machine()}) cannot confine a program: that needs Linux on x86-64 "
            "or aarch64; run programs on another machine, behind HttpReward"
        )
    job = Job(
        source,
        stdin,
        cpu_seconds=math.ceil(limits.seconds) + 1,
        memory_bytes=limits.memory_mb * 2**20,
        filter=_filter(platform.machine(), bool(command)),
        parent=os.getpid(),
        is_test=is_test,
        channel=channel,
        command=command,
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
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its exit status tells the reason
                process.stdin.write(json.dumps(asdict(job)).encode())
                await process.stdin.drain()
                process.stdin.close()
            yield spawned
        finally:
            spawned.kill()
            await spawned.outputs
            await process.wait()


@functools.cache
def _filter(machine: str, starts: bool) -> str:
    return seccomp_filter(machine, starts=starts).hex()


@functools.cache
def interpreter(language: str) -> tuple[str, ...]:
    """The command that runs a program of `language`, without the program; none for python, which is there already.

    Raises `ConfigError` for a language that is not known, or whose interpreter is not on this machine.
    """
    if language == "python":
        return ()
    if language not in INTERPRETERS:
        known = ", ".join(["python", *INTERPRETERS])
        raise ConfigError(
            f"there is no sandbox for {language!r} programs; there is one for {known}. What must be compiled, or "
            "starts processes, needs a grader of its own behind HttpReward"
        )
    name, *options = INTERPRETERS[language]
    if (path := shutil.which(name)) is None:
        raise ConfigError(f"{language} programs need the interpreter {name}, which is not on this machine's PATH")
    return os.path.realpath(path), *options


async def run_program(
    source: str, stdin: str = "", limits: Limits | None = None, *, language: str = "python"
) -> ProgramResult:
    """Run `source` with `stdin` and wait for its end.

    Raises ConfigError, without running anything, if this machine cannot confine a process, or has no `interpreter`.
    """
    limits = limits or Limits()
    async with _spawned(limits, source, stdin, command=interpreter(language)) as process:
        await process.begun()
        return await process.ended(limits.seconds)


async def run_test(program: str, test: str, limits: Limits | None = None) -> TestResult:
    """Run `test`, Python statements or one expression that must be true, against `program`, each in its own sandbox.

    The program can only answer the test's calls, with plain data (`rlloop.rewards._sandbox_calls`), which is compared
    in the test's process. Raises ConfigError as `run_program` does.
    """
    limits = limits or Limits()
    async with contextlib.AsyncExitStack() as stack:
        pipes = [*os.pipe(), *os.pipe()]
        try:
            asked, ask, answered, answer = pipes
            begin = stack.enter_async_context
            processes = [
                await begin(_spawned(limits, program, channel=(asked, answer))),
                await begin(_spawned(limits, test, is_test=True, channel=(answered, ask))),
            ]
        finally:
            for end in pipes:
                os.close(end)
        for process in processes:
            await process.begun()
        tester = processes[1]
        try:
            async with asyncio.timeout(limits.seconds):
                verdict = await tester.control.readline()
        except TimeoutError:
            return TestResult("timeout", f"took longer than {limits.seconds:g} s")
        if not verdict:
            return TestResult("failed", f"the test's process died: {(await tester.ended(1)).stderr[-500:]}")
        return TestResult(**json.loads(verdict))


@functools.cache
def require_confinement(language: str = "python") -> None:
    """Raises ConfigError if this machine cannot confine programs, or an interpreter does not start confined."""
    with ThreadPoolExecutor(1) as pool:  # the caller may be in an event loop
        result = pool.submit(asyncio.run, run_program("", limits=Limits(seconds=STARTING), language=language)).result()
    if result.status != "ok":
        raise ConfigError(f"the interpreter of {language} programs does not start confined: {result.stderr:.300}")
