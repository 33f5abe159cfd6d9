"""Train-inference KL by the region whose engines sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlloop.parity.monitor import compare
from rlloop.types import Sample


def by_region(samples: Sequence[Sample], trainer_logprobs: Sequence[np.ndarray]) -> dict[str, float]:
    """`fleet/<region>/tokens`, `/tokens_different` and `/k3`, where engines of several regions sampled."""
    regions = [None if (origin := sample.completion.origin) is None else origin.partition("/")[0] for sample in samples]
    metrics: dict[str, float] = {}
    for region in sorted({region for region in regions if region is not None}):
        mine = [i for i, its in enumerate(regions) if its == region]
        found = compare([samples[i] for i in mine], [trainer_logprobs[i] for i in mine]).metrics
        metrics |= {
            f"fleet/{region}/{name}": found[f"parity/{name}"]
            for name in ("tokens", "tokens_different", "k3")
            if f"parity/{name}" in found
        }
    return metrics
