"""Experts whose outputs GPUs write to each other: tokens go in parts that the memory holds. Ranks here are objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlloop.models import expert_exchange
from rlloop.parallel.cut import share

TOKENS, TOP_K, WIDTH, EXPERTS = 11, 2, 8, 5


class Memory:
    """Of peers: what a rank writes is what the others would read."""

    def __init__(self, numbers: int) -> None:
        self.numbers, self.gathered = numbers, list[int]()

    def rows(self, dtype: torch.dtype, width: int) -> int:
        return self.numbers // width if dtype == torch.bfloat16 else 0

    def chosen(self, outputs: Tensor, chosen: Tensor, begin: int, end: int) -> Tensor:
        self.gathered.append(chosen.numel())
        assert chosen.numel() * WIDTH <= self.numbers
        own = (chosen >= begin) & (chosen < end)
        return torch.where(own[..., None], outputs, 0.0)


class Experts:
    count = EXPERTS

    def __init__(self, weights: Tensor, begin: int) -> None:
        self.weights, self.begin = weights, begin

    def named_parameters(self) -> Any:
        return {"weight": self.weights}.items()

    def computed(self, x: Tensor, chosen: Tensor, weights: dict[str, Tensor], step: Any) -> Tensor:
        held = torch.cat((weights["weight"], torch.zeros(1, WIDTH, WIDTH, dtype=x.dtype)))
        return torch.einsum("td,tkde->tke", x, held[chosen])


@pytest.mark.parametrize("numbers", [16, 64, 80, 10_000])
def test_parts_together_are_what_all_ranks_experts_make(monkeypatch, numbers):
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH).bfloat16()
    weights, chosen = torch.randn(EXPERTS, WIDTH, WIDTH).bfloat16(), torch.randint(EXPERTS, (TOKENS, TOP_K))
    total, memory = torch.zeros(TOKENS, TOP_K, WIDTH), Memory(numbers)
    monkeypatch.setattr(expert_exchange, "peers_among", lambda ranks: memory)
    for rank in range(2):
        begin, end = share(EXPERTS, 2, rank)
        ranks = SimpleNamespace(size=2, rank=rank)
        ops = SimpleNamespace(fuses=True, row_slots=lambda x: None)
        step: Any = SimpleNamespace(context=SimpleNamespace(tp=ranks, ranks=lambda axis, ranks=ranks: ranks), ops=ops)
        experts: Any = Experts(weights[begin:end], begin)
        parts = expert_exchange.written_experts(experts, x, chosen, step)
        assert parts is not None
        for at, outputs in parts:
            total[at] += outputs.float()
    exact = torch.einsum("td,tkde->tke", x, weights[chosen]).float()
    assert torch.equal(total, exact)
    assert len(memory.gathered) == 2 * -(-TOKENS // (numbers // WIDTH // TOP_K))
    assert max(memory.gathered) - min(memory.gathered) <= 2 * TOP_K  # parts of about one size


def test_too_small_a_memory_or_no_tokens_leave_the_exchange(monkeypatch):
    for numbers, tokens in ((TOP_K * WIDTH - 1, TOKENS), (1000, 0)):
        monkeypatch.setattr(expert_exchange, "peers_among", lambda ranks, numbers=numbers: Memory(numbers))
        ranks = SimpleNamespace(size=2, rank=0)
        step: Any = SimpleNamespace(
            context=SimpleNamespace(tp=ranks, ranks=lambda axis, ranks=ranks: ranks),
            ops=SimpleNamespace(fuses=True, row_slots=lambda x: None),
        )
        x, chosen = torch.zeros(tokens, WIDTH).bfloat16(), torch.zeros(tokens, TOP_K, dtype=torch.int64)
        assert expert_exchange.written_experts(Any, x, chosen, step) is None
