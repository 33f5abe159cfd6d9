"""transformers in float64, where it would go to float32 by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from rlloop.models import load_model, token_logprobs
from rlloop.numerics.profile import NumericsProfile
from tests.support.checkpoints import SIZES

RNG = np.random.default_rng(5)  # no token often enough for two positions of the same score
PROMPT, COMPLETION = (RNG.integers(0, SIZES["vocab_size"], length).tolist() for length in (8, 20))


class Wide(TorchFunctionMode):
    """Keep float64 tensors in float64 where a model's norms, softmaxes, routers and recurrences ask for float32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros or (args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64):
            if func is torch.Tensor.float:
                return args[0]
            args = [torch.float64 if value is torch.float32 else value for value in args]
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


@torch.no_grad()
def their_logprobs(folder: Path) -> Tensor:
    """Of `COMPLETION` after `PROMPT`. [T] float64"""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with Wide():
        logits = model(torch.tensor([PROMPT + COMPLETION])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(COMPLETION)[:, None])[:, 0]


@torch.no_grad()
def our_logprobs(folder: Path) -> Tensor:
    model = load_model(folder, dtype="float64", profile=NumericsProfile.preset("reference"))
    return token_logprobs(model, [(PROMPT, COMPLETION)])[0]
