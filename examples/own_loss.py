"""A loss of your own, trained by rlloop's trainer: completions below their group's mean weigh less than those above it.

    python examples/own_loss.py            # under a minute on a laptop; nothing is downloaded

A loss is a function from a `LossBatch` to a `LossOutput`. This script calls the trainer with it. Two settings give it
to `rlloop train`, in this folder or with the function in an installed package:

    rlloop train --config-name countdown algorithm.loss._target_=own_loss.asymmetric algorithm.loss.negative=0.3

A small random model learns to repeat the letter that it is given. Arrays carry their shape in their
names: S sequences (prompts x completions of each), N tokens of all of them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

import rlloop
from rlloop.algorithms import LossBatch, LossOutput, get_advantage
from rlloop.config.trainer import TrainerConfig
from rlloop.metrics import Mean
from rlloop.recipes.custom.tiny import write_tiny
from rlloop.trainer import Trainer
from rlloop.types import Example, RewardResult, Sample

LETTERS = "abcdefgh"
GROUP, TOKENS = 16, 6


def asymmetric(batch: LossBatch, *, negative: float = 0.5) -> LossOutput:
    """REINFORCE that punishes less than it rewards: −1/N sum_n w_n A_n logprob_n, w = 1 where A >= 0, else `negative`.

    Denominator: the tokens of the whole optimizer step, so that the shares of its micro-batches add up to its mean.
    """
    b = batch.unmasked()  # the tokens that are trained, [N], in float64
    below_N = b.advantages < 0
    weight_N = torch.where(below_N, negative, 1.0)
    if b.weights is not None:  # algorithm.correction, where a run has one
        weight_N = weight_N * b.weights
    loss = -(weight_N * b.advantages * b.logprobs).sum() / b.total_tokens
    return LossOutput(loss, {"loss/below_mean": Mean(below_N.sum().item(), len(below_N))})


def main(steps: int = 60) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(Path(folder))  # or any Hugging Face folder of a family that rlloop knows
        model = rlloop.load_model(folder)
        ids = Tokenizer.from_file(f"{folder}/tokenizer.json").get_vocab()
        trainer = Trainer(model, TrainerConfig(lr=4e-3))  # updates `model` in place, so the engine has them at once
    engine = rlloop.Engine(model)
    examples_S = [Example(letter, [ids[letter]], letter, data={}) for letter in LETTERS for _ in range(GROUP)]
    group_S = [index // GROUP for index in range(len(examples_S))]
    rewards = []
    for step in range(steps):
        engine.set_version(step)  # the weights have changed: cached keys and values are dropped
        seeds = range(step * len(examples_S), (step + 1) * len(examples_S))
        sampling = [rlloop.SamplingParams(max_tokens=TOKENS, seed=seed, ignore_eos=True) for seed in seeds]
        completions = engine.generate([example.prompt_ids for example in examples_S], sampling)
        reward_S = [float(np.mean([id == c.prompt_ids[0] for id in c.token_ids])) for c in completions]
        advantage_S = get_advantage("group_norm")(reward_S, group_S)
        batch = [
            Sample(f"{step}/{i}", examples_S[i], c, "", RewardResult(reward_S[i]), group_S[i], float(advantage_S[i]))
            for i, c in enumerate(completions)
        ]
        update = trainer.forward_backward(batch, asymmetric)
        trainer.optim_step()
        sampled_N = np.concatenate([completion.logprobs for completion in completions])
        different = int((np.concatenate(update.logprobs).view(np.int32) != sampled_N.view(np.int32)).sum())
        rewards.append(float(np.mean(reward_S)))
        below = update.metrics["loss/below_mean"].value
        print(f"step {step}: reward {rewards[-1]:.3f}, {below:.0%} below the mean, {different} differ", flush=True)
    return rewards


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
