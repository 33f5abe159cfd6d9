"""Model FLOPs utilisation (MFU) of an update: the model's operations over those that the GPU could do in that time.

Chowdhery et al. 2022 (PaLM, arXiv:2204.02311), appendix B, with half the attention, since it is causal. Recomputation
(checkpointed layers, a second forward, a reference model) counts as time but not as work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch

from rlloop.metrics import Mean
from rlloop.models import Model
from rlloop.models.parameters import ParameterStore

PEAKS = {  # substring of a device's name -> dense bfloat16 operations per second, from datasheets; first match counts
    "B200": 2.25e15,
    "H200": 9.89e14,
    "H100 PCIe": 7.56e14,
    "H100 NVL": 8.35e14,
    "H100": 9.89e14,
    "A100": 3.12e14,
    "L40S": 3.62e14,
}


def peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak dense 16-bit operations per second; None for other devices and for float32."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for substring, rate in PEAKS.items() if substring in name), None)


_active: WeakKeyDictionary[Model, float] = WeakKeyDictionary()  # counting takes milliseconds, and is of each update


def active_weights(model: Model) -> float:
    """Weights that one token is multiplied with: chosen experts only, and no embedding that is only looked up."""
    if model not in _active:
        _active[model] = _counted(model)
    return _active[model]


def _counted(model: Model) -> float:
    config, shares = model.config, {}
    if config.mixture is not None:
        shares = {".experts.": config.mixture.routing.top_k / config.mixture.num_experts}
    if not config.tied:
        shares["embed_tokens"] = 0.0
    return sum(
        math.prod(shape) * next((share for substring, share in shares.items() if substring in name), 1.0)
        for name, shape in ParameterStore(model.with_adapter(None)).shapes().items()
    )


def operations(model: Model, spans: Iterable[tuple[int, int]]) -> float:
    """Floating-point operations of forward and backward over sequences, of which tokens are computed from and up to."""
    config = model.config
    width = config.num_heads * config.head_dim
    if config.latent is not None:
        width = config.num_heads * (config.latent.nope_dim + config.latent.rope_dim + config.latent.v_dim) / 2
    weights, attention = active_weights(model), 6 * len(config.attention_layers) * width
    return sum(6 * weights * (end - begin) + attention * (end**2 - begin**2) for begin, end in spans)


def utilisation(model: Model, spans: Iterable[tuple[int, int]], seconds: float) -> dict[str, Mean]:
    """`perf/mfu` of an update, of all GPUs of the layout; empty where the device's peak is unknown."""
    rate = peak(model.context.device, model.dtype)
    gpus = model.context.layout.world_size
    return {} if rate is None else {"perf/mfu": Mean(operations(model, spans), rate * gpus * seconds)}
