"""A process that starts a victim, lets hostile programs loose, and prints as JSON what became of whom.

Usage: SECRET=SECRET-of-the-parent attack_world.py FOLDER open|closed [denied system call]...
That is outside or inside of the sandbox, as whoever runs it.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import attacks  # noqa: E402

from rlloop.errors import ConfigError  # noqa: E402
from rlloop.rewards.sandbox import Limits, run_program  # noqa: E402

LIMITS = Limits(seconds=30.0, memory_mb=256, output_bytes=2**20)


def deny(*numbers: int) -> None:
    """As a container's profile does: these system calls are denied to this process and to all that it starts."""
    program = [(0x20, 0, 0, 0)]
    for number in numbers:
        program += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050001)]
    code = b"".join(struct.pack("HBBI", *one) for one in [*program, (0x06, 0, 0, 0x7FFF0000)])
    buffer, libc = ctypes.create_string_buffer(code, len(code)), ctypes.CDLL(None)
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.c_char_p(header), 0, 0) == 0


class Victim:
    def __init__(self, folder: Path) -> None:
        (folder / "read").write_text("SECRET-in-a-file")
        with (folder / "read").open() as given:
            self.process = subprocess.Popen(
                [sys.executable, "-ISc", "import time; print(flush=True); time.sleep(1000)"],
                env={"SECRET": "SECRET-in-the-environment"},
                stdin=given,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        self.process.stdout.readline()
        (folder / "read").unlink()
        self.before = self.state()

    def state(self) -> object:
        pid = self.process.pid
        return [
            os.getpriority(os.PRIO_PROCESS, pid),
            sorted(os.sched_getaffinity(pid)),
            os.sched_getscheduler(pid),
            [resource.prlimit(pid, which) for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU)],
            ctypes.CDLL(None).syscall(252, 1, pid),  # ioprio_get
        ]

    def harmed(self, patience: float) -> str | None:
        with contextlib.suppress(subprocess.TimeoutExpired):  # a signal takes its time
            self.process.wait(patience)
        if self.process.poll() is not None:
            return f"ended with {self.process.returncode}"
        if Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "SR":
            return "stopped"
        return None if self.state() == self.before else f"{self.before} became {self.state()}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def new_folder(place: Path) -> Path:
    place.mkdir()
    (place / "kept").write_text("kept")
    os.setxattr(place / "kept", "user.kept", b"kept")
    (place / "kept").chmod(0o640)
    return place


def content(folder: Path) -> object:
    def one(file: Path) -> object:
        status = file.lstat()
        text = file.read_text() if file.name == "kept" else None
        extended = [(name, os.getxattr(file, name).decode("latin1")) for name in os.listxattr(file)]
        return [file.name, status.st_mode, status.st_mtime, status.st_nlink, text, extended]

    return sorted(map(one, folder.iterdir()), key=str)


def outside(source: str) -> str:
    done = subprocess.run([sys.executable, "-IS", "-"], input=source, capture_output=True, text=True, timeout=60)
    return done.stdout


def inside(source: str) -> str:
    return asyncio.run(run_program(source, limits=LIMITS)).stdout


def main() -> None:
    place, mode, *denied = sys.argv[1:]
    if denied:
        deny(*map(int, denied))
    run = inside if mode == "closed" else outside
    # All at once where nothing should come of it; one after the other, each with a victim of its own, where it should.
    tables = [attacks.ATTACKS] if mode == "closed" else [{name: text} for name, text in attacks.EFFECTIVE.items()]
    report: dict[str, object] = {"user": os.getuid(), "attacks": {}}
    for number, table in enumerate(tables):
        folder = new_folder(Path(place) / str(number))
        victim, before = Victim(folder), content(folder)
        try:
            started = time.monotonic()
            output = run(attacks.program(table, victim.process.pid, os.getpid(), str(folder)))
            took = time.monotonic() - started
        except ConfigError as error:
            report["refused"] = str(error)
            output, took = "", 0.0
        lines = {line.rpartition(": ")[2]: line for line in output.splitlines() if ": " in line}
        after = content(folder)
        effects = [
            victim.harmed(5.0 if mode == "open" and not attacks.SIGNALS.keys().isdisjoint(table) else 0.0),
            None if after == before else f"{before} became {after}",
            "read" if "SECRET" in output else None,
        ]
        victim.end()
        for name in table:
            report["attacks"][name] = [lines.get(name, "no line"), [each for each in effects if each], took]
    print(json.dumps(report))


if __name__ == "__main__":
    signal.alarm(200)
    main()
