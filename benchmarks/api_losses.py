"""A built-in loss of the training API beside the same loss as a custom one, which takes two passes.

    python benchmarks/api_losses.py [--only dense] [--full]   # LoRA of rank 32, or all weights; on a GPU, bfloat16
    python benchmarks/api_losses.py --tiny                    # a tiny model on the CPU, nothing recorded

A step is `forward_backward` and `optim_step` on 32 sequences of 128 + 384 tokens. Built-in: the loss is evaluated
between the one forward and the backward. Custom, as `forward_backward_custom` does it for any function: a forward, the
function of all logprobs and its gradient, and `forward_backward` with that gradient as weights. Both are timed in turns
on one service, and before that their gradients' norms are compared, so the work is the same. The peer's value is the
custom way's; aims are the ratios that a service published for its own. By arithmetic a second forward f beside f and a
backward b costs (2f + b) / (f + b): 1.33 where b is 2f, 1.5 where a frozen base makes it f.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_shapes import MODELS, make_folder
from results_schema import Figure, need_gpus, report
from torch import Tensor

from rlloop.models import new_model, save_model
from rlloop.training.clients import ServiceClient, TrainingClient
from rlloop.training.service import TrainingService
from rlloop.training.types import AdamParams, Datum
from rlloop.types import ModelInput

Loss = Callable[[Tensor, dict[str, Tensor]], Tensor]  # of a datum's logprobs [N] and its inputs
SMALLER: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "eos_token_id": 1,
}  # fmt: skip
SMALLER_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


def clipped(low: float, high: float) -> Loss:
    def loss(logprobs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        ratio, advantages = (logprobs - inputs["logprobs"]).exp(), inputs["advantages"]
        return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()

    return loss


def dro(logprobs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    quadratic = (logprobs - inputs["logprobs"]) ** 2
    return -(logprobs * inputs["advantages"] - 0.025 * quadratic).sum()


def cross_entropy(logprobs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return -(logprobs * inputs["weights"]).sum()


WAYS: dict[str, tuple[str, dict[str, float | str], Loss, float]] = {  # built-in, settings, custom, published ratio
    "GRPO": ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, clipped(0.8, 1.2), 2.0),
    "DRO": ("dro", {"beta": 0.05}, dro, 1.7),
    "DAPO": ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}, clipped(0.8, 1.28), 1.4),
    "SFT": ("cross_entropy", {}, cross_entropy, 1.3),
}


def batch(client: TrainingClient, vocabulary: int, sequences: int, prompt: int, new: int) -> dict[bool, list[Datum]]:
    """Data of RL (True) and of SFT (False). Sampled logprobs are near those of the model, as after a few updates."""
    rng = np.random.default_rng(0)
    rows = rng.integers(3, vocabulary - 3, (sequences, prompt + new + 1))
    own = (np.arange(prompt + new) >= prompt).astype(np.float32)
    plain = [
        Datum(ModelInput.from_ids(row[:-1].tolist()), {"target_tokens": row[1:].astype(np.int64), "weights": own})
        for row in rows
    ]
    outputs = client.forward(plain).result().loss_fn_outputs
    rl = [
        Datum(
            each.model_input,
            {
                "target_tokens": each.loss_fn_inputs["target_tokens"],
                "logprobs": (output["logprobs"] + rng.normal(0, 0.1, len(own))).astype(np.float32),
                "advantages": own * np.float32(rng.normal()),
            },
        )
        for each, output in zip(plain, outputs, strict=True)
    ]
    return {True: rl, False: plain}


def custom(of: Loss) -> Callable[[list[Datum], list[Tensor]], tuple[Tensor, dict[str, float]]]:
    """A user's loss function over all data."""

    def loss(data: list[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        given = [{key: torch.as_tensor(value) for key, value in each.loss_fn_inputs.items()} for each in data]
        return torch.stack([of(one, inputs) for one, inputs in zip(logprobs, given, strict=True)]).sum(), {}

    return loss


def measure(name: str, client: TrainingClient, data: dict[bool, list[Datum]], rounds: int) -> list[Figure]:
    def step(loss: str, fused: bool, rate: float) -> tuple[float, float]:
        """Seconds, and the gradient's norm. The weights stay: the rate is 0 but for Adam's state."""
        builtin, settings, of, _ = WAYS[loss]
        given = data[loss != "SFT"]
        began = time.perf_counter()
        if fused:
            made = client.forward_backward(given, builtin, settings)
        else:
            made = client.forward_backward_custom(given, custom(of))
        update = client.optim_step(AdamParams(learning_rate=rate))
        made.result()
        norm = update.result().metrics["optim/grad_norm"]
        return time.perf_counter() - began, norm

    figures = []
    for loss, (_, _, _, published) in WAYS.items():
        norms = [step(loss, fused, 0.0)[1] for fused in (True, False)]  # also warms up
        assert abs(norms[0] - norms[1]) <= 1e-3 * norms[0], (loss, norms)
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(rounds):
            for fused in (True, False) if turn % 2 else (False, True):
                times[fused].append(step(loss, fused, 0.0)[0])
        fused, two = (1e3 * float(np.median(times[way])) for way in (True, False))
        figures.append(
            Figure(name=f"{loss} step, {name}", unit="ms", value=fused, peer="custom, two passes", peer_value=two,
                   aim=published, lower_is_better=True)
        )  # fmt: skip
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, help="one of the models")
    parser.add_argument("--full", action="store_true", help="all weights train")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, nothing recorded")
    given = parser.parse_args()
    if not given.tiny:
        need_gpus(instead="--tiny runs a toy on a CPU")
    figures = []
    for model in [given.only] if given.only else list(MODELS):
        name, config = MODELS[model]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            if given.tiny:
                name, config = f"tiny {model}", {**config, **SMALLER, **(SMALLER_EXPERTS if model == "moe" else {})}
                save_model(new_model(config, seed=0), folder)
                settings: dict[str, Any] = {"leaf_tokens": 2048}
            else:
                make_folder(model, folder)
                settings = {"leaf_tokens": 16384, "dtype": "bfloat16", "device": "cuda"}
            service = TrainingService(folder, checkpoints=Path(temporary) / "checkpoints", **settings)
            rank = 0 if given.full else 32
            client = ServiceClient(service).create_lora_training_client(rank=rank, seed=0)
            sizes = (16, 16, 48) if given.tiny else (32, 128, 384)
            data = batch(client, config["vocab_size"], *sizes)
            ways = "all weights" if given.full else f"LoRA {rank}"
            figures += measure(f"{name}, {ways}, {sizes[0]} x {sizes[1]}+{sizes[2]} tokens", client, data, given.rounds)
            service.close()
            del client, service
    report("api-losses" + ("-full" if given.full else ""), figures, write=not given.tiny)


if __name__ == "__main__":
    main()
