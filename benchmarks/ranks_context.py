"""Training on one sequence of 131,072 and of 262,144 tokens over the GPUs of a host (`trainer.layout.cp`), beside one.

    python benchmarks/ranks_context.py [--cp 1 2 4] [--lengths 131072 262144] [--keep-attention] [--layers 28] [--quick]

A random Qwen3 of the 0.6B shape, bfloat16, all layers recomputed in the backward (`--keep-attention` and
`--offload-activations` as in `long_context.py`, whose sequences and loss these are). Forward and backward; the update
is left out. Each number of GPUs has processes of its own, one after the other, and goes from short to long until a GPU
is out of memory. Figures are recorded with each of them: tokens per second beside one GPU's; peak memory of the GPU
that needs most, of tensors, beside one GPU's and beside what `rlloop doctor --model --micro-batches 1` predicts
(without an engine's parts, and what CUDA and NCCL reserve); and how many logprobs have other bits than one GPU's, which
1 among `--cp` makes. Two rounds of each length, fewer where the time that is left is needed for one of every longer
length.

`--tiny` runs a toy shape on CPUs over gloo, which shows that the script works and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from long_context import OUTGROWN, POSITIONS, check_layers, config_of, memory_figures, predicted, title_of, words_of
from long_context_sides import needed, sequence
from ranks_train import FOUND, our_model, run_ranks
from results_schema import Figure, need_gpus, report

from rlloop.parallel.layout import Layout

LENGTHS, SMALL = [131072, 262144], [96, 161]  # the last does not divide by the number of ranks
WARM, PROMPT = 4096, {True: 20, False: 512}  # tokens that are not trained, of toys or not
Made = dict[str, Any]  # of a length: seconds of rounds, peak of each rank, logprobs as int32; or that it is outgrown
Found = dict[int, dict[int, Made]]  # GPUs -> tokens -> what was made


class Setting:
    """One rank's part of the work."""

    def __init__(self, args: argparse.Namespace, rank: int, size: int) -> None:
        self.rank, self.size, self.args, self.prompt = rank, size, args, PROMPT[args.tiny]
        self.device = torch.device("cpu") if args.tiny else torch.device("cuda", rank)
        self.config = config_of(args.tiny, args.layers)
        self.layout = Layout(cp=size)


def child(setting: Setting, address: str, out: Path) -> None:
    """One rank, which goes from short to long; the first writes what it has found after each round."""
    from rlloop.algorithms import get_loss
    from rlloop.config.trainer import TrainerConfig
    from rlloop.parallel.start import process_group
    from rlloop.trainer import Trainer, TrainSequence

    args, found, cuda = setting.args, dict[int, Made](), setting.device.type == "cuda"

    def run(length: int) -> np.ndarray:
        uniform = np.full(length - setting.prompt, -np.log(model.vocab_size), np.float32)
        batch = TrainSequence(
            token_ids=sequence(length, model.vocab_size), predict=range(setting.prompt, length),
            advantages=np.ones_like(uniform), rollout_logprobs=uniform,
        )  # fmt: skip
        result = trainer.forward_backward([batch], get_loss("grpo"), old_logprobs=[uniform])
        trainer.drop_gradient()
        if cuda:
            torch.cuda.synchronize()
        return np.concatenate(result.logprobs)

    def measure(length: int, longer: list[int]) -> None:
        made: Made = {"seconds": [], "peak": []}
        for index in range(args.rounds):
            late = index and time.monotonic() + needed(made["seconds"][-1], length, longer) > args.until
            if ranks.gather_objects(late)[0]:  # each would find another answer
                break
            if cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            ranks.gather_objects(None)
            begin = time.perf_counter()
            logprobs = run(length)
            ranks.gather_objects(None)  # when all are done
            made["seconds"].append(time.perf_counter() - begin)
            made["peak"] = ranks.gather_objects(torch.cuda.max_memory_allocated() if cuda else 0)
            made["logprobs"] = logprobs.astype(np.float32).view(np.int32).tolist()
            found[length] = made
            if setting.rank == 0:
                took = f"{made['seconds'][-1]:.2f} s"
                print(f"cp={setting.size}, {length:,} tokens: {took}", file=sys.stderr, flush=True)
                out.write_text(json.dumps(found))

    with process_group(setting.device, address, setting.rank, setting.size):
        model = our_model(setting, setting.layout)
        ranks = model.context.ranks("cp")
        kept = {"checkpoint_keep_attention": args.keep_attention, "checkpoint_offload": args.offload_activations}
        trainer = Trainer(model, TrainerConfig(max_batch_tokens=POSITIONS, checkpoint_layers="all", **kept))
        run(min(WARM, *args.lengths))
        for at, length in enumerate(args.lengths):
            try:
                measure(length, args.lengths[at + 1 :])
            except torch.OutOfMemoryError as error:
                print(f"rank {setting.rank}: {str(error).split('. ')[0]}", file=sys.stderr, flush=True)
                (out.parent / "outgrown").write_text(str(length))
                raise


def found_by(args: argparse.Namespace, size: int, end: float) -> tuple[dict[int, Made], bool]:
    """Results of so many GPUs until then, by length, and whether they ended for another reason than memory."""
    given = {**vars(args), "until": end}
    with tempfile.TemporaryDirectory() as name:
        codes = run_ranks([__file__, "--child", json.dumps(given), str(size)], size, folder := Path(name))
        out, outgrown = folder / FOUND, folder / "outgrown"
        told = json.loads(out.read_text()) if out.exists() else {}
        found = {int(length): made for length, made in told.items()}
        if outgrown.exists():
            least = int(outgrown.read_text())
            return {each: {"outgrown": True} for each in args.lengths if each >= least} | found, False
    if codes:
        print(f"{size} GPUs: ranks ended with {codes}", file=sys.stderr, flush=True)
    return found, bool(codes)


def figures_of(args: argparse.Namespace, found: Found, size: int, length: int) -> list[Figure]:
    """Figures of one length over so many GPUs, beside one GPU where it has been measured."""
    setting, made, alone = Setting(args, 0, size), found[size].get(length), found.get(1, {}).get(length)
    if made is None:  # its ranks ended before
        return []
    settings = {"keep_attention": args.keep_attention, "offload_activations": args.offload_activations}
    said = title_of(length, words_of(args.tiny, args.layers), {**settings, "offload": "none"}) + f", cp={size}"
    outgrown = bool(alone and alone.get("outgrown"))
    peer = None if size == 1 or alone is None else "itself on 1 GPU" + OUTGROWN * outgrown
    beside = None if peer is None or outgrown else alone
    if made.get("outgrown"):
        return [Figure(name=f"forward + backward, {said}{OUTGROWN}", unit="tokens/s", value=0.0, peer=peer)]
    speeds, others = ([length / each for each in (side or {"seconds": []})["seconds"]] for side in (made, beside))
    figures = [Figure.of_rounds(f"forward + backward, {said}", "tokens/s", speeds, peer, others)]
    if peak := max(made["peak"]):
        expected = predicted(setting.config, length, {**settings, "offload": "none"}, setting.layout)
        other = max(beside["peak"]) if beside else None
        figures += memory_figures(f"largest of the GPUs, {said}", peak, peer, other, expected)
    if beside:
        one, other = (np.array(side["logprobs"]) for side in (made, beside))
        differ = int((one != other).sum())
        differing = f"logprobs that differ from one GPU's, of {len(one):,}, {said}"
        figures.append(Figure(name=differing, unit="logprobs", value=differ))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, nargs="+", help="numbers of GPUs; 1, 2 and 4 of those there are by default")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of the sequence")
    parser.add_argument("--layers", type=int, help="of the model; all if left out")
    parser.add_argument("--keep-attention", action="store_true", help="trainer.checkpoint_keep_attention=true")
    parser.add_argument("--offload-activations", action="store_true", help="trainer.checkpoint_offload=true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=540, help="of all; second rounds are left out to keep it")
    parser.add_argument("--quick", action="store_true", help="nothing recorded")
    parser.add_argument("--tiny", action="store_true", help="a toy on CPUs, nothing recorded")
    parser.add_argument("--child", nargs=5, metavar=("ARGS", "SIZE", "RANK", "ADDRESS", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        given, size, rank, address, out = args.child
        given = argparse.Namespace(**json.loads(given))
        torch.set_num_threads(1 if given.tiny else 4)
        child(Setting(given, int(rank), int(size)), address, Path(out))
        return 0
    if not args.tiny:
        need_gpus(max(args.cp or [1]), "--tiny runs a toy on a CPU")
    end, there = time.monotonic() + args.seconds, 2 if args.tiny else torch.cuda.device_count()
    args.lengths = sorted(args.lengths or (SMALL if args.tiny else LENGTHS))
    sizes = sorted(args.cp or [size for size in (1, 2, 4) if size <= there])
    if not (least := PROMPT[args.tiny] + 2) <= args.lengths[0] <= args.lengths[-1] <= POSITIONS:
        parser.error(f"--lengths: from {least:,} up to {POSITIONS:,} tokens")
    check_layers(parser, args)
    found, failed = Found(), False
    for at, size in enumerate(sizes):
        share = 1 / size / sum(1 / each for each in sizes[at:])  # of the time: half of it on twice the GPUs
        found[size], ended = found_by(args, size, time.monotonic() + (end - time.monotonic()) * share)
        failed |= ended
        figures = [figure for length in args.lengths for figure in figures_of(args, found, size, length)]
        report("ranks-context", figures, packages=("triton",), part=True, write=not (args.quick or args.tiny))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
