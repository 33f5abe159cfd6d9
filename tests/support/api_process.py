"""`rlloop serve api` as a process of its own, to be killed."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ApiProcess:
    def __init__(self, model: Path, folder: Path, port: int, *options: str) -> None:
        self.command = [
            sys.executable, "-m", "rlloop", "serve", "api", "--model", str(model), "--folder", str(folder),
            "--port", str(port), "--threads", "1", "--leaf-tokens", "64", *options,
        ]  # fmt: skip
        self.url = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> ApiProcess:
        self._process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._process.stdout is not None
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

    def kill(self) -> None:
        """SIGKILL: nothing is written any more."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
