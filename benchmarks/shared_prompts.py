"""`trainer.share_prompts`: seconds of training and of recomputing one group, its common prompt computed once or not.

A random dense Qwen3 takes GRPO's `forward_backward` of one group, and then scores it without a gradient (`recompute`,
which always shares), with and without sharing, in turns, in one process and with micro-batches of the same size. Bits
of the logprobs are compared, and gradients by the norm of their difference.

    python benchmarks/shared_prompts.py                                   # a GPU: 0.6B, bfloat16, 16 x (8192 + 512)
    python benchmarks/shared_prompts.py --device cpu --no-write           # 3M, float32, 16 x (1024 + 64)
    python benchmarks/shared_prompts.py --device cpu --prompt 512 --new 32 --rounds 3 --no-write
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import numpy as np
import torch
from gpu_shapes import QWEN3_06B
from results_schema import Figure, need_gpus, report
from train import CONFIG

from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.models import new_model
from rlloop.trainer import Trainer, TrainSequence

SMALL = {**CONFIG, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 16384}
AIM, WORK = 3.0, ("train", "recompute")


def make_group(vocab: int, group: int, prompt: int, new: int) -> list[TrainSequence]:
    """Completions of one prompt, each of `new` / 2 to `new` tokens."""
    rng = np.random.default_rng(0)
    common, batch = rng.integers(3, vocab, prompt).tolist(), []
    for _ in range(group):
        made = int(rng.integers(new // 2, new + 1))
        batch.append(
            TrainSequence(
                token_ids=common + rng.integers(3, vocab, made).tolist(),
                predict=range(prompt, prompt + made),
                advantages=np.full(made, rng.normal(), np.float32),
                rollout_logprobs=np.full(made, -np.log(vocab), np.float32),
            )
        )
    return batch


def seconds(work: Callable[[], object]) -> float:
    finish = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    finish()
    began = time.perf_counter()
    work()
    finish()
    return time.perf_counter() - began


@contextmanager
def without_sharing() -> Iterator[None]:
    """Turns sharing off in forwards without a gradient, which otherwise share where they can."""
    with ExitStack() as stack:
        for module in ("models.scoring", "trainer.trainer"):
            stack.enter_context(patch(f"rlloop.{module}.why_not_shared", return_value="the benchmark compares"))
        yield


def gradient(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: total for name, total in trainer._masters.gradients.totals().items() if total is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--prompt", type=int, help="tokens; 8192, on a CPU 1024")
    parser.add_argument("--new", type=int, help="tokens of a completion at most; 512, on a CPU 64")
    parser.add_argument("--micro-batch-tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()
    cpu = args.device == "cpu"
    if not cpu:
        need_gpus(instead="--device cpu trains a small model")
    prompt, new = args.prompt or (1024 if cpu else 8192), args.new or (64 if cpu else 512)
    config, kind, dtype = (SMALL, "3M", "float32") if cpu else (QWEN3_06B, "0.6B shape", "bfloat16")
    batch = make_group(config["vocab_size"], args.group, prompt, new)
    tokens = sum(len(item.token_ids) for item in batch)
    trainers = {
        share: Trainer(
            new_model(config, seed=0, dtype=dtype).to(args.device),
            TrainerConfig(max_batch_tokens=args.micro_batch_tokens, share_prompts=share),
        )
        for share in (False, True)
    }
    times: dict[tuple[str, bool], list[float]] = {(what, share): [] for what in WORK for share in trainers}
    gradients, logprobs = {}, {}
    for turn in range(args.rounds + 1):  # the first one compiles
        for share, trainer in trainers.items():
            trainer.drop_gradient()
            taken = seconds(lambda t=trainer: t.forward_backward(batch, get_loss("grpo")))
            times["train", share].append(taken)
            if turn == 0:
                gradients[share] = gradient(trainer)
            with nullcontext() if share else without_sharing():
                taken = seconds(lambda s=share, t=trainer: logprobs.update({s: t.logprobs(batch)}))
            times["recompute", share].append(taken)
    same = sum(int((a.view(np.int32) != b.view(np.int32)).sum()) for a, b in zip(*logprobs.values(), strict=True))
    print(f"{same} of {sum(len(item.predict) for item in batch)} logprobs differ")
    apart = [(mine - gradients[False][name]).norm() / mine.norm() for name, mine in gradients[True].items()]
    print(f"gradients differ by {float(max(apart)):.1e} of their norm at most")
    figures = []
    for what in WORK:
        plain, shared = (times[what, share][1:] for share in (False, True))
        for name, taken in (("whole", plain), ("shared", shared)):
            least, middle, most = min(taken), statistics.median(taken), max(taken)
            print(f"{what}, {name}: {least:.3f} / {middle:.3f} / {most:.3f} s (min, median, max)")
        title = f"{what}, {kind} {dtype}, {args.group} x ({prompt} + {new // 2} to {new}), one prompt"
        mine, whole = ([tokens / each for each in taken] for taken in (shared, plain))
        figures.append(Figure.of_rounds(title, "tokens/s", mine, "the same, every sequence whole", whole, aim=AIM))
    report("shared-prompts", figures, packages=() if cpu else ("triton",), write=not args.no_write)


if __name__ == "__main__":
    main()
