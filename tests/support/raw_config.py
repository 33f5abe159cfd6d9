"""The config.json of a small model."""

from __future__ import annotations

import json
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.checkpoints import EVERY, SIZES


def raw(family: str = "qwen3", **changes: Any) -> dict[str, Any]:
    """A config.json as transformers writes it; a change to `...` leaves the key out."""
    make, own = EVERY[family]
    made = make(**{**SIZES, **own})
    written = {
        **json.loads(made.to_json_string()),
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[made.model_type]],
    }
    return {name: value for name, value in {**written, **changes}.items() if value is not ...}
