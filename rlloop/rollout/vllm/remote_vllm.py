"""A `vllm serve` as an engine of a fleet: sampling and weights, over vLLM's routes, which only this process can reach.

`ServedEngine` is what `EngineService` drives, so admission, versions, pauses and the server's routes are the embedded
engine's. The replica is in vLLM's worker (`rlloop.rollout.vllm.worker_replica`); `ServedReplica` has it look for new
weights, and runs its changes with nothing in flight, vLLM paused and its caches dropped.

Each completion names the weights that vLLM sampled it with. If they are not the last committed ones (vLLM was
restarted, or its weights were changed by others), it is refused and the weights are sent again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import numpy as np

from rlloop.errors import UNREADABLE, ConfigError, RlloopError, SyncError, readable
from rlloop.rollout.engine.front_end import EngineFrontEnd
from rlloop.rollout.engine.service import EngineService, PauseMode
from rlloop.rollout.engine.validation import Limits
from rlloop.rollout.errors import VersionUnavailable
from rlloop.rollout.fleet.weight_follower import Source
from rlloop.rollout.fleet.wire import Array, unpack_array
from rlloop.rollout.vllm.messages import Chosen, Facts, ReplicaState
from rlloop.rollout.vllm.requests import RAW_ID, check_sampling, check_text, check_top, raw_of_stock, vllm_params
from rlloop.rollout.vllm.upstream import Answer, Upstream, UpstreamError, abort_route
from rlloop.sync.replica import State
from rlloop.sync.target import TORN
from rlloop.types import NOTHING, Completion, ModelInput, Part, PromptScores, SamplingParams, stop_ids

TICK = 0.01  # seconds that a step waits for vLLM, while other requests may come in
LOOK = 0.05  # seconds between looks at a replica that is busy


class ServedEngine(EngineFrontEnd):
    """Continues prompts inside vLLM's server. For one thread; `policy_version` is `TORN` before the first commit."""

    def __init__(self, upstream: Upstream, facts: Facts, *, seed: int = 0) -> None:
        super().__init__(Limits(facts.vocabulary, facts.positions, facts.positions, facts.eos_token_ids), seed)
        self.policy_version = TORN
        self.label = ""  # of the weights that were committed last
        self._upstream, self.facts = upstream, facts
        self._boot = secrets.token_hex(8)
        self._running: dict[int, tuple[list[int], SamplingParams, Future[bytes]]] = {}
        self._answered: SimpleQueue[int] = SimpleQueue()
        self._held = False

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def so_far(self, request_id: int, begin: int = 0) -> Part:
        """Nothing: vLLM is asked for whole completions."""
        return NOTHING

    def score(self, prompt: ModelInput | list[int], top_logprobs: int = 0) -> PromptScores:
        raise ConfigError(
            "vLLM's server scores no prompts for rlloop (echo with logprobs, prompt_logprobs); leave it out"
        )

    def _check(self, prompt: ModelInput | list[int], sampling: SamplingParams, top_logprobs: int = 0) -> None:
        check_top(top_logprobs)
        check_text(prompt)
        super()._check(prompt, sampling)
        check_sampling(sampling, self.facts.stock)
        if self.facts.stock and sampling.min_tokens:
            raise ConfigError(
                f"min_tokens is {sampling.min_tokens}: vLLM's server bans other tokens meanwhile than the trainer does "
                "(its tokenizer's end among them); leave it off, or serve rlloop's model"
            )

    def _accept(
        self, id: int, prompt: ModelInput, sampling: SamplingParams, top_logprobs: int, adapter: str | None
    ) -> None:
        stop = stop_ids(sampling, self.limits.eos_token_ids)
        columns = 0 if self.facts.stock else 2
        name = self._name(id) if self.facts.chooses else None
        params = vllm_params(sampling, stop, raw=not self.facts.stock, columns=columns, name=name)
        body = {"request_id": self._name(id), "token_ids": prompt.token_ids, "sampling_params": params}
        answer = self._upstream.start("/inference/v1/generate", body)
        self._running[id] = (prompt.token_ids, sampling, answer)
        answer.add_done_callback(lambda _: self._answered.put(id))

    def step(self) -> list[tuple[int, Completion]]:
        """Completions that vLLM finished meanwhile. Where one request fails, all in flight are dropped."""
        self._stats.steps += 1
        done = []
        try:
            ids = [self._answered.get(timeout=TICK)]
            while not self._answered.empty():
                ids.append(self._answered.get())
        except Empty:
            return []
        try:
            running = [id for id in ids if id in self._running]
            chosen = self._chosen(running)
            done = [(id, self._completion(id, chosen, at)) for at, id in enumerate(running)]
        except RlloopError:
            self._drop()
            raise
        return done

    def abort(self, request_id: int) -> Completion | None:
        """End one request now; returns what it has, or None if it is not in flight, or vLLM cannot tell."""
        if request_id not in self._running:
            return None
        answer = self._running[request_id][2]
        try:
            while not answer.done():  # it may not have come to vLLM yet
                self._end([request_id])
                wait([answer], LOOK)
            return self._completion(request_id, self._chosen([request_id]), 0)
        except RlloopError:
            self._running.pop(request_id, None)
            return None

    def abort_all(self) -> list[tuple[int, Completion]]:
        ended = [(id, self.abort(id)) for id in list(self._running)]
        return [(id, completion) for id, completion in ended if completion is not None]

    def _forget_cached(self) -> None:
        """vLLM has: its caches are dropped in the pause in which its weights change."""

    def hold(self) -> None:
        """Suspend computing; requests in flight are kept."""
        self._upstream.post("/pause", mode="keep")
        self._held = True

    def release(self) -> None:
        if self._held:
            self._upstream.post("/resume")
            self._held = False

    def fingerprint(self) -> dict[str, Any]:
        return self.facts.fingerprint

    def _chosen(self, ids: Sequence[int]) -> Chosen | None:
        """Discrete choices of these requests, and the label of the weights, where answers do not have it."""
        if not ids or not (self.facts.chooses or not self.facts.says_weights):
            return None
        names = msgspec.json.encode([self._name(id) for id in ids]).decode()
        return self._upstream.rpc(Chosen, "rlloop_chosen", names)

    def _completion(self, id: int, chosen: Chosen | None, at: int) -> Completion:
        """`chosen.experts[at]` are its own."""
        prompt, sampling, answer = self._running.pop(id)
        try:
            [choice] = msgspec.json.decode(answer.result(), type=readable(Answer)).choices
            rows = choice.logprobs.content
            logprobs = np.array([row.logprob for row in rows], np.float32)
            if self.facts.stock:
                raw = raw_of_stock(sampling, logprobs)
            else:
                columns = [{each.id: each.logprob for each in row.top_logprobs} for row in rows]
                raw = np.array([row[RAW_ID] for row in columns], np.float32)
        except (*UNREADABLE, KeyError) as error:
            raise UpstreamError(
                f"vLLM at {self._upstream.url} answered something that is not a completion: {error!r}"
            ) from None
        if self.facts.says_weights or chosen is None:
            labels = [each.version for each in choice.weight_versions or ()]
        else:
            labels = [chosen.label]  # the proxy changes them with nothing in flight, so they served all the time
        if choice.token_ids and labels != [self.label]:
            version, self.policy_version, self.label = self.policy_version, TORN, ""
            raise VersionUnavailable(TORN, version, version)
        computed = len(prompt) + len(choice.token_ids) - 1 if choice.token_ids else 0  # the last token is only drawn
        self._count(prompt, choice.token_ids)
        return Completion(
            prompt_ids=list(prompt),
            token_ids=choice.token_ids,
            logprobs=logprobs,
            raw_logprobs=raw,
            policy_version=self.policy_version,
            finish_reason=choice.finish_reason,
            sampling=sampling,
            routed_experts=None if chosen is None else _rows(chosen.experts[at], computed),
            selected=None if chosen is None else _rows(chosen.selected[at], computed),
        )

    def _drop(self) -> None:
        ids = list(self._running)
        self._running.clear()
        with suppress(UpstreamError):  # what failed may be vLLM itself
            if ids:  # an empty list would mean all requests, also other clients'
                self._end(ids)

    def _end(self, ids: Sequence[int]) -> None:
        names = [f"generate-tokens-{self._name(id)}" for id in ids]  # as vLLM calls them
        self._upstream.post(abort_route(self.facts), {"request_ids": names})

    def _name(self, id: int) -> str:
        return f"{self._boot}-{id}"


def _rows(packed: Array | None, count: int) -> np.ndarray | None:
    """The first `count` recorded rows; recordings come in whole blocks of tokens."""
    array = unpack_array(packed)
    return None if array is None or count == 0 else array[:count]


class ServedService(EngineService):
    """The service of a `ServedEngine`: vLLM runs by itself, so requests kept in a pause must be held in vLLM."""

    def __init__(self, engine: ServedEngine, *, max_waiting: int = 4096) -> None:
        self._served = engine
        super().__init__(engine, max_waiting=max_waiting)

    def pause(self, mode: PauseMode = "wait") -> None:
        if mode != "keep":
            self._served.release()
        super().pause(mode)
        if mode == "keep":
            self._served.hold()

    def resume(self) -> None:
        self._served.release()
        super().resume()


class ServedReplica:
    """The replica in vLLM's worker, as `ReplicaFollower` drives one."""

    def __init__(
        self,
        upstream: Upstream,
        engine: ServedEngine,
        source: Source,
        exclusively: Callable[[Callable[[], None]], None],
    ) -> None:
        """`exclusively` runs a change with nothing in flight, as `EngineService.change_weights` does."""
        self._upstream, self._engine, self._exclusively = upstream, engine, exclusively
        self._source, self.any_run = msgspec.json.encode(source).decode(), source.any_run
        self._last: ReplicaState | None = None
        self._lost = ""  # reason why vLLM could not be reached
        self._paused = 0.0

    @property
    def state(self) -> State:
        return State.error if self._lost or self._last is None else self._last.state

    @property
    def run_id(self) -> str | None:
        return None if self._last is None else self._last.run_id

    @property
    def error(self) -> str:
        return self._lost or ("" if self._last is None else self._last.error)

    @property
    def ready(self) -> bool:
        state = self._last
        return state is not None and state.ready and state.label == self._engine.label

    @property
    def torn(self) -> bool:
        return self._last is not None and self._last.torn

    @property
    def metrics(self) -> Mapping[str, float]:
        known = {} if self._last is None else self._last.metrics
        return {**known, "sync/pause_seconds": self._paused}

    def poll(self) -> bool:
        """Have the worker fetch newer weights. Returns True if new ones serve now."""
        before = self._engine.label
        try:
            state = self._look("rlloop_follow", self._source)
            while True:
                other = state.step != TORN and state.label != self._engine.label
                if state.waiting or (other and not state.busy):
                    with suppress(SyncError):  # which the state says, too
                        self._exclusively(self._settle)
                elif state.busy:
                    time.sleep(LOOK)
                else:
                    break
                state = self._look("rlloop_state")
        except UpstreamError as error:
            self._lost = str(error)
            return False
        self._lost = ""
        return self._engine.label != before

    def _look(self, method: str, *arguments: str) -> ReplicaState:
        self._last = self._upstream.rpc(ReplicaState, method, *arguments)
        return self._last

    def _settle(self) -> None:
        """Run the worker's pending change, after which vLLM's weights, its name for them and this state agree."""
        began = time.perf_counter()
        self._upstream.post("/pause", mode="wait")  # which drops its caches, too
        state = self._upstream.rpc(ReplicaState, "rlloop_commit")
        if state.step == TORN:  # and it stays paused
            raise SyncError("the weights inside vLLM are of no version")
        if self._engine.facts.says_weights:
            self._upstream.post("/update_weight_version", {"new_version": state.label})
        self._upstream.post("/resume")
        self._engine.policy_version, self._engine.label = state.step, state.label
        self._paused = time.perf_counter() - began
