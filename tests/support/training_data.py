"""Data and comparisons for tests of the training API."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from rlloop.training.service import TrainingService
from rlloop.training.types import (
    AdamParams,
    Datum,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
)
from rlloop.types import ModelInput

VOCABULARY = 300
ADAM = AdamParams(learning_rate=1e-2)


def supervised(seed: int, count: int, longest: int = 24) -> list[Datum]:
    """Random sequences with weights of 0 and 1."""
    rng = np.random.default_rng(seed)
    data = []
    for _ in range(count):
        ids = rng.integers(3, VOCABULARY, int(rng.integers(4, longest))).tolist()
        weights = (rng.random(len(ids) - 1) < 0.7).astype(np.float32)
        data.append(Datum(ModelInput.from_ids(ids[:-1]), {"target_tokens": ids[1:], "weights": weights}))
    return data


def sampled(
    prompt: list[int], sequence: SampledSequence, advantage: float = 1.0, named: bool = True, **inputs: float
) -> Datum:
    """A sampled sequence to be trained, with its provenance. `inputs`: further numbers of its own tokens."""
    tokens = [*prompt, *sequence.tokens]
    before, own = len(prompt) - 1, len(sequence.tokens)

    def padded(values: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros(before), values]).astype(np.float32)

    numbers = {"logprobs": sequence.logprobs, "advantages": np.full(own, advantage)}
    numbers |= {name: np.full(own, value) for name, value in inputs.items()}
    arrays = {name: padded(values) for name, values in numbers.items()}
    datum = Datum(ModelInput.from_ids(tokens[:-1]), {"target_tokens": tokens[1:], **arrays})
    if not named:
        return datum
    id = sequence.sequence_id
    return datum.with_provenance(
        [
            PromptProvenanceSpan(sequence_id=id, length=before + 1),
            SampledProvenanceSpan(sequence_id=id, length=own - 1),
        ],
        [
            PromptProvenanceSpan(sequence_id=id, offset=1, length=before),
            SampledProvenanceSpan(sequence_id=id, length=own),
        ],
    )


def digest(service: TrainingService, model_id: str) -> str:
    """Of the masters of a model, whose calls are all done."""
    model = service._models.get(model_id).model
    assert model is not None
    found = blake2b(digest_size=8)
    for name, tensor in sorted(model.trainer.masters.items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()
