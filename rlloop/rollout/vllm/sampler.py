"""rlloop's sampler in place of vLLM's: tokens and logprobs by the operations that the trainer scores with."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.sample.sampler import Sampler

from rlloop.models import Model
from rlloop.models.logits_processing import warp_for
from rlloop.numerics.layout import LogitsProcessing
from rlloop.numerics.transfer import on_device
from rlloop.rollout.vllm.requests import RAW, RAW_ID
from rlloop.types import SamplingParams

Drawn = tuple[Tensor, Tensor, Tensor]  # what `Ops.sample` returns


@dataclass(frozen=True)
class Rows:
    """Sampling parameters of a batch, a row for each request."""

    ids: list[str]
    sampling: list[SamplingParams]
    seeds: Tensor  # [N] int64
    warp: LogitsProcessing
    bans: bool  # stop tokens are banned for one request at least, which may be over with the next step


@dataclass(frozen=True)
class Replayed:
    """A CUDA graph's outputs of a step, in place of its hidden states; valid until the next one."""

    logits: Tensor  # [N, V] float32
    drawn: Drawn | None  # None: the sampler has to

    def __getitem__(self, rows: object) -> Replayed:
        """Row selection by vLLM, which must select all rows."""
        return self


class ExactSampler(Sampler):
    """Draws a row's random number from its request's seed and position, so nothing depends on the batch.

    Nothing here synchronises with a GPU or waits for tokens: vLLM may start a step before the host has the last one's.
    """

    def __init__(self, runner: Any, policy: Model) -> None:
        super().__init__("processed_logprobs")
        self.runner, self.policy = runner, policy
        self._rows = Rows([], [], torch.empty(0), LogitsProcessing(), bans=False)

    def rows(self) -> Rows:
        """Rows of the present batch: the last step's, unless requests came or went, or bans may have ended."""
        ids = self.runner.input_batch.req_ids
        if ids != self._rows.ids or self._rows.bans:
            known = dict(zip(self._rows.ids, self._rows.sampling, strict=True))
            states = [self.runner.requests[id] for id in ids]
            sampling = [known.get(id) or ours(state.sampling_params, id) for id, state in zip(ids, states, strict=True)]
            generated = [len(state.output_token_ids) for state in states]
            bans = any(done < params.min_tokens for done, params in zip(generated, sampling, strict=True))
            seeds = np.array([params.seed for params in sampling], np.int64)
            device = self.policy.device
            warp = warp_for(sampling, generated, (), device=device)
            self._rows = Rows(list(ids), sampling, on_device(seeds, device), warp, bans)
        return self._rows

    def forward(self, logits: Tensor, sampling_metadata: Any, *unused: Any, **also_unused: Any) -> SamplerOutput:
        """logits [N, V] float32, a row for each request of the batch, also for those whose prompt goes on."""
        # Ours are numbered. On the CPU vLLM would wind its own back after a part of a prompt, which torch cannot.
        self.runner.input_batch.generators.clear()
        model = self.runner.get_model()
        if model.step is None:  # vLLM warms up, with no requests
            return super().forward(logits, sampling_metadata)
        drawn = None if model.replayed is None else model.replayed.drawn
        if drawn is None:
            rows = self.rows()
            drawn = self.policy.ops.sample(logits, rows.warp, rows.seeds, model.step.lengths)
        tokens, logprobs, raw = drawn
        columns = sampling_metadata.max_num_logprobs
        out = None
        if columns is not None:
            both = torch.stack([logprobs, raw], 1)[:, : 1 + columns]
            ids = tokens[:, None].expand_as(both).int().contiguous()
            if columns > 1:
                ids[:, 1] = RAW_ID
            # Token ranks would cost a pass over the vocabulary, and are not requested.
            out = LogprobsTensors(ids, both.contiguous(), 0 * tokens)
        return SamplerOutput(sampled_token_ids=tokens.int()[:, None], logprobs_tensors=out)


def ours(params: VllmParams, request_id: str) -> SamplingParams:
    """A request's parameters as rlloop's. A request without a seed gets one derived from its id."""
    seed = params.seed
    if seed is None:
        seed = int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little") >> 1
    return SamplingParams(
        max_tokens=params.max_tokens or 1 << 30,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        seed=seed,
        ignore_eos=True,  # what ends it is all in the stop tokens
        stop_token_ids=tuple(sorted(params.stop_token_ids or () if params.ignore_eos else params.all_stop_token_ids)),
    )


class OnlyExact(LogitsProcessor):
    """Logits processor that changes nothing; vLLM's hook for refusing requests on arrival, with the server's status
    400."""

    @classmethod
    def validate_params(cls, sampling_params: VllmParams) -> None:
        params = sampling_params
        unknown = {
            "presence_penalty": params.presence_penalty != 0,
            "frequency_penalty": params.frequency_penalty != 0,
            "repetition_penalty": params.repetition_penalty != 1,
            "logit_bias": bool(params.logit_bias),
            "allowed_token_ids": bool(params.allowed_token_ids),
            "bad_words": bool(params.bad_words),
            "structured_outputs": params.structured_outputs is not None,
            "prompt_logprobs": params.prompt_logprobs is not None,
        }
        if named := [name for name, asked in unknown.items() if asked]:
            raise ValueError(
                f"{', '.join(named)}: the trainer's distribution knows nothing of it, so logprobs would not be its; "
                "leave it out, or serve the stock model"
            )
        most = 2 if RAW in (params.extra_args or {}) else 0
        if params.logprobs not in (None, *range(most + 1)) or params.logprob_token_ids:
            raise ValueError(
                f"logprobs is {params.logprobs}; rlloop's model gives the sampled token's alone: logprobs=0"
            )
        ours(params, "")  # refuses what rlloop's parameters cannot be

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        """No state."""

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        """Does nothing: there is no state."""
