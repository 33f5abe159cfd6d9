"""Metadata by which one model definition serves training, prefill and decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from rlloop.numerics.transfer import on_device

SHARED_TILE = 64  # tokens; a shared prefix is a multiple of it, so that no tile of keys has those of two sequences
VOCABULARY_BLOCK = 4096  # tokens that kernels for GPUs measure apart; ranks that share a vocabulary divide it there


@dataclass(frozen=True)
class AttentionLayout:
    """Keys that each of T flat query tokens reads: those of its own sequence, at positions up to its own.

    Sequence s owns the flat query tokens `query_start[s]` up to `query_start[s + 1]`; the first of them stands at
    position `context[s]`. Its key and value at position j lie in slot
    `block_start[s, j // block_size] + j % block_size` of the key and value stores. Two forms: the trainer's, where the
    stores are the flat tokens themselves (one block a sequence), and the engine's, where they are a paged cache.

    In the trainer's form sequences may be in families: the sequences families[f] up to families[f + 1], of which the
    first is a prefix and the others go on from its end, so that they read its keys, all of them, before their own; a
    recurrence goes on from its state (`branches`).
    """

    query_start: torch.Tensor  # [S + 1] int64
    context: torch.Tensor  # [S] int64
    block_start: torch.Tensor  # [S, B] int64
    block_size: int
    contiguous: bool  # True: the stores are the flat tokens, and gradients can flow
    families: tuple[int, ...] | None = None  # [F + 1] indices of sequences; None: each is a family of its own
    # So many sequences at the beginning have one query each, and attention reads them apart, as it reads decoding. The
    # bits are the same, and long contexts are read in parts at once.
    decoding: int = 0

    @cached_property
    def tokens(self) -> int:
        """The number of query tokens, T."""
        return int(self.query_start[-1])

    @cached_property
    def sequences(self) -> torch.Tensor:
        """The sequence that each query token belongs to. [T] int64"""
        counts = self.query_start.diff()
        return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of each query token in its sequence. [T] int64"""
        offset = self.context - self.query_start[:-1]
        return torch.arange(len(self.sequences), device=offset.device) + offset[self.sequences]

    @classmethod
    def of_sequences(cls, lengths: list[int], device: str | torch.device = "cpu") -> AttentionLayout:
        """Whole sequences laid end to end: the trainer's form."""
        start = on_device(np.array([*accumulate(lengths, initial=0)], np.int64), device)
        return cls(
            query_start=start,
            context=torch.zeros(len(lengths), dtype=torch.int64, device=device),
            block_start=start[:-1, None],
            block_size=max(lengths, default=1),
            contiguous=True,
        )

    @classmethod
    def of_families(cls, families: list[list[int]], device: str | torch.device = "cpu") -> AttentionLayout:
        """The trainer's form with shared prefixes: lengths of the sequences of each family, laid end to end.

        Example: [[128, 5, 9], [70]] has two sequences of 133 and 137 tokens, which share 128, and one of 70. Raises
        ValueError where a prefix that others go on from is not a multiple of `SHARED_TILE`, 1 or more times. Without
        such prefixes: `of_sequences`.
        """
        if all(len(each) == 1 for each in families):
            return cls.of_sequences([length for (length,) in families], device)
        if wrong := [each for each in families if len(each) > 1 and (each[0] % SHARED_TILE or not each[0])]:
            raise ValueError(f"{wrong[0][0]} tokens cannot be shared; a shared prefix has a multiple of {SHARED_TILE}")
        lengths = [length for each in families for length in each]
        shared = [each[0] if index else 0 for each in families for index in range(len(each))]
        starts = list(accumulate(lengths, initial=0))
        firsts = list(accumulate(map(len, families), initial=0))
        prefixes = [starts[first] for first, each in zip(firsts, families, strict=False) for _ in each]
        most = max(-(-sum(each) // SHARED_TILE) for each in zip(shared, lengths, strict=True))
        blocks = np.zeros((len(lengths), most), np.int64)
        for row, before, prefix, (begin, end) in zip(blocks, shared, prefixes, pairwise(starts), strict=True):
            slots = [*range(prefix, prefix + before, SHARED_TILE), *range(begin, end, SHARED_TILE)]
            row[: len(slots)] = slots
        return cls(
            query_start=on_device(np.array(starts, np.int64), device),
            context=on_device(np.array(shared, np.int64), device),
            block_start=on_device(blocks, device),
            block_size=SHARED_TILE,
            contiguous=True,
            families=tuple(firsts),
        )

    @cached_property
    def apart(self) -> tuple[AttentionLayout, AttentionLayout]:
        """The sequences that decode, and the others."""
        count, start = self.decoding, self.query_start
        return (
            replace(self, query_start=start[: count + 1], context=self.context[:count],
                    block_start=self.block_start[:count], decoding=0),
            replace(self, query_start=start[count:] - count, context=self.context[count:],
                    block_start=self.block_start[count:], decoding=0),
        )  # fmt: skip

    def part(self, begin: int, end: int) -> AttentionLayout:
        """The query tokens `begin` up to `end` alone, whose keys lie where they are; without gradients."""
        start = self.query_start.clamp(begin, end)
        counts, context = start.diff(), self.context + start[:-1] - self.query_start[:-1]
        some = counts > 0
        return AttentionLayout(
            query_start=torch.cat((start.new_zeros(1), counts[some].cumsum(0))), context=context[some],
            block_start=self.block_start[some], block_size=self.block_size, contiguous=False,
        )  # fmt: skip

    def family_lengths(self) -> list[list[int]]:
        """Lengths of the sequences of each family, as `of_families` takes them."""
        lengths = self.query_start.diff().tolist()
        return [lengths[first:end] for first, end in pairwise(self.families or range(len(lengths) + 1))]

    @cached_property
    def prefixes(self) -> torch.Tensor:
        """Flat index of the first token of each sequence's family. [S] int64"""
        assert self.families is not None
        firsts = [first for first, end in pairwise(self.families) for _ in range(first, end)]
        return self.query_start[torch.tensor(firsts, dtype=torch.int64, device=self.query_start.device)]

    @cached_property
    def readers(self) -> torch.Tensor:
        """Flat index after the last token that reads keys of each sequence. [S] int64"""
        assert self.families is not None
        last = list(range(1, len(self.context) + 1))
        for first, end in pairwise(self.families):
            last[first] = end
        return self.query_start[torch.tensor(last, dtype=torch.int64, device=self.query_start.device)]

    @cached_property
    def branches(self) -> Branches:
        """Families as recurrences take them: what begins, then what goes on."""
        families, device = self.family_lengths(), self.query_start.device
        spans, begin = [], 0  # flat tokens of each family's sequences
        for lengths in families:
            ends = list(accumulate(lengths, initial=begin))
            spans.append([*pairwise(ends)])
            begin = ends[-1]

        def part(chosen: list[tuple[int, int]]) -> tuple[slice | torch.Tensor, torch.Tensor]:
            starts = torch.tensor([*accumulate((end - begin for begin, end in chosen), initial=0)], device=device)
            if all(end == following for (_, end), (following, _) in pairwise(chosen)):
                return slice(chosen[0][0], chosen[-1][1]), starts
            return torch.cat([torch.arange(*span, device=device) for span in chosen]), starts

        family = [index for index, each in enumerate(families) for _ in each[1:]]
        turn = [at for each in families for at in range(len(each) - 1)]
        turns = [[at for at, mine in enumerate(turn) if mine == now] for now in range(max(turn) + 1)]
        indices = torch.tensor(family, device=device)
        first, first_start = part([each[0] for each in spans])
        later, later_start = part([span for each in spans for span in each[1:]])
        return Branches(
            first, first_start, later, later_start, indices, (self.context > 0).nonzero()[:, 0],
            tuple(torch.tensor(each, device=device) for each in turns),
        )  # fmt: skip


@dataclass(frozen=True)
class Branches:
    """F families of sequences: the first one of each, and N that go on from the first of theirs."""

    first: slice | torch.Tensor  # the flat tokens of the first ones, end to end
    first_start: torch.Tensor  # [F + 1] int64: where each begins there
    later: slice | torch.Tensor  # likewise of those that go on
    later_start: torch.Tensor  # [N + 1] int64
    family: torch.Tensor  # [N] int64: from whose first one each goes on
    sequences: torch.Tensor  # [N] int64: which sequences of the layout they are
    turns: tuple[torch.Tensor, ...]  # ascending indices of the N: those that go on first in their family, second, ...


@dataclass(frozen=True)
class AttentionMask:
    """Past keys that a query attends to, and how their softmax is split."""

    split: int = 0  # number of keys per part of the softmax, joined in order; 0: one part
    window: int = 0  # number of last keys, its own included (as one part); 0: all
    sinks: torch.Tensor | None = None  # [H] a score of each head that takes its share of the mass and has no value


CAUSAL = AttentionMask()


@dataclass(frozen=True)
class DecoderWeights:
    """Weights of a layer of grouped-query attention and a gated MLP, without biases."""

    norms: tuple[torch.Tensor, torch.Tensor]  # before the attention and before the MLP, [D]
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    head_norms: tuple[torch.Tensor, torch.Tensor] | None  # of queries and keys
    o: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    @property
    def all(self) -> tuple[torch.Tensor, ...]:
        return (*self.norms, *self.qkv, *(self.head_norms or ()), self.o, self.gate, self.up, self.down)


@dataclass(frozen=True)
class RecurrentState:
    """State of a recurrent layer that an engine keeps of each sequence between steps, in float32.

    Sequence s of a layout reads `store[rows[s]]`, unless it begins (its context is 0), and leaves its new state there.
    """

    store: torch.Tensor  # [R, ...] float32
    rows: torch.Tensor  # [S] int64, distinct
    # The device's last launches, from the last one that was no norm on, wrote to neither, nor to the layout: the next
    # may read them early.
    settled: bool = False


@dataclass(frozen=True)
class LogitsProcessing:
    """Steps from each of T rows of logits to the distribution sampled from; `rlloop.SamplingParams` has their order.

    `None` in place of a tensor means that no row uses that step. Temperature 0 is greedy: the token is the lowest-id
    argmax of those not banned, and its logprob is the raw one (temperature 1, nothing banned, nothing truncated).
    """

    temperature: torch.Tensor | None = None  # [T] float32
    top_k: torch.Tensor | None = None  # [T] int64, 0 is off
    top_p: torch.Tensor | None = None  # [T] float32, 1 is off
    min_p: torch.Tensor | None = None  # [T] float32, 0 is off
    banned_start: torch.Tensor | None = None  # [T + 1] int64: row t may not take banned_ids[start[t]:start[t + 1]]
    banned_ids: torch.Tensor | None = None  # [N] int64

    @property
    def plain(self) -> bool:
        """True if no row uses any step."""
        return all(value is None for value in vars(self).values())

    def rows(self, begin: int, end: int) -> LogitsProcessing:
        """The steps of rows `begin` up to `end`."""
        cut = {
            name: None if value is None else value[begin:end]
            for name, value in vars(self).items()
            if name not in ("banned_start", "banned_ids")
        }
        if self.banned_start is None:
            return LogitsProcessing(**cut)
        return LogitsProcessing(**cut, banned_start=self.banned_start[begin : end + 1], banned_ids=self.banned_ids)


@dataclass(frozen=True)
class AdapterTerms:
    """Further terms of each output's sum in a product of R rows: those of low-rank adapters (LoRA, arXiv:2106.09685).

    Row i, whose matrix is m = slots[i], gets `ranks[m]` terms more: z[i, k] * up[m, n, k], in ascending k.
    """

    z: torch.Tensor  # [R, r] the rows' products with A, rounded to the compute type
    up: torch.Tensor  # [M, N, r] B times the adapter's scale, rounded; [M, r, N] if not by_row
    by_row: bool
    slots: torch.Tensor  # [R] int64
    ranks: torch.Tensor  # [M] int64; 0: no terms


@dataclass(frozen=True)
class Factors:
    """The factors of one weight [N, K], of all adapters in slots: S of them, in each of G groups (experts, heads)."""

    down: torch.Tensor  # A: [S, r, K]; of experts [G, S, r, K]
    up: torch.Tensor  # B times the scale: [S, N, r]; of experts [G, S, N, r], by head [G, S, N / G, r]
    ranks: torch.Tensor  # [S] int64, at most r; 0: the slot has no factors of this weight


BLANKS = 1 << 20  # numbers that are filled at once: few launches a forward


class AdapterSlots:
    """Adapter slot of each row of a forward."""

    def __init__(
        self,
        factors: Mapping[int, Factors | Callable[[], Factors]],
        slots: torch.Tensor | None = None,
        single: bool = False,
    ) -> None:
        """`factors`, or what makes them, by the weight's id. `slots` [T] int64; None: all have the first slot.

        `single`: the rows are known to have at most one slot with factors, below all others that they have.
        """
        self._factors, self._slots, self._kept = factors, slots, dict[tuple[Any, ...], Any]()
        self._blank: torch.Tensor | None = None
        self.single = single or slots is None

    def kept(self, make: Callable[[torch.Tensor], Any], *key: Any) -> Any:
        """`make(slots)`, computed once per key, so that a forward sorts its rows once for all products."""
        assert self._slots is not None
        if key not in self._kept:
            self._kept[key] = make(self._slots)
        return self._kept[key]

    def keeps(self, *key: Any) -> bool:
        return key in self._kept

    def blank(self, count: int, device: torch.device) -> torch.Tensor:
        """[count] int16, all -1, that nothing else has had: for work that shows what is there by writing it. A forward
        that a CUDA graph records needs slots of its own, since each replay has to fill its memory."""
        blank = self._blank
        if blank is None or len(blank) < count:
            blank = torch.full((max(count, BLANKS),), -1, dtype=torch.int16, device=device)
        self._blank = blank[count:]
        return blank[:count]

    def renewed(self) -> AdapterSlots:
        """The same slots for another forward."""
        return AdapterSlots(self._factors, self._slots, self.single)

    @property
    def uniform(self) -> bool:
        return self._slots is None

    def of(self, weight: torch.Tensor) -> Factors | None:
        factors = self._factors.get(id(weight))
        return factors() if callable(factors) else factors

    def slots(self, like: torch.Tensor) -> torch.Tensor:
        """[T] int64, for the rows of `like` [T, ...]."""
        if self._slots is None:
            return torch.zeros(len(like), dtype=torch.int64, device=like.device)
        assert len(self._slots) == len(like), (len(self._slots), len(like))
        return self._slots

    def at(self, rows: torch.Tensor | slice) -> AdapterSlots:
        """The slots of these rows only."""
        return self if self._slots is None else AdapterSlots(self._factors, self._slots[rows], self.single)

    def of_rows(self, slots: torch.Tensor | None) -> AdapterSlots:
        """The slots of other rows; None: all have the first slot."""
        return AdapterSlots(self._factors, slots)

    def with_factors(self, factors: Mapping[int, Factors]) -> AdapterSlots:
        """A copy with these factors in place of the weights' own, by the weight's id."""
        return AdapterSlots({**self._factors, **factors}, self._slots, self.single)

    @cached_property
    def order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows by slot, stably, and the reverse: two permutations [T] int64."""
        assert self._slots is not None
        order = self._slots.argsort(stable=True)
        return order, torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def offsets_of(groups: torch.Tensor, count: int) -> torch.Tensor:
    """[count + 1]: index where each group begins in ascending `groups` [R] int64; without host synchronisation."""
    return torch.searchsorted(groups, torch.arange(count + 1, device=groups.device))
