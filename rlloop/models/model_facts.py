"""A model's sizes, device and cache shapes, as engines and trainers ask for them."""

from __future__ import annotations

from abc import abstractmethod

import torch

from rlloop.models import attention, latent
from rlloop.models.architecture import ModelConfig
from rlloop.models.recurrent import delta_states, mamba_states
from rlloop.models.stages import Stage
from rlloop.numerics.ops import Ops
from rlloop.parallel.context import ParallelContext


class ModelFacts:
    """Mixin of `Model`."""

    config: ModelConfig
    context: ParallelContext
    ops: Ops

    @property
    @abstractmethod
    def stage(self) -> Stage: ...

    @property
    def device(self) -> torch.device:
        return self.context.device

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.config.eos_token_ids

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    def cache_spec(self) -> list[dict[str, tuple[int, ...]]]:
        """Shapes of the tensors that each layer caches for a token, by name, in `Cache.write`'s order."""
        config, layers, own = self.config, range(self.config.num_layers), self.stage.layers
        if config.latent is not None:
            return [latent.cache_shapes(config.latent, layer) if layer in own else {} for layer in layers]
        attend = set(config.attention_layers) & set(own)
        return [attention.cache_shapes(config, self.context.tp) if layer in attend else {} for layer in layers]

    def state_spec(self) -> list[dict[str, tuple[int, ...]]]:
        """Shapes of the float32 states that each layer keeps for a sequence, by name; empty unless it is recurrent."""
        config, layers = self.config, range(self.config.num_layers)
        own, states, recurrent = set(self.stage.layers), {}, set()
        if config.mamba is not None and config.blocks is not None:
            states = mamba_states(config.mamba, self.context, self.ops)
            recurrent = {layer for layer in own if config.blocks[layer] == "linear_attention"}
        elif config.delta is not None:
            states, recurrent = delta_states(config.delta, self.context, self.ops), own & set(config.delta.layers)
        return [states if layer in recurrent else {} for layer in layers]

    @property
    def recurrent(self) -> bool:
        return self.config.delta is not None or self.config.mamba is not None

    def route_shape(self) -> tuple[int, int, int] | None:
        """(layers with experts, experts chosen for a token, experts of a layer); None without experts."""
        mixture = self.config.mixture
        if mixture is None or not mixture.layers:
            return None
        return len(mixture.layers), mixture.routing.top_k, mixture.num_experts

    def indexed_layers(self) -> int:
        """The number of layers with an indexer."""
        latent = self.config.latent
        return 0 if latent is None or latent.indexer is None else len(latent.indexer.layers)
