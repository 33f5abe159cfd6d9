"""`rlloop doctor --model FOLDER --parity`: whether engine and trainer give a model's tokens the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlloop.cli.machine_check import Line
from rlloop.models.config import read_config

SEQUENCES = 8  # of text


def examine_parity(folder: Path, dtype: str, profile: str | None) -> Iterator[Line]:
    """A line for each type of token: text and image tokens beside drawn pictures, and completions of texts.

    `profile`: the engine's, "" the trainer's, which is `rlloop`. None: nothing is measured, and of a model that reads
    images a line says how to ask for it. Raises `ConfigError` or `ModelError` for a profile or folder that cannot be
    used.
    """
    sees = read_config(folder).vision is not None
    if profile is None:
        if sees:
            yield Line(None, "text and image tokens", "--parity compares engine and trainer on them, on the CPU")
        return

    from rlloop.parity_tool.measure import ALL
    from rlloop.parity_tool.report import compare  # imports matplotlib

    engine = f"engine:{folder}@{profile}" if profile else f"engine:{folder}"
    report = compare(engine, str(folder), dtype, None, SEQUENCES, None)
    for name, each in report.comparison.by_type.items():
        if name != ALL:
            yield Line(
                each.equal,
                f"zero KLD of {name} tokens, {dtype}",
                f"k3 {each.k3:.2g}, {each.different} of {each.tokens} logprobs differ, engine against trainer",
            )
    if sees and report.text_only:
        yield Line(False, f"zero KLD of image tokens, {dtype}", f"not measured. {report.text_only}")
