"""The recurrence of gated delta networks and of Mamba-2 beside kernels of flash-linear-attention, mamba-ssm and vLLM.

    python benchmarks/gpu_recurrent.py [--cells 'Nemotron*/decode*'] [--seconds 120] [--triton FOLDER ...] [--quick]

Cells are `SHAPE/WORK`. Training, `8x1024` and `1x8192` tokens: the scan alone, forward, and forward and backward, whole
sequences end to end, timed with their launches. Decode, of 1, 32 and 256 sequences: one token of each by CUDA graphs,
every call on states of its own. Ours takes and makes float32, the peers bfloat16 with float32 decays
(`recurrent_peers.py`); those that are not installed are left out. `tokens-8x1024`: our forward of whole sequences,
which goes in chunks, beside our decode of the same sequences, one token of each after the other, both by CUDA graphs;
their results are compared bit for bit.

vLLM's kernels have no backward. That of flash-linear-attention refuses to run with Triton 3.4 to 3.7.0 on Hopper, where
it would be wrong. `--triton` names folders that hold other releases of Triton (`pip install --no-deps --target FOLDER
triton==3.7.1`): a peer that refuses here is tried with each of them in a process of its own, which takes its turns in
the same rounds, and its figure names the release. What runs nowhere is named without a value.

The peers' autotuners try their whole lists; what they will compile is compiled before, on all CPUs
(`compile_ahead.py`). Figures are recorded with each peer that is ready, vLLM's first, so that a run that is cut off has
some; what it is at goes to stderr.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial

import rlloop  # before torch, as `rlloop train` does  # isort: skip
import cells
import recurrent_peers as peers
import torch
from compile_ahead import compile_ahead, progress
from gpu_shapes import seconds
from recurrent_peers import PLACE, Call, Shape, elapsed, inputs
from recurrent_worker import Worker
from results_schema import Figure, need_gpus, report
from torch import Tensor

from rlloop.numerics.layout import AttentionLayout, RecurrentState
from rlloop.numerics.ops import ops_for
from rlloop.numerics.profile import NumericsProfile

assert rlloop.__version__
SHAPES = {  # key heads, heads, numbers of a key, of a value; the delta rule or not
    "Qwen3.5-35B-A3B": (16, 32, 128, 128, True),
    "Nemotron-3-Nano": (8, 64, 128, 64, False),
}
TINY = {"toy-delta": (1, 2, 8, 8, True), "toy-mamba": (1, 2, 8, 4, False)}
TRAINING = {"8x1024": (8, 1024), "1x8192": (1, 8192)}  # sequences, tokens of each
DECODE = {"decode-1": 1, "decode-32": 32, "decode-256": 256}
READING = {"tokens-8x1024": (8, 1024)}
SMALL = {"2x32": (2, 32)}, {"decode-2": 2}, {"tokens-2x40": (2, 40)}  # 40: two chunks and a half on a GPU
QUICK = ["*/8x1024", "*/decode-32"]
ROUNDS = 5
OPS = ops_for(NumericsProfile())


def milliseconds(timers: list[Callable[[], float]]) -> list[list[float]]:
    """Milliseconds of one call of each, in rounds in which they take turns."""
    times = [list[float]() for _ in timers]
    for index in range(ROUNDS + 2):
        for timer, each in zip(timers, times, strict=True):
            took = timer()
            if index > 1:
                each.append(took)
    return times


def training(name: str, shape: Shape, sequences: int, length: int, tritons: list[str]) -> Iterator[list[Figure]]:
    """Of the forward, then of the forward and backward, as `growing` has them."""
    corrects, tokens = shape[4], sequences * length
    layout = AttentionLayout.of_sequences([length] * sequences, PLACE)
    leaves = [x.requires_grad_() for x in inputs(tokens, shape)]
    grad = torch.randn(tokens, *leaves[2].shape[1:], device=PLACE)
    others = peers.scans(leaves, corrects, layout.query_start.int(), grad)

    def forward() -> Tensor:
        return OPS.scan(*(x.detach() for x in leaves), corrects, layout, None)

    def both() -> object:
        return torch.autograd.grad(OPS.scan(*leaves, corrects, layout, None), leaves, grad)

    compile_ahead(f"{name}'s peers", [call for calls in others.values() for call in calls if call is not None])
    for at, (kind, work) in enumerate({"forward": forward, "forward and backward": both}.items()):
        calls = {peer: call for peer, each in others.items() if (call := each[at]) is not None}
        asked = partial(Worker.first, tritons, at=at, shape=shape, sequences=sequences, length=length)
        yield from growing(f"{kind}, {name}, {sequences} x {length} tokens", work, calls, asked)


def growing(
    title: str, work: Call, calls: dict[str, Call], asked: Callable[[str], Worker | None]
) -> Iterator[list[Figure]]:
    """The work beside the peers that are ready, whenever there is one more; those that refuse come last, in workers."""
    timers, refused = dict[str, Callable[[], float]](), list[str]()

    def measured() -> list[Figure]:
        value, *times = milliseconds([partial(elapsed, work), *timers.values()])
        return compared(title, "ms", value, dict(zip(timers, times, strict=True)), refused, aim=0.8)

    for peer, call in calls.items():
        progress(f"{title}: {peer}")
        if peers.runs(peer, call):
            timers[peer] = partial(elapsed, call)
            yield measured()
        else:
            refused.append(peer)
    if refused or not timers:
        yield measured()
    with ExitStack() as workers:
        for peer in [*refused]:
            progress(f"{title}: {peer} in a process of its own")
            if worker := asked(peer):
                workers.enter_context(worker)
                refused.remove(peer)
                timers[f"{peer} with Triton {worker.triton}"] = worker.elapsed
                yield measured()


def compared(
    title: str, unit: str, value: list[float], times: dict[str, list[float]], refused: Iterable[str], aim: float
) -> list[Figure]:
    """A figure for each peer, without its value where it does not run."""
    rounds: dict[str | None, list[float] | None] = {**times, **{f"{peer}: does not run here": None for peer in refused}}
    return [
        Figure.of_rounds(title, unit, value, peer, other, aim=aim if other else None, lower_is_better=True)
        for peer, other in (rounds or {None: None}).items()
    ]


def decode(name: str, shape: Shape, sequences: int) -> list[Figure]:
    groups, heads, key, width, corrects = shape
    size = OPS.scan_state(groups, heads, key, width, PLACE)
    layout = AttentionLayout(
        torch.arange(sequences + 1, device=PLACE), torch.arange(sequences, device=PLACE) % 16 + 100,
        torch.zeros(sequences, 1, dtype=torch.int64, device=PLACE), 1, contiguous=False,
    )  # fmt: skip
    given = inputs(sequences, shape)
    copies = max(2, min(32, (256 << 20) // (sequences * heads * key * width * 4)))
    rows = torch.arange(sequences, device=PLACE)
    stores = [torch.randn(sequences, *size, device=PLACE) * 0.1 for _ in range(copies)]

    def ours(store: Tensor) -> Tensor:
        with torch.inference_mode():
            return OPS.scan(*given, corrects, layout, RecurrentState(store, rows, settled=True))

    asked = peers.steps(given, corrects, copies)
    run = {peer: calls for peer, calls in asked.items() if peers.runs(peer, calls[0])}
    works: list[list[Callable[[], object]]] = [[lambda store=store: ours(store) for store in stores], *run.values()]
    if PLACE.type == "cuda":
        value, *times = ([1e6 * each for each in rounds] for rounds in seconds(works))
    else:
        value, *times = ([1000 * elapsed(calls[0]) for _ in range(ROUNDS)] for calls in works)
    title = f"decode, {name}, {sequences} sequences"
    return compared(title, "us", value, dict(zip(run, times, strict=True)), asked.keys() - run.keys(), aim=1.0)


def reading(name: str, shape: Shape, sequences: int, length: int) -> list[Figure]:
    """In chunks, as the trainer and prefill read, beside token by token, as decode does."""
    groups, heads, key, width, corrects = shape
    given = inputs(sequences * length, shape)
    whole = AttentionLayout.of_sequences([length] * sequences, PLACE)
    store = torch.zeros(sequences, *OPS.scan_state(groups, heads, key, width, PLACE), device=PLACE)
    rows, starts = torch.arange(sequences, device=PLACE), torch.arange(sequences + 1, device=PLACE)
    block = torch.zeros(sequences, 1, dtype=torch.int64, device=PLACE)
    contexts = torch.arange(length, device=PLACE)[:, None].repeat(1, sequences)
    layouts = [AttentionLayout(starts, context, block, 1, contiguous=False) for context in contexts]
    by_token = [x.unflatten(0, (sequences, length)).transpose(0, 1).contiguous() for x in given]
    state = RecurrentState(store, rows)

    def chunks() -> Tensor:
        with torch.inference_mode():
            return OPS.scan(*given, corrects, whole, None)

    def tokens() -> Iterator[Tensor]:
        with torch.inference_mode():
            for at, layout in enumerate(layouts):
                yield OPS.scan(*(x[at] for x in by_token), corrects, layout, state)

    def all_tokens() -> None:
        for _ in tokens():
            pass

    made = torch.stack([*tokens()], 1).flatten(0, 1)
    differ = int((made.view(torch.int32) != chunks().view(torch.int32)).sum())
    if PLACE.type == "cuda":
        value, other = ([1000 * each for each in rounds] for rounds in seconds([[chunks], [all_tokens]]))
    else:
        value, other = milliseconds([partial(elapsed, chunks), partial(elapsed, all_tokens)])
    title = f"{name}, {sequences} x {length} tokens"
    return [
        *compared(f"forward in chunks, {title}", "ms", value, {"token by token": other}, [], aim=1.0),
        Figure(name=f"differ from token by token, of {made.numel():,} numbers, {title}", unit="numbers", value=differ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one size of each; records nothing")
    parser.add_argument(
        "--triton", nargs="+", default=[], metavar="FOLDER", help="other releases, for peers that refuse"
    )
    parser.add_argument("--tiny", action="store_true", help="toys on a CPU, nothing recorded")
    cells.add_arguments(parser)
    args = parser.parse_args()
    shapes, (scans, steps, reads) = (TINY, SMALL) if args.tiny else (SHAPES, (TRAINING, DECODE, READING))
    every = [f"{shape}/{work}" for shape in shapes for work in (*scans, *steps, *reads)]
    picked = cells.chosen(every, args.cells or (QUICK if args.quick and not args.tiny else None))
    if args.list:
        print("\n".join(picked))
        return
    if not args.tiny:
        need_gpus(instead="--tiny runs a toy on a CPU")
    packages = [package for module, package in peers.PACKAGES.items() if peers.here(module)]
    for cell in cells.within({cell: [cell] for cell in picked}, args.seconds):
        name, work = cell.split("/")
        if work in scans:
            made = training(name, shapes[name], *scans[work], args.triton)
        elif work in reads:
            made = iter([reading(name, shapes[name], *reads[work])])
        else:
            made = iter([decode(name, shapes[name], steps[work])])
        for figures in made:
            report("gpu-recurrent", figures, packages=tuple(packages), part=True, write=not (args.quick or args.tiny))


if __name__ == "__main__":
    main()
