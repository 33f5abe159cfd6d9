"""Cache of image features: computed once for all requests with an image and all chunks of a prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from rlloop.inputs import Image, ModelInput
from rlloop.models.vision import PlacedFeatures, place_features
from rlloop.rollout.engine.request import RequestTable
from rlloop.rollout.engine.scheduler import ScheduledStep

if TYPE_CHECKING:
    from rlloop.models import Model

MOST_BYTES = 1 << 30  # of features kept on the model's device; the least recently used go first


class FeatureCache:
    """Features by image digest, for one version of the weights."""

    def __init__(self) -> None:
        self._kept = OrderedDict[str, Tensor]()

    def forget(self) -> None:
        """Drop all features; the weights have changed."""
        self._kept.clear()

    def placed(
        self, model: Model, table: RequestTable, batch: ScheduledStep, query_start: np.ndarray
    ) -> PlacedFeatures | None:
        """Image features for a step's placeholder tokens; None if there are none."""
        within = table.placed[batch.rows] & (batch.context < table.prompt_length[batch.rows])
        if not within.any():
            return None
        columns = (each[within].tolist() for each in (batch.rows, batch.context, batch.counts, query_start[:-1]))
        return self.place(
            model,
            (
                (table.request(row).model_input, begin, begin + count, at)
                for row, begin, count, at in zip(*columns, strict=True)
            ),
        )

    def place(self, model: Model, segments: Iterable[tuple[ModelInput, int, int, int]]) -> PlacedFeatures | None:
        """`place_features` of these segments, with features from the cache."""
        return place_features(segments, partial(self._see, model))

    def _see(self, model: Model, images: list[Image]) -> list[Tensor]:
        missing = [image for image in images if image.digest not in self._kept]
        if missing:
            new_features = model.see(missing)
            self._kept.update({image.digest: each for image, each in zip(missing, new_features, strict=True)})
        for image in images:
            self._kept.move_to_end(image.digest)
        features = [self._kept[image.digest] for image in images]
        while len(self._kept) > len(images) and sum(each.nbytes for each in self._kept.values()) > MOST_BYTES:
            self._kept.popitem(last=False)
        return features
