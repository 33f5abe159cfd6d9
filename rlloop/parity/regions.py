"""Train-inference KL by the region whose engines sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlloop.parity.monitor import compare
from rlloop.types import Sample


def by_region(samples: Sequence[Sample], trainer_logprobs: Sequence[np.ndarray]) -> dict[str, float]:
    """Metrics `fleet/<region>/tokens`, `/tokens_different` and `/k3`; none if engines have no region."""
    regions = [None if (origin := sample.completion.origin) is None else origin.partition("/")[0] for sample in samples]
    metrics: dict[str, float] = {}
    for region in sorted({region for region in regions if region is not None}):
        mine = [i for i, other in enumerate(regions) if other == region]
        metrics_of_region = compare([samples[i] for i in mine], [trainer_logprobs[i] for i in mine]).metrics
        metrics |= {
            f"fleet/{region}/{name}": metrics_of_region[f"parity/{name}"]
            for name in ("tokens", "tokens_different", "k3")
            if f"parity/{name}" in metrics_of_region
        }
    return metrics
