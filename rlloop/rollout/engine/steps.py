"""The steps of an engine on its device, from a scheduled batch to drawn tokens: alone, or together with engines that
share experts (data-parallel attention), each for its own requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlloop.errors import ConfigError
from rlloop.models.routing_record import RoutingRecord
from rlloop.numerics.layout import AttentionLayout
from rlloop.parallel.collectives import Ranks
from rlloop.rollout.engine.adapters import EngineAdapters
from rlloop.rollout.engine.choice_store import ChoiceStore
from rlloop.rollout.engine.drawing import Drawing, Drawn, to_host
from rlloop.rollout.engine.feature_cache import FeatureCache
from rlloop.rollout.engine.front_end import EngineFrontEnd
from rlloop.rollout.engine.graph_sizes import decoding
from rlloop.rollout.engine.graphs import EngineGraphs
from rlloop.rollout.engine.kv_cache import PagedCache, slots_of_copies
from rlloop.rollout.engine.request import Request
from rlloop.rollout.engine.scheduler import ScheduledStep
from rlloop.rollout.engine.step_tokens import LateTokens, StepTokens, with_late

LOGITS_AT_ONCE = {"cpu": 1 << 25, "cuda": 1 << 28}  # elements; rows are independent, so cutting them changes no bits


@dataclass(frozen=True)
class Flight:
    """A step that was started and not yet collected."""

    batch: ScheduledStep
    token_ids: Tensor  # [E] int64, where the model is
    wait: Callable[[], Drawn]


class Steps(Drawing, EngineFrontEnd):
    """Mixin of the engine: computes the steps that are scheduled, and gives the cache's memory back between them."""

    page_size: int
    sleeps: bool  # made with `sleep=True`
    _asleep = False
    _cache: PagedCache
    _images: FeatureCache
    _adapters: EngineAdapters
    _choices: ChoiceStore | None
    _graphs: EngineGraphs | None
    _together: Ranks  # those that take each step together

    @torch.inference_mode()
    def _start(
        self, batch: ScheduledStep, tokens_before: Tensor | None = None, *, eager: bool = False, warped: bool = False
    ) -> Flight:
        """Compute the batch's tokens and draw the next one for each request that emits. `tokens_before` [E]: tokens
        drawn by the step before, if the batch was scheduled ahead of them. `eager`: without a CUDA graph; `warped`:
        not with a graph that draws."""
        table = self._scheduler.table
        self._cache.copy_states(batch.restores)
        self._copy_tails(batch.copies)
        inputs = StepTokens.of(batch, table, self.page_size)
        emitting, slots_of = batch.rows[batch.emits], self._adapters.of_rows(table, batch.rows)
        late = None if tokens_before is None else self._late(batch, inputs, tokens_before)
        scores = bool(table.scored[batch.rows].any())
        decodes = len(emitting) == len(inputs.index) and inputs.positions.ndim == 1 and not scores  # one token each
        if self._graphs is not None and decodes and not eager:
            if late is not None and len(late[0]) == len(inputs.index):
                _, tokens = late
            else:
                tokens = with_late(self._tensor(inputs.tokens), late)
            warp = self._warp(emitting)
            if not warped and self._draws_plainly(warp) and not table.top[emitting].any():
                token_ids, drawn = self._graphs.draw(tokens, slots_of, inputs, emitting, table.seed[emitting])
            else:
                logits = self._graphs.logits(tokens, slots_of, inputs, emitting)
                token_ids, drawn = self._sample([logits], emitting, warp)
        else:
            of_tokens = None if slots_of is None else slots_of[inputs.sequence]
            last = inputs.query_start[1:][batch.emits] - 1
            hidden = self._hidden(batch, inputs, of_tokens, late, None if scores else last)
            if scores:
                self._score_prompts(batch, inputs.query_start, hidden)
                hidden = self._picked(hidden, last)
            vocabulary = self.model.vocab_size
            at_once = max(1, LOGITS_AT_ONCE.get(self._device.type, LOGITS_AT_ONCE["cpu"]) // vocabulary)
            adapters = self._adapters.on_device(None if slots_of is None else slots_of[batch.emits], self._device)
            spans = (slice(begin, begin + at_once) for begin in range(0, len(hidden), at_once))
            logits = (self.model.logits(hidden[span], adapters and adapters.at(span)) for span in spans)
            token_ids, drawn = self._sample(logits, emitting, self._warp(emitting))
        self._cache.copy_states(batch.saves)
        self._scheduler.advance(batch)
        return Flight(batch, token_ids, to_host(drawn))

    def _copy_tails(self, copies: Sequence[tuple[int, int, int]]) -> None:
        if copies:
            source, target = (self._tensor(slots) for slots in slots_of_copies(copies, self.page_size))
            for store in (self._cache, *([] if self._choices is None else [self._choices])):
                store.copy_slots(source, target)

    def _hidden(
        self, batch: ScheduledStep, inputs: StepTokens, slots_of: np.ndarray | None, late: LateTokens | None,
        read: np.ndarray | None,
    ) -> Tensor:  # fmt: skip
        """Last hidden states [T, D], or [R, D] of the tokens `read` [R]. `slots_of` [T]: adapters' slots."""
        images = self._images.placed(self.model, self._scheduler.table, batch, inputs.query_start)
        decodes = 0 if self._graphs is None else decoding(batch.counts, inputs.block_start.shape[1] * self.page_size)
        plain = images is None and inputs.positions.ndim == 1 and self._together.size == 1
        graphs = self._graphs if plain else None
        if graphs is not None and (hidden := graphs.hidden(batch, inputs, slots_of, decodes, late)) is not None:
            return hidden if read is None else self._picked(hidden, read)
        self._cache.slots, self._cache.rows = self._tensor(inputs.slots), self._tensor(batch.rows)
        layout = AttentionLayout(
            query_start=self._tensor(inputs.query_start),
            context=self._tensor(batch.context),
            block_start=self._tensor(inputs.block_start),
            block_size=self.page_size,
            contiguous=False,
            decoding=decodes,
        )
        routes = None if self._choices is None else RoutingRecord()
        adapters = self._adapters.on_device(slots_of, self._device)
        tokens, positions = with_late(self._tensor(inputs.tokens), late), self._tensor(inputs.positions)
        some = None  # kernels want a row at least
        if read is not None and len(read) < len(tokens):
            some = self._tensor(read if len(read) else np.array([len(tokens) - 1]))
        kept = {"routes": routes, "adapters": adapters, "images": images, "read": some}
        hidden = self.model.hidden(tokens, positions, layout, self._cache, **kept)
        if self._choices is not None and routes is not None:
            self._choices.write(self._cache.slots, routes)
        return hidden if read is None else hidden[: len(read)]

    def _finish(self, flight: Flight) -> list[tuple[Request, bool]]:
        return self._scheduler.postprocess(flight.batch, *flight.wait())

    def _late(self, batch: ScheduledStep, inputs: StepTokens, drawn: Tensor) -> LateTokens:
        """Tokens of a step scheduled ahead that only the device knows: `drawn` [E] by the step before."""
        assert batch.source is not None
        unknown = batch.source >= 0
        return inputs.query_start[:-1][unknown], self._picked(drawn, batch.source[unknown])

    def _picked(self, rows: Tensor, source: np.ndarray) -> Tensor:
        return rows if np.array_equal(source, np.arange(len(rows))) else rows[self._tensor(source)]

    def _goes_on(self) -> bool:
        return self.has_work if self._together.size == 1 else any(self._together.gather_objects(self.has_work))

    def _step_together(self) -> list[tuple[Request, bool]]:
        """A step of all ranks that share experts; ranks without requests run their experts on the others' tokens."""
        batch = self._scheduler.schedule() if self._scheduler.num_requests else None
        wishes = self._together.gather(torch.tensor([self._wishes(batch)]))
        works, eager, rows, pages, warped = wishes.amax(0).tolist()
        if not works:
            return []
        self.wake_up()
        if self._graphs is not None and not eager:
            self._graphs.least = (rows, pages)
        if batch is not None:
            return self._finish(self._start(batch, eager=bool(eager), warped=bool(warped)))
        with torch.inference_mode():
            if self._graphs is None or eager:
                self.model.without_tokens()
            else:
                self._graphs.idle(draws=not warped)
        return []

    def _wishes(self, batch: ScheduledStep | None) -> tuple[int, ...]:
        """This rank's requirements for a step that all ranks take together: (has work, needs the path without a graph,
        rows of the graph, pages of the graph, draws on the host)."""
        if batch is None:
            return (0, 0, 0, 0, 0)
        if self._graphs is None or not (batch.emits.all() and (batch.counts == 1).all()):
            return (1, 1, 0, 0, 0)
        warp, table = self._warp(batch.rows), self._scheduler.table
        pages = -(-int((batch.context + batch.counts).max()) // self.page_size)
        warped = not self._draws_plainly(warp) or bool(table.top[batch.rows].any())
        return (1, 0, *self._graphs.shape(len(batch.rows), pages), int(warped))

    def sleep(self) -> None:
        """Give back the memory of keys, values and states, and forget what they hold. The weights stay, and CUDA graphs
        with the addresses that they hold.

        Raises `ConfigError` while requests are in flight, and for an engine that was not made with `sleep=True`.
        """
        if self._asleep:
            return
        if not self.sleeps or self._cache.memory is None:
            raise ConfigError("an engine that is to sleep has to be made with sleep=True")
        if self.in_flight:
            raise ConfigError(f"sleep came while {self.in_flight} requests are in flight; call abort_all() first")
        self._scheduler.forget(self.policy_version)
        self._images.forget()
        self._cache.memory.release()
        self._asleep = True

    def wake_up(self) -> None:
        """Take the memory again. Raises `ConfigError` where others have taken it."""
        if self._asleep and self._cache.memory is not None:
            self._cache.memory.restore()
            self._asleep = False
