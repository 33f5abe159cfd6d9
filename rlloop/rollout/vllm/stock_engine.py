"""vLLM's own model and numerics. Its logprobs are measured against the trainer's, and corrected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlloop.errors import ConfigError, SyncError
from rlloop.models import Model
from rlloop.models.adapter_weights import AdapterWeights
from rlloop.models.checkpoint_names import HEAD, stored_shapes
from rlloop.models.parameters import ParameterStore
from rlloop.rollout.engine.front_end import EngineFrontEnd
from rlloop.rollout.vllm import names, versions
from rlloop.rollout.vllm.engine import VllmEngine
from rlloop.rollout.vllm.requests import check_text
from rlloop.rollout.vllm.stock_models import check_stock_model
from rlloop.rollout.vllm.weights import Part, place, plain
from rlloop.sync.bits import digest
from rlloop.sync.live import bits_of
from rlloop.types import ModelInput, SamplingParams

CPU_PAGE = 32  # of vLLM's CPU kernel: pages are a multiple of it
CPU_LATENT_PAGE = 16  # exactly this, with latent attention
GPU_PAGE = 16


class StockVllmEngine(VllmEngine):
    """Samples with vLLM's own model and kernels: not bit-exact, so only for `parity.mode=observe` or `fallback`.

    vLLM has its own parameters. `set_version` copies those of `model` into them, in place and in vLLM's fused layout,
    compares digests afterwards, and drops everything computed with others. Tensor-parallel ranks of the model are
    vLLM's as well (tensor_parallel_size, and with `ep` its expert parallelism); all of them call each method.
    """

    raw_column = False
    formats: ClassVar = {"load_format": names.STOCK_FORMAT}

    def __init__(self, model: Model, **settings: Any) -> None:
        """As `VllmEngine`. Raises `SyncError` where vLLM divides a weight otherwise than `live_parts` says."""
        super().__init__(model, **settings)
        if model.context.tp.size > 1:  # vLLM's own loader has given each rank its parts
            live = self.live_parts()
            wrong = [name for name, part in self._parts(live) if _digest(part) != _digest(plain(live[name]))]
            if wrong:
                raise SyncError(f"a rank's parts of vLLM's weights are not where they were looked for: {_few(wrong)}")

    def read_adapter(self, folder: str | Path) -> AdapterWeights:
        """Raises `ConfigError`: vLLM's own model has no adapters of rlloop's."""
        raise ConfigError(f"{folder} is an adapter, and only rlloop's own model has adapters; use the engine vllm")

    def _check_adapter(self, adapter: str | None) -> None:
        EngineFrontEnd._check_adapter(self, adapter)

    def _check(self, prompt: ModelInput | list[int], sampling: SamplingParams, top_logprobs: int = 0) -> None:
        check_text(prompt)
        super()._check(prompt, sampling, top_logprobs)

    def live_parts(self) -> dict[str, Part]:
        """vLLM's live weights by Hugging Face name; where all are views, `rlloop.sync.live.LiveTarget` takes them."""
        [weights] = self._llm.collective_rpc("live_parts")
        return weights

    @torch.no_grad()
    def set_version(self, version: int) -> None:
        """Copy the weights. Raises `SyncError` if a name matches no live parameter, or if digests differ afterwards."""
        self.model.refresh()
        live, sent = self.live_parts(), dict[str, bytes]()
        for name, part in self._parts(live):
            live[name].copy_(part)
            sent[name] = _digest(part)
        wrong = [name for name in sent if sent[name] != _digest(plain(live[name]))]
        if wrong:
            raise SyncError(f"vLLM serves other weights than it was sent: {_few(wrong)}")
        if self.model.config.latent is not None:
            self._llm.collective_rpc("renew")
        super().set_version(version)

    def _parts(self, live: dict[str, Part]) -> Iterator[tuple[str, Tensor]]:
        """The slice of the trainer's weights for each of `live`, by name. Collective."""
        tp, store, config = self.model.context.tp, ParameterStore(self.model), self.model.config
        shapes = tp.gather_objects({name: tuple(part.shape) for name, part in live.items()})
        named = stored_shapes(store.shapes(), config.architecture).keys() ^ set[str]().union(*shapes)
        if apart := sorted(named - ({HEAD} if config.tied else set())):
            raise SyncError(f"the trainer's weights and vLLM's are not the same: {_few(apart)}")
        for name, whole in store.wholes_as_stored():
            if name in live:
                holders = [rank for rank, each in enumerate(shapes) if name in each]
                parts = [shapes[rank][name] for rank in holders]
                dim, begin = place(tuple(whole.shape), parts, holders.index(tp.rank))
                yield name, whole.narrow(dim, begin, live[name].shape[dim])

    def fingerprint(self) -> dict[str, Any]:
        """The model's facts with vLLM's in place of our operations': never the trainer's fingerprint."""
        return versions.stock_fingerprint(self.model.fingerprint())

    def _start(self, **settings: Any) -> Any:
        layout = self.model.context.layout
        settings |= {"tensor_parallel_size": layout.tp, "enable_expert_parallel": layout.ep > 1}
        check_stock_model(self.model.config, self.model.device.type, layout.tp)
        if os.environ.get("VLLM_USE_FLASHINFER_SAMPLER") == "1":
            raise ConfigError(
                "VLLM_USE_FLASHINFER_SAMPLER=1: that sampler has no logprobs of what it sampled from; unset it"
            )
        latent, least = self.model.config.latent, GPU_PAGE
        if self.model.device.type == "cpu":
            least = CPU_PAGE if latent is None else CPU_LATENT_PAGE
            # A seeded request whose prompt is cut fails on the CPU build (its generator has no offset to go back to).
            settings["enable_chunked_prefill"] = False
            settings["max_num_batched_tokens"] = max(settings["max_num_batched_tokens"], settings["max_model_len"])
            if latent is not None:
                settings["attention_backend"] = "CPU_MLA"  # with AMX's kernel, kv_b_proj is split and freed
        elif self.model.route_shape() is not None:
            settings["moe_backend"] = "triton"  # whose weights have a checkpoint's layout
        page = -(-settings["block_size"] // least) * least
        settings["kv_cache_memory_bytes"] *= page // settings["block_size"] + 1  # a page more than whole ones need
        settings["block_size"] = page
        return super()._start(logprobs_mode="processed_logprobs", **settings)


def _few(names: list[str]) -> str:
    return ", ".join(names[:5])


def _digest(tensor: Tensor) -> bytes:
    return digest(bits_of(tensor).array)
