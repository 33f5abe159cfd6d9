"""`rlloop delta A B`: its arguments and its printed result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlloop.cli.parser import new_parser

DELTA = """\
Measure a weight sync from checkpoint A to B: bytes by rlloop's codec, by other codecs, and by the entropy.
"""

DELTA_EXAMPLES = """\
example:
  rlloop delta runs/mine/checkpoints/step_50 runs/mine/checkpoints/step_100 --bfloat16
"""


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("delta", DELTA, DELTA_EXAMPLES)
    parser.add_argument("old", type=Path, metavar="A", help="a Hugging Face folder with safetensors")
    parser.add_argument("new", type=Path, metavar="B", help="the same model, some steps later")
    parser.add_argument("--tensors", action="store_true", help="also print a line for each tensor")
    parser.add_argument(
        "--bfloat16", action="store_true",
        help="round float32 to bfloat16 first: checkpoints are float32, engines of model.dtype=bfloat16 get bfloat16",
    )  # fmt: skip
    args = parser.parse_args(arguments)

    from rlloop.cli.delta_size import Sizes, compare, describe, read_pair, version_bytes

    old, new = read_pair(args.old, args.new, args.bfloat16)
    total = Sizes()
    for name, tensor in compare(old, new):
        if args.tensors:
            changed = 100 * tensor.changed / max(1, tensor.elements)
            print(f"{name}: {tensor.full:,} bytes, {changed:.3g}% changed, {tensor.delta:,} bytes of delta")
        total += tensor
    print("\n".join(describe(total, *version_bytes(old, new))))
    return 0
