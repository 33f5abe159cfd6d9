"""Both sides of `long_context.py`, in a process of their own: what they train, and how long it takes."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from children import tell

BLOCK = 2048  # rows of logits that the peer makes at a time
CHOOSES = 32768  # tokens by which the peer chooses its attention
Run = Callable[[int], float]  # (tokens of the sequence) -> loss


def sequence(length: int, vocabulary: int) -> list[int]:
    return np.random.default_rng(length).integers(3, vocabulary, length).tolist()


def ours(folder: Path, device: str, settings: dict[str, Any]) -> Run:
    import rlloop
    from rlloop.algorithms import get_loss
    from rlloop.config.trainer import TrainerConfig
    from rlloop.trainer import Trainer, TrainSequence

    model = rlloop.load_model(folder, dtype="bfloat16", device=device)
    keeps, moves, offload, prompt = (
        settings[name] for name in ("keep_attention", "offload_activations", "offload", "prompt")
    )
    trainer = Trainer(
        model,
        TrainerConfig(
            max_batch_tokens=settings["positions"],
            checkpoint_layers="all",
            checkpoint_keep_attention=keeps,
            checkpoint_offload=moves,
            offload=offload,
        ),
    )

    def run(length: int) -> float:
        uniform = np.full(length - prompt, -np.log(model.vocab_size), np.float32)
        batch = TrainSequence(
            token_ids=sequence(length, model.vocab_size), predict=range(prompt, length),
            advantages=np.ones(length - prompt, np.float32), rollout_logprobs=uniform,
        )  # fmt: skip
        result = trainer.forward_backward([batch], get_loss("grpo"), old_logprobs=[uniform])
        trainer.drop_gradient()
        return float(result.metrics["loss/total"].value)

    return run


def theirs(folder: Path, device: str, settings: dict[str, Any]) -> Run:
    import torch
    from torch.autograd.graph import save_on_cpu
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.checkpoint import checkpoint
    from transformers import AutoModelForCausalLM

    prompt = settings["prompt"]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.to(device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    state = [torch.zeros(3, *each.shape, device=device) for each in model.parameters()]  # masters and moments
    moves = save_on_cpu(pin_memory=device == "cuda") if settings.get("peer_offloads") else nullcontext()
    kinds = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def loss_of(hidden: Any, targets: Any, weight: float) -> Any:
        logprobs = model.lm_head(hidden).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        ratio = (logprobs + float(np.log(model.config.vocab_size))).exp()
        return -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight).sum()

    def run(length: int) -> float:
        ids = torch.tensor(sequence(length, model.config.vocab_size), device=device)
        with sdpa_kernel(kinds, set_priority=True), moves:
            made = model.model(ids[None], attention_mask={"full_attention": None}, use_cache=False)  # causal by itself
            pairs = zip(made.last_hidden_state[0, prompt - 1 : -1].split(BLOCK), ids[prompt:].split(BLOCK), strict=True)
            blocks = [checkpoint(loss_of, *pair, 1 / (length - prompt), use_reentrant=False) for pair in pairs]
            loss: Any = sum(blocks)
        with sdpa_kernel(kinds, set_priority=True):
            loss.backward()
        model.zero_grad(set_to_none=True)
        assert state
        return float(loss.detach())

    times: dict[bool, float] = {}
    for cudnn in (False, True) if device == "cuda" else ():
        if cudnn:
            kinds.insert(0, SDPBackend.CUDNN_ATTENTION)
        try:
            run(settings["warm"])
            times[cudnn] = timed(run, min(CHOOSES, *settings["lengths"].values()), device)[0]
        except RuntimeError as error:
            print(f"SDPA, cuDNN first: {cudnn}, does not run: {str(error).splitlines()[0]}", file=sys.stderr)
    if times.get(True, np.inf) >= times.get(False, 0.0) and SDPBackend.CUDNN_ATTENTION in kinds:
        kinds.remove(SDPBackend.CUDNN_ATTENTION)
    print(f"peer: seconds with cuDNN first, or not: {times}; {kinds[0]}", file=sys.stderr, flush=True)
    return run


def timed(run: Run, length: int, device: str) -> tuple[float, float]:
    """(seconds, loss), with the device's work complete."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    loss = run(length)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, loss


def needed(seconds: float, length: int, longer: Sequence[int]) -> float:
    """Seconds of another round and of one of each longer length: attention's grow with the square."""
    return seconds * (1 + sum((each / length) ** 2 for each in longer))


def one_round(run: Run, length: int, device: str) -> float | None:
    """Tell a round, or that memory was over. Its seconds, or None."""
    import torch

    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        took, loss = timed(run, length, device)
    except torch.OutOfMemoryError as error:
        print(str(error).split(". ")[0], file=sys.stderr, flush=True)
        tell(length=length, outgrown=True)
        del error
        gc.collect()  # graphs of recomputed layers hold themselves
        return None
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    tell(length=length, seconds=took, loss=loss, peak=peak)
    return took


def measure(run: Run, settings: dict[str, Any], device: str) -> None:
    """Tell each round, from short to long, until memory or time is over."""
    lengths = sorted(settings["lengths"].values())
    for at, length in enumerate(lengths):
        took: float | None = 0.0
        for index in range(settings["rounds"]):
            if index and time.monotonic() + needed(took, length, lengths[at + 1 :]) > settings["deadline"]:
                break
            took = one_round(run, length, device)
            if took is None:
                for each in lengths[at + 1 :]:  # what is longer takes more
                    tell(length=each, outgrown=True)
                return


def search(run: Run, settings: dict[str, Any], device: str) -> None:
    """Tell a round of each length that is twice the one before, until memory or time is over, and then more rounds of
    the longest. `late`: of a length for which there is no time, even if memory is over half way."""
    length, longest, last = settings["first"], 0, 0.0
    while length <= settings["most"]:
        if longest and time.monotonic() + 2 * last > settings["deadline"]:
            tell(length=length, late=True)
            break
        took = one_round(run, length, device)
        if took is None:
            break
        longest, last, length = length, took, 2 * length
    for _ in range(settings["rounds"] - 1):
        if longest and time.monotonic() + last < settings["deadline"]:
            one_round(run, longest, device)
