"""vLLM as scheduler and pager; all arithmetic is the trainer's own model and operations."""

from __future__ import annotations

import gc
import json
import logging
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from rlloop.errors import ConfigError, RunError
from rlloop.models.adapter_slots import MAX_RANK, SLOTS
from rlloop.models.peer_gathers import open_peers
from rlloop.models.prompt_scores import score_prompt
from rlloop.models.vision import check_images
from rlloop.rollout.engine.adapters import AdapterVerbs, EngineAdapters
from rlloop.rollout.engine.choice_store import Choices
from rlloop.rollout.engine.engine import STATE_BYTES
from rlloop.rollout.engine.front_end import EngineFrontEnd
from rlloop.rollout.engine.kv_cache import bytes_per_token
from rlloop.rollout.engine.validation import Limits
from rlloop.rollout.vllm import names, versions
from rlloop.rollout.vllm.lifetime import LIVE, Life, process_state_kept, shut_down
from rlloop.rollout.vllm.requests import Request, check_sampling, check_top, raw_of_stock, vllm_params
from rlloop.rollout.vllm.step_inputs import StepInputs
from rlloop.types import (
    NOTHING,
    Completion,
    FinishReason,
    ModelInput,
    Part,
    PromptScores,
    SamplingParams,
    as_model_input,
    stop_ids,
)

if TYPE_CHECKING:
    from rlloop.models import Model

log = logging.getLogger(__name__)

DEFAULT_CACHE_BYTES = 1 << 30


class VllmEngine(AdapterVerbs, EngineFrontEnd):
    """Continues prompts with `model` inside vLLM, in this process: the parameters are shared, nothing is copied.

    The arguments are those of `rlloop.Engine`, and as there, none of them decides a completion's bits. One caller at a
    time. The model's parameters may change in place; call `set_version` after, and `close` when done. Tensor-parallel
    ranks each have such an engine and make the same calls; vLLM itself knows of one rank, and the model exchanges data.

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
        if model.config.left_out:
            raise ConfigError(
                f"{model.config.architecture} has a vision tower that is left out, which is not proven inside vLLM; "
                "set rollout.engine=embedded"
            )
        if self.raw_column and model.device.type == "cuda" and os.environ.get("VLLM_BATCH_INVARIANT") == "1":
            raise ConfigError(
                "VLLM_BATCH_INVARIANT=1 changes operations of torch in this whole process, the trainer's among them; "
                "rlloop's model has the same bits in every batch without it: unset it"
            )
        self._sleeps, self._asleep = sleep, False
        self._model = model
        self._requests: dict[str, Request] = {}  # by vLLM's id
        self._held: dict[str, Request] = {}  # requests that wait for an adapter's slot, not yet in vLLM
        self._adapters = EngineAdapters(model, adapter_slots, adapter_rank)
        self._inputs = StepInputs(model, self._requests, self._adapters)
        self._chooses = bool(model.route_shape() or model.indexed_layers())
        if model.recurrent:
            max_running = _most_running(model, max_running)
        token_bytes = bytes_per_token(model.cache_spec(), model.dtype)
        if max_cache_tokens is None:
            whole = max_running * -(-model.max_positions // page_size) * page_size
            room = min(model.context.tp.gather_objects(DEFAULT_CACHE_BYTES // token_bytes))  # ranks schedule the same
            max_cache_tokens = max(model.max_positions, min(whole, room))
        super().__init__(Limits(model.vocab_size, model.max_positions, max_cache_tokens, model.eos_token_ids), seed)
        longest = min(model.max_positions, max_cache_tokens + 1)
        blocks = -(-max(max_cache_tokens, longest) // page_size) + 1  # vLLM reserves one
        gc.collect()  # collect unreferenced engines before allocating
        if self.raw_column:
            open_peers(model, model.context.tp, model.device, max_batch_tokens)
        if sleep and model.device.type == "cuda" and any(other.sleeps for other in LIVE):
            raise ConfigError("another vLLM engine with sleep=True lives in this process; close it first")
        self._live = live = Life(
            sleeps=sleep and model.device.type == "cuda",
            guest=any(other.guest for other in LIVE) if LIVE else torch.distributed.is_initialized(),
        )
        LIVE.add(live)
        self._llm = self._start(
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=longest,
            block_size=page_size,
            kv_cache_memory_bytes=blocks * page_size * token_bytes,
            max_num_seqs=max_running,
            max_num_batched_tokens=max(max_batch_tokens, max_running),
            enable_prefix_caching=prefix_caching and not model.recurrent,
            enable_chunked_prefill=True,
            enforce_eager=True,
            skip_tokenizer_init=True,
            generation_config="vllm",  # not the folder's own sampling defaults
            disable_log_stats=True,
        )
        if prefix_caching and model.recurrent:
            log.warning(
                "%s has recurrent layers, whose states vLLM's blocks do not hold: its prefix cache is off",
                model.config.architecture,
            )
        client = self._llm.engine_core
        if finalizer := getattr(client, "_finalizer", None):
            finalizer.detach()  # it would destroy state of other engines in this process
        self._end = weakref.finalize(self, shut_down, client.engine_core, live)
        if self.raw_column:
            self._llm.collective_rpc("take_inputs", args=(self._inputs,))

    @property
    def model(self) -> Model:
        """The model that computes every number. Another view of its weights may replace it between requests."""
        return self._model

    @model.setter
    def model(self, view: Model) -> None:
        self._model = view
        self._llm.collective_rpc("run", args=(view,))
        self._adapters.model = self._inputs.model = view

    # ---------------------------------------------------------------------------------------------- step by step

    def so_far(self, request_id: int, begin: int = 0) -> Part:
        request = self._requests.get(str(request_id))
        return NOTHING if request is None else Part(request.token_ids[begin:], *self._logprobs(request, begin))

    def score(self, prompt: ModelInput | list[int], top_logprobs: int = 0) -> PromptScores:
        """Scores by the trainer's forward, beside vLLM."""
        if not self.raw_column:
            raise ConfigError("scores of a prompt would be the trainer's, not vLLM's; use the engine vllm or embedded")
        return score_prompt(self.model, prompt, top_logprobs)

    def prefill_logprobs(self, prompts: Sequence[ModelInput | list[int]]) -> list[np.ndarray]:
        """As `rlloop.Engine.prefill_logprobs`, by the steps of vLLM."""
        if not self.raw_column:
            raise ConfigError("vLLM's own model gives no logprobs of a prompt; use the engine vllm or embedded")
        assert not self.has_work, "requests are in flight"
        params, scored = SamplingParams(max_tokens=1, seed=0), list[np.ndarray]()
        for prompt in prompts:
            self._check(prompt, params)
        for prompt in prompts:
            scored.append(np.zeros(len(prompt) - 1, np.float32))
            self._queue(Request(self._next_id, as_model_input(prompt), params, scored=scored[-1]))
            self._next_id += 1
        try:
            while self.has_work:
                self.step()
        finally:
            self.abort_all()
            self._rest()
        return scored

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    def step(self) -> list[tuple[int, Completion]]:
        if not self.has_work:
            return []
        self._stats.steps += 1
        self._stats.adapter_waits += bool(self._held)
        ended: list[tuple[Request, str]] = []
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

    def _abort(self, requests: list[Request]) -> list[tuple[int, Completion]]:
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
        self._inputs.forget()
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

        with tempfile.TemporaryDirectory() as folder, process_state_kept():
            (Path(folder) / "config.json").write_text(json.dumps(self.model.config.raw))
            settings |= {**self.formats, "additional_config": lend(self.model)}
            if self._live.guest:
                settings["distributed_executor_backend"] = names.RANK_EXECUTOR
            if self.model.device.type == "cuda":
                settings |= {"worker_cls": names.GPU_WORKER, "gpu_memory_utilization": 0.02}
                settings |= {"enable_sleep_mode": self._sleeps}
                settings |= {"logits_processors": [names.GATE]} if self.raw_column else {}
            return LLMEngine.from_engine_args(EngineArgs(model=folder, **settings))

    def _check(self, prompt: ModelInput | list[int], sampling: SamplingParams, top_logprobs: int = 0) -> None:
        check_top(top_logprobs)
        super()._check(prompt, sampling)
        check_images(prompt, self.model.config)
        check_sampling(sampling, stock=not self.raw_column)

    def _accept(
        self, id: int, prompt: ModelInput, sampling: SamplingParams, top_logprobs: int, adapter: str | None
    ) -> None:
        named = self._adapters.named(adapter)
        if named is not None and self._adapters.slots <= self._adapters.own:
            raise ConfigError("the adapter in training takes the only slot; give the engine adapter_slots=2 or more")
        self._queue(Request(id, prompt, sampling, named))

    def _queue(self, request: Request) -> None:
        self.wake_up()
        self._requests[str(request.id)] = self._held[str(request.id)] = request
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

    def _begin(self, request: Request) -> None:
        llm, asked = self._llm, dict[str, Any](prompt_token_ids=request.prompt_ids)
        if (salt := request.salt) is not None:
            asked["cache_salt"] = salt
        params, tasks = self._params(request.sampling), llm.get_supported_tasks()
        llm.engine_core.add_request(llm.input_processor.process_inputs(str(request.id), asked, params, tasks))

    def _rest(self) -> None:
        if self._sleeps:
            self.sleep()

    def _params(self, sampling: SamplingParams) -> Any:
        from vllm.sampling_params import SamplingParams as VllmParams

        stop = stop_ids(sampling, self.model.eos_token_ids)
        return VllmParams(**vllm_params(sampling, stop, raw=self.raw_column, columns=int(self.raw_column)))

    def _completions(self, ended: list[tuple[Request, str]], *, admits: bool = True) -> list[tuple[int, Completion]]:
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
        self, request: Request, reason: str, experts: np.ndarray | None, selected: np.ndarray | None
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
            model_input=None if request.model_input.is_text else request.model_input,
        )

    def _logprobs(self, request: Request, begin: int) -> tuple[np.ndarray, np.ndarray]:
        """Logprobs under the sampled distribution, and raw ones, from the `begin`-th token on."""
        columns = 1 + self.raw_column
        logprobs = np.frombuffer(request.logprobs[4 * columns * begin :], np.float32).reshape(-1, columns).T.copy()
        return logprobs[0], logprobs[1] if self.raw_column else raw_of_stock(request.sampling, logprobs[0])


def _most_running(model: Model, asked: int) -> int:
    """Requests of a recurrent model that may run at a time; on a GPU their states take memory at once."""
    if not any(model.cache_spec()):
        raise ConfigError(
            f"{model.config.architecture} has recurrent layers alone, and vLLM needs pages to schedule by; set "
            "rollout.engine=embedded"
        )
    if model.device.type == "cpu":
        return asked
    rows = STATE_BYTES // bytes_per_token(model.state_spec(), torch.float32)
    return max(1, min(asked, *model.context.ranks("tp").gather_objects(rows)))  # ranks schedule the same
