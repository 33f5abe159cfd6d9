"""Tokens per second and peak memory of forward and backward on a GPU, bfloat16: the trainer beside PyTorch.

    python benchmarks/gpu_train.py [--cells '0.6B/*' '8B-8/short'] [--seconds 540] [--rounds 3] [--without padded]
                                   [--max-batch-tokens 16384] [--apart] [--quick] [--list] [--profile]

Cells are `SHAPE/WORK`; without `--cells` those of 0.6B, of 8 layers of the 8B shape and of `moe`. Work: `short` 64
sequences of 128 + 384 tokens, `long` 8 of 512 + 7,680, `ragged` 96 of 128 to 2,176, of which 64 are the prompt. All
take the same sequences in micro-batches of at most 16,384 tokens (`--max-batch-tokens`; figures name another), with
GRPO's clipped loss.

- rlloop: `forward_backward`, every parity guarantee on: invariant kernels, float64 losses with their metrics, the
  entropy of every token, logprobs handed back. It holds weights in bfloat16 (2 B a parameter), masters and AdamW's
  moments (4 and 8 B) and sums of gradients in float32, of n micro-batches at most ceil(log2 n) + 1 (4 B each, those of
  one micro-batch 2 B).
- peers (train_peers.py): transformers' own model, padded or packed, each also compiled, with the fastest attention that
  runs and logits in chunks; no metrics and no entropy. They hold weights and gradients in bfloat16 (2 B each).

The fastest peer counts for speed, the one with the least memory for memory, plus what it lacks: masters, moments and a
gradient in float32, 16 B a parameter. The others are recorded too. Those that do not run are named, with the reason.

Each has a process of its own. Where they fit on the GPU together they take turns, and each round follows one that is
not timed, since memory is handed back in between; else (or with `--apart`) they run one after the other. One that ends
beside the others runs once more alone. Speeds are medians of the rounds, beside their least and most; tokens are those
of the sequences, never padding; peak memory is that of tensors. Losses and gradients' norms are compared: a peer that
is further off than `CLOSE` says so in its name. The roofline is three forwards at the peak rate.

With `--profile` rlloop trains alone, nothing is recorded, and a batch's kernels and the host's operations are printed
with their times: a GPU that works less than a batch takes waits for the host.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import cells
import numpy as np
from children import Child, Ended, Rounds, answer, in_turns
from gpu_shapes import EVERY, SHAPES, bytes_of, make_folder
from profiled import profiled
from results_schema import Figure, device_name, need_gpus, report
from roofline import device_rates, train_speed
from train_peers import Peer, Row, timed

BUDGET, ROUNDS, CLOSE, GIB = 16384, 5, 0.02, 1 << 30
SPEED, MEMORY = 1.15, 1.0  # aims
LACKS = 4 + 8 + 4  # bytes a parameter of masters, moments, float32 gradients
BESIDE = 1 << 30  # of a process that waits: CUDA's own
OLD_LOGPROB = -float(np.log(151936))
WORKS = {"short": "64 x (128 + 384)", "long": "8 x (512 + 7,680)", "ragged": "96 x (64 + 64 to 2,112)"}
CELLS = [f"{shape}/{work}" for shape in SHAPES for work in WORKS]
USUAL = ["0.6B/*", "8B-8/*", "moe/*"]
PEERS = {  # the arguments of `Peer`
    "padded": {"packed": False, "compiled": False},
    "padded, compiled": {"packed": False, "compiled": True},
    "packed": {"packed": True, "compiled": False},
    "packed, compiled": {"packed": True, "compiled": True},
}
SIDES = ["rlloop", *PEERS]
TINY = {"budget": 20, "new": {"tiny": [(3, 5), (2, 9), (4, 4)]}}  # micro-batches of two and one
Run = Callable[[], float]  # the loss


def sequences(work: str) -> list[Row]:
    rng = np.random.default_rng(0)
    sizes = {"short": [(128, 384)] * 64, "long": [(512, 7680)] * 8, **TINY["new"]}.get(work)
    if sizes is None:
        sizes = [(64, int(new)) for new in rng.integers(64, 2113, 96)]
    advantages = np.random.default_rng(1).normal(size=len(sizes)).tolist()
    return [
        Row(rng.integers(3, 150000, prompt + new), prompt, advantage, np.full(new, OLD_LOGPROB, np.float32))
        for (prompt, new), advantage in zip(sizes, advantages, strict=True)
    ]


class Ours:
    """rlloop's side of `Theirs`."""

    name = "rlloop"

    def __init__(self, folder: Path, device: str, budget: int) -> None:
        import rlloop
        from rlloop.config.trainer import TrainerConfig
        from rlloop.trainer import Trainer

        model = rlloop.load_model(folder, dtype="bfloat16", device=device)
        self.trainer = Trainer(model, TrainerConfig(max_batch_tokens=budget, lr=0.0))

    def prepare(self, batch: list[Row]) -> Run:
        from rlloop.algorithms import get_loss
        from rlloop.trainer import TrainSequence

        old = [row.old for row in batch]
        made = [
            TrainSequence(
                token_ids=row.tokens.tolist(), predict=range(row.prompt, len(row.tokens)),
                advantages=np.full(len(row.old), row.advantage, np.float32), rollout_logprobs=row.old,
            )
            for row in batch
        ]  # fmt: skip

        def run() -> float:
            result = self.trainer.forward_backward(made, get_loss("grpo"), old_logprobs=old)
            return float(result.metrics["loss/total"].value)

        return run

    def drop_gradient(self) -> None:
        self.trainer.drop_gradient()

    def gradient_norm(self) -> float:
        return self.trainer.optim_step()["loss/grad_norm"]  # at a rate of 0


class Theirs:
    """A peer: `prepare` for a batch, then call what that made; gradients add up until they are dropped."""

    def __init__(self, folder: Path, device: str, budget: int, how: dict[str, bool]) -> None:
        self.peer, self.budget = Peer(folder, device, **how), budget

    @property
    def name(self) -> str:
        return self.peer.name

    def prepare(self, batch: list[Row]) -> Run:
        parts = self.peer.lay_out(batch, self.budget)
        self.peer.tune(parts)
        return lambda: self.peer.forward_backward(parts)[0]

    def drop_gradient(self) -> None:
        self.peer.drop_gradient()

    def gradient_norm(self) -> float:
        return self.peer.gradient_norm()


def serve(what: str, folder: Path, device: str, budget: int, turns: bool) -> None:
    """A round for each line on stdin (`WORK ROUND`), of which 0 makes everything ready: its speed, peak memory in GiB,
    loss, norm of the gradient, and the side's name."""
    import torch

    side = Ours(folder, device, budget) if what == "rlloop" else Theirs(folder, device, budget, PEERS[what])
    ready: dict[str, Any] = {}  # of the work at hand

    def once() -> float:
        loss = ready["run"]()
        side.drop_gradient()
        return loss

    def round_of(line: str) -> dict[str, Any]:
        work, index = line.split()
        batch = sequences(work)
        if index == "0":
            ready["run"] = side.prepare(batch)
            ready.update(loss=ready["run"](), norm=side.gradient_norm())
            side.drop_gradient()
        if index == "0" or turns:
            once()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = timed(once, device)
        peak = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None
        if device == "cuda" and turns:
            torch.cuda.empty_cache()
        made = {"speed": sum(len(row.tokens) for row in batch) / seconds, "peak": peak, "name": side.name}
        made |= {"loss": ready["loss"], "norm": ready["norm"]}
        print(f"{work}, round {index}, {seconds:.3f} s: {made}", file=sys.stderr, flush=True)
        return made

    answer(round_of)


def together(shape: str, peers: int, memory: float, budget: int = BUDGET) -> bool:
    """True if a GPU has room for all processes, of which those that wait keep what their parameters need."""
    import torch

    from rlloop.models.config import parse_config
    from rlloop.parallel.layout import Layout
    from rlloop.training.memory import ENGINES, layer_activations, predict

    config = parse_config(EVERY[shape][1])
    parts = predict(config, Layout(), torch.bfloat16, budget).parts
    layers = layer_activations(config, Layout(), torch.bfloat16, budget) * config.num_layers  # none is made again
    ours = sum(size for name, size in parts.items() if name not in (*ENGINES, "reserved", "activations")) + layers
    return ours + peers * (bytes_of(shape)[0] + BESIDE) < 0.9 * memory


def figures_of(shape: str, work: str, found: Rounds, failures: dict[str, str], budget: int = BUDGET) -> list[Figure]:
    """Figures of one cell: rlloop's speed and memory beside each peer's, those first that count."""
    words, config = EVERY[shape]
    if "rlloop" not in found:
        return []
    mine, others = found["rlloop"], {name: rounds for name, rounds in found.items() if name != "rlloop"}
    batch = sequences(work)
    sizes, rates = [(len(row.tokens), len(row.old)) for row in batch], device_rates(device_name())
    bound = rates and train_speed(config, sizes, rates[1])
    title = f"trainer forward + backward, {words} bf16, {WORKS.get(work, work)}"
    title += f", at most {budget:,} tokens at once" if budget != BUDGET else ""
    lacks = LACKS * bytes_of(shape)[0] / 2 / GIB

    def of(rounds: list[dict[str, Any]], key: str) -> list[float]:
        return [each[key] for each in rounds]

    def named(rounds: list[dict[str, Any]]) -> str:
        last = rounds[-1]
        apart = [
            f"{what} {last[key] / mine[-1][key]:.3f} of rlloop's"
            for key, what in (("loss", "loss"), ("norm", "gradient's norm"))
            if abs(last[key] - mine[-1][key]) > CLOSE * abs(mine[-1][key])
        ]
        return ", ".join([last["name"], *apart])

    fastest = sorted(others.items(), key=lambda side: -float(np.median(of(side[1], "speed"))))
    leanest = sorted(others.items(), key=lambda side: max(of(side[1], "peak"))) if mine[-1]["peak"] else []
    speeds = [
        Figure.of_rounds(
            title, "tokens/s", of(mine, "speed"), named(rounds), of(rounds, "speed"),
            peer_kind=f"transformers, {name}", aim=None if at else SPEED, roofline=bound,
        )
        for at, (name, rounds) in enumerate(fastest)
    ]  # fmt: skip
    for name, reason in failures.items():
        said = f"transformers, {name}: does not run here ({reason})"
        kind = f"transformers, {name}"
        speeds.append(Figure.of_rounds(title, "tokens/s", of(mine, "speed"), said, peer_kind=kind, roofline=bound))
    speeds = speeds or [Figure.of_rounds(title, "tokens/s", of(mine, "speed"), roofline=bound)]
    memory = [
        Figure.of_rounds(
            f"peak memory, {title}", "GiB", of(mine, "peak"),
            f"{rounds[-1]['name']}: {max(of(rounds, 'peak')):.1f}, and {lacks:.1f} of masters, moments, gradients",
            [peak + lacks for peak in of(rounds, "peak")], peer_kind=f"transformers, {name}",
            aim=None if at else MEMORY, lower_is_better=True,
        )
        for at, (name, rounds) in enumerate(leanest)
    ]  # fmt: skip
    return speeds + memory


def measure(
    shape: str, works: Iterable[str], names: list[str], rounds: int, turns: bool,
    record: Callable[[list[Figure]], object], budget: int,
) -> bool:  # fmt: skip
    """Record each work's figures once it is done. False where rlloop ended."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as place:
        make_folder(shape, Path(place))
        found: dict[str, Rounds] = {}
        failures: dict[str, str] = {}

        def ended(child: Child, error: Ended) -> None:
            print(error, file=sys.stderr, flush=True)
            failures[child.name] = (error.errors or [str(error).splitlines()[-1]])[-1][:120]

        def known(work: str, made: Rounds) -> None:
            found.setdefault(work, {}).update(made)
            missing = {name: why for name, why in failures.items() if name not in found[work] and name in PEERS}
            record(figures_of(shape, work, found[work], missing, budget))

        def run(group: list[str], these: Iterable[str]) -> list[str]:
            arguments = ["--child", place, device, str(budget), str(int(len(group) > 1))]
            children = [Child(name, [sys.executable, __file__, *arguments, name]) for name in group]
            return list(in_turns(children, these, rounds, known, ended))

        for work in run(names, works) if turns else works:
            for name in names:
                if name not in found.get(work, ()):
                    failures.pop(name, None)
                    run([name], [work])
    return all("rlloop" in each for each in found.values())


def show_profiles(shape: str, works: Iterable[str], budget: int) -> None:
    """Print where the time of rlloop's batches goes."""
    import torch

    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as place:
        make_folder(shape, Path(place))
        side = Ours(Path(place), "cuda" if cuda else "cpu", budget)
        for work in works:
            run = side.prepare(sequences(work))

            def once(run: Run = run) -> None:
                run()
                side.drop_gradient()
                if cuda:
                    torch.cuda.synchronize()

            once()
            profiled(once, 1, f"{shape}/{work}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="nothing recorded")
    parser.add_argument("--tiny", action="store_true", help="a toy on a CPU, nothing recorded")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--without", choices=list(PEERS), action="append", default=[], help="of the peers")
    parser.add_argument("--max-batch-tokens", type=int, default=BUDGET, help="of a micro-batch, for all sides")
    parser.add_argument("--apart", action="store_true", help="one after the other, even if there is room for all")
    parser.add_argument("--profile", action="store_true", help="print where the time of rlloop's batches goes")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    cells.add_arguments(parser)
    args = parser.parse_args()
    if args.child:
        folder, device, budget, turns, what = args.child
        serve(what, Path(folder), device, int(budget), turns == "1")
        return 0
    if not (args.tiny or args.list):
        need_gpus(instead="--tiny runs a toy on a CPU")
    names = [name for name in SIDES if name not in args.without]

    def record(figures: list[Figure]) -> None:
        write = not (args.quick or args.tiny)
        report("gpu-train", figures, packages=("triton", "transformers"), part=True, write=write)

    if args.tiny and args.profile:
        show_profiles("tiny", ["tiny"], TINY["budget"])
        return 0
    if args.tiny:
        return int(not measure("tiny", ["tiny"], names, args.rounds, not args.apart, record, TINY["budget"]))
    picked = cells.chosen(CELLS, args.cells or USUAL)
    if args.list:
        print("\n".join(picked))
        return 0
    import torch

    failed, budget, room = [], args.max_batch_tokens, torch.cuda.get_device_properties(0).total_memory
    begun = cells.within({cell: [cell] for cell in picked}, args.seconds)
    for shape, mine in itertools.groupby(begun, lambda cell: cell.split("/")[0]):
        if args.profile:
            show_profiles(shape, (cell.split("/")[1] for cell in mine), budget)
            continue
        turns = not args.apart and together(shape, len(names) - 1, room, budget)
        if not measure(shape, (cell.split("/")[1] for cell in mine), names, args.rounds, turns, record, budget):
            failed.append(shape)
    if failed:
        print(f"rlloop did not run everything of {' '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
