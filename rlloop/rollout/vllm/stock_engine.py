"""vLLM's own model and numerics. Its logprobs are measured against the trainer's, and corrected."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlloop.errors import ConfigError, SyncError
from rlloop.models.adapter_weights import AdapterWeights
from rlloop.models.architecture import LatentConfig
from rlloop.models.checkpoint_names import HEAD
from rlloop.rollout.engine.front_end import EngineFrontEnd
from rlloop.rollout.vllm import names, versions
from rlloop.rollout.vllm.engine import VllmEngine
from rlloop.rollout.vllm.requests import check_text
from rlloop.rollout.vllm.weights import Part, plain
from rlloop.sync.bits import digest
from rlloop.sync.live import bits_of, named_weights
from rlloop.types import ModelInput, SamplingParams

CPU_PAGE = 32  # of vLLM's CPU kernel: pages are a multiple of it
CPU_LATENT_PAGE = 16  # exactly this, with latent attention
GPU_PAGE = 16
CPU_LATENT = (512, 64)  # kv_lora_rank and qk_rope_head_dim of the only shape that its kernel for that knows


class StockVllmEngine(VllmEngine):
    """Samples with vLLM's own model and kernels: not bit-exact, so only for `parity.mode=observe` or `fallback`.

    vLLM has its own parameters. `set_version` copies those of `model` into them, in place and in vLLM's fused layout,
    compares digests afterwards, and drops everything computed with others.
    """

    raw_column = False
    formats: ClassVar = {"load_format": names.STOCK_FORMAT}

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
        sent, live = named_weights(self.model), self.live_parts()
        tied = {HEAD} if self.model.config.tied else set()
        if apart := sorted((sent.keys() ^ live.keys()) - tied):
            raise SyncError(f"the trainer's weights and vLLM's are not the same: {', '.join(apart[:5])}")
        shared = [name for name in sent if name in live]
        for name in shared:
            live[name].copy_(sent[name])
        wrong = [name for name in shared if _digest(sent[name]) != _digest(plain(live[name]))]
        if wrong:
            raise SyncError(f"vLLM serves other weights than it was sent: {', '.join(wrong[:5])}")
        if self.model.config.latent is not None:
            self._llm.collective_rpc("renew")
        super().set_version(version)

    def fingerprint(self) -> dict[str, Any]:
        """The model's facts with vLLM's in place of our operations': never the trainer's fingerprint."""
        return versions.stock_fingerprint(self.model.fingerprint())

    def _start(self, **settings: Any) -> Any:
        if (ranks := self.model.context.tp.size) > 1:
            raise ConfigError(
                f"rollout.layout.tp is {ranks}, and rollout.engine=vllm_stock runs on one rank beside a trainer; set "
                "tp to 1, or rollout.engine=vllm, which has one rank's bits at any tp"
            )
        if self.model.config.vision is not None:
            raise ConfigError(
                f"rollout.engine=vllm_stock with {self.model.config.architecture}: vLLM's own vision tower was not "
                "tried; set rollout.engine=vllm or embedded"
            )
        if self.model.recurrent:
            raise ConfigError(
                f"rollout.engine=vllm_stock with {self.model.config.architecture}: vLLM's own recurrent layers were "
                "not tried; set rollout.engine=vllm or embedded"
            )
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
                _check_latent(latent)
                settings["attention_backend"] = "CPU_MLA"  # with AMX's kernel, kv_b_proj is split and freed
        elif latent is not None and latent.indexer is not None:
            raise ConfigError("rollout.engine=vllm_stock with an indexer was not tried; rollout.engine=vllm runs it")
        elif self.model.route_shape() is not None:
            settings["moe_backend"] = "triton"  # whose weights have a checkpoint's layout
        page = -(-settings["block_size"] // least) * least
        settings["kv_cache_memory_bytes"] *= page // settings["block_size"] + 1  # a page more than whole ones need
        settings["block_size"] = page
        return super()._start(logprobs_mode="processed_logprobs", **settings)


def _check_latent(latent: LatentConfig) -> None:
    """Raises `ConfigError` for shapes that vLLM's CPU kernel for latent attention does not support."""
    if latent.indexer is None and (latent.kv_rank, latent.rope_dim) == CPU_LATENT:
        return
    shape = f"{latent.kv_rank} and {latent.rope_dim}" if latent.indexer is None else "an indexer"
    raise ConfigError(
        f"rollout.engine=vllm_stock with latent attention: vLLM's CPU kernel knows kv_lora_rank={CPU_LATENT[0]} with "
        f"qk_rope_head_dim={CPU_LATENT[1]}, without an indexer; this model has {shape}. rollout.engine=vllm runs it"
    )


def _digest(tensor: Tensor) -> bytes:
    return digest(bits_of(tensor).array)
