"""Tokens per second of one optimizer step: rlloop's trainer beside a plain PyTorch loop; fused beside custom losses.

Both train a random 3M-parameter float32 Qwen3 on the same sequences (prompt and completion ids, advantages, old
logprobs) with GRPO, one clipping by global norm and one fused AdamW a step, on micro-batches of about the same size.

- rlloop: `forward_backward` and `optim_step`, every parity guarantee on: invariant kernels, sequences laid end to end,
  float64 losses with all their metrics, entropy of every token, logprobs handed back for the comparison.
- plain: transformers' Qwen3 (SDPA), right-padded rows under an attention mask (none where all rows are full), lm_head
  at completion positions only, log_softmax, PPO-clipped token mean in float32, no metrics, no entropy.

`uniform` has no padding, so the plain loop computes nothing in vain; `ragged` is what sampling gives. Tokens are those
of the sequences, prompts included, padding not. They take turns, and of each the fastest of the rounds counts.

    python benchmarks/train.py [--rounds 7] [--no-write]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from results_schema import Figure, report, table
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rlloop import load_model
from rlloop.algorithms import get_loss
from rlloop.config import TrainerConfig
from rlloop.trainer import Trainer, TrainSequence

VOCAB, SEQUENCES, LR = 4096, 64, 1e-4


def make_folder(path: Path) -> None:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    model.save_pretrained(path)


def make_batch(ragged: bool) -> list[TrainSequence]:
    """Prompts of 16 and completions of 64 tokens; ragged: 8 to 24 and 16 to 112, the same on average."""
    rng = np.random.default_rng(0)
    batch = []
    for _ in range(SEQUENCES):
        prompt, made = (int(rng.integers(8, 25)), int(rng.integers(16, 113))) if ragged else (16, 64)
        batch.append(
            TrainSequence(
                token_ids=rng.integers(1, VOCAB, prompt + made).tolist(),
                predict=range(prompt, prompt + made),
                advantages=np.full(made, rng.normal(), np.float32),
                rollout_logprobs=np.full(made, -np.log(VOCAB), np.float32),
            )
        )
    return batch


class PlainLoop:
    """What one would write without a framework."""

    def __init__(self, model: PreTrainedModel, micro_batch_tokens: int) -> None:
        self.model = model
        self.budget = micro_batch_tokens
        matrices = [p for p in model.parameters() if p.ndim == 2]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(self, batch: list[TrainSequence]) -> None:
        total = sum(len(item.predict) for item in batch)
        rows = max(1, self.budget * len(batch) // sum(len(item.token_ids) for item in batch))
        for start in range(0, len(batch), rows):
            self.loss(batch[start : start + rows], total).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, batch: list[TrainSequence], total: int) -> Tensor:
        width = max(len(item.token_ids) for item in batch)
        full = all(len(item.token_ids) == width for item in batch)
        tokens = torch.tensor([item.token_ids + [0] * (width - len(item.token_ids)) for item in batch])
        mask = None if full else torch.tensor([[i < len(item.token_ids) for i in range(width)] for item in batch])
        hidden = self.model.model(tokens, attention_mask=mask).last_hidden_state
        row = torch.tensor([i for i, item in enumerate(batch) for _ in item.predict])
        at = torch.tensor([t for item in batch for t in item.predict])
        logits = self.model.lm_head(hidden[row, at - 1])
        logprobs = logits.log_softmax(-1).gather(-1, tokens[row, at][:, None])[:, 0]
        advantages, old = (
            torch.from_numpy(np.concatenate([getattr(item, name) for item in batch]))
            for name in ("advantages", "rollout_logprobs")
        )
        ratio = (logprobs - old).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / total


def update(trainer: Trainer, batch: list[TrainSequence], loss: str, *, custom: bool = False) -> None:
    old = [item.rollout_logprobs for item in batch if item.rollout_logprobs is not None]
    run = trainer.forward_backward_custom if custom else trainer.forward_backward
    run(batch, get_loss(loss), old_logprobs=old)
    trainer.optim_step()


def fastest(rounds: int, *runs: Callable[[], object]) -> list[float]:
    """Seconds of each, taking turns, after one unmeasured round."""
    times = [[] for _ in runs]
    for index in range(rounds + 1):
        for run, seen in zip(runs, times, strict=True):
            began = time.perf_counter()
            run()
            if index:
                seen.append(time.perf_counter() - began)
    return [min(seen) for seen in times]


def main() -> None:
    parser = argparse.ArgumentParser(description="Trainer tokens/s against a plain PyTorch loop.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folder(folder)
        trainer = Trainer(load_model(folder), TrainerConfig(lr=LR, max_batch_tokens=args.micro_batch_tokens))
        plain = PlainLoop(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), args.micro_batch_tokens)

        for ragged in (False, True):
            batch = make_batch(ragged)
            tokens = sum(len(item.token_ids) for item in batch)
            ours, theirs = fastest(args.rounds, partial(update, trainer, batch, "grpo"), partial(plain.step, batch))
            kind = "ragged" if ragged else "uniform"
            figures.append(
                Figure(
                    name=f"trainer, float32 Qwen3 3M, GRPO, {SEQUENCES} {kind} sequences, {tokens} tokens",
                    unit="tokens/s",
                    value=tokens / ours,
                    peer="plain PyTorch loop, transformers Qwen3, SDPA",
                    peer_value=tokens / theirs,
                    aim=0.85,
                )
            )
        for loss in ("grpo", "dapo", "dro", "sft"):
            fused, custom = fastest(
                max(1, args.rounds // 2),
                partial(update, trainer, batch, loss),
                partial(update, trainer, batch, loss, custom=True),
            )
            figures.append(
                Figure(
                    name=f"fused {loss}, float32 Qwen3 3M, {SEQUENCES} ragged sequences",
                    unit="tokens/s",
                    value=tokens / fused,
                    peer="the same as a custom loss (two forwards)",
                    peer_value=tokens / custom,
                )
            )
    if args.no_write:
        print(table(figures))
    else:
        report("train", figures, packages=("transformers",))


if __name__ == "__main__":
    main()
