"""Expert choices in a rollout file: the smallest integer type that holds them, compressed.

{"shape": [63, 4, 2], "type": "uint8", "data": "KLUv/SB+..."}      zstd, then base64
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import zstandard


def pack_experts(experts: np.ndarray) -> dict[str, Any]:
    """[tokens, layers, top_k] of an unsigned type, as JSON values."""
    data = zstandard.compress(np.ascontiguousarray(experts).tobytes(), 3)
    return {"shape": list(experts.shape), "type": experts.dtype.name, "data": base64.b64encode(data).decode()}


def unpack_experts(packed: Mapping[str, Any]) -> np.ndarray:
    """What `pack_experts` was given."""
    content = zstandard.decompress(base64.b64decode(packed["data"]))
    return np.frombuffer(content, packed["type"]).reshape(packed["shape"])
