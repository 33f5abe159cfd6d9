"""Which implementation of each operation a model runs: the declared half of its numerical definition."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

IMPLEMENTATIONS = ("rlloop", "stock", "reference")


@dataclass(frozen=True)
class NumericsProfile:
    """One knob an operation. Engine and trainer agree bit for bit when they run the same profile on the same backend.

    - `rlloop` keeps the contract: the bits of a row depend on nothing but that row.
    - `stock` is what PyTorch does by default: as fast as the library gets, and it varies with batch size and phase.
    - `reference` is slow and obvious, in any float type, float64 included: the oracle of the tests.
    """

    linear: str = "rlloop"
    rms_norm: str = "rlloop"
    activation: str = "rlloop"
    rope: str = "rlloop"
    attention: str = "rlloop"
    token_logprob: str = "rlloop"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value not in IMPLEMENTATIONS:
                raise ValueError(f"NumericsProfile.{field.name} is {value!r}; allowed are {', '.join(IMPLEMENTATIONS)}")

    @classmethod
    def preset(cls, name: str) -> NumericsProfile:
        """The profile that runs every operation by the implementation `name`."""
        return cls(**{field.name: name for field in dataclasses.fields(cls)})

    @property
    def holds_contract(self) -> bool:
        """Whether every operation is the invariant one, so that `parity.mode=require` can hold."""
        return self == NumericsProfile()

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
