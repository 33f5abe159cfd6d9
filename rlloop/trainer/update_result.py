"""Results of one `forward_backward`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlloop.metrics import Mean, Reduction
from rlloop.models import Model
from rlloop.trainer.batching import StepBatch
from rlloop.trainer.leaves import Leaf, recomputed
from rlloop.trainer.mfu import utilisation
from rlloop.types import Recomputed


@dataclass(frozen=True)
class UpdateResult:
    recomputed: Recomputed  # [P] a sequence, in batch order, before the update
    metrics: dict[str, Reduction]  # the loss's own and `loss/total`, over the whole step
    tokens: int  # trained
    sequences: int  # with at least one trained token
    forward_tokens: int  # of all sequences, prompts included; what they share counts for each
    micro_batches: int

    @property
    def logprobs(self) -> Sequence[np.ndarray]:
        """[P] float32 a sequence."""
        return self.recomputed.logprobs

    @classmethod
    def of(
        cls, model: Model, step: StepBatch, leaves: Sequence[Leaf], metrics: dict[str, Reduction], began: float
    ) -> UpdateResult:
        """The results of `model` on `step`; `metrics` are the loss's. What is recomputed is on the host, so the device
        has finished and the time since `began` is complete."""
        lengths, again = [len(row.token_ids) for row in step.rows], recomputed(step, leaves)
        shared = step.shared or [0] * len(lengths)
        of_shared = {} if step.shared is None else {"trainer/shared_tokens": Mean(sum(shared), sum(lengths))}
        return cls(
            recomputed=again,
            metrics={
                **metrics,
                "loss/total": Mean(metrics["loss/total"].value, 1),  # a sum over micro-batches, a mean over updates
                **of_shared,
                **utilisation(model, zip(shared, lengths, strict=True), time.perf_counter() - began),
            },
            tokens=step.total_tokens,
            sequences=step.total_sequences,
            forward_tokens=sum(lengths),
            micro_batches=len(step.micro_batches),
        )
