"""Recurrent layers over shared prefixes: the bits of whole sequences forward, and their gradients in a fixed order."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from rlloop.numerics import reference
from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile
from tests.support.shared_prefixes import whole_sequences

OURS = ops_for(NumericsProfile())
FAMILIES = [[17], [128, 2, 1, 19], [64, 3], [1]]  # prefixes, then what goes on from them
GROUPS, HEADS, KEY, VALUE, CHANNELS = 2, 4, 12, 20, 300
# A GPU's kernels multiply parts of 16 bits.
WORST = 3e-5 if "tests.support.interpreted_kernels" in sys.modules else 2e-6


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(name: str, families: list[list[int]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What each token has, and what all read."""
    tokens = sum(map(sum, families))
    if name.startswith("conv"):
        bias = {"bias": drawn(CHANNELS, seed=7)} if name == "conv with a bias" else {}
        return {"x": drawn(tokens, CHANNELS, seed=1)}, {"weight": drawn(CHANNELS, 1, 4, seed=2), **bias}
    return {
        "q": drawn(tokens, GROUPS, KEY, seed=1),
        "k": drawn(tokens, GROUPS, KEY, seed=2) / KEY**0.5,
        "v": drawn(tokens, HEADS, VALUE, seed=3),
        "decay": torch.sigmoid(drawn(tokens, HEADS, seed=4) + 4),  # so that much of a prefix is left at its end
        "beta": torch.sigmoid(drawn(tokens, HEADS, seed=5)),
    }, {}


CASES = "delta", "mamba", "conv", "conv with a bias"


def run(name: str, ops: Any, layout: AttentionLayout, given: dict[str, Tensor]) -> Tensor:
    if name.startswith("conv"):
        return ops.causal_conv(given["x"], given["weight"], given.get("bias"), layout, None)
    return ops.scan(*given.values(), name == "delta", layout, None)


def gradients(name: str, families: list[list[int]], at: slice = slice(None)) -> dict[str, Tensor]:
    """Of a sum of outputs, weighed by tokens; `at`: of these tokens of `FAMILIES`, which `families` are."""
    tokens, weights = case(name, FAMILIES)
    given = {n: x[at].clone().requires_grad_() for n, x in tokens.items()} | {
        n: x.clone().requires_grad_() for n, x in weights.items()
    }
    out = run(name, OURS, AttentionLayout.of_families(families), given)
    slopes = drawn(sum(map(sum, FAMILIES)), *out.shape[1:], seed=9)[at]
    return dict(zip(given, torch.autograd.grad(out, list(given.values()), slopes), strict=True))


@pytest.mark.parametrize("families", [FAMILIES, [[64, 2, 5]], [[64, 1, 1]]], ids=["several", "small", "small single"])
@pytest.mark.parametrize("name", CASES)
def test_a_shared_prefix_changes_no_bit(name: str, families: list[list[int]]) -> None:
    (tokens, weights), (rows, lengths) = case(name, families), whole_sequences(families)
    shared = run(name, OURS, AttentionLayout.of_families(families), tokens | weights)
    whole = {n: x[rows] for n, x in tokens.items()} | weights
    assert same_bits(shared[rows], run(name, OURS, AttentionLayout.of_sequences(lengths), whole))


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_whole_sequences_added_up(name: str) -> None:
    (tokens, weights), (rows, lengths) = case(name, FAMILIES), whole_sequences(FAMILIES)
    exact = {n: x.double().requires_grad_() for n, x in (tokens | weights).items()}
    whole = {n: x[rows] if n in tokens else x for n, x in exact.items()}
    out = run(name, reference, AttentionLayout.of_sequences(lengths), whole)
    times = torch.bincount(rows).view(-1, *[1] * (out.ndim - 1))  # what several sequences share counts once
    slopes = (drawn(len(times), *out.shape[1:], seed=9).double() / times)[rows]
    wanted = dict(zip(exact, torch.autograd.grad(out, list(exact.values()), slopes), strict=True))
    for part, made in gradients(name, FAMILIES).items():
        assert (made - wanted[part]).norm() < WORST * wanted[part].norm(), part


@pytest.mark.parametrize("name", ["delta", "mamba"])
def test_gradients_of_some_heads_at_a_time_are_those_of_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU makes them where there are many states."""
    backward = pytest.importorskip("rlloop.numerics.kernels.triton.recurrence_backward")
    made = gradients(name, FAMILIES)
    monkeypatch.setattr(backward, "NUMBERS", 1)
    assert all(same_bits(x, made[n]) for n, x in gradients(name, FAMILIES).items())


@pytest.mark.parametrize("name", CASES)
def test_gradients_know_neither_threads_nor_neighbours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlloop.numerics.kernels.cpu.compiled.jit.GRAIN", 1)  # else so little work has one thread
    made, own = gradients(name, FAMILIES), slice(17, 17 + sum(FAMILIES[1]))
    alone = gradients(name, FAMILIES[1:2], own)
    assert all(same_bits(x, made[n][own]) for n, x in alone.items() if n not in ("weight", "bias"))
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert all(same_bits(x, made[n]) for n, x in gradients(name, FAMILIES).items())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_families_of_one_are_whole_sequences(name: str) -> None:
    """Also beside others: their gradients have the same bits."""
    own = slice(0, FAMILIES[0][0])
    made, alone = gradients(name, FAMILIES), gradients(name, FAMILIES[:1], own)
    assert all(same_bits(x, made[n][own]) for n, x in alone.items() if n not in ("weight", "bias"))
