"""Checks of one family of models, shared by its tests and by the table of families."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlloop import SamplingParams, load_model, token_logprobs
from rlloop.algorithms import loss_for
from rlloop.config.run import AlgorithmConfig
from rlloop.config.trainer import Schedule, TrainerConfig
from rlloop.trainer import Trainer
from rlloop.trainer.batching import TrainSequence
from tests.support.checkpoints import (
    SIZES,
    by_our_names,
)

PROMPTS = [[5], list(range(3, 20)), list(range(10, 80)), [9, 8, 7]]
SAMPLING = [
    SamplingParams(max_tokens=30, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=20, seed=2, temperature=0.8, top_p=0.9),
    SamplingParams(max_tokens=25, seed=3, temperature=1.2, top_k=30, min_tokens=10),
    SamplingParams(max_tokens=20, seed=4, temperature=0.0),
]
STEPS = 40


SFT = loss_for(AlgorithmConfig(loss="sft", advantage="grpo"))


def memorise(folder: Path) -> tuple[list[float], dict[str, float]]:
    """The loss (mean nats a token) of each step, and how far each parameter moved, in its own norm.

    The learning rate falls to 0: at a constant one, a token that changes experts late costs a spike.
    """
    model = load_model(folder)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rng = np.random.default_rng(0)
    batch = [
        TrainSequence.supervised(rng.integers(3, 97, 4).tolist(), rng.integers(3, 97, 12).tolist()) for _ in range(4)
    ]
    trainer = Trainer(model, TrainerConfig(lr=1e-2, schedule=Schedule.linear, num_steps=STEPS, max_batch_tokens=256))
    losses = []
    for _ in range(STEPS):
        result = trainer.forward_backward(batch, SFT)
        losses.append(-float(np.concatenate(result.logprobs).mean()))
        trainer.optim_step()
    moved = {
        name: ((parameter.detach() - before[name]).norm() / before[name].norm()).item()
        for name, parameter in model.named_parameters()
    }
    return losses, moved


LENGTHS = ((1, 1), (3, 9), (17, 30), (64, 70), (5, 16))  # of prompt and completion


def sequences() -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(0)
    vocabulary = SIZES["vocab_size"]
    return [(rng.integers(0, vocabulary, p).tolist(), rng.integers(0, vocabulary, c).tolist()) for p, c in LENGTHS]


def theirs(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> Tensor:
    """Logits that predict the completion. [T, V] float32"""
    return model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()


def logprobs_of(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> Tensor:
    return theirs(model, prompt, completion).log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def compare(folder: Path, model: PreTrainedModel) -> tuple[float, dict[str, float]]:
    """Largest logprob error, and relative gradient error by parameter, under one random weighting of all tokens."""
    ours = load_model(folder)
    mine = token_logprobs(ours, sequences())
    reference = [logprobs_of(model, *pair) for pair in sequences()]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(len(row), generator=generator) for row in mine]
    for rows in (mine, reference):
        torch.stack([(row * weight).sum() for row, weight in zip(rows, weights, strict=True)]).sum().backward()
    error = max((a - b).abs().max().item() for a, b in zip(mine, reference, strict=True))
    gradients = by_our_names({name: parameter.grad for name, parameter in model.named_parameters()})
    without = {name for name, _ in ours.named_parameters() if "indexer" in name or "e_score" in name}
    assert gradients.keys() - without == dict(ours.named_parameters()).keys() - without
    relative = {}
    for name, parameter in ours.named_parameters():
        wanted = gradients.get(name)
        if name in without:  # a choice has no gradient, there as here
            assert parameter.grad is None
            assert wanted is None
            continue
        assert parameter.grad is not None
        assert wanted is not None
        assert wanted.norm() > 1e-2, f"{name} is not tested: its gradient vanishes"
        relative[name] = ((parameter.grad - wanted).norm() / wanted.norm()).item()
    return error, relative
