"""`rlloop compare`: runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlloop.cli.parser import new_parser

COMPARE = """\
Compare runs: outcomes, whether each collapsed, and the settings that differ.

Runs that differ in the seed only are one arm, with a band over its seeds, each seed's outcome at the end (pass@1, mean
reward or preference accuracy), and bootstrap intervals of their mean and of the difference from the control. That is
the first arm; of a multirun, one without a mismatch. Collapse is decided by the rule in the runs' configurations
(eval.collapse_fraction, eval.collapse_evals).
"""

COMPARE_EXAMPLES = """\
examples:
  rlloop compare runs/a runs/b
  rlloop compare runs/countdown/2026-01-01_12-00-00 -o report.html    a multirun's folder: all of its runs
"""


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("compare", COMPARE, COMPARE_EXAMPLES)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="runs' folders, or a multirun's")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE",
        help="also write a report: .html (plus its pictures and data in files of the same name), or .png (curves only)",
    )  # fmt: skip
    args = parser.parse_args(arguments)

    from rlloop.study.compare import compare

    compare(args.runs, args.output)
    return 0
