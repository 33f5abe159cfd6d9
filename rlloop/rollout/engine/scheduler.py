"""The scheduler: chooses the tokens of each step, and records the tokens that the step drew.

First come, first served. Running requests go first, in the order of admission; the rest of the token budget goes to
waiting ones, long prompts in chunks. When blocks run out, the request admitted last is preempted: it returns to the
front of the queue with its tokens, whose keys and values are recomputed later. None of this changes a completion, since
the bits of a token depend only on its own sequence.

A group's prompt is computed once. Its whole blocks are shared; what it has beyond them, but for the last token, is
copied from the first request of the group, whose step makes it, before the step after.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from itertools import islice

import numpy as np

from rlloop.rollout.engine.choice_store import ChoiceStore
from rlloop.rollout.engine.kv_cache import BlockManager
from rlloop.rollout.engine.request import Request, RequestTable
from rlloop.rollout.engine.saved_states import SavedStates

PATIENCE, LOOK_AHEAD = 256, 1024  # requests that pass one whose adapter has no slot; that are looked at for it


@dataclass(frozen=True)
class ScheduledStep:
    """The tokens of one step: S requests, T tokens laid end to end. `emits` marks requests that get a new token."""

    rows: np.ndarray  # [S] rows of the request table
    context: np.ndarray  # [S] tokens of each request that are in the cache already
    counts: np.ndarray  # [S] tokens of each request to compute now, at least 1
    emits: np.ndarray  # [S] bool: the last known token is among them
    alive: np.ndarray  # [S] bool: not ended meanwhile, so its new token counts
    # [S] of a step scheduled ahead: which of the emitting requests of the step before makes its token, which the table
    # does not know yet; −1: all its tokens are known
    source: np.ndarray | None = None
    restores: tuple[tuple[int, int], ...] = ()  # rows of recurrent states to copy before the step, from and to
    saves: tuple[tuple[int, int], ...] = ()  # and after it
    copies: tuple[tuple[int, int, int], ...] = ()  # to do before the step: (from block, to block, leading slots of it)


@dataclass
class EngineStats:
    """Counts since the engine was created."""

    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    made_tokens: int = 0
    computed_tokens: int = 0  # computed by the model: all but cache hits; recomputed ones count again
    cached_tokens: int = 0  # that admissions found in the prefix cache
    preemptions: int = 0
    adapter_waits: int = 0  # steps in which a request waited for an adapter slot
    adapter_swaps: int = 0  # copies of adapters from the host into slots, of all engines over the model
    adapter_swap_bytes: int = 0
    adapter_swap_seconds: float = 0.0  # of the host


class Scheduler:
    """`schedule`, start the model, `advance`, `postprocess`: strictly in turn. Between the last two the next step may
    be on its way: `schedule_ahead`, start the model, `advance`. What lies between must not fail half-way: blocks
    are named when they are scheduled, so after a step that did not finish the scheduler has to be thrown away."""

    def __init__(
        self,
        blocks: BlockManager,
        stats: EngineStats,
        *,
        max_batch_tokens: int,
        max_running: int,
        choices: ChoiceStore | None = None,
        adapter_slots: int = 1,
        own_adapter: bool = False,
        states: SavedStates | None = None,
    ) -> None:
        """`adapter_slots`: adapters that may run at once. `own_adapter`: requests that name none have the model's.
        `states`: saved recurrent states; None: the model has no recurrent layers."""
        self.blocks = blocks
        self.stats = stats
        self.max_batch_tokens = max_batch_tokens
        self.table = RequestTable(max_running, blocks.page_size, choices)
        self.waiting: deque[Request] = deque()
        self.running = np.zeros(0, dtype=np.int64)  # rows, in order of admission
        self._ahead: ScheduledStep | None = None
        self._coming: set[bytes] = set()  # tails that the step being scheduled computes
        self._later: dict[int, tuple[int, int, int]] = {}  # by row: copies of such tails, before the next step
        self.states = states
        self._adapter_slots, self._own_adapter = adapter_slots, own_adapter
        self._adapters: Counter[str | None] = Counter()  # running requests of each adapter that takes a slot
        self._passed = 0  # requests admitted ahead of the first waiting one, which lacks a slot

    @property
    def num_requests(self) -> int:
        return len(self.waiting) + len(self.running)

    def forget(self, policy_version: int) -> None:
        """Drop everything cached; the policy has changed."""
        self.blocks.forget(policy_version)
        if self.states is not None:
            self.states.forget()

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.stats.requests += 1
        self.stats.prompt_tokens += len(request.prompt_ids)

    def remove(self, request_id: int) -> Request | None:
        """Remove a waiting or running request; None if it is unknown."""
        for request in self.waiting:
            if request.id == request_id:
                self.waiting.remove(request)
                return request
        for row in self.running.tolist():
            if self.table.request(row).id == request_id:
                self.running = self.running[self.running != row]
                return self._release(row)
        return None

    def drain(self) -> list[Request]:
        """Remove all requests."""
        requests = [self._release(row) for row in self.running.tolist()] + list(self.waiting)
        self.running = self.running[:0]
        self.waiting.clear()
        return requests

    def schedule(self) -> ScheduledStep:
        """Choose the step's tokens and allocate a slot for each. Empty only when there are no requests."""
        self._ahead, preempted = None, self._make_room()
        return self._step_of(self.running, None, admits=not preempted)

    def _step_of(self, rows: np.ndarray, drawn: np.ndarray | None, admits: bool) -> ScheduledStep:
        """The step of running `rows`, and of waiting requests if it `admits` them. `drawn` [R]: `ScheduledStep.source`
        by row of the table."""
        table = self.table
        copies, self._later = list(self._later.values()), {}
        self._coming.clear()
        context, pending = table.computed[rows], self._pending(rows)
        counts = np.clip(self.max_batch_tokens - (np.cumsum(pending) - pending), 0, pending)
        chosen = counts > 0
        rows, context, counts = rows[chosen], context[chosen], counts[chosen]
        source = np.full(len(rows), -1) if drawn is None else drawn[rows]
        after, size, ends = context + counts, self.blocks.page_size, table.prompt_length[rows] - 1
        fills = (after // size > context // size) | ((context < ends) & (after >= ends))
        for index in np.flatnonzero(fills & (source < 0)).tolist():  # others have no name yet
            self._remember(int(rows[index]), int(context[index]), int(after[index]))
        restores: list[tuple[int, int]] = []
        if self.waiting and admits:
            admitted = self._admit(self.max_batch_tokens - int(counts.sum()), restores, copies)
            if admitted:
                new_rows, new_counts = np.array(admitted).T
                self.running = np.concatenate((self.running, new_rows))
                now = new_counts > 0
                rows, counts = np.concatenate((rows, new_rows[now])), np.concatenate((counts, new_counts[now]))
                context, source = table.computed[rows], np.concatenate((source, np.full(now.sum(), -1)))
        if self.waiting and not self._has_slot(self.waiting[0]):
            self.stats.adapter_waits += 1
        after = context + counts
        saves: dict[int, int] = {}  # where to -> row; of a place that is taken twice, its last owner's alone
        if self.states is not None:
            stopped = rows[(after == self.states.stops[rows]) & (counts > 0)].tolist()
            saves = {self.states.save(row): row for row in stopped}
        return ScheduledStep(
            rows, context, counts, after == table.length[rows], np.ones(len(rows), bool),
            source=None if drawn is None else source, restores=tuple(restores),
            saves=tuple((row, to) for to, row in saves.items()), copies=tuple(copies),
        )  # fmt: skip

    def _pending(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of each row to compute at once: all that are known, or those up to where its state is to be saved."""
        computed, end = self.table.computed[rows], self.table.length[rows]
        if self.states is not None:
            stops = self.states.stops[rows]
            end = np.where(stops > computed, stops, end)
        return end - computed

    def schedule_ahead(self, before: ScheduledStep) -> ScheduledStep | None:
        """Schedule the step after `before`, which is running, so its tokens are not known yet.

        A request that turns out to have ended has computed one token in vain. None if the step must wait for `before`:
        a request must be preempted or its prompt's logprobs are read, or nothing is known to be left to do.
        """
        self._ahead, table = None, self.table
        rows = self.running[table.length[self.running] < table.max_length[self.running]]
        needy, first = self._without_slot(rows), self._next_waiting()
        idle = not len(rows) and (first is None or self._place_for(self.waiting[first], 0) is None)
        scores = table.scored[rows].any() or (first is not None and self.waiting[first].scored is not None)
        if scores or idle or not self.blocks.may_append(len(needy)):
            return None
        self._append(needy)
        # Of `before`, requests that have ended since it was scheduled may have left their rows to others.
        alive = np.flatnonzero(before.alive[before.emits])
        drawn = np.full(len(table.length), -1)
        drawn[before.rows[before.emits][alive]] = alive
        self._ahead = self._step_of(rows, drawn, admits=True)
        return self._ahead

    def advance(self, batch: ScheduledStep) -> None:
        """Mark a started batch: its tokens count as computed, and those it draws as known."""
        table = self.table
        table.computed[batch.rows] += batch.counts
        table.length[batch.rows[batch.emits]] += 1

    def postprocess(
        self, batch: ScheduledStep, token_ids: np.ndarray, logprobs: np.ndarray, raw_logprobs: np.ndarray
    ) -> list[tuple[Request, bool]]:
        """Record one new token for each request that emits; returns those it ends, and whether a stop token did."""
        table, counts = self.table, batch.alive[batch.emits]
        rows, at = (each[batch.emits][counts] for each in (batch.rows, batch.context + batch.counts))
        token_ids = token_ids[counts]
        self.stats.steps += 1
        self.stats.computed_tokens += int(batch.counts.sum())
        self.stats.made_tokens += len(rows)
        table.tokens[rows, at] = token_ids
        table.logprobs[rows, at] = logprobs[counts]
        table.raw_logprobs[rows, at] = raw_logprobs[counts]
        if batch.source is not None:  # blocks that these tokens fill could not be named
            late = (batch.source[batch.emits][counts] >= 0) & (at % self.blocks.page_size == 0)
            for row, after in zip(rows[late].tolist(), at[late].tolist(), strict=True):
                self._remember(row, after - 1, after)
        stopped = (table.stop_ids[rows] == token_ids[:, None]).any(1)
        ended = stopped | (at + 1 == table.max_length[rows])
        if not ended.any():
            return []
        gone = rows[ended]
        table.length[gone], table.computed[gone] = at[ended] + 1, at[ended]  # whatever the step ahead makes
        if self._ahead is not None and self._ahead is not batch:
            self._ahead.alive[np.isin(self._ahead.rows, gone)] = False
        self.running = self.running[~np.isin(self.running, gone)]
        return [(self._release(row), stop) for row, stop in zip(gone.tolist(), stopped[ended].tolist(), strict=True)]

    def _make_room(self) -> bool:
        """Append a block to each running request that needs one; preempts the last admitted until enough are free."""
        table, size, preempted = self.table, self.blocks.page_size, False
        needy = self._without_slot(self.running)
        while not self.blocks.may_append(len(needy)):
            self._preempt(int(self.running[-1]))
            preempted = True
            needy = self._without_slot(self.running)
        self._append(needy)
        assert (table.length[self.running] <= table.num_blocks[self.running] * size).all()
        return preempted

    def _without_slot(self, rows: np.ndarray) -> np.ndarray:
        return rows[self.table.length[rows] > self.table.num_blocks[rows] * self.blocks.page_size]

    def _append(self, rows: np.ndarray) -> None:
        table = self.table
        for row in rows.tolist():
            table.blocks[row, table.num_blocks[row]] = self.blocks.append()
            table.num_blocks[row] += 1

    def _admit(
        self, budget: int, restores: list[tuple[int, int]], copies: list[tuple[int, int, int]]
    ) -> list[tuple[int, int]]:
        """Move waiting requests into rows while tokens, blocks and rows last. Returns (row, tokens to compute now): 0
        for one that begins in the next step. Adds to `restores` from which row of states to which, and to `copies`."""
        admitted = []
        while budget > 0 and (index := self._next_waiting()) is not None:
            request = self.waiting[index]
            allocation = self._place_for(request, len(admitted))
            if allocation is None:
                break
            shared, fresh = allocation
            del self.waiting[index]
            self._passed = self._passed + 1 if index else 0
            if self._takes_slot(request):
                self._adapters[request.adapter_key] += 1
            whole, tail = len(shared) * self.blocks.page_size, self._cached_tail(request, len(shared))
            computed = whole if tail is None else len(request.prompt_ids) - 1
            blocks = self.blocks.allocate(shared, fresh)
            row = self.table.load(request, blocks, computed)
            if self.states is not None:
                if shared:
                    restores.append((self.states.row(request.block_hashes[len(shared) - 1]), row))
                last = (len(request.prompt_ids) - 1) // self.blocks.page_size
                if last > len(shared) and request.scored is None:  # prompts that are scored share nothing
                    self.states.expect(row, last * self.blocks.page_size, request.block_hashes[last - 1])
            known = len(request.token_ids) - computed
            count = min(budget, known if self.states is None else int(self._pending(np.array([row]))[0]))
            if tail is not None:
                copy = tail[1], blocks[len(shared)], computed - whole
                if tail[0] in self._coming:
                    self._later[row], count = copy, 0
                else:
                    copies.append(copy)
            budget -= count
            self.stats.cached_tokens += computed
            # At once, so that the next request of the same group shares blocks that this very step fills.
            self._remember(row, computed, computed + count)
            admitted.append((row, count))
        return admitted

    def _next_waiting(self) -> int | None:
        """Index of the next waiting request: the first, or while its adapter has no slot, the first whose adapter has.

        No more than `PATIENCE` requests pass the first one.
        """
        if self.waiting and self._has_slot(self.waiting[0]):
            return 0
        if self._passed >= PATIENCE:
            return None
        ahead = enumerate(islice(self.waiting, LOOK_AHEAD))
        return next((index for index, request in ahead if self._has_slot(request)), None)

    def _takes_slot(self, request: Request) -> bool:
        return request.adapter is not None or self._own_adapter

    def _has_slot(self, request: Request) -> bool:
        """True if its adapter is running, one more may run, or it needs none."""
        free = len(self._adapters) < self._adapter_slots
        return free or not self._takes_slot(request) or request.adapter_key in self._adapters

    def _place_for(self, request: Request, newcomers: int) -> tuple[list[int], int] | None:
        """Its leading cached blocks and the number of further ones that it needs; None if there is no room now."""
        known = len(request.token_ids)
        # The last known token is always computed: its hidden state is what the next token is drawn from.
        shared = self._cached_blocks(request, (known - 1) // self.blocks.page_size)
        if self.states is not None:
            names = request.block_hashes[: (known - 1) // self.blocks.page_size]
            most = self.states.longest(names)
            if most is not None and most > len(shared):  # the state is there yet, but some of the blocks are not
                most = self.states.longest(names[: len(shared)])
            if most is None:
                return None
            shared = shared[:most]
        fresh = -(-known // self.blocks.page_size) - len(shared)
        # Leave each running request room to grow by a block; otherwise the new one would soon be preempted.
        room = self.blocks.can_allocate(shared, fresh + len(self.running) + newcomers)
        return (shared, fresh) if room and self.table.num_free else None

    def _cached_blocks(self, request: Request, count: int) -> list[int]:
        if not self.blocks.prefix_caching or request.scored is not None:
            return []
        return self.blocks.match(self._names(request, request.token_ids, count)[:count])

    def _cached_tail(self, request: Request, shared: int) -> tuple[bytes, int] | None:
        """Name and block of its prompt's tail but for the last token, if cached. `shared`: how many blocks are."""
        end = len(request.prompt_ids) - 1
        if request.scored is not None or end < len(request.token_ids) - 1 or shared != end // self.blocks.page_size:
            return None
        name = self._tail(request)
        block = None if name is None else self.blocks.holder(name)
        return None if name is None or block is None else (name, block)

    def _tail(self, request: Request) -> bytes | None:
        """The name of its prompt's tail but for the last token; None where there is none, or it cannot be shared."""
        end = len(request.prompt_ids) - 1
        if not self.blocks.prefix_caching or self.states is not None or end % self.blocks.page_size == 0:
            return None
        self._names(request, request.token_ids, end // self.blocks.page_size)
        return self.blocks.tail(request.block_hashes, request.token_ids[:end], request.model_input, request.adapter_key)

    def _names(self, request: Request, token_ids: np.ndarray, count: int) -> list[bytes]:
        """The names of its first `count` blocks, and of further ones computed before."""
        return self.blocks.chain(request.block_hashes, token_ids, count, request.model_input, request.adapter_key)

    def _remember(self, row: int, computed: int, after: int) -> None:
        """Name what this step completes by taking the row's cached tokens from `computed` to `after`: blocks, and the
        prompt's tail."""
        size, request, table = self.blocks.page_size, self.table.request(row), self.table
        if self.blocks.prefix_caching and after // size > computed // size:
            names = self._names(request, table.tokens[row], after // size)
            for block in range(computed // size, after // size):
                self.blocks.remember(int(table.blocks[row, block]), names[block])
        end = int(table.prompt_length[row]) - 1
        if computed < end <= after and (tail := self._tail(request)) is not None and self.blocks.holder(tail) is None:
            self.blocks.remember(int(table.blocks[row, end // size]), tail)
            self._coming.add(tail)

    def _preempt(self, row: int) -> None:
        self.running = self.running[:-1]
        self.waiting.appendleft(self._release(row))
        self.stats.preemptions += 1

    def _release(self, row: int) -> Request:
        if self.states is not None:
            self.states.leave(row)
        if (copy := self._later.pop(row, None)) is not None:
            self.table.computed[row] -= copy[2]
        request, blocks = self.table.unload(row)
        self.blocks.deallocate(blocks)
        if self._takes_slot(request):
            self._adapters[request.adapter_key] -= 1
            self._adapters += Counter()  # drops those of no request
        return request
