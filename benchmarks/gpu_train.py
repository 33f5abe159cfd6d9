"""Tokens per second of forward and backward on a GPU, bfloat16: the trainer beside PyTorch, dense and with experts.

    python benchmarks/gpu_train.py [--quick] [--only dense]

Both take the same 64 sequences of 128 + 384 tokens in micro-batches of 16,384 tokens, with GRPO's clipped loss.

- rlloop: `forward_backward`, every parity guarantee on: invariant kernels, float64 losses with their metrics, the
  entropy of every token, logprobs handed back, gradients added up in float32.
- plain: transformers' own model with SDPA, no padding, lm_head at completion positions only, log_softmax in float32,
  gradients added up in bfloat16, no metrics and no entropy.

Each has a process of its own, one after the other; the fastest of the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gpu_shapes import MODELS, QWEN3_06B, make_folder
from results_schema import Figure, report, table

SEQUENCES, PROMPT, NEW, BUDGET, ROUNDS = 64, 128, 384, 16384, 5
LENGTH = PROMPT + NEW
OLD_LOGPROB = -float(np.log(QWEN3_06B["vocab_size"]))


def rows() -> np.ndarray:
    return np.random.default_rng(0).integers(3, 150000, (SEQUENCES, LENGTH))


def advantages() -> np.ndarray:
    return np.random.default_rng(1).normal(size=SEQUENCES).astype(np.float32)


def ours(folder: Path) -> Callable[[], object]:
    import rlloop
    from rlloop.algorithms import get_loss
    from rlloop.config.trainer import TrainerConfig
    from rlloop.trainer import Trainer, TrainSequence

    model = rlloop.load_model(folder, dtype="bfloat16", device="cuda")
    trainer = Trainer(model, TrainerConfig(max_batch_tokens=BUDGET))
    batch = [
        TrainSequence(
            token_ids=ids.tolist(),
            predict=range(PROMPT, LENGTH),
            advantages=np.full(NEW, advantage, np.float32),
            rollout_logprobs=np.full(NEW, OLD_LOGPROB, np.float32),
        )
        for ids, advantage in zip(rows(), advantages(), strict=True)
    ]
    old = [np.full(NEW, OLD_LOGPROB, np.float32)] * SEQUENCES
    return lambda: trainer.forward_backward(batch, get_loss("grpo"), old_logprobs=old)


def plain(folder: Path) -> Callable[[], object]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").cuda()
    tokens, weights = torch.from_numpy(rows()).cuda(), torch.from_numpy(advantages()).cuda()
    count = BUDGET // LENGTH

    def run() -> None:
        for begin in range(0, SEQUENCES, count):
            part = tokens[begin : begin + count]
            hidden = model.model(part, use_cache=False).last_hidden_state[:, PROMPT - 1 : -1]
            logits = model.lm_head(hidden).float()
            logprobs = logits.log_softmax(-1).gather(-1, part[:, PROMPT:, None])[..., 0]
            ratio, advantage = (logprobs - OLD_LOGPROB).exp(), weights[begin : begin + count, None]
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / (SEQUENCES * NEW)
            loss.backward()

    return run


def measure(what: str, folder: Path) -> float:
    """Tokens per second."""
    import torch

    run = {"rlloop": ours, "plain": plain}[what](folder)
    best = float("inf")
    for index in range(ROUNDS + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - begin
        print(f"{what}, round {index}: {elapsed:.3f} s", file=sys.stderr)
        best = min(best, elapsed) if index > 1 else best
    print(f"{what}: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most", file=sys.stderr)
    return SEQUENCES * LENGTH / best


def in_child(what: str, folder: Path) -> float:
    command = [sys.executable, __file__, "--child", what, str(folder)]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(out.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="nothing recorded")
    parser.add_argument("--only", choices=MODELS, action="append", help="of the models")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child[0], Path(args.child[1]))))
        return
    figures = []
    for model in args.only or MODELS:
        with tempfile.TemporaryDirectory() as name:
            make_folder(model, Path(name))
            mine, theirs = (in_child(what, Path(name)) for what in ("rlloop", "plain"))
        figures.append(
            Figure(
                name=f"trainer forward + backward, {MODELS[model][0]} bf16, {SEQUENCES} x ({PROMPT} + {NEW})",
                unit="tokens/s", value=mine, peer="transformers, SDPA", peer_value=theirs, aim=1.0,
            )
        )  # fmt: skip
    if args.quick:
        print(table(figures))
    else:
        report("gpu-train", figures, packages=("triton", "transformers"))


if __name__ == "__main__":
    main()
