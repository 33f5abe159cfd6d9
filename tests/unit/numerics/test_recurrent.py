"""Recurrent layers' operations: bits that no cut, neighbour or thread leaves a trace in; values and gradients."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlloop.numerics.layout import AttentionLayout, RecurrentState
from rlloop.numerics.ops import ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile

OURS, REFERENCE = ops_for(NumericsProfile()), ops_for(NumericsProfile.preset("reference"))
LENGTHS = [1, 40, 2, 70, 3]
HEADS, GROUPS, KEY, VALUE, CHANNELS, WIDTH = 4, 2, 12, 20, 300, 4
Work = Callable[..., Tensor]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def inputs(tokens: int) -> dict[str, Tensor]:
    return {
        "q": drawn(tokens, GROUPS, KEY, seed=1),
        "k": drawn(tokens, GROUPS, KEY, seed=2) / KEY**0.5,
        "v": drawn(tokens, HEADS, VALUE, seed=3),
        "decay": torch.sigmoid(drawn(tokens, HEADS, seed=4) + 2),
        "beta": torch.sigmoid(drawn(tokens, HEADS, seed=5)),
    }


def scanned(corrects: bool, ops=OURS) -> Work:
    return lambda layout, states, q, k, v, decay, beta: ops.scan(q, k, v, decay, beta, corrects, layout, states)


def convolved(bias: bool, ops=OURS) -> Work:
    given = drawn(CHANNELS, seed=7) if bias else None
    return lambda layout, states, x, weight: ops.causal_conv(x, weight, given, layout, states)


STATE = OURS.scan_state(GROUPS, HEADS, KEY, VALUE, torch.device("cpu"))
CASES = {
    "delta": (scanned(True), inputs(sum(LENGTHS)), {}, STATE),
    "mamba": (scanned(False), inputs(sum(LENGTHS)), {}, STATE),
    **{
        name: (
            convolved(bias), {"x": drawn(sum(LENGTHS), CHANNELS)}, {"weight": drawn(CHANNELS, 1, WIDTH)},
            (WIDTH - 1, CHANNELS),
        )
        for name, bias in (("conv", False), ("conv with a bias", True))
    },
}  # fmt: skip


def steps(counts: list[list[int]]) -> list[AttentionLayout]:
    """Layouts that take so many tokens of each sequence at a time, as an engine's steps do."""
    layouts, before = [], torch.zeros(len(counts[0]), dtype=torch.int64)
    for step in counts:
        start = torch.cat((torch.zeros(1, dtype=torch.int64), torch.tensor(step).cumsum(0)))
        layouts.append(AttentionLayout(start, before.clone(), before[:, None], 1, contiguous=False))
        before += torch.tensor(step)
    return layouts


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", [[1], [7], [64], [3, 1, 1, 30]])
def test_cuts_leave_no_trace(case: str, sizes: list[int]) -> None:
    work, tokens, weights, shape = CASES[case]
    whole = work(AttentionLayout.of_sequences(LENGTHS), None, **tokens, **weights)
    starts = [sum(LENGTHS[:s]) for s in range(len(LENGTHS))]
    # Sequences leave when they end; rows hold what others left there.
    store, done, step = drawn(9, *shape), [0] * len(LENGTHS), 0
    while any(count < length for count, length in zip(done, LENGTHS, strict=True)):
        running = [s for s, length in enumerate(LENGTHS) if done[s] < length]
        counts = [min(sizes[(step + s) % len(sizes)], LENGTHS[s] - done[s]) for s in running]
        (layout,) = steps([counts])
        layout = dataclasses.replace(layout, context=torch.tensor([done[s] for s in running]))
        at = torch.cat([torch.arange(n) + starts[s] + done[s] for s, n in zip(running, counts, strict=True)])
        made = work(
            layout, RecurrentState(store, torch.tensor(running) + 2), **{n: x[at] for n, x in tokens.items()}, **weights
        )
        assert same_bits(made, whole[at])
        for s, n in zip(running, counts, strict=True):
            done[s] += n
        step += 1


@pytest.mark.skipif("tests.support.interpreted_kernels" not in sys.modules, reason="kernels of a GPU")
@pytest.mark.parametrize("case", ["delta", "mamba"])
def test_many_programs_have_the_bits_of_few(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of three sequences: the second goes on in a begun chunk, has none, and is of a new one.

    `scan_four` takes 64 tokens at a time."""
    from rlloop.numerics.kernels.triton import scan

    work, tokens, weights, shape = CASES[case]
    made = []
    for few in (scan.FEW_PROGRAMS, 0):
        monkeypatch.setattr(scan, "FEW_PROGRAMS", few)
        store = drawn(9, *shape)
        for layout in steps([[85, 3, 0], [14, 0, 70]]):
            count = int(layout.query_start[-1])
            state = RecurrentState(store, torch.tensor([2, 0, 4]))
            made.append(work(layout, state, **{n: x[:count] for n, x in tokens.items()}, **weights))
        made.append(store)
    for few, many in zip(made[:3], made[3:], strict=True):
        assert same_bits(few, many)


@pytest.mark.parametrize("case", CASES)
def test_neighbours_and_threads_leave_no_trace(case: str) -> None:
    work, tokens, weights, _ = CASES[case]
    whole = work(AttentionLayout.of_sequences(LENGTHS), None, **tokens, **weights)
    alone = {name: x[41:113] for name, x in tokens.items()}
    assert same_bits(work(AttentionLayout.of_sequences([2, 70]), None, **alone, **weights), whole[41:113])
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert same_bits(work(AttentionLayout.of_sequences(LENGTHS), None, **tokens, **weights), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_the_references(case: str) -> None:
    work, tokens, weights, _ = CASES[case]
    reference = {
        "delta": scanned(True, REFERENCE), "mamba": scanned(False, REFERENCE), "conv": convolved(False, REFERENCE),
        "conv with a bias": convolved(True, REFERENCE),
    }[case]  # fmt: skip
    made = []
    for run, kind in ((work, torch.float32), (reference, torch.float64)):
        given = {name: x.to(kind, copy=True).requires_grad_() for name, x in (tokens | weights).items()}
        out = run(AttentionLayout.of_sequences(LENGTHS), None, **given)
        (out * drawn(*out.shape, seed=9)).sum().backward()
        made.append({"": out.detach(), **{name: x.grad for name, x in given.items()}})
    parts = "tests.support.interpreted_kernels" in sys.modules and case in ("delta", "mamba")
    for name, wanted in made[1].items():
        assert wanted is not None
        error = (made[0][name] - wanted).norm() / wanted.norm()
        assert error < (3e-5 if name and parts else 1e-6), name  # a GPU's gradients of a scan have 16 bits


@pytest.mark.parametrize("floor", [0.0, 0.4])
def test_gates(floor: float) -> None:
    a, rate, bias = 3 * drawn(50, HEADS), drawn(HEADS), drawn(HEADS, seed=2)
    made = []
    for ops, kind in ((OURS, torch.float32), (REFERENCE, torch.float64)):
        given = [x.to(kind, copy=True).requires_grad_() for x in (a, rate, bias)]
        decay, step = ops.recurrent_gates(given[0], given[1], given[2], floor)
        (decay * drawn(50, HEADS, seed=5) + step * drawn(50, HEADS, seed=6)).sum().backward()
        made.append([decay.detach(), step.detach(), *(x.grad for x in given)])
    for ours, wanted in zip(*made, strict=True):
        assert ours is not None
        assert wanted is not None
        torch.testing.assert_close(ours.double(), wanted, rtol=2e-6, atol=2e-6)
    alone = OURS.recurrent_gates(a[7:8], rate, bias, floor)
    assert all(same_bits(one, every[7:8].float()) for one, every in zip(alone, made[0], strict=False))


def test_sigmoid_products() -> None:
    gate, up = drawn(30, 21), drawn(30, 21, seed=3)
    made = []
    for ops, kind in ((OURS, torch.float32), (REFERENCE, torch.float64)):
        given = [x.to(kind, copy=True).requires_grad_() for x in (gate, up)]
        out = ops.sigmoid_mul(*given)
        (out * drawn(30, 21, seed=5)).sum().backward()
        made.append([out.detach(), *(x.grad for x in given)])
    for ours, wanted in zip(*made, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-6, atol=1e-6)
    assert same_bits(OURS.sigmoid_mul(gate[4:5, :3], up[4:5, :3]), made[0][0][4:5, :3])


def test_experts_without_gates() -> None:
    x, up, down = drawn(25, 16), drawn(5, 24, 16), drawn(5, 16, 24)
    chosen = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(t))[:2] for t in range(25)])
    chosen[chosen == 3] = 4 - (chosen[chosen == 3] == 4).long()  # an expert with no tokens
    made = OURS.experts(x, up, down, chosen, False)
    torch.testing.assert_close(made, REFERENCE.experts(x, up, down, chosen, False), rtol=1e-5, atol=1e-4)
    assert same_bits(OURS.experts(x[9:10], up, down, chosen[9:10], False), made[9:10])


TOKENS, ODD = 2000, 37  # numbers enough for PyTorch's own operations to share them among threads
LAYOUT = AttentionLayout.of_sequences([400] * 5)


@pytest.mark.parametrize(
    "work",
    [
        lambda: (OURS.sigmoid_mul, [drawn(TOKENS, ODD), drawn(TOKENS, ODD, seed=1)]),
        lambda: (OURS.recurrent_gates, [drawn(TOKENS, ODD), drawn(ODD, seed=1), drawn(ODD, seed=2)]),
        lambda: (
            lambda x, weight, bias: OURS.causal_conv(x, weight, bias, LAYOUT, None),
            [drawn(TOKENS, ODD), drawn(ODD, 1, WIDTH), drawn(ODD)],
        ),
        lambda: (
            lambda q, k, v, sinks: OURS.attention(q, k, v, AttentionLayout.of_sequences([1000]), 1.0, sinks),
            [drawn(1000, ODD, 4), drawn(1000, 1, 4), drawn(1000, 1, 4, seed=1), drawn(ODD)],
        ),
    ],
    ids=["sigmoid_mul", "gates", "conv", "sinks"],
)
def test_threads_leave_no_trace_in_gradients(work: Callable[[], tuple[Callable[..., Tensor], list[Tensor]]]) -> None:
    run, given = work()
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            leaves = [tensor.clone().requires_grad_() for tensor in given]
            made = run(*leaves)
            made = torch.stack(made) if isinstance(made, tuple) else made
            found.append(torch.autograd.grad(made, leaves, drawn(*made.shape, seed=3)))
    finally:
        torch.set_num_threads(before)
    for gradients in found[1:]:
        assert all(same_bits(one, other) for one, other in zip(gradients, found[0], strict=True))
