"""`rlloop doctor`: abilities of this machine, or the layouts in which a model fits."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rlloop.cli.parser import new_parser
from rlloop.errors import ConfigError
from rlloop.parallel.layout import is_other_rank

if TYPE_CHECKING:
    from rlloop.cli.machine_check import Line  # imports torch

DOCTOR = """\
Show what this machine can do (ok) and cannot do (--), and how to get the rest: zero KLD (equal bits) by dtype and
device, optional packages, vLLM. The first call compiles kernels. Exit code: 0, or 1 if the CPU or a GPU does not hold
zero KLD. --compile compiles them, and does nothing else.

With --model and --gpus: the layouts over so many GPUs in which training this model fits, and the memory of a rank by
part, predicted from config.json. Exit code: 0, or 1 if none fits.

With --model and --parity: the KL (k3) and the logprobs that differ between the model's engine and trainer on random
tokens, by type; of a model that reads images also beside drawn pictures, text and image tokens. It loads the model
twice, on the CPU. Exit code: 0, or 1 if a bit differs or image tokens could not be compared.
"""

MOST_MICRO_BATCHES = 4096
OF_LAYOUTS = (  # options that mean nothing without --gpus
    "memory", "tokens", "micro_batches", "offload", "lora", "keep_attention", "offload_activations",
    "freeze_vision_tower", "image_tokens", "critic", "rollout_layout", "shard",
)  # fmt: skip
DOCTOR_EXAMPLES = """\
example:
  rlloop doctor --model my-model --gpus 8 --memory 80
  rlloop doctor --model my-model --gpus 1 --memory 80 --offload masters
  rlloop doctor --model my-model --gpus 8 --memory 80 --lora 32 --tokens 262144
  rlloop doctor --model my-vl --parity
"""


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("doctor", DOCTOR, DOCTOR_EXAMPLES)
    parser.add_argument(
        "--compile", action="store_true", help="compile the CPU kernels now, on all cores, so that no run waits for it"
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="examine this model; needs --gpus or --parity")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs to distribute it over")
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory of one GPU (default: this machine's)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    parser.add_argument(
        "--tokens", type=int, default=16384, metavar="T", help="tokens of a micro-batch (default: 16384)"
    )
    parser.add_argument("--micro-batches", type=int, default=8, metavar="N", help="of an update, at most (default: 8)")
    parser.add_argument(
        "--offload", choices=("none", "moments", "masters"), default="none", help="trainer.offload (default: none)"
    )
    parser.add_argument(
        "--shard", choices=("optimizer", "parameters"), default="optimizer", help="trainer.shard (default: optimizer)"
    )
    parser.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="train an adapter of this rank (default: all weights)"
    )
    parser.add_argument("--keep-attention", action="store_true", help="trainer.checkpoint_keep_attention=true")
    parser.add_argument("--freeze-vision-tower", action="store_true", help="trainer.freeze_vision_tower=true")
    parser.add_argument(
        "--image-tokens", type=int, metavar="N", help="of --tokens, those that stand for pictures (default: all)"
    )
    parser.add_argument("--critic", action="store_true", help="with a critic (algorithm.critic), as PPO has")
    parser.add_argument("--offload-activations", action="store_true", help="trainer.checkpoint_offload=true")
    parser.add_argument(
        "--rollout-layout", nargs="*", metavar="AXIS=N",
        help="layout of the engine, as in tp=2 (no value: one rank), whose own weights are counted "
        "(default: it shares the trainer's)",
    )  # fmt: skip
    parser.add_argument(
        "--parity", nargs="?", const="", metavar="PROFILE",
        help="compare engine and trainer by type of token; PROFILE: the engine's (default: the trainer's), as in "
        "rlloop,expert_combine=bf16_each",
    )  # fmt: skip
    args = parser.parse_args(arguments)
    if (args.model is None) != (args.gpus is None and args.parity is None):
        raise ConfigError("--model and --gpus belong together, as in --model M --gpus 8, or --model and --parity")
    given = [f"--{name.replace('_', '-')}" for name in OF_LAYOUTS if getattr(args, name) != parser.get_default(name)]
    if args.gpus is None and given:
        raise ConfigError(f"{', '.join(given)}: of the memory of layouts; give --model FOLDER and --gpus N as well")
    if is_other_rank(of_machine=args.model is None) and not args.compile:
        return 0
    if args.compile:
        from rlloop.launch.kernels import compile_kernels

        print(f"ok  kernels: compiled in {compile_kernels(('float32', 'bfloat16')):.0f} s, in float32 and bfloat16")
        return 0
    if args.model is None:
        from rlloop.cli.machine_check import examine

        lines = examine()
    else:
        layouts = () if args.gpus is None else _layouts(args)

        from rlloop.cli.model_parity import examine_parity

        parity = examine_parity(args.model, args.dtype, args.parity)
        lines = chain(layouts, parity) if args.parity is None else chain(parity, layouts)  # what refuses comes first
    broken = 0
    for line in lines:
        mark = {True: "ok ", False: "-- ", None: "   "}[line.holds]
        print(f"{mark} {line.subject}: {line.text}", flush=True)
        broken += line.subject.startswith(("zero KLD", "fits")) and not line.holds
    return 1 if broken else 0


def _layouts(args: argparse.Namespace) -> Iterator[Line]:
    """The lines of `--gpus`. Raises `ConfigError` for numbers out of range."""
    if args.gpus < 1 or args.tokens < 1 or args.lora < 0:
        raise ConfigError(
            f"--gpus is {args.gpus}, --tokens {args.tokens} and --lora {args.lora}; the first two must be at least "
            "1, and a rank cannot be negative"
        )
    if not 1 <= args.micro_batches <= MOST_MICRO_BATCHES:
        raise ConfigError(f"--micro-batches is {args.micro_batches}; it must be from 1 to {MOST_MICRO_BATCHES}")
    if args.memory is not None and not args.memory > 0:
        raise ConfigError(f"--memory is {args.memory:g}; it must be a positive number of GiB")
    if args.image_tokens is not None and not 0 <= args.image_tokens <= args.tokens:
        raise ConfigError(f"--image-tokens is {args.image_tokens}; it must be from 0 to --tokens ({args.tokens})")

    from rlloop.cli.memory import examine_model

    return examine_model(
        args.model, args.gpus, args.dtype, args.tokens, args.memory, args.offload, args.lora, args.keep_attention,
        args.offload_activations, args.freeze_vision_tower, args.image_tokens, args.critic,
        args.rollout_layout, args.micro_batches, args.shard,
    )  # fmt: skip
