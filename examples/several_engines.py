"""Several engines over one model, each in a thread: the completions are, bit for bit, those of a single engine.

    python examples/several_engines.py            # under a minute on a laptop; nothing is downloaded

A completion is a function of weights, prompt, sampling parameters and seed, whatever it is batched with, so prompts may
be dealt out in any way. `rlloop train launch=ray ray.replicas=3` and `fleet=regions` do the same over processes and
machines. The run's folder is recorded, for `rlloop dashboard` and `rlloop verify`.
"""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

import rlloop
from rlloop.recipes.custom.tiny import write_tiny

LETTERS, ENGINES = "abcdefgh", 3
GROUP, TOKENS, LR = 16, 6, 4e-3


def main(steps: int = 60, folder: str | None = None) -> list[float]:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(folder or scratch)
        write_tiny(root / "model")  # or any Hugging Face folder of a family that rlloop knows
        model = rlloop.load_model(root / "model")
        ids = Tokenizer.from_file(str(root / "model/tokenizer.json")).get_vocab()
        engines = [rlloop.Engine(model) for _ in range(ENGINES)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        prompts = [[ids[letter]] for letter in LETTERS for _ in range(GROUP)]
        settings = {"engines": ENGINES, "lr": LR}
        with (
            ThreadPoolExecutor(ENGINES) as pool,
            rlloop.Run(root / "run", settings, parity="require", engine=model.fingerprint()) as run,
        ):
            for step in range(1, steps + 1):
                completions = sample(pool, engines, prompts, step)
                if step == 1:  # the same prompts and seeds, by one engine
                    again = sample(pool, engines[:1], prompts, step)
                    assert all(a.token_ids == b.token_ids for a, b in zip(completions, again, strict=True))
                    assert all((a.logprobs == b.logprobs).all() for a, b in zip(completions, again, strict=True))
                learn(run, step, model, optimizer, completions)
        return run.columns("reward/mean")["reward/mean"]


def sample(
    pool: ThreadPoolExecutor, engines: list[rlloop.Engine], prompts: list[list[int]], step: int
) -> list[rlloop.Completion]:
    """Every engine takes each n-th prompt; seeds belong to prompts, not to engines."""
    count = len(engines)

    def share(index: int) -> list[rlloop.Completion]:
        engines[index].set_version(step - 1)  # the weights have changed: cached keys and values are dropped
        seeds = range(1000 * step + index, 1000 * step + len(prompts), count)
        sampling = [rlloop.SamplingParams(max_tokens=TOKENS, seed=seed, ignore_eos=True) for seed in seeds]
        return engines[index].generate(prompts[index::count], sampling)

    shares = list(pool.map(share, range(count)))
    return [shares[index % count][index // count] for index in range(len(prompts))]


def learn(
    run: rlloop.Run, step: int, model: rlloop.Model, optimizer: torch.optim.Optimizer, batch: list[rlloop.Completion]
) -> None:
    """One REINFORCE step with the group's mean as baseline; the completions and their rewards are recorded."""
    reward_S = np.array([np.mean([token == each.prompt_ids[0] for token in each.token_ids]) for each in batch])
    reward_PG = reward_S.reshape(-1, GROUP)
    advantage_S = (reward_PG - reward_PG.mean(1, keepdims=True)).reshape(-1) / (reward_S.std() + 1e-6)
    logprobs = rlloop.token_logprobs(model, [(each.prompt_ids, each.token_ids) for each in batch])
    rows = zip(batch, reward_S, advantage_S, logprobs, strict=True)
    run.samples(step, [
        {"completion": each, "reward": reward, "advantage": advantage, "trainer_logprobs": scored}
        for each, reward, advantage, scored in rows
    ])  # fmt: skip
    loss = -(torch.stack(logprobs) * torch.tensor(advantage_S, dtype=torch.float32)[:, None]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log(step, {"loss/value": loss})
    print(f"step {step}: reward {reward_S.mean():.3f}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
