"""One sequence of 32k to 1M tokens on one GPU: training tokens per second and peak memory, and a step of RL.

    python benchmarks/long_context.py [--only 32k 128k] [--keep-attention] [--offload-activations] [--seconds 540]
                                      [--quick] [--tiny]
    python benchmarks/long_context.py --find-longest [--layers 4] [--only 256k] [--seconds 540]
    python benchmarks/long_context.py --rl [--seconds 300]

A random Qwen3 of the 0.6B shape in bfloat16, with as many positions as the lengths take. Forward and backward of one
sequence, of which all but the first 512 tokens are trained by GRPO's clipped loss:

- rlloop: `Trainer` with `checkpoint_layers=all`; `checkpoint_keep_attention`, `checkpoint_offload` and `offload` as
  `--keep-attention`, `--offload-activations` and `--offload` say. Masters and moments are on the GPU.
- peer: transformers' model, SDPA by whichever of PyTorch's choice and cuDNN is faster on 32,768 tokens, gradient
  checkpointing, lm_head and loss in recomputed blocks of 2,048 rows. It holds masters and moments of the same size.

512k and 1M are measured if `--only` names them. Each has a process of its own, and goes from short to long; one that
runs out of memory says so and ends. Three rounds of each length, fewer where the time that is left is needed for one of
every longer length. Peak memory is that of tensors, beside the prediction of `rlloop doctor --model --micro-batches 1`
(without an engine's parts, and what CUDA reserves). `--layers N`: both models have so many, and the figures' names say
it, for lengths at which a step of all layers takes too long.

`--find-longest`: the peer trains on one sequence, and on one of twice the length, from the first of `--only` on, until
it is out of memory; then with its activations offloaded to pinned memory too (`save_on_cpu`), from the length at which
it ran out. Ours trains at the longest that the peer reached either way, and at twice that; rounds as above.

`--rl`: steps of RL at 128k: the engine reads a prompt of 130,000 tokens in chunks and samples 4 completions of 64, the
trainer computes their logprobs again (the prompt once, `share_prompts`), counts those with other bits and tokens that
it draws otherwise, learns and steps. Then a prompt of 256k tokens is read alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from children import told
from gpu_shapes import SHAPES, TINY, save_random
from long_context_rl import read_alone, rl_figures, rl_steps
from long_context_sides import measure, ours, search, theirs
from results_schema import Figure, device_name, need_gpus, report
from roofline import device_rates, train_speed

if TYPE_CHECKING:
    from rlloop.parallel.layout import Layout

ROUNDS, WARM = 3, 4096
POSITIONS = 524288 + 64
LENGTHS = {"32k": 32768, "128k": 131072, "256k": 262144, "512k": 524288, "1M": 1048576}
DEFAULT = ("32k", "128k", "256k")
SIDES = {"rlloop": "rlloop", "peer": "transformers, SDPA, layers recomputed"}
OFFLOADED, OUTGROWN = ", activations offloaded", ": out of memory"
RL = {"prompt": 130000, "new": 64, "count": 4, "alone": 262144}
SMALL = {  # for a CPU, to try the script out
    "lengths": {"96": 96, "160": 160}, "prompt": 20, "warm": 32, "most": 192, "positions": POSITIONS,
    "rl": {"prompt": 150, "new": 5, "count": 2, "alone": 200},
}  # fmt: skip
LARGE = {"lengths": LENGTHS, "prompt": 512, "warm": WARM, "most": 1 << 21, "positions": POSITIONS, "rl": RL}
Found = dict[str, dict[int, dict[str, Any]]]  # side -> length -> seconds of rounds, peak, loss, or out of memory


def config_of(tiny: bool, layers: int | None = None) -> dict[str, Any]:
    config = {**(TINY if tiny else SHAPES["0.6B"])[1], "max_position_embeddings": POSITIONS}
    return config if layers is None else {**config, "num_hidden_layers": layers}


def words_of(tiny: bool, layers: int | None = None) -> str:
    """The shape's name in figures."""
    words, config = TINY if tiny else SHAPES["0.6B"]
    whole = config["num_hidden_layers"]
    return words if layers in (None, whole) else f"{words}, {layers} of {whole} layers"


def check_layers(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    whole = config_of(args.tiny)["num_hidden_layers"]
    if args.layers is not None and not 1 <= args.layers <= whole:
        parser.error(f"--layers {args.layers}: the shape has {whole}; give 1 to {whole}")


def child(side: str, folder: Path, settings: dict[str, Any]) -> None:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if side == "rl":
        import rlloop

        model = rlloop.load_model(folder, dtype="bfloat16", device=device)
        rl_steps(model, settings, device)
        gc.collect()
        torch.cuda.empty_cache()
        read_alone(model, settings, device)
        return
    run = (ours if side == "rlloop" else theirs)(folder, device, settings)
    run(settings["warm"])
    (search if "first" in settings else measure)(run, settings, device)


def predicted(config: dict[str, Any], length: int, settings: dict[str, Any], layout: Layout | None = None) -> float:
    """Bytes that `rlloop doctor --model --micro-batches 1` predicts for a rank, without an engine's parts and what CUDA
    reserves. Without a layout: for one rank."""
    import torch

    from rlloop.models.config import parse_config
    from rlloop.parallel.layout import Layout
    from rlloop.training.memory import ENGINES, predict

    parts = predict(
        parse_config(config), layout or Layout(), torch.bfloat16, length, settings["offload"],
        keep_attention=settings["keep_attention"], offload_activations=settings["offload_activations"], micro_batches=1,
    ).parts  # fmt: skip
    return sum(size for name, size in parts.items() if name not in (*ENGINES, "reserved"))


def speeds(length: int, made: dict[str, Any]) -> list[float]:
    return [length / each for each in made["seconds"]]


def title_of(length: int, words: str, settings: dict[str, Any]) -> str:
    said = f"one sequence of {length:,} tokens, {words} bf16, layers recomputed"
    said += " but for attention" if settings["keep_attention"] else ""
    said += OFFLOADED if settings["offload_activations"] else ""
    return said + ("" if settings["offload"] == "none" else f", offload={settings['offload']}")


def memory_figures(said: str, peak: float, peer: str | None, theirs: float | None, expected: float) -> list[Figure]:
    """Peak memory beside the peer's, and what is predicted beside it; in bytes."""
    gib = 1 << 30
    return [
        Figure(
            name=f"peak memory, {said}", unit="GiB", value=peak / gib, peer=peer, peer_value=theirs and theirs / gib,
            lower_is_better=True,
        ),
        Figure(
            name=f"peak memory that rlloop doctor predicts, {said}", unit="GiB", value=expected / gib, peer="measured",
            peer_value=peak / gib,
        ),
    ]  # fmt: skip


def figures_of(found: Found, length: int, config: dict[str, Any], words: str, settings: dict[str, Any]) -> list[Figure]:
    """Figures of one length, with what has been measured so far."""
    prompt, said = settings["prompt"], title_of(length, words, settings)
    mine, other = (found[side].get(length, {}) for side in SIDES)
    how = OFFLOADED * bool(other.get("offloaded")) + OUTGROWN * bool(other.get("outgrown"))
    named = SIDES["peer"] + how if other else None
    figures = []
    if mine.get("seconds"):
        rates = device_rates(device_name())
        bound = rates and train_speed(config, [(length, length - prompt)], rates[1])
        theirs = speeds(length, other) if other.get("seconds") else None
        figures = [
            Figure.of_rounds(
                f"forward + backward, {said}", "tokens/s", speeds(length, mine), named, theirs, aim=1.0, roofline=bound
            )
        ]  # fmt: skip
    elif mine.get("outgrown") and other.get("seconds"):
        title = f"forward + backward, {said}{OUTGROWN}"
        figures = [Figure.of_rounds(title, "tokens/s", [0.0], named, speeds(length, other), aim=1.0)]
    elif mine.get("outgrown"):
        figures = [Figure(name=f"forward + backward, {said}{OUTGROWN}", unit="tokens/s", value=0.0, peer=named)]
    if mine.get("peak"):
        expected = predicted(config, length, settings)
        figures += memory_figures(said, mine["peak"], named, other.get("peak"), expected)
    return figures


def longest_of(found: Found, side: str) -> int:
    """Tokens of the longest sequence on which a side has trained; 0: of none."""
    return max((length for length, made in found[side].items() if made["seconds"]), default=0)


def longest_figure(found: Found, words: str, settings: dict[str, Any], outgrown: bool) -> list[Figure]:
    """The longest of the lengths tried, which are powers of two apart; ours has tried up to twice the peer's.

    `outgrown`: it was memory, not time, that kept the peer from a longer one."""
    reached = {side: longest_of(found, side) for side in SIDES}
    if not reached["rlloop"]:
        return []
    said = title_of(0, words, settings).partition(" tokens, ")[2]
    how = OFFLOADED * bool(found["peer"][reached["peer"]].get("offloaded"))
    how += "" if outgrown else ": no longer one was tried"
    aim = 2.0 if outgrown else None
    return [
        Figure(
            name=f"longest sequence trained, of twice the peer's longest and that, {said}", unit="tokens",
            value=reached["rlloop"], peer=SIDES["peer"] + how, peer_value=reached["peer"], aim=aim,
        )
    ]  # fmt: skip


class Run:
    """A run of the children: collects what they tell and records it."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder, self.end = args, folder, time.monotonic() + args.seconds
        self.config, self.words = config_of(args.tiny, args.layers), words_of(args.tiny, args.layers)
        settings = {**(SMALL if args.tiny else LARGE), "offload": args.offload, "rounds": args.rounds}
        settings |= {"keep_attention": args.keep_attention, "offload_activations": args.offload_activations}
        names = args.only or [name for name in settings["lengths"] if args.tiny or name in DEFAULT]
        settings["lengths"] = {name: settings["lengths"][name] for name in names}
        longest = max(settings["lengths"].values())
        self.config["max_position_embeddings"] = settings["positions"] = max(POSITIONS, longest + 64)
        self.settings: dict[str, Any] = settings
        self.found: Found = {side: {} for side in SIDES}
        self.failed = False

    def record(self, figures: list[Figure]) -> None:
        write = not (self.args.quick or self.args.tiny)
        report("long-context", figures, packages=("triton", "transformers"), part=True, write=write)

    def told(self, side: str, share: float = 1.0, **more: Any) -> Iterator[dict[str, Any]]:
        """The results of a side's child, given a share of the time that is left."""
        seconds = (self.end - time.monotonic()) * share
        settings = {**self.settings, "deadline": time.monotonic() + seconds, **more}
        command = [sys.executable, __file__, "--child", side, str(self.folder), json.dumps(settings)]
        try:
            for made in told(command, seconds):
                print(f"{side}: {made}", file=sys.stderr, flush=True)
                yield made
        except subprocess.CalledProcessError as error:
            print(f"{side} ended with code {error.returncode}", file=sys.stderr, flush=True)
            self.failed = True

    def take(self, side: str, made: dict[str, Any], **more: Any) -> None:
        """Keep a round of training, and record its length's figures."""
        of = self.found[side].setdefault(made["length"], {"seconds": []})
        if made.get("outgrown"):
            of["outgrown"] = not of["seconds"]
        else:
            of["seconds"].append(made["seconds"])
            of["outgrown"] = False  # it may have been, before activations were offloaded
            of["peak"] = max(made["peak"], of.get("peak", 0)) if made["peak"] else None
        of.update(more)
        self.record(figures_of(self.found, made["length"], self.config, self.words, self.settings))

    def rl(self) -> None:
        steps, alone = list[dict[str, Any]](), list[float]()
        for made in self.told("rl"):
            (steps if "sample" in made else alone).append(made.get("alone", made))
            self.record(rl_figures(steps, alone, self.settings["rl"], self.words))

    def train(self) -> None:
        # Ours last: it has what is left where the peer runs out of memory.
        sides = [side for side in reversed(SIDES) if side not in self.args.without]
        for at, side in enumerate(sides):
            for made in self.told(side, 1 / (len(sides) - at)):
                self.take(side, made)

    def find(self) -> None:
        first, outgrown = min(self.settings["lengths"].values()), 0
        for share, offloaded in ((0.45, False), (0.4, True)):
            outgrown = 0
            for made in self.told("peer", share, first=first, peer_offloads=offloaded, lengths={"first": first}):
                if made.get("late"):
                    print(f"peer: no time for {made['length']:,} tokens; give more --seconds or fewer --layers")
                    continue
                outgrown = made["length"] if made.get("outgrown") else outgrown
                self.take("peer", made, offloaded=offloaded)
            if not outgrown:  # time ended it, or `most` did
                break
            first = outgrown
        longest = longest_of(self.found, "peer")
        if not longest:
            print("the peer trained at none of the lengths; begin with a shorter one (--only)", file=sys.stderr)
            self.failed = True
            return
        self.positions(2 * longest + 64)
        for made in self.told("rlloop", lengths={"longest": longest, "twice": 2 * longest}):
            self.take("rlloop", made)
            self.record(longest_figure(self.found, self.words, self.settings, outgrown > 0))

    def positions(self, count: int) -> None:
        """Rotations for so many positions, and micro-batches of so many tokens."""
        self.config["max_position_embeddings"] = self.settings["positions"] = max(count, POSITIONS)
        path = self.folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": max(count, POSITIONS)}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=LENGTHS, nargs="+", help="of the lengths")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--rl", action="store_true", help="steps of RL instead of training alone")
    what.add_argument("--find-longest", action="store_true", help="the peer's longest sequence, and ours beside it")
    parser.add_argument("--layers", type=int, metavar="N", help="of both models; all if left out")
    parser.add_argument("--without", choices=SIDES, action="append", default=[], help="of the sides")
    parser.add_argument("--offload", choices=("none", "moments", "masters"), default="none")
    parser.add_argument("--keep-attention", action="store_true", help="trainer.checkpoint_keep_attention=true")
    parser.add_argument("--offload-activations", action="store_true", help="trainer.checkpoint_offload=true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=540, help="of all; what is measured by then is recorded")
    parser.add_argument("--quick", action="store_true", help="nothing recorded")
    parser.add_argument("--tiny", action="store_true", help="a toy on a CPU, nothing recorded")
    parser.add_argument("--child", nargs=3, metavar=("SIDE", "FOLDER", "SETTINGS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        side, folder, settings = args.child
        child(side, Path(folder), json.loads(settings))
        return 0
    check_layers(parser, args)
    if args.find_longest and args.without:
        parser.error("--find-longest needs both sides; leave --without out")
    if not args.tiny:
        need_gpus(instead="--tiny runs a toy on a CPU")
    with tempfile.TemporaryDirectory() as folder:
        run = Run(args, Path(folder))
        save_random(run.config, folder)
        (run.rl if args.rl else run.find if args.find_longest else run.train)()
    for side, lengths in run.found.items():
        for length, made in lengths.items():
            if made["seconds"]:
                print(f"{side}, {length:,} tokens: {statistics.median(speeds(length, made)):,.0f} tokens/s")
    return int(run.failed)


if __name__ == "__main__":
    sys.exit(main())
