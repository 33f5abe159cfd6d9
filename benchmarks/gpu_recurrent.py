"""The recurrence of gated delta networks and of Mamba-2 beside flash-linear-attention's kernels.

    python benchmarks/gpu_recurrent.py [--quick]

Training: the scan alone, forward and backward, whole sequences end to end, timed with their launches; ours takes and
makes float32, the peer bfloat16 with float32 decays. Decode: one token of each sequence by CUDA graphs, every call on
states of its own. Without the package `fla` (flash-linear-attention) there is no peer, nor where it refuses: its
backward does with Triton 3.4 to 3.7 on Hopper, where it would be wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable

import rlloop  # before torch, as `rlloop train` does  # isort: skip
import torch
from gpu_shapes import seconds
from results_schema import Figure, report, table
from torch import Tensor

from rlloop.numerics.layout import AttentionLayout, RecurrentState
from rlloop.numerics.ops import ops_for
from rlloop.numerics.profile import NumericsProfile

assert rlloop.__version__
SHAPES = {  # key heads, heads, numbers of a key, of a value; the delta rule or not
    "Qwen3.5-35B-A3B": (16, 32, 128, 128, True),
    "Nemotron 3 Nano": (8, 64, 128, 64, False),
}
TRAINING = ((8, 1024), (1, 8192))  # sequences, tokens of each
DECODE = (1, 32, 256)
ROUNDS = 5
OPS = ops_for(NumericsProfile())
CUDA = torch.device("cuda")


def inputs(tokens: int, shape: str) -> list[Tensor]:
    """q, k [T, G, K], v [T, H, V], decay and beta [T, H]: float32."""
    groups, heads, key, width, _ = SHAPES[shape]
    q, k = (torch.randn(tokens, groups, key, device=CUDA) for _ in "qk")
    v, gates = torch.randn(tokens, heads, width, device=CUDA), torch.rand(2, tokens, heads, device=CUDA)
    return [q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), v, 0.9 + 0.1 * gates[0], gates[1]]


def theirs(given: list[Tensor], shape: str) -> dict[str, Tensor]:
    """The same for the peer, which has no groups in Mamba-2, nor betas: they are multiplied into the values."""
    groups, heads, _, _, corrects = SHAPES[shape]
    q, k, v, decay, beta = given
    if not corrects:
        q, k = (x.repeat_interleave(heads // groups, 1) for x in (q, k))
        v = v * beta[..., None]
    named = {"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16(), "g": decay.log()}
    return named | ({"beta": beta.bfloat16()} if corrects else {})


def milliseconds(works: list[Callable[[], object]]) -> list[list[float] | None]:
    """Of one call each, in rounds in which they take turns. None: it does not run here."""
    times: list[list[float]] = [[] for _ in works]
    for at, work in enumerate(works):
        try:
            work()
        except RuntimeError as error:
            print(f"does not run here: {str(error).splitlines()[0]}", file=sys.stderr)
            works[at] = list
    for index in range(ROUNDS + 2):
        for at, work in enumerate(works):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            if index > 1:
                times[at].append(begin.elapsed_time(end))
    return [None if work is list else each for work, each in zip(works, times, strict=True)]


def training(shape: str, sequences: int, length: int, peer: bool) -> list[Figure]:
    corrects, tokens = SHAPES[shape][4], sequences * length
    layout = AttentionLayout.of_sequences([length] * sequences, CUDA)
    leaves = [x.requires_grad_() for x in inputs(tokens, shape)]
    grad = torch.randn(tokens, *leaves[2].shape[1:], device=CUDA)
    works: list[Callable[[], object]] = [
        lambda: OPS.scan(*(x.detach() for x in leaves), corrects, layout, None),
        lambda: torch.autograd.grad(OPS.scan(*leaves, corrects, layout, None), leaves, grad),
    ]
    if peer:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.simple_gla import chunk_simple_gla

        run = chunk_gated_delta_rule if corrects else chunk_simple_gla
        named = {name: x.detach()[None].requires_grad_() for name, x in theirs(leaves, shape).items()}
        starts = layout.query_start.int()
        half = grad.bfloat16()[None]
        works += [
            lambda: run(**{name: x.detach() for name, x in named.items()}, scale=1.0, cu_seqlens=starts)[0],
            lambda: torch.autograd.grad(run(**named, scale=1.0, cu_seqlens=starts)[0], list(named.values()), half),
        ]
    times = milliseconds(works)
    of_peer = times[2:] or [None, None]
    name = f"{shape}, {sequences} x {length} tokens"
    return [
        Figure.of_rounds(
            f"{kind}, {name}", "ms", value or [0.0], None if other is None else "flash-linear-attention", other,
            aim=0.8, lower_is_better=True,
        )
        for kind, value, other in zip(("forward", "forward and backward"), times[:2], of_peer, strict=True)
    ]  # fmt: skip


def decode(shape: str, sequences: int, peer: bool) -> list[Figure]:
    groups, heads, key, width, corrects = SHAPES[shape]
    size = OPS.scan_state(groups, heads, key, width, CUDA)
    layout = AttentionLayout(
        torch.arange(sequences + 1, device=CUDA), torch.arange(sequences, device=CUDA) % 16 + 100,
        torch.zeros(sequences, 1, dtype=torch.int64, device=CUDA), 1, contiguous=False,
    )  # fmt: skip
    given = inputs(sequences, shape)
    copies = max(2, min(32, (256 << 20) // (sequences * heads * key * width * 4)))
    rows = torch.arange(sequences, device=CUDA)
    stores = [torch.randn(sequences, *size, device=CUDA) * 0.1 for _ in range(copies)]

    def ours(store: Tensor) -> Tensor:
        with torch.inference_mode():
            return OPS.scan(*given, corrects, layout, RecurrentState(store, rows))

    works: list[list[Callable[[], object]]] = [[lambda store=store: ours(store) for store in stores]]
    if peer:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
        from fla.ops.simple_gla import fused_recurrent_simple_gla

        run = fused_recurrent_gated_delta_rule if corrects else fused_recurrent_simple_gla
        named = {name: x[:, None] for name, x in theirs(given, shape).items()}
        states = [torch.randn(sequences, heads, key, width, device=CUDA) for _ in range(copies)]

        def other(state: Tensor) -> Tensor:
            with torch.inference_mode():
                return run(**named, scale=1.0, initial_state=state, output_final_state=True)[0]

        works.append([lambda state=state: other(state) for state in states])
    value, *rest = ([1e6 * each for each in times] for times in seconds(works))
    return [
        Figure.of_rounds(
            f"decode, {shape}, {sequences} sequences", "us", value, "flash-linear-attention" if peer else None,
            rest[0] if rest else None, aim=1.0, lower_is_better=True,
        )
    ]  # fmt: skip


def show(figures: list[Figure], more: list[Figure]) -> None:
    """Added, and printed at once: a run that is cut short has shown what it measured."""
    figures += more
    for each in more:
        print(f"{each.name}: {each.value:.3f} {each.unit}, peer {each.peer_value}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one size of each; records nothing")
    quick, peer = parser.parse_args().quick, importlib.util.find_spec("fla") is not None
    figures: list[Figure] = []
    for shape in SHAPES:
        for sequences, length in TRAINING[: 1 if quick else None]:
            show(figures, training(shape, sequences, length, peer))
        for sequences in DECODE[1:2] if quick else DECODE:
            show(figures, decode(shape, sequences, peer))
    if quick:
        print(table(figures))
    else:
        report("gpu-recurrent", figures, packages=("flash-linear-attention",) if peer else ())


if __name__ == "__main__":
    main()
