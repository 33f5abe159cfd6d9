"""Toy data and a random model, to try the objectives without a download: the larger of two digits.

    python -m rlloop.recipes.offline.toy toy

writes toy/model, and in toy/: demonstrations.jsonl (right answers), mixed.jsonl (either digit, so that there is
something left to prefer) and preferences.jsonl (the larger digit chosen, the smaller rejected).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from ..custom.tiny import write_tiny


def write_toy(folder: Path, seed: int = 0) -> None:
    write_tiny(folder / "model", [str(digit) for digit in range(10)], hidden_size=32, num_layers=2, seed=seed)
    rng = np.random.default_rng(seed)
    pairs = [(a, b) for a in range(10) for b in range(10) if a != b]
    files = {
        "demonstrations": [{"prompt": f"{a} {b}", "completion": str(max(a, b))} for a, b in pairs],
        "mixed": [
            {"prompt": f"{a} {b}", "completion": str(int(rng.choice([a, b])))} for _ in range(10) for a, b in pairs
        ],
        "preferences": [{"prompt": f"{a} {b}", "chosen": str(max(a, b)), "rejected": str(min(a, b))} for a, b in pairs],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: python -m rlloop.recipes.offline.toy FOLDER", file=sys.stderr)
        return 2
    write_toy(Path(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
