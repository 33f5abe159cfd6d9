"""`rlloop serve api` as a process of its own, to be killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.command import Command


def processor_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


class ApiProcess:
    def __init__(self, model: Path, folder: Path, port: int, *options: str) -> None:
        self.options = (
            "serve", "api", "--model", str(model), "--folder", str(folder), "--port", str(port), "--threads", "1",
            "--leaf-tokens", "64", *options,
        )  # fmt: skip
        self.url = f"http://127.0.0.1:{port}"
        self._folder = folder
        self._process: Command | None = None

    def start(self) -> ApiProcess:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process = Command(*self.options, cwd=self._folder)
        lines = []
        for line in self._process.stdout:
            lines.append(line)
            if line.startswith("rlloop api: http"):
                return self
        raise AssertionError("".join(lines))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def wait(self) -> int:
        """The exit code of a server that ends by itself."""
        assert self._process is not None
        code = self._process.wait(240)
        self._process.stdout.close()
        return code

    def kill(self) -> None:
        """SIGKILL: nothing is written any more."""
        assert self._process is not None
        if self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
