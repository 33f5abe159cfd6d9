"""Arrays to devices."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def on_device(array: np.ndarray, device: str | torch.device) -> Tensor:
    """A copy on `device`; to a GPU from pinned memory, since a pageable copy waits for all queued work."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    np.copyto(pinned.numpy(), array)  # by this thread: PyTorch wakes all of its own, milliseconds for 64
    return pinned.to(device, non_blocking=True)
