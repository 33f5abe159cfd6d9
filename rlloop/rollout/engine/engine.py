"""The embedded engine: schedule, run, postprocess.

It samples with the model object that is trained, so its logprobs have the trainer's bits: for any batch, page size,
chunk size, cache state or preemption.

On a GPU decoding overlaps with scheduling: while a step runs, the next one is started with tokens that are still on the
device, and the host reads results one step later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlloop.errors import ConfigError
from rlloop.models.adapter_slots import MAX_RANK, SLOTS
from rlloop.models.peer_gathers import open_peers
from rlloop.models.routing_record import RoutingRecord
from rlloop.models.scoring import score_prompt
from rlloop.models.vision import check_images
from rlloop.numerics.layout import AttentionLayout, LogitsProcessing
from rlloop.parallel.context import ALONE
from rlloop.rollout.engine.adapters import AdapterVerbs, EngineAdapters
from rlloop.rollout.engine.choice_store import ChoiceStore
from rlloop.rollout.engine.drawing import Drawing, Drawn, to_host
from rlloop.rollout.engine.feature_cache import FeatureCache
from rlloop.rollout.engine.graph_sizes import decoding
from rlloop.rollout.engine.graphs import EngineGraphs, LateTokens, with_late
from rlloop.rollout.engine.kv_cache import BlockManager, PagedCache, bytes_per_token, slots_of_copies
from rlloop.rollout.engine.request import Request
from rlloop.rollout.engine.saved_states import SavedStates
from rlloop.rollout.engine.scheduler import ScheduledStep, Scheduler
from rlloop.rollout.engine.sleeping import Sleeping
from rlloop.rollout.engine.step_tokens import StepTokens
from rlloop.rollout.engine.validation import Limits
from rlloop.types import NOTHING, Alternatives, Completion, ModelInput, Part, PromptScores, SamplingParams

if TYPE_CHECKING:
    from rlloop.models import Model

DEFAULT_CACHE_BYTES = 4 << 30
SAVED_STATES = 64
STATE_BYTES = 8 << 30  # of recurrent states on a GPU
LOGITS_AT_ONCE = {"cpu": 1 << 25, "cuda": 1 << 28}  # elements; rows are independent, so cutting them changes no bits


@dataclass(frozen=True)
class _Flight:
    """A step that was started and not yet collected."""

    batch: ScheduledStep
    token_ids: Tensor  # [E] int64, where the model is
    wait: Callable[[], Drawn]


class Engine(Drawing, AdapterVerbs, Sleeping):
    """Continues prompts with `model`. One caller at a time: it is not thread-safe.

    - `page_size`: tokens of a cache block; prefixes are shared in whole blocks, and a prompt's rest is copied.
    - `max_batch_tokens`: tokens computed in one step; longer prompts are cut into chunks.
    - `max_cache_tokens`: tokens of the key-value cache. None: `max_running` whole contexts, or 4 GiB if that is less.
    - `prefix_caching`: keep the blocks of finished requests for others that begin alike, until the policy changes.
      With recurrent layers, states at the ends of the `SAVED_STATES` latest prompts' last whole blocks are kept, too.
    - `max_running`: requests in one step; with recurrent layers on a GPU fewer, if their states take more than 8 GiB.
    - `record_choices`: keep which experts and past tokens the model chose for each token; `Completion` has them.
    - `adapter_slots`, `adapter_rank`: room for adapters on the model's device: how many may run at once, of which rank
      at most. More may be loaded: their requests wait for a slot. Memory is taken by the weights that adapters adapt.
    - `seed`: of the stream that requests without a seed of their own draw theirs from.
    - `sleep`: `sleep()` may give back the cache's memory; the next step takes it again.

    None of these but `seed` changes a completion's bits.

    The model's parameters may change in place (they do, in training); call `set_version` after.

    Each tensor-parallel rank has an engine with the same settings, and every method is called on all of them with the
    same arguments: they schedule and draw the same. Ranks along dp_shard that share experts (data-parallel attention)
    have their own requests and take steps together: all call `generate`, some perhaps with no prompts.
    """

    def __init__(
        self,
        model: Model,
        *,
        page_size: int = 16,
        max_batch_tokens: int = 8192,
        max_cache_tokens: int | None = None,
        prefix_caching: bool = True,
        max_running: int = 512,
        record_choices: bool = True,
        seed: int = 0,
        adapter_slots: int = SLOTS,
        adapter_rank: int = MAX_RANK,
        sleep: bool = False,
    ) -> None:
        for name, value in (
            ("page_size", page_size),
            ("max_batch_tokens", max_batch_tokens),
            ("max_running", max_running),
            ("adapter_slots", adapter_slots),
            ("adapter_rank", adapter_rank),
        ):
            if value < 1:
                raise ConfigError(f"Engine's {name} is {value}; it must be at least 1")
        self.model = model
        self.page_size = page_size
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._adapters = EngineAdapters(model, adapter_slots, adapter_rank)
        self._prefix_caching = prefix_caching
        self._device = model.context.device
        self._together = model.context.ranks("ep") if model.context.layout.expert_leaves > 1 else ALONE
        spec, states, dtype = model.cache_spec(), model.state_spec(), model.dtype
        self._saved_states = min(SAVED_STATES, max_running) if prefix_caching and model.recurrent else 0
        if model.recurrent and self._device.type != "cpu":  # where memory is taken before it is used
            rows = STATE_BYTES // max(1, bytes_per_token(states, torch.float32))
            for axis in ("tp", "pp"):
                rows = min(model.context.ranks(axis).gather_objects(rows))
            self._saved_states = min(self._saved_states, rows // 4)
            max_running = self._max_running = max(1, min(max_running, rows - self._saved_states))
        if max_cache_tokens is None:
            whole = max_running * -(-model.max_positions // page_size) * page_size
            room = DEFAULT_CACHE_BYTES // max(1, bytes_per_token(spec, dtype))
            for axis in ("tp", "pp"):  # ranks with more heads or layers have room for fewer tokens
                room = min(model.context.ranks(axis).gather_objects(room))
            max_cache_tokens = max(page_size, min(whole, room))
        if max_cache_tokens < page_size:
            raise ConfigError(
                f"Engine's max_cache_tokens is {max_cache_tokens}; it must be at least one page ({page_size} tokens)"
            )
        self._num_blocks = max_cache_tokens // page_size
        room = self._num_blocks * page_size
        super().__init__(Limits(model.vocab_size, model.max_positions, room, model.eos_token_ids), seed)
        spare = 0 if self._device.type == "cpu" else page_size
        rows, self.sleeps = max_running + self._saved_states, sleep
        self._cache = PagedCache(spec, room, dtype, self._device, states, rows, spare, sleep)
        self._choices = ChoiceStore.of(model, room + spare) if record_choices else None
        self._images = FeatureCache()
        self._graphs = None
        open_peers(model, model.context.tp, self._device, max_batch_tokens)
        if self._device.type == "cuda":
            self._graphs = EngineGraphs(model, self._cache, page_size, self._choices)
        self._scheduler = self._new_scheduler()
        self._flight: _Flight | None = None
        self._ended: list[tuple[Request, bool]] = []  # not returned yet, and True if a stop token ended them
        self._last_warp = ([], LogitsProcessing())

    def prepare(self) -> int:
        """Record the usual steps as CUDA graphs before the first request; returns their number. 0 on a CPU."""
        self.wake_up()
        with torch.inference_mode():
            return 0 if self._graphs is None else self._graphs.prepare(self._max_running)

    # ---------------------------------------------------------------------------------------------- step by step

    def so_far(self, request_id: int, begin: int = 0) -> Part:
        table = self._scheduler.table
        row = table.row_of.get(request_id)
        if row is None:
            return NOTHING
        known = int(table.length[row])
        if self._flight is not None and row in self._flight.batch.rows[self._flight.batch.emits]:
            known -= 1  # on its way
        first = int(table.prompt_length[row])
        at, likeliest = slice(first + begin, known), table.request(row).likeliest[begin : known - first]
        ids, logprobs, raw = table.tokens[row, at], table.logprobs[row, at], table.raw_logprobs[row, at]
        return Part(ids.tolist(), logprobs.copy(), raw.copy(), Alternatives.joined(likeliest))

    def score(self, prompt: ModelInput | list[int], top_logprobs: int = 0, adapter: str | None = None) -> PromptScores:
        self._check_images(prompt)
        model = self.model if adapter is None else self.model.with_adapter(adapter)
        return score_prompt(model, prompt, top_logprobs)

    def prefill_logprobs(self, prompts: Sequence[ModelInput | list[int]]) -> list[np.ndarray]:
        """[P - 1] float32 each: logprobs of a prompt's tokens but the first, at temperature 1, as prefill computes
        them: in chunks, over pages, without the prefix cache. `score` takes the trainer's path.
        """
        assert not self.has_work, "requests are in flight"
        params, requests = SamplingParams(max_tokens=1, seed=0), list[Request]()
        for prompt in prompts:
            self._check(prompt, params)
        for prompt in prompts:
            requests.append(Request.of(self._next_id, prompt, params, self.limits.eos_token_ids))
            requests[-1].scored, self._next_id = {}, self._next_id + 1
            self._scheduler.add(requests[-1])
        try:
            while self.has_work:
                self.step()
        finally:
            self.abort_all()
        scored = ([each.scored[begin] for begin in sorted(each.scored)] for each in requests if each.scored is not None)
        return [np.concatenate([np.zeros(0, np.float32), *chunks]) for chunks in scored]

    @property
    def in_flight(self) -> int:
        return self._scheduler.num_requests + len(self._ended)

    def _goes_on(self) -> bool:
        return self.has_work if self._together.size == 1 else any(self._together.gather_objects(self.has_work))

    def step(self) -> list[tuple[int, Completion]]:
        if self._together.size > 1:
            return self._step_together()
        ended, self._ended = self._ended, []
        if self._scheduler.num_requests == 0:
            return self._completions(ended)
        self.wake_up()
        try:
            flight = self._flight or self._start(self._scheduler.schedule())
            self._flight = None
            ahead = None if self._graphs is None else self._scheduler.schedule_ahead(flight.batch)
            if ahead is not None:
                self._flight = self._start(ahead, flight.token_ids)
            late = self._finish(flight)
            if self._flight is not None and not self._flight.batch.alive.any():
                self._flight = None
        except BaseException:
            # Blocks are named when scheduled; after a step that failed, their contents are undefined.
            self._scheduler, self._flight = self._new_scheduler(), None
            raise
        if self._flight is not None and self._choices is not None:  # their choices come after the step in flight
            self._ended, late = late, []
        return self._completions(ended + late)

    def _step_together(self) -> list[tuple[int, Completion]]:
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
            return self._completions(self._finish(self._start(batch, eager=bool(eager), warped=bool(warped))))
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

    def abort(self, request_id: int) -> Completion | None:
        self._settle()
        for request, stopped in self._ended:
            if request.id == request_id:
                self._ended.remove((request, stopped))
                return self._completions([(request, stopped)])[0][1]
        request = self._scheduler.remove(request_id)
        return None if request is None else request.completion(self.policy_version, "abort")

    def abort_all(self) -> list[tuple[int, Completion]]:
        self._settle()
        ended, self._ended = self._ended, []
        drained = self._scheduler.drain()
        return self._completions(ended) + [(r.id, r.completion(self.policy_version, "abort")) for r in drained]

    def _settle(self) -> None:
        """Wait for the step in flight, so that a request that is removed has all of its tokens."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._ended += self._finish(flight)

    def _completions(self, ended: list[tuple[Request, bool]]) -> list[tuple[int, Completion]]:
        version = self.policy_version
        return [(request.id, request.completion(version, "stop" if stop else "length")) for request, stop in ended]

    # ---------------------------------------------------------------------------------------------- weights and facts

    def _forget_cached(self) -> None:
        self.model.refresh()
        self._scheduler.forget(self.policy_version)
        self._adapters.set_version(self.policy_version)
        self._images.forget()
        if self._graphs is not None:
            self._graphs.check_weights()

    def fingerprint(self) -> dict[str, Any]:
        return self.model.fingerprint()

    def close(self) -> None:
        """Drop the CUDA graphs, which are recorded anew if the engine goes on. NCCL cannot be left before: it waits
        for every graph in which ranks exchange data."""
        if self._graphs is not None:
            self._graphs.drop()

    # ---------------------------------------------------------------------------------------------- one step

    @torch.inference_mode()
    def _start(
        self, batch: ScheduledStep, tokens_before: Tensor | None = None, *, eager: bool = False, warped: bool = False
    ) -> _Flight:
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
            where = (inputs.index, inputs.positions, inputs.slots, inputs.block_start, batch.rows)
            warp = self._warp(emitting)
            if not warped and self._draws_plainly(warp) and not table.top[emitting].any():
                token_ids, drawn = self._graphs.draw(tokens, slots_of, *where, table.seed[emitting])
            else:
                token_ids, drawn = self._sample([self._graphs.logits(tokens, slots_of, *where)], emitting, warp)
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
        return _Flight(batch, token_ids, to_host(drawn))

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
        if self._graphs is not None and images is None and inputs.positions.ndim == 1 and self._together.size == 1:
            at = (inputs.positions, inputs.slots, batch.counts, batch.context, inputs.block_start)
            if (hidden := self._graphs.hidden(inputs.tokens, slots_of, *at, batch.rows, decodes, late)) is not None:
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

    def _finish(self, flight: _Flight) -> list[tuple[Request, bool]]:
        return self._scheduler.postprocess(flight.batch, *flight.wait())

    def _late(self, batch: ScheduledStep, inputs: StepTokens, drawn: Tensor) -> LateTokens:
        """Of a step scheduled ahead, the tokens that only the device knows: `drawn` [E] by the step before."""
        assert batch.source is not None
        unknown = batch.source >= 0
        return inputs.query_start[:-1][unknown], self._picked(drawn, batch.source[unknown])

    def _picked(self, rows: Tensor, source: np.ndarray) -> Tensor:
        return rows if np.array_equal(source, np.arange(len(rows))) else rows[self._tensor(source)]

    # ---------------------------------------------------------------------------------------------- requests

    def _new_scheduler(self) -> Scheduler:
        blocks = BlockManager(
            self._num_blocks,
            self.page_size,
            prefix_caching=self._prefix_caching,
            policy_version=self.policy_version,
        )
        return Scheduler(
            blocks,
            self._stats,
            max_batch_tokens=self._max_batch_tokens,
            max_running=self._max_running,
            choices=self._choices,
            adapter_slots=self._adapters.slots,
            own_adapter=self._adapters.own,
            states=SavedStates(self._max_running, self._saved_states) if self._saved_states else None,
        )

    def _check(self, prompt: ModelInput | list[int], sampling: SamplingParams, top_logprobs: int = 0) -> None:
        super()._check(prompt, sampling, top_logprobs)
        self._check_images(prompt)

    def _check_images(self, prompt: ModelInput | list[int]) -> None:
        if (config := getattr(self.model, "config", None)) is not None:  # a model of another's may have none
            check_images(prompt, config)

    def _accept(
        self, id: int, prompt: ModelInput, sampling: SamplingParams, top_logprobs: int, adapter: str | None
    ) -> None:
        loaded = self._adapters.named(adapter)
        self._scheduler.add(Request.of(id, prompt, sampling, self.limits.eos_token_ids, top_logprobs, loaded))
