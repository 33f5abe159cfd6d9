"""A peer's scan in a process of its own, with a release of Triton other than this one's.

    python benchmarks/recurrent_worker.py '["flash-linear-attention", 1, [16, 32, 128, 128, true], 8, 1024]'

That is the peer, 0 for forward or 1 for forward and backward, the shape, the sequences and the tokens of each. It calls
the peer once, its kernels compiled ahead, and prints its release of Triton; then, for each line that it reads, the
milliseconds of one more call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from typing import Any, Self

from compile_ahead import compile_ahead
from recurrent_peers import PLACE, Shape, elapsed, inputs, scans

PATIENCE = 240.0  # seconds until an answer; the first comes when every kernel has been compiled and tuned


class Worker:
    """Such a process; `triton` is its release. Raises RuntimeError if the peer does not run in it either."""

    def __init__(self, folder: str, peer: str, at: int, shape: Shape, sequences: int, length: int) -> None:
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps([peer, at, shape, sequences, length])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
        try:
            self.triton = str(self._answer())
        except RuntimeError:
            self.__exit__()
            raise

    @classmethod
    def first(cls, folders: Iterable[str], peer: str, **asked: Any) -> Self | None:
        """With the first of the folders that has a Triton with which the peer runs; the others' reasons are printed."""
        for folder in folders:
            try:
                return cls(folder, peer, **asked)
            except RuntimeError as error:
                print(f"{peer} does not run with {folder}: {error}", flush=True)
        return None

    def elapsed(self) -> float:
        """Milliseconds of one call."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        timer = threading.Timer(PATIENCE, self._process.kill)
        timer.start()
        answer = json.loads(self._process.stdout.readline() or '{"error": "it ended, or took too long"}')
        timer.cancel()
        if isinstance(answer, dict):
            raise RuntimeError(answer["error"])
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the packages print is no answer
    try:
        answer(answers)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}), file=answers)


def answer(answers: Any) -> None:
    import torch
    import triton

    peer, at, shape, sequences, length = json.loads(sys.argv[1])
    given = inputs(sequences * length, shape)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=PLACE) * length
    call = scans(given, shape[-1], starts, torch.randn_like(given[2]), [peer])[peer][at]
    compile_ahead(f"{peer} with Triton {triton.__version__}", [call])
    call()
    print(json.dumps(triton.__version__), file=answers)
    for _ in sys.stdin:
        print(json.dumps(elapsed(call)), file=answers)


if __name__ == "__main__":
    main()
