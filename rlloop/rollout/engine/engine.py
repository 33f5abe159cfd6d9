"""The embedded engine: schedule, run, postprocess.

It samples with the model object that is trained, so its logprobs have the trainer's bits: for any batch, page size,
chunk size, cache state or preemption.

On a GPU decoding overlaps with scheduling: while a step runs, the next one is started with tokens that are still on the
device, and the host reads results one step later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlloop.errors import ConfigError
from rlloop.models.adapter_slots import MAX_RANK, SLOTS
from rlloop.models.peer_gathers import open_peers
from rlloop.models.prompt_scores import score_prompt
from rlloop.models.vision import check_images
from rlloop.numerics.layout import LogitsProcessing
from rlloop.parallel.context import ALONE
from rlloop.rollout.engine.adapters import AdapterVerbs, EngineAdapters
from rlloop.rollout.engine.choice_store import ChoiceStore
from rlloop.rollout.engine.feature_cache import FeatureCache
from rlloop.rollout.engine.graphs import EngineGraphs
from rlloop.rollout.engine.kv_cache import BlockManager, PagedCache, bytes_per_token
from rlloop.rollout.engine.request import Request
from rlloop.rollout.engine.saved_states import SavedStates
from rlloop.rollout.engine.scheduler import Scheduler
from rlloop.rollout.engine.steps import Flight, Steps
from rlloop.rollout.engine.validation import Limits, check_request
from rlloop.types import NOTHING, Alternatives, Completion, ModelInput, Part, PromptScores, SamplingParams

if TYPE_CHECKING:
    from rlloop.models import Model

DEFAULT_CACHE_BYTES = 4 << 30
SAVED_STATES = 64
STATE_BYTES = 8 << 30  # of recurrent states on a GPU


class Engine(AdapterVerbs, Steps):
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
        if isinstance(model, str | Path):
            raise ConfigError(f"Engine's model is {str(model)!r}; it must be a Model, as load_model returns")
        if not isinstance(seed, int | np.integer):
            raise ConfigError(f"Engine's seed is {seed!r}; it must be a whole number")
        for name, value in (
            ("page_size", page_size),
            ("max_batch_tokens", max_batch_tokens),
            ("max_running", max_running),
            ("adapter_slots", adapter_slots),
            ("adapter_rank", adapter_rank),
            *([] if max_cache_tokens is None else [("max_cache_tokens", max_cache_tokens)]),
        ):
            if not isinstance(value, int | np.integer) or value < 1:
                raise ConfigError(f"Engine's {name} is {value!r}; it must be a whole number, at least 1")
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
            self._graphs = EngineGraphs(model, self._cache, page_size, self._choices, max_batch_tokens)
        self._scheduler = self._new_scheduler()
        self._flight: Flight | None = None
        self._ended: list[tuple[Request, bool]] = []  # not returned yet, and True if a stop token ended them
        self._last_warp = ([], LogitsProcessing())

    def prepare(self, requests: int = 256, tokens: int = 1024) -> int:
        """Record the usual steps as CUDA graphs before they come: those of up to `requests` requests of up to `tokens`
        tokens each, prompt and completion, but with prompts only in contexts of up to 1,024 tokens. Returns the number
        of graphs; 0 on a CPU.

        Ranks record the same ones, and the log names a rank that cannot; where one is interrupted all stop, and can be
        used.
        """
        for name, value in (("requests", requests), ("tokens", tokens)):
            if value < 1:
                raise ConfigError(f"Engine.prepare's {name} is {value}; it must be at least 1")
        self.wake_up()
        with torch.inference_mode():
            return 0 if self._graphs is None else self._graphs.prepare(min(requests, self._max_running), tokens)

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
        limits = replace(self.limits, positions=self.limits.positions + 1)  # the token made is never read
        for prompt in prompts:
            check_request(prompt, params, limits)
            self._check_images(prompt)
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

    def step(self) -> list[tuple[int, Completion]]:
        if self._together.size > 1:
            try:
                return self._completions(self._step_together())
            except BaseException:
                self._begin_anew()
                raise
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
            self._begin_anew()
            raise
        if self._flight is not None and self._choices is not None:  # their choices come after the step in flight
            self._ended, late = late, []
        return self._completions(ended + late)

    def _begin_anew(self) -> None:
        """Blocks are named when scheduled; after a step that failed, their contents are undefined."""
        self._scheduler, self._flight = self._new_scheduler(), None

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
