"""Worker extension with which vLLM's own server follows a store of weights.

    vllm serve ... --worker-extension-cls rlloop.rollout.vllm.worker_replica.Following

The replica lives in the worker, where the weights are: it fetches, stages and verifies in a thread while vLLM serves.
A commit, which needs nothing in flight, waits there until `rlloop serve proxy`, which can ensure that, runs it.
The proxy calls the methods whose names begin with `rlloop_`, through vLLM's `collective_rpc`; what crosses is JSON.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import torch
from vllm.engine.protocol import EngineClient

from rlloop.errors import SyncError
from rlloop.models.checkpoint_names import EMBEDDING, HEAD
from rlloop.rollout.fleet.weight_follower import Source
from rlloop.rollout.fleet.wire import pack_array
from rlloop.rollout.vllm.loading import facts_of
from rlloop.rollout.vllm.messages import Chosen, Facts, ReplicaState
from rlloop.rollout.vllm.model import RlloopForCausalLM
from rlloop.rollout.vllm.weights import Packed, Part, live_parts, renew
from rlloop.sync.bits import Bits
from rlloop.sync.live import NAMES, LiveTarget, bits_of, named_weights, tensor_of
from rlloop.sync.manifest import public_key
from rlloop.sync.replica import Replica
from rlloop.sync.target import TORN, Layout


class Following:
    """Mixed into vLLM's worker by vLLM, so its names must not be the worker's."""

    model_runner: Any
    vllm_config: Any
    recorder: Any
    rlloop_replica: WorkerReplica | None = None

    def rlloop_facts(self) -> dict[str, Any]:
        """`Facts` about the model, for the proxy."""
        return msgspec.to_builtins(self._facts())

    def rlloop_follow(self, source: str) -> dict[str, Any]:
        """Look for newer weights at `source` (a `Source`, as JSON). Returns the `ReplicaState` at once."""
        asked = msgspec.json.decode(source, type=Source)
        replica = self.rlloop_replica
        if replica is None or replica.source != asked:
            if replica is not None:
                replica.close()
            model, dtype = self.model_runner.get_model(), self.vllm_config.model_config.dtype
            replica = self.rlloop_replica = WorkerReplica(asked, _live(model), partial(renew, model, dtype))
        replica.look()
        return self.rlloop_state()

    def rlloop_state(self) -> dict[str, Any]:
        assert self.rlloop_replica is not None, "rlloop_follow comes first"
        return msgspec.to_builtins(self.rlloop_replica.state())

    def rlloop_commit(self) -> dict[str, Any]:
        """Run the change that waits. Call it with nothing in flight."""
        assert self.rlloop_replica is not None, "rlloop_follow comes first"
        self.rlloop_replica.commit()
        return self.rlloop_state()

    def rlloop_chosen(self, names: str) -> dict[str, Any]:
        """`Chosen` by the requests of these names (a list, as JSON), once each. Arrays are in base64."""
        asked = msgspec.json.decode(names, type=list[str])
        choices = [(None, None)] * len(asked) if self.recorder is None else self.recorder.take(asked)
        label = "" if self.rlloop_replica is None else self.rlloop_replica.state().label
        experts, selected = ([pack_array(of_it[index]) for of_it in choices] for index in (0, 1))
        return msgspec.to_builtins(Chosen(label, experts, selected))

    def _facts(self) -> Facts:
        config, model = self.vllm_config, self.model_runner.get_model()
        facts, mode = facts_of(model, config), config.model_config.logprobs_mode
        if facts is None:
            return Facts(refused="vLLM loaded its model by itself: start it with --load-format rlloop or rlloop_stock")
        if (ranks := config.parallel_config.world_size_across_dp) > 1:  # of them, vLLM hands on the first one's answers
            return Facts(refused=f"it has {ranks} ranks, and weights are brought to one: start a vLLM for each GPU")
        if facts.stock and mode != "processed_logprobs":
            return Facts(refused=f"its logprobs are {mode}: start vLLM with --logprobs-mode processed_logprobs")
        if facts.stock and config.device_config.device_type == "cpu" and config.scheduler_config.enable_chunked_prefill:
            return Facts(refused="seeded prompts must not be cut: start vLLM with --no-enable-chunked-prefill")
        says = hasattr(EngineClient, "update_weight_version")
        return msgspec.structs.replace(facts, chooses=self.recorder is not None, says_weights=says)


class WorkerReplica:
    """A replica over vLLM's live weights, whose changes wait for `commit`."""

    def __init__(self, source: Source, live: Mapping[str, Part], renew: Callable[[], None]) -> None:
        """`renew` recomputes the tensors that the model derives from its weights."""
        self.source, self._renew = source, renew
        tied = {HEAD: EMBEDDING} if HEAD not in live else {}
        self._replica = Replica(
            source.open(),
            public_key(source.public_key),
            self._target(live, tied),
            run_id=source.run_id,
            any_run=source.any_run,
        )
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="replica")
        self._polling: Future[bool] | None = None
        self._lock = threading.Lock()
        self._waiting: tuple[Callable[[], Any], Future[Any]] | None = None
        self._closed = False
        self._boot, self._changes, self._step = secrets.token_hex(8), 0, TORN

    def look(self) -> None:
        """Look for newer weights, unless a look is running. Raises unexpected errors of the last look."""
        last = self._polling
        if last is None or last.done():
            self._polling = self._pool.submit(self._replica.poll)
        if last is not None and last.done():
            last.result()

    def state(self) -> ReplicaState:
        replica = self._replica
        return ReplicaState(
            busy=self._polling is not None and not self._polling.done(),
            waiting=self._waiting is not None,
            state=replica.state,
            error=replica.error,
            ready=replica.ready,
            torn=replica.torn,
            step=self._step,
            label=f"{self._boot}/{self._changes}",
            metrics=dict(replica.metrics),
            run_id=replica.run_id,
        )

    def commit(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        change, answer = waiting
        try:
            result = change()
        except Exception as error:  # belongs to the replica, which says so in its state
            answer.set_exception(error)
        else:
            answer.set_result(result)

    def close(self) -> None:
        """Replaced by another replica: pending changes are dropped."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting[1].set_exception(SyncError("another store is followed now"))
        self._pool.shutdown(wait=False)

    def _target(self, live: Mapping[str, Part], tied: Mapping[str, str]) -> LiveTarget:
        return PartsTarget(live, self._set_version, self._exclusively, tied)

    def _set_version(self, step: int) -> None:
        """Called in `commit`; the proxy makes vLLM drop everything computed with earlier weights."""
        if step != TORN:
            self._renew()
        self._step = step
        self._changes += 1

    def _exclusively(self, change: Callable[[], Any]) -> Any:
        answer: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise SyncError("another store is followed now")
            self._waiting = (change, answer)
        return answer.result()


class PartsTarget(LiveTarget):
    """A `LiveTarget` with tensors whose numbers lie in an order of vLLM's own."""

    def __init__(
        self, live: Mapping[str, Part], set_version: Callable[[int], None],
        exclusively: Callable[[Callable[[], Any]], Any], aliases: Mapping[str, str],
    ) -> None:  # fmt: skip
        views = {name: weight for name, weight in live.items() if not isinstance(weight, Packed)}
        super().__init__(views.items(), set_version, exclusively, aliases)
        self._packed = {name: weight for name, weight in live.items() if isinstance(weight, Packed)}

    def layout(self) -> Layout:
        packed = {name: (NAMES[weight.live.dtype], tuple(weight.places.shape)) for name, weight in self._packed.items()}
        return {**super().layout(), **packed}

    def read(self, name: str) -> Bits:
        weight = self._packed.get(name)
        return super().read(name) if weight is None else bits_of(weight.read())

    @torch.no_grad()
    def write(self, name: str, bits: Bits) -> None:
        weight = self._packed.get(name)
        if weight is None:
            super().write(name, bits)
        else:
            weight.copy_(tensor_of(bits, weight.live.dtype))


def _live(model: Any) -> Mapping[str, Part]:
    return named_weights(model.policy) if isinstance(model, RlloopForCausalLM) else live_parts(model)
