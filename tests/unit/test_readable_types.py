"""Types of messages, which threads decode."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FIRST = """
import sys, threading
from dataclasses import make_dataclass
import msgspec
from rlloop.web.requests import parsed

sys.setswitchinterval(1e-6)
for _ in range(50):
    inner = make_dataclass("Inner", [(f"f{index}", "int | None", None) for index in range(20)])
    kind = msgspec.defstruct("Kind", [("inner", list[inner])])
    begin = threading.Barrier(8)
    read = lambda: (begin.wait(), parsed(b'{"inner": [{"f1": 2}]}', kind))
    threads = [threading.Thread(target=read) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
"""


def test_several_threads_may_be_the_first_to_read_a_type() -> None:
    assert subprocess.run([sys.executable, "-c", FIRST], cwd=Path(__file__).parents[2]).returncode == 0
