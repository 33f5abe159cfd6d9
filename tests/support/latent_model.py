"""A pretend model whose layers cache one latent per token and not keys and values: the engine must not care."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlloop.models.adapter_slots import AdapterRegistry
from rlloop.models.head import Head
from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import ops_for
from rlloop.numerics.profile import NumericsProfile
from rlloop.parallel.context import ParallelContext
from rlloop.types import Completion, SamplingParams

VOCABULARY, WIDTH, HEADS, LAYERS = 48, 32, 2, 2


class LatentModel(nn.Module):
    eos_token_ids = (2,)
    recurrent = False
    max_positions = 160
    context = ParallelContext(torch.device("cpu"))
    adapter = None
    vocab_size = VOCABULARY
    stage = None  # of a pipeline

    def __init__(self, profile: NumericsProfile | None = None, seed: int = 0) -> None:
        super().__init__()
        self.profile = profile or NumericsProfile()
        self.ops = ops_for(self.profile)
        self.output = Head(self.ops, lambda: self.head, None)
        self.adapters = AdapterRegistry()
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) / shape[-1] ** 0.5)

        self.embed = nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=generator))
        self.head = nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=generator) / 4)
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.query = nn.ParameterList([weight(HEADS * WIDTH, WIDTH) for _ in range(LAYERS)])
        self.latent = nn.ParameterList([weight(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.out = nn.ParameterList([weight(WIDTH, HEADS * WIDTH) for _ in range(LAYERS)])
        frequency = 1e3 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2))
        angle = torch.outer(torch.arange(self.max_positions), frequency).float()
        self.cos, self.sin = angle.cos(), angle.sin()

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    def refresh(self) -> None:
        """No weights are copies of others."""

    def state_spec(self) -> list[dict[str, tuple[int, ...]]]:
        return [{}] * LAYERS

    def cache_spec(self) -> list[dict[str, tuple[int, ...]]]:
        return [{"latent": (1, WIDTH)}] * LAYERS

    def route_shape(self) -> None:
        return None

    def indexed_layers(self) -> int:
        return 0

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: AttentionLayout,
        cache=None,
        routes=None,
        adapters=None,
        images=None,
        read=None,
    ):
        ops, x, rest = self.ops, self.embed[tokens], None
        for layer in range(LAYERS):
            normed, rest = ops.rms_norm(x, self.norm, 1e-6, rest)
            q = ops.linear(normed, self.query[layer]).view(-1, HEADS, WIDTH)
            latent = ops.linear(normed, self.latent[layer]).view(-1, 1, WIDTH)
            q, latent = (ops.rope(t, positions, self.cos, self.sin) for t in (q, latent))
            if cache is not None:
                (latent,) = cache.write(layer, latent=latent)
            x = ops.linear(ops.attention(q, latent, latent, layout, WIDTH**-0.5).flatten(1), self.out[layer])
        hidden = ops.rms_norm(x, self.norm, 1e-6, rest)[0]
        return hidden if read is None else hidden[read]

    def logits(self, hidden: Tensor, adapters=None):
        return self.ops.logits(hidden, self.head)


PROMPTS = [[5, 6, 7], [9], list(range(3, 40)), [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]]


def longest(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "seed": 1, "ignore_eos": True, **changes})


def same(a: Completion, b: Completion) -> bool:
    return (
        a.token_ids == b.token_ids
        and a.logprobs.tobytes() == b.logprobs.tobytes()
        and a.raw_logprobs.tobytes() == b.raw_logprobs.tobytes()
    )
