"""Figures from a process of its own, one by one as it measures them, until its time is over.

for made in told([sys.executable, __file__, "--child", "peer"], seconds=120):
    print(made)  # {"length": 32768, "seconds": 1.5}: what the child said by `tell(length=32768, seconds=1.5)`
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MARK = "#made "


def tell(**values: Any) -> None:
    """Hand values to the process that reads `told`, at once."""
    print(f"\n{MARK}{json.dumps(values)}", flush=True)


def told(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """What the command tells. It and its processes are killed when the seconds are over, or nobody reads on.

    Raises `subprocess.CalledProcessError` if it fails by itself.
    """
    child = subprocess.Popen(
        command, env={**os.environ, **(environment or {})}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    late = threading.Event()

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.killpg(child.pid, signal.SIGKILL)

    def end() -> None:
        late.set()
        kill()

    timer = threading.Timer(seconds, end)
    timer.start()
    assert child.stdout is not None
    try:
        for line in child.stdout:
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK))
        code = child.wait()
    finally:
        timer.cancel()
        kill()
        child.wait()
        child.stdout.close()
    if late.is_set():
        print(f"stopped after {seconds:.0f} s: {' '.join(command)}", file=sys.stderr, flush=True)
    elif code:
        raise subprocess.CalledProcessError(code, command)
