"""A scheduler driven by a pretend model, with a shadow of the cache that knows what every slot holds."""

from __future__ import annotations

from collections import Counter

import numpy as np

from rlloop.rollout.engine.kv_cache import BlockManager
from rlloop.rollout.engine.request import Request
from rlloop.rollout.engine.scheduler import EngineStats, ScheduledStep, Scheduler
from rlloop.types import SamplingParams

VOCABULARY = 31
EOS = 0


def next_token(tokens: tuple[int, ...]) -> int:
    """The pretend model: a token is a function of everything before it."""
    return sum((i + 1) * t for i, t in enumerate(tokens)) * 7 % VOCABULARY


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tuple(tokens)))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


class Simulation:
    """`overlap`: as on a GPU, the next step begins before the tokens of the last one are known."""

    def __init__(
        self, *, num_blocks: int, page_size: int, max_batch_tokens: int, max_running: int, prefix_caching: bool = True,
        overlap: bool = False,
    ) -> None:  # fmt: skip
        self.blocks = BlockManager(num_blocks, page_size, prefix_caching=prefix_caching)
        self.stats = EngineStats()
        self.scheduler = Scheduler(self.blocks, self.stats, max_batch_tokens=max_batch_tokens, max_running=max_running)
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.version = 0
        self.slots: dict[int, tuple[int, tuple[int, ...]]] = {}  # slot -> (version, the tokens up to its own)
        self.requests: dict[int, tuple[list[int], int]] = {}
        self.finished: dict[int, list[int]] = {}
        self.next_id = 0
        self.overlap = overlap
        self.flight: tuple[ScheduledStep, np.ndarray] | None = None
        self.counted: Counter[str] = Counter()  # what the statistics must say
        self.overlapped = 0
        self.wasted = 0

    def fits(self, prompt: list[int], max_tokens: int) -> bool:
        return len(prompt) + max_tokens - 1 <= self.blocks.num_blocks * self.blocks.page_size

    def add(self, prompt: list[int], max_tokens: int) -> int:
        id = self.next_id
        self.next_id += 1
        self.requests[id] = (prompt, max_tokens)
        self.counted.update(requests=1, prompt_tokens=len(prompt))
        self.scheduler.add(Request.of(id, prompt, SamplingParams(max_tokens=max_tokens, seed=id), (EOS,)))
        return id

    def step(self) -> None:
        batch, made = self.flight or self.start(self.schedule())
        self.flight = None
        ahead = self.scheduler.schedule_ahead(batch) if self.overlap else None
        if ahead is not None:
            self.overlapped += 1
            self.flight = self.start(ahead, made)
        self.finish_step(batch, made)
        if self.flight is not None:
            self.wasted += int((~self.flight[0].alive).sum())
            if not self.flight[0].alive.any():
                self.flight = None

    def schedule(self) -> ScheduledStep:
        before = self.running_ids()
        batch = self.scheduler.schedule()
        self.counted.update(preemptions=len(set(before) - set(self.running_ids())))
        return batch

    def running_ids(self) -> list[int]:
        return [self.scheduler.table.request(row).id for row in self.scheduler.running.tolist()]

    def start(self, batch: ScheduledStep, before: np.ndarray | None = None) -> tuple[ScheduledStep, np.ndarray]:
        table, size = self.scheduler.table, self.blocks.page_size
        assert len(batch.rows) > 0
        assert len(set(batch.rows.tolist())) == len(batch.rows) <= self.max_running
        assert (batch.counts > 0).all()
        assert batch.counts.sum() <= self.max_batch_tokens
        assert (table.num_blocks[batch.rows] == -(-table.length[batch.rows] // size)).all(), (
            "a block too many or too few"
        )
        slots_of = {
            row: [int(table.blocks[row, p // size]) * size + p % size for p in range(context + count)]
            for row, context, count in zip(
                batch.rows.tolist(), batch.context.tolist(), batch.counts.tolist(), strict=True
            )
        }
        tokens_of = {row: tuple(table.tokens[row, : len(slots)].tolist()) for row, slots in slots_of.items()}
        if before is not None:
            assert batch.source is not None
            for row, source in zip(batch.rows.tolist(), batch.source.tolist(), strict=True):
                if source >= 0:
                    tokens_of[row] = (*tokens_of[row][:-1], int(before[source]))
        copied = [(to * size + i, self.slots[source * size + i]) for source, to, n in batch.copies for i in range(n)]
        assert len({slot for slot, _ in copied}) == len(copied), "two tokens were copied to one slot"
        self.slots.update(copied)
        written: list[int] = []
        for row, context in zip(batch.rows.tolist(), batch.context.tolist(), strict=True):
            for p in range(context, len(slots_of[row])):
                self.slots[slots_of[row][p]] = (self.version, tokens_of[row][: p + 1])
                written.append(slots_of[row][p])
        assert len(written) == len(set(written)), "two tokens were written to one slot"
        for row, slots in slots_of.items():  # as attention does: all writes of the step, then all reads
            for p, slot in enumerate(slots):
                assert self.slots[slot] == (self.version, tokens_of[row][: p + 1]), "a request reads another's slot"
        made = np.array([next_token(tokens_of[row]) for row in batch.rows[batch.emits].tolist()], dtype=np.int64)
        self.scheduler.advance(batch)
        return batch, made

    def finish_step(self, batch: ScheduledStep, made: np.ndarray) -> None:
        self.counted.update(
            steps=1, computed_tokens=int(batch.counts.sum()), made_tokens=int(batch.alive[batch.emits].sum())
        )
        scores = made.astype(np.float32)
        for request, stopped in self.scheduler.postprocess(batch, made, scores, -scores):
            completion = request.completion(self.version, "stop" if stopped else "length")
            prompt, max_tokens = self.requests.pop(request.id)
            assert completion.token_ids == expected(prompt, max_tokens)
            assert stopped == (completion.token_ids[-1] == EOS)
            assert completion.logprobs.tolist() == completion.token_ids
            assert completion.raw_logprobs.tolist() == [-t for t in completion.token_ids]
            self.finished[request.id] = completion.token_ids

    def settle(self) -> None:
        if self.flight is not None:
            flight, self.flight = self.flight, None
            self.finish_step(*flight)

    def abort(self, id: int) -> None:
        self.settle()
        if id in self.finished:
            return
        request = self.scheduler.remove(id)
        assert request is not None
        assert request.id == id
        prompt, max_tokens = self.requests.pop(id)
        made = request.completion(self.version, "abort").token_ids
        assert made == expected(prompt, max_tokens)[: len(made)]

    def new_version(self) -> None:
        self.settle()
        self.scheduler.drain()
        self.requests.clear()
        self.version += 1
        self.blocks.forget(self.version)

    def finish(self) -> None:
        steps = 0
        while self.scheduler.num_requests:
            self.step()
            self.check()
            steps += 1
            assert steps < 10_000, "no progress"
        assert not self.requests
        assert self.blocks.num_free == self.blocks.num_blocks, "a block leaked"

    def check(self) -> None:
        """Every block is in one state, its references are its users, and the statistics are what happened."""
        assert {name: getattr(self.stats, name) for name in self.counted} == dict(self.counted)
        table, blocks = self.scheduler.table, self.blocks
        users = Counter(
            block
            for row in self.scheduler.running.tolist()
            for block in table.blocks[row, : table.num_blocks[row]].tolist()
        )
        assert [users[block] for block in range(blocks.num_blocks)] == blocks.references
        free = blocks._blank + list(blocks._remembered)
        assert len(free) == len(set(free)) == blocks.num_free
        assert set(free) == {block for block in range(blocks.num_blocks) if blocks.references[block] == 0}
        assert {name: block for block, names in blocks._names_of.items() for name in names} == blocks._block_of
        assert set(blocks._remembered) <= set(blocks._names_of)
        assert not set(blocks._blank) & set(blocks._names_of)
        assert len(self.scheduler.running) + table.num_free == self.max_running
