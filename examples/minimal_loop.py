"""The whole algorithm in one file: GRPO at zero train-inference KL, on the public API alone.

    python examples/minimal_loop.py            # under a minute on a laptop; nothing is downloaded

A small random model learns to repeat the letter that it is given. Tensors carry their shape in their names:
P prompts, G completions of each, S = P x G sequences, T tokens of a completion.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

import rlloop
from rlloop.recipes.custom.tiny import write_tiny

LETTERS = "abcdefgh"
GROUP, TOKENS, LR, CLIP = 16, 6, 4e-3, 0.2


def main(steps: int = 60) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(Path(folder))  # or any Hugging Face folder of a family that rlloop knows
        model = rlloop.load_model(folder)
        vocabulary = Tokenizer.from_file(f"{folder}/tokenizer.json").get_vocab()
    engine = rlloop.Engine(model)  # samples with the very weights that the optimizer moves: no copy, no sync
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    prompts = [[vocabulary[letter]] for letter in LETTERS for _ in range(GROUP)]  # S prompts of one token each
    rewards = []
    for step in range(steps):
        engine.set_version(step)  # the weights have changed: cached keys and values are dropped
        seeds = range(step * len(prompts), (step + 1) * len(prompts))
        sampling = [rlloop.SamplingParams(max_tokens=TOKENS, seed=seed, ignore_eos=True) for seed in seeds]
        completions = engine.generate(prompts, sampling)

        reward_S = np.array([np.mean([token == c.prompt_ids[0] for token in c.token_ids]) for c in completions])
        reward_PG = reward_S.reshape(-1, GROUP)
        advantage_PG = (reward_PG - reward_PG.mean(1, keepdims=True)) / (reward_PG.std(1, keepdims=True) + 1e-6)
        advantage_S1 = torch.tensor(advantage_PG.reshape(-1, 1), dtype=torch.float32)

        logprob_ST = torch.stack(rlloop.token_logprobs(model, [(c.prompt_ids, c.token_ids) for c in completions]))
        sampled_ST = torch.from_numpy(np.stack([c.logprobs for c in completions]))
        different = (logprob_ST.detach().view(torch.int32) != sampled_ST.view(torch.int32)).sum().item()
        assert different == 0, f"{different} tokens have other bits in the trainer than in the engine"

        ratio_ST = (logprob_ST - sampled_ST).exp()  # exactly 1 here; it moves where a batch takes several updates
        clipped_ST = ratio_ST.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratio_ST * advantage_S1, clipped_ST * advantage_S1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rewards.append(float(reward_S.mean()))
        print(f"step {step}: reward {rewards[-1]:.3f}, {different} of {logprob_ST.numel()} tokens differ", flush=True)
    return rewards


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
