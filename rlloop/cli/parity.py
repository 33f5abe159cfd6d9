"""`rlloop parity A B`: its arguments, and what of them can be refused before torch is there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rlloop.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")

DESCRIPTION = """\
How far two definitions of one model are apart, where they part first, and what each knob between them brings.

A and B are, each, one of:
  FOLDER[@PROFILE]           rlloop's definition of a Hugging Face folder; PROFILE is rlloop, stock, huggingface or
                             reference, then knobs: FOLDER@rlloop,linear=stock,expert_combine=bf16_each
  engine:FOLDER[@PROFILE]    sampled by the embedded engine
  transformers:FOLDER        transformers' own model
  RUN                        a run's last saved rollout
  FILE.jsonl                 logprobs from elsewhere: prompt_ids, token_ids, logprobs and, perhaps, token_types
"""


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0, or 3 with --require where a bit differs."""
    given = _parser().parse_args(arguments)
    _refuse(given)

    from rich.console import Console

    from rlloop.parity_tool.report import compare, draw, show

    console = Console()
    report = compare(given.a, given.b, given.dtype, given.prompts, given.sequences, given.length)
    show(report, console)
    if given.output is not None:
        (given.output / "parity.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n")
        draw(report, given.output / "parity.png")
        console.print(f"{given.output / 'parity.json'}, {given.output / 'parity.png'}", highlight=False)
    return 3 if given.require and not report.comparison.all.equal else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlloop parity",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("a", metavar="A", help="in the engine's place")
    parser.add_argument("b", metavar="B", help="in the trainer's place")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="what models compute in (float32)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSONL of prompt_ids, token_ids and token_types")
    parser.add_argument("--sequences", type=int, default=8, metavar="N", help="without --prompts: random ones (8)")
    parser.add_argument("--length", type=int, default=64, metavar="N", help="tokens of a random sequence (64)")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="write parity.json and parity.png there")
    parser.add_argument("--require", action="store_true", help="exit code 3 where a bit differs")
    return parser


def _refuse(given: argparse.Namespace) -> None:
    for text in (given.a, given.b):
        place = text.removeprefix("engine:").removeprefix("transformers:")
        if not any(Path(name).exists() for name in (place, place.partition("@")[0])):
            raise ConfigError(
                f"{text}: there is no {place}; give a model's folder, engine:FOLDER, transformers:FOLDER, a run's "
                "folder, or a file of logprobs"
            )
    for name, least in (("sequences", 1), ("length", 2)):
        if getattr(given, name) < least:
            raise ConfigError(f"--{name} is {getattr(given, name)}; it must be at least {least}")
    if given.prompts is not None and not given.prompts.is_file():
        raise ConfigError(f"--prompts is {str(given.prompts)!r}, and there is no such file")
    if given.output is not None:
        try:
            given.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"-o is {str(given.output)!r}; it cannot be made: {error.strerror}") from None
