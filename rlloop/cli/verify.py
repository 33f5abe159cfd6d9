"""`rlloop verify`: the checks of a run's records, printed one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlloop.cli.parser import new_parser
from rlloop.errors import ConfigError

SHOWN_PROBLEMS = 20  # of each check

VERIFY = """\
Check a run's records against each other, against the certificate, and against values computed again. The run may be
running. docs/runs.md says what each check proves. Exit code: 0, or 1 if a check fails.

Of a log of the training API (FOLDER/sessions/ID/models/N): its commands are executed again, and the weights compared.
"""

VERIFY_EXAMPLES = """\
examples:
  rlloop verify runs/mine                  512 completions drawn again, 1,000 rewards computed again
  rlloop verify runs/mine --all            all of them
  rlloop verify runs/mine --replay         train the run again, and compare every record
"""


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("verify", VERIFY, VERIFY_EXAMPLES)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or a model's log of `rlloop serve api`")
    parser.add_argument(
        "--rescore", type=int, default=512, metavar="N",
        help="completions to draw and score again, bit for bit, under the stored weights (default: 512; 0: none)",
    )  # fmt: skip
    parser.add_argument(
        "--rewards", type=_number_or_all, default=1000, metavar="N",
        help="completions whose reward is computed again: a number, or all (default: 1000; 0: none)",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="all completions, for --rescore and --rewards")
    parser.add_argument("--replay", action="store_true", help="train the run again elsewhere, and compare every record")
    parser.add_argument(
        "--run-code", action="store_true",
        help="call the task and reward that the run names even if they are not rlloop's; this may run any code",
    )  # fmt: skip
    parser.add_argument(
        "--public-key", type=Path, metavar="FILE", help="public half of certificate.key, PEM or hexadecimal"
    )
    parser.add_argument("--witness", type=Path, metavar="FILE", help="file written by certificate.witness")
    args = parser.parse_args(arguments)
    if args.witness is not None and (not args.witness.exists() or args.witness.is_dir()):  # it may be a pipe
        raise ConfigError(f"--witness {args.witness} is not a file; give the one that certificate.witness names")

    from rich.console import Console

    from rlloop.api.log import segments
    from rlloop.audit import Extent, verify

    extent = Extent(
        rescored=None if args.all else args.rescore,
        rewarded=None if args.all else args.rewards,
        run_code=args.run_code,
        replay=args.replay,
        public_key=args.public_key,
        witness=args.witness,
    )
    problems = 0
    with Console(stderr=True).status("reading") as status:
        if segments(args.run):
            from rlloop.audit.commands import verify_log

            checks = verify_log(args.run.resolve(), status.update)
        else:
            checks = verify(args.run, extent, status.update)
        for check in checks:
            print(f"{'ok ' if not check.problems else 'BAD'} {check.name}: {check.summary}", flush=True)
            for problem in check.problems[:SHOWN_PROBLEMS]:
                print(f"      {problem}")
            if (more := len(check.problems) - SHOWN_PROBLEMS) > 0:
                print(f"      and {more} more")
            problems += len(check.problems)
    return 1 if problems else 0


def _number_or_all(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdigit():
        raise ValueError(text)
    return int(text)
