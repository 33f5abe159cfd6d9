"""rlloop's attention, with its fixed tiles, over vLLM's pages.

Each store of a layer (keys, values, or whatever `Model.cache_spec` names) is one paged tensor of vLLM's, so a slot is
vLLM's slot and the stores need no other layout than [slots, ...].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec

from rlloop.numerics.layout import AttentionLayout, RecurrentState

if TYPE_CHECKING:
    from vllm.v1.kv_cache_layout import KVCacheLayout


class StepMetadata:
    """One step's tokens as our model takes them, converted from vLLM's tensors on first use."""

    def __init__(self, step: CommonAttentionMetadata, block_size: int) -> None:
        self._step, self.block_size = step, block_size
        self.count = step.num_actual_tokens
        self.decodes = step.num_actual_tokens == step.num_reqs  # each request has one token to compute

    @cached_property
    def counts(self) -> np.ndarray:
        """Tokens of each request in this step. [S] int64"""
        return np.diff(self._step.query_start_loc_cpu.numpy().astype(np.int64))

    @cached_property
    def slots(self) -> Tensor:
        """Cache slot of each token's keys and values. [T] int64"""
        return self._step.slot_mapping[: self.count].long()

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each request after this step, which is the index of the token that it samples. [S] int64"""
        return self._step.seq_lens.long()

    @cached_property
    def blocks(self) -> Tensor:
        """The pages of each request. [S, B] int32"""
        lengths = self._step.seq_lens
        longest = self._step.max_seq_len if lengths.is_cuda else int(lengths.max())  # exactly one is known on the host
        return self._step.block_table_tensor[:, : -(-longest // self.block_size)]

    @cached_property
    def layout(self) -> AttentionLayout:
        query_start = self._step.query_start_loc.long()
        return AttentionLayout(
            query_start=query_start,
            context=self.lengths - query_start.diff(),
            block_start=self.blocks.long() * self.block_size,
            block_size=self.block_size,
            contiguous=False,
        )


class LayoutBuilder(AttentionMetadataBuilder[StepMetadata]):
    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StepMetadata:
        return StepMetadata(common_attn_metadata, self.block_size)


class FixedTileBackend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        raise NotImplementedError("our layers call rlloop.numerics themselves")

    @staticmethod
    def get_builder_cls() -> type[LayoutBuilder]:
        return LayoutBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LBNHC,)  # a token's heads together: slots in order, a layer at a time

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The cache's shape, as vLLM 0.26 requests it."""
        return num_blocks, block_size, num_kv_heads, head_size

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


class PagedStore(nn.Module, AttentionLayerBase):
    """One store of one layer, as vLLM's cache manager sees it: a layer with `heads` x `width` numbers a token."""

    kv_cache: Tensor

    def __init__(self, heads: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.width, self.dtype = heads, width, dtype
        self.rows = torch.empty(0)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return FixedTileBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.heads,
            head_size=self.width,
            head_size_v=0,
            dtype=self.dtype,
        )

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """[blocks, heads, block_size, width], of which the tokens are the slower dimension in memory."""
        self.kv_cache = kv_cache
        by_token = kv_cache.permute(0, 2, 1, 3)
        assert by_token.is_contiguous(), f"a store in strides {kv_cache.stride()}"
        self.rows = by_token.view(-1, self.heads, self.width)


class GpuStore(PagedStore):
    """vLLM 0.26 assigns the cache, in the shape that the backend names: [blocks, block_size, heads, width]."""

    @property
    def kv_cache(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rows

    @kv_cache.setter
    def kv_cache(self, cache: Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if cache.numel():
            self.rows = cache.view(-1, self.heads, self.width)


class PagedStores:
    """The `Cache` of `Model.hidden`: writes this step's tensors into vLLM's pages."""

    def __init__(
        self,
        stores: list[dict[str, PagedStore]],
        slots: Tensor,
        states: Callable[[int, str], RecurrentState] | None = None,
    ) -> None:
        """`states`: of this step's sequences, by layer and name; None: the model is not recurrent."""
        self._stores, self._slots, self._states = stores, slots, states

    def places(self, layer: int, *names: str) -> tuple[Tensor, ...]:
        return self._slots, *(self._stores[layer][name].rows for name in names)

    def write(self, layer: int, **tensors: Tensor) -> tuple[Tensor, ...]:
        stores = self._stores[layer]
        for name, tensor in tensors.items():
            rows = stores[name].rows
            rows.view(len(rows), -1).index_copy_(0, self._slots, tensor.reshape(len(tensor), -1))
        return tuple(stores[name].rows for name in tensors)

    def carried(self, layer: int, name: str) -> RecurrentState:
        assert self._states is not None, "no layer of this model is recurrent"
        return self._states(layer, name)
