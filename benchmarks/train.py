"""Tokens per second of one optimizer step: rlloop's trainer beside a plain PyTorch loop; fused beside custom losses.

Both train a random 3M-parameter float32 Qwen3 on the same sequences (prompt and completion ids, advantages, old
logprobs) with GRPO, one clipping by global norm and one fused AdamW a step, on micro-batches of about the same size.

- rlloop: `forward_backward` and `optim_step`, every parity guarantee on: invariant kernels, sequences laid end to end,
  float64 losses with all their metrics, entropy of every token, logprobs handed back for the comparison.
- plain: transformers' Qwen3 (SDPA), right-padded rows under an attention mask (none where all rows are full), lm_head
  at completion positions only, log_softmax, PPO-clipped token mean in float32, no metrics, no entropy.

Each has a process of its own, because rlloop sets the OpenMP wait policy for its whole process; they take turns, and of
each the median of its rounds counts, beside least and most. `uniform` has no padding, so the plain loop computes
nothing in vain; `ragged` is what sampling gives. Tokens are those of the sequences, prompts included, padding not.

    python benchmarks/train.py [--rounds 7] [--micro-batch-tokens 4096] [--no-write]
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
from results_schema import Figure, report

VOCAB, SEQUENCES, LR = 4096, 64, 1e-4
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
}
OLD_LOGPROB = -float(np.log(VOCAB))

Step = Callable[[], object]


class Row(NamedTuple):
    tokens: list[int]
    prompt: int  # how many of them are the prompt's
    advantage: float


def make_rows(ragged: bool) -> list[Row]:
    """Prompts of 16 and completions of 64 tokens; ragged: 8 to 24 and 16 to 112, the same on average."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(SEQUENCES):
        prompt, made = (int(rng.integers(8, 25)), int(rng.integers(16, 113))) if ragged else (16, 64)
        rows.append(Row(rng.integers(1, VOCAB, prompt + made).tolist(), prompt, float(rng.normal())))
    return rows


def rlloop_steps(folder: Path, budget: int) -> dict[str, Step]:
    import rlloop  # before torch, as `rlloop train` does  # isort: skip
    from rlloop.algorithms import get_loss
    from rlloop.config.trainer import TrainerConfig
    from rlloop.trainer import Trainer, TrainSequence

    trainer = Trainer(rlloop.load_model(folder), TrainerConfig(lr=LR, max_batch_tokens=budget))

    def sequence(row: Row) -> TrainSequence:
        made = len(row.tokens) - row.prompt
        return TrainSequence(
            token_ids=row.tokens,
            predict=range(row.prompt, len(row.tokens)),
            advantages=np.full(made, row.advantage, np.float32),
            rollout_logprobs=np.full(made, OLD_LOGPROB, np.float32),
        )

    def step(rows: list[Row], loss: str, custom: bool = False) -> None:
        batch = [sequence(row) for row in rows]
        run = trainer.forward_backward_custom if custom else trainer.forward_backward
        run(batch, get_loss(loss), old_logprobs=[np.full(len(s.predict), OLD_LOGPROB, np.float32) for s in batch])
        trainer.optim_step()

    uniform, ragged = make_rows(ragged=False), make_rows(ragged=True)
    steps: dict[str, Step] = {"uniform": lambda: step(uniform, "grpo"), "ragged": lambda: step(ragged, "grpo")}
    for loss in ("grpo", "dapo", "dro", "sft"):
        steps[f"fused {loss}"] = lambda loss=loss: step(ragged, loss)
        steps[f"custom {loss}"] = lambda loss=loss: step(ragged, loss, custom=True)
    return steps


def plain_steps(folder: Path, budget: int) -> dict[str, Step]:
    """Baseline: a plain training loop on transformers, without a framework."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def loss(rows: list[Row], total: int) -> torch.Tensor:
        width = max(len(row.tokens) for row in rows)
        full = all(len(row.tokens) == width for row in rows)
        tokens = torch.tensor([row.tokens + [0] * (width - len(row.tokens)) for row in rows])
        mask = None if full else torch.tensor([[i < len(row.tokens) for i in range(width)] for row in rows])
        hidden = model.model(tokens, attention_mask=mask).last_hidden_state
        places = [range(row.prompt, len(row.tokens)) for row in rows]
        index = torch.tensor([i for i, at in enumerate(places) for _ in at])
        at = torch.tensor([t for at in places for t in at])
        logits = model.lm_head(hidden[index, at - 1])
        logprobs = logits.log_softmax(-1).gather(-1, tokens[index, at][:, None])[:, 0]
        advantages = torch.tensor([row.advantage for row in rows])[index]
        ratio = (logprobs - OLD_LOGPROB).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / total

    def step(rows: list[Row]) -> None:
        total = sum(len(row.tokens) - row.prompt for row in rows)
        count = max(1, budget * len(rows) // sum(len(row.tokens) for row in rows))
        for start in range(0, len(rows), count):
            loss(rows[start : start + count], total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    uniform, ragged = make_rows(ragged=False), make_rows(ragged=True)
    return {"uniform": lambda: step(uniform), "ragged": lambda: step(ragged)}


def serve(make: Callable[[Path, int], dict[str, Step]], folder: Path, budget: int, pipe: Connection) -> None:
    """A process: for each name that comes in, take that step and send its seconds."""
    steps = make(folder, budget)
    while (name := pipe.recv()) is not None:
        began = time.perf_counter()
        steps[name]()
        pipe.send(time.perf_counter() - began)


def speeds(rounds: int, tokens: int, *runs: tuple[Connection, str]) -> list[list[float]]:
    """Tokens per second of each in every round, taking turns, after one unmeasured round."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds + 1):
        for (pipe, name), seen in zip(runs, times, strict=True):
            pipe.send(name)
            seen.append(pipe.recv())
    return [[tokens / seconds for seconds in seen[1:]] for seen in times]


def measure(ours: Connection, plain: Connection, rounds: int) -> list[Figure]:
    figures = []
    tokens = {kind: sum(len(row.tokens) for row in make_rows(kind == "ragged")) for kind in ("uniform", "ragged")}
    for kind, count in tokens.items():
        mine, theirs = speeds(rounds, count, (ours, kind), (plain, kind))
        title = f"trainer, float32 Qwen3 3M, GRPO, {SEQUENCES} {kind} sequences, {count} tokens"
        peer = "plain PyTorch loop, transformers Qwen3, SDPA"
        figures.append(Figure.of_rounds(title, "tokens/s", mine, peer, theirs, aim=0.85))
    for loss in ("grpo", "dapo", "dro", "sft"):
        fused, custom = speeds(rounds, tokens["ragged"], (ours, f"fused {loss}"), (ours, f"custom {loss}"))
        title = f"fused {loss}, float32 Qwen3 3M, {SEQUENCES} ragged sequences"
        peer = "the same as a custom loss (two forwards)"
        figures.append(Figure.of_rounds(title, "tokens/s", fused, peer, custom))
    return figures


def make_folder(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        make_folder(Path(name))
        pipes = []
        for make in (rlloop_steps, plain_steps):
            here, there = context.Pipe()
            work = (make, Path(name), args.micro_batch_tokens, there)
            context.Process(target=serve, args=work, daemon=True).start()
            pipes.append(here)
        figures = measure(*pipes, args.rounds)
        for pipe in pipes:
            pipe.send(None)
    report("train", figures, packages=("transformers",), write=not args.no_write)


if __name__ == "__main__":
    main()
