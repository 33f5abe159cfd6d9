"""vLLM as scheduler and pager; all arithmetic is the trainer's own model and operations."""

from __future__ import annotations

import gc
import json
import os
import random
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from rlloop.errors import ConfigError, RunError
from rlloop.models.adapter_slots import MAX_RANK, SLOTS, LoadedAdapter
from rlloop.models.scoring import score_prompt
from rlloop.rollout.engine.adapters import AdapterVerbs, EngineAdapters
from rlloop.rollout.engine.choice_store import Choices
from rlloop.rollout.engine.front_end import EngineFrontEnd
from rlloop.rollout.engine.validation import Limits
from rlloop.rollout.vllm import names, versions
from rlloop.rollout.vllm.requests import check_sampling, check_supported, raw_of_stock, vllm_params
from rlloop.types import NOTHING, Completion, FinishReason, ModelInput, Part, PromptScores, SamplingParams, stop_ids

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput

    from rlloop.models import Model

DEFAULT_CACHE_BYTES = 1 << 30


@dataclass
class _Request:
    """A request in flight: collects the tokens and logprobs that vLLM's core sends after each step."""

    id: int
    prompt_ids: list[int]
    sampling: SamplingParams
    adapter: LoadedAdapter | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: bytearray = field(default_factory=bytearray)  # float32: all columns of a token, then of the next
    cached: int = 0  # of the prompt's tokens

    def take(self, output: EngineCoreOutput) -> None:
        if output.prefill_stats is not None and not self.token_ids:
            self.cached = output.prefill_stats.num_cached_tokens
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs += output.new_logprobs.logprobs.tobytes()


class VllmEngine(AdapterVerbs, EngineFrontEnd):
    """Continues prompts with `model` inside vLLM, in this process: the parameters are shared, nothing is copied.

    The arguments are those of `rlloop.Engine`, and as there, none of them decides a completion's bits. One caller at a
    time. The model's parameters may change in place; call `set_version` after, and `close` when done. Tensor-parallel
    ranks each have such an engine and make the same calls; vLLM itself knows of one rank.

    Raises `ConfigError` where vLLM cannot be used here (`rlloop doctor` says why, too).
    """

    formats: ClassVar = {"config_format": names.FORMAT, "load_format": names.FORMAT}
    raw_column = True  # whether the sampler sends logprobs at temperature 1 as well

    def __init__(
        self,
        model: Model,
        *,
        page_size: int = 16,
        max_batch_tokens: int = 8192,
        max_cache_tokens: int | None = None,
        prefix_caching: bool = True,
        max_running: int = 512,
        seed: int = 0,
        sleep: bool = False,
        adapter_slots: int = SLOTS,
        adapter_rank: int = MAX_RANK,
    ) -> None:
        """`sleep`: whenever `generate` returns, as beside a trainer in the same memory."""
        versions.require()
        if model.config.vision is not None or model.config.left_out:
            raise ConfigError(
                f"{model.config.architecture} has a vision tower, which is not proven inside vLLM; use engine=embedded"
            )
        if model.recurrent:
            raise ConfigError(
                f"{model.config.architecture} has recurrent layers, whose states have no place in vLLM's pages here; "
                "set rollout.engine=embedded"
            )
        if self.raw_column and model.device.type == "cuda" and os.environ.get("VLLM_BATCH_INVARIANT") == "1":
            raise ConfigError(
                "VLLM_BATCH_INVARIANT=1 changes operations of torch in this whole process, the trainer's among them; "
                "rlloop's model has the same bits in every batch without it: unset it"
            )
        self._sleeps, self._asleep = sleep, False
        self._model = model
        self._requests: dict[str, _Request] = {}  # by vLLM's id
        self._held: dict[str, _Request] = {}  # requests that wait for an adapter's slot, not yet in vLLM
        self._adapters = EngineAdapters(model, adapter_slots, adapter_rank)
        self._chooses = bool(model.route_shape() or model.indexed_layers())
        spec = model.cache_spec()
        token_bytes = sum(prod(shape) for layer in spec for shape in layer.values()) * model.dtype.itemsize
        if max_cache_tokens is None:
            whole = max_running * -(-model.max_positions // page_size) * page_size
            max_cache_tokens = max(model.max_positions, min(whole, DEFAULT_CACHE_BYTES // token_bytes))
        super().__init__(Limits(model.vocab_size, model.max_positions, max_cache_tokens, model.eos_token_ids), seed)
        blocks = -(-max_cache_tokens // page_size) + 1  # vLLM reserves one
        gc.collect()  # collect unreferenced engines before allocating
        if sleep and model.device.type == "cuda" and any(other.sleeps for other in _LIVE):
            raise ConfigError("another vLLM engine with sleep=True lives in this process; close it first")
        self._live = live = _Life(
            sleeps=sleep and model.device.type == "cuda",
            guest=any(other.guest for other in _LIVE) if _LIVE else torch.distributed.is_initialized(),
        )
        _LIVE.add(live)
        self._llm = self._start(
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=min(model.max_positions, max_cache_tokens + 1),
            block_size=page_size,
            kv_cache_memory_bytes=blocks * page_size * token_bytes,
            max_num_seqs=max_running,
            max_num_batched_tokens=max(max_batch_tokens, max_running),
            enable_prefix_caching=prefix_caching,
            enable_chunked_prefill=True,
            enforce_eager=True,
            skip_tokenizer_init=True,
            generation_config="vllm",  # not the folder's own sampling defaults
            disable_log_stats=True,
        )
        client = self._llm.engine_core
        if finalizer := getattr(client, "_finalizer", None):
            finalizer.detach()  # it would destroy state of other engines in this process
        self._end = weakref.finalize(self, _shut_down, client.engine_core, live)
        if self.raw_column:
            requests, adapters = self._requests, self._adapters
            self._llm.collective_rpc("adapt", args=(lambda ids: _slots_of(ids, requests, adapters),))

    @property
    def model(self) -> Model:
        """The model that computes every number. Another view of its weights may replace it between requests."""
        return self._model

    @model.setter
    def model(self, view: Model) -> None:
        self._model = view
        self._llm.collective_rpc("run", args=(view,))
        self._adapters.model = view

    # ---------------------------------------------------------------------------------------------- step by step

    def so_far(self, request_id: int, begin: int = 0) -> Part:
        request = self._requests.get(str(request_id))
        return NOTHING if request is None else Part(request.token_ids[begin:], *self._logprobs(request, begin))

    def score(self, prompt: ModelInput | list[int], top_logprobs: int = 0) -> PromptScores:
        """By the trainer's forward, beside vLLM."""
        if not self.raw_column:
            raise ConfigError("scores of a prompt would be the trainer's, not vLLM's; use the engine vllm or embedded")
        return score_prompt(self.model, prompt, top_logprobs)

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    def step(self) -> list[tuple[int, Completion]]:
        if not self.has_work:
            return []
        self._stats.steps += 1
        self._stats.adapter_waits += bool(self._held)
        ended: list[tuple[_Request, str]] = []
        try:
            for output in self._llm.engine_core.get_output().outputs:
                request = self._requests.get(output.request_id)
                if request is not None:  # else it was aborted meanwhile
                    request.take(output)
                    if output.finish_reason is not None:
                        ended.append((request, str(output.finish_reason)))
            return self._completions(ended)
        except BaseException:
            self._drop()
            raise

    def abort(self, request_id: int) -> Completion | None:
        ended = self._abort([self._requests[str(request_id)]] if str(request_id) in self._requests else [])
        return ended[0][1] if ended else None

    def abort_all(self) -> list[tuple[int, Completion]]:
        return self._abort(list(self._requests.values()))

    def _abort(self, requests: list[_Request]) -> list[tuple[int, Completion]]:
        completions = self._completions([(request, "abort") for request in requests], admits=False)
        self._llm.engine_core.abort_requests([str(request.id) for request in requests])
        self._admit()
        return completions

    def _drop(self) -> None:
        """Drop all requests and cached blocks: after a failed step, named blocks have undefined contents."""
        ids = [id for id in self._requests if id not in self._held]
        self._requests.clear()
        self._held.clear()
        self._forget_begun()
        self._llm.engine_core.abort_requests(ids)
        self._forget_cached()

    def _forget_cached(self) -> None:
        self._model.refresh()
        self._adapters.set_version(self.policy_version)
        if not self._llm.reset_prefix_cache():
            raise RunError("vLLM kept its prefix cache, though no request is in flight")

    def _forget_begun(self) -> None:
        """Discard a step that vLLM began for requests that have ended."""
        if not self._requests and (begun := self._llm.engine_core.engine_core.batch_queue):
            begun.clear()

    # ---------------------------------------------------------------------------------------------- weights and facts

    def sleep(self) -> None:
        """Free the caches' memory until `wake_up` or the next request. The weights stay."""
        if self._asleep:
            return
        if self.has_work:
            raise ConfigError(f"sleep came while {len(self._requests)} requests are in flight; call abort_all() first")
        if self.model.device.type == "cuda" and not self._sleeps:
            raise ConfigError("on a GPU, an engine that is to sleep has to be made with sleep=True")
        self._forget_cached()
        self._llm.collective_rpc("release_caches")
        self._asleep = self._live.asleep = True

    def wake_up(self) -> None:
        if not self._asleep:
            return
        self._llm.collective_rpc("restore_caches")
        self._asleep = self._live.asleep = False

    def fingerprint(self) -> dict[str, Any]:
        """The model's fingerprint, since vLLM decides no bits."""
        return self.model.fingerprint()

    def close(self) -> None:
        """Free the cache's memory."""
        self._end()

    # ---------------------------------------------------------------------------------------------- vLLM

    def _start(self, **settings: Any) -> Any:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from rlloop.rollout.vllm.loading import lend

        with tempfile.TemporaryDirectory() as folder, _process_state_kept():
            (Path(folder) / "config.json").write_text(json.dumps(self.model.config.raw))
            settings |= {**self.formats, "additional_config": lend(self.model)}
            if self.model.device.type == "cuda":
                settings |= {"worker_cls": names.GPU_WORKER, "gpu_memory_utilization": 0.02}
                settings |= {"enable_sleep_mode": self._sleeps}
                settings |= {"logits_processors": [names.GATE]} if self.raw_column else {}
            return LLMEngine.from_engine_args(EngineArgs(model=folder, **settings))

    def _check(self, prompt: ModelInput | list[int], sampling: SamplingParams, top_logprobs: int = 0) -> None:
        check_supported(prompt, top_logprobs)
        super()._check(prompt, sampling)
        check_sampling(sampling, stock=not self.raw_column)

    def _accept(
        self, id: int, prompt: ModelInput, sampling: SamplingParams, top_logprobs: int, adapter: str | None
    ) -> None:
        named = self._adapters.named(adapter)
        if named is not None and self._adapters.slots <= self._adapters.own:
            raise ConfigError("the adapter in training takes the only slot; give the engine adapter_slots=2 or more")
        self.wake_up()
        request = _Request(id, prompt.token_ids, sampling, named)
        self._requests[str(id)] = self._held[str(id)] = request
        self._admit()

    def _admit(self) -> None:
        """Pass waiting requests to vLLM as far as there are slots for their adapters."""
        running = {each.adapter for id, each in self._requests.items() if id not in self._held} - {None}
        room = self._adapters.slots - self._adapters.own
        for id, request in list(self._held.items()):
            if request.adapter is not None and request.adapter not in running:
                if len(running) == room:
                    continue
                running.add(request.adapter)
            del self._held[id]
            self._begin(request)

    def _begin(self, request: _Request) -> None:
        llm, asked = self._llm, dict[str, Any](prompt_token_ids=request.prompt_ids)
        if request.adapter is not None:  # names its blocks
            asked["cache_salt"] = request.adapter.key
        params, tasks = self._params(request.sampling), llm.get_supported_tasks()
        llm.engine_core.add_request(llm.input_processor.process_inputs(str(request.id), asked, params, tasks))

    def _rest(self) -> None:
        if self._sleeps:
            self.sleep()

    def _params(self, sampling: SamplingParams) -> Any:
        from vllm.sampling_params import SamplingParams as VllmParams

        stop = stop_ids(sampling, self.model.eos_token_ids)
        return VllmParams(**vllm_params(sampling, stop, raw=self.raw_column, columns=int(self.raw_column)))

    def _completions(self, ended: list[tuple[_Request, str]], *, admits: bool = True) -> list[tuple[int, Completion]]:
        """Completions of requests that just ended, with the reasons; vLLM's tables still know their pages."""
        choices: list[Choices] = [(None, None)] * len(ended)
        if self._chooses and ended:
            asked = []
            for request, _ in ended:
                generated = len(request.token_ids)
                asked.append((str(request.id), len(request.prompt_ids) + generated - 1 if generated else 0))
            [choices] = self._llm.collective_rpc("choices", args=(asked,))
        completions = [self._completion(*each, *chosen) for each, chosen in zip(ended, choices, strict=True)]
        self._forget_begun()
        if admits and self._held:
            self._admit()
        return completions

    def _completion(
        self, request: _Request, reason: str, experts: np.ndarray | None, selected: np.ndarray | None
    ) -> tuple[int, Completion]:
        del self._requests[str(request.id)]
        self._held.pop(str(request.id), None)
        logprobs, raw = self._logprobs(request, 0)
        self._count(request.prompt_ids, request.token_ids, request.cached)
        reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
        return request.id, Completion(
            prompt_ids=request.prompt_ids,
            token_ids=request.token_ids,
            logprobs=logprobs,
            raw_logprobs=raw,
            policy_version=self.policy_version,
            finish_reason=reasons.get(reason, "abort"),
            sampling=request.sampling,
            routed_experts=experts,
            selected=selected,
        )

    def _logprobs(self, request: _Request, begin: int) -> tuple[np.ndarray, np.ndarray]:
        """Logprobs under the sampled distribution, and raw ones, from the `begin`-th token on."""
        columns = 1 + self.raw_column
        logprobs = np.frombuffer(request.logprobs[4 * columns * begin :], np.float32).reshape(-1, columns).T.copy()
        return logprobs[0], logprobs[1] if self.raw_column else raw_of_stock(request.sampling, logprobs[0])


def _slots_of(ids: list[str], requests: dict[str, _Request], adapters: EngineAdapters) -> np.ndarray | None:
    """[S] int64 the adapters' slots of a step's requests; None where none names one. One that has ended has none."""
    named = [None if (request := requests.get(id)) is None else request.adapter for id in ids]
    return adapters.slots_of(named) if any(each is not None for each in named) else None


class _Life:
    """Marks a live engine of this process. Held by the engine, so it is freed with an engine that could not start."""

    def __init__(self, sleeps: bool, guest: bool) -> None:
        """`sleeps`: by vLLM's sleep mode, which is the process's. `guest`: the process group is of a run's ranks."""
        self.sleeps, self.asleep, self.guest = sleeps, False, guest


_LIVE: weakref.WeakSet[_Life] = weakref.WeakSet()


def _shut_down(core: Any, live: _Life) -> None:
    """vLLM's process groups are the process's, so the last engine takes them down."""
    from vllm.distributed import cleanup_dist_env_and_memory, destroy_model_parallel

    if live.sleeps and live.asleep:
        core.collective_rpc("restore_caches")  # sleeping memory cannot be freed
    _LIVE.discard(live)
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    if not _LIVE and live.guest:
        destroy_model_parallel()
    elif not _LIVE:
        cleanup_dist_env_and_memory()


@contextmanager
def _process_state_kept() -> Iterator[None]:
    """vLLM seeds Python, numpy and torch, and sets the number of threads, as if the process were its own."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_num_threads(threads)
