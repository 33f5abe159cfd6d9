"""Cost of the live comparison in the trainer: raw logprobs, and redrawing every token, from the update's own logits.

    python benchmarks/redraw.py [--device cuda] [--rounds 9] [--no-write]

One model, one batch of 64 sequences, `forward_backward` with GRPO's loss in three ways that take turns: comparing
nothing but logprobs, raw ones too, and draws as well. Plain: temperature 1, nothing truncated, where raw logprobs are
the logprobs. Of each the fastest round counts; the spread is printed.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from results_schema import Figure, report
from train import CONFIG, SEQUENCES, make_rows

WARPS = {"plain": {}, "temperature 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9}}
WAYS = ("logprobs alone", "and raw logprobs", "and draws")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()

    import rlloop  # before torch, as `rlloop train` does  # isort: skip
    import torch

    from rlloop.algorithms import get_loss
    from rlloop.config.trainer import TrainerConfig
    from rlloop.models import RedrawRecord, new_model
    from rlloop.trainer import Trainer, TrainSequence
    from rlloop.trainer.batching import StepBatch

    if args.device == "cpu":
        architecture = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        shape, dtype, budget = {**architecture, **CONFIG}, "float32", 4096
        what, rows = "float32 Qwen3 3M", [(row.tokens, row.prompt, row.advantage) for row in make_rows(ragged=True)]
    else:
        from gpu_shapes import QWEN3_06B

        rng, shape, dtype, budget, what = (
            np.random.default_rng(0),
            QWEN3_06B,
            "bfloat16",
            16384,
            "bf16 Qwen3 0.6B shape",
        )
        rows = [(rng.integers(3, 150000, 512).tolist(), 128, float(rng.normal())) for _ in range(SEQUENCES)]
    model = new_model(shape, seed=0, dtype=dtype).to(args.device)
    trainer, figures = Trainer(model, TrainerConfig(max_batch_tokens=budget)), []
    for name, warp in WARPS.items():
        batch = [
            TrainSequence(
                token_ids=ids,
                predict=range(prompt, len(ids)),
                advantages=np.full(len(ids) - prompt, advantage, np.float32),
                rollout_logprobs=np.full(len(ids) - prompt, -9.0, np.float32),
                sampling=rlloop.SamplingParams(max_tokens=512, seed=index, **warp),
            )
            for index, (ids, prompt, advantage) in enumerate(rows)
        ]
        seen: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.rounds + 1):
            for way, times in seen.items():
                record = None if way == WAYS[0] else lambda way=way: RedrawRecord(draws=way == WAYS[2])
                StepBatch.redraw_record = lambda self, redraws, make=record: make and make()  # pyright: ignore
                began = time.perf_counter()
                trainer.forward_backward(batch, get_loss("grpo"))
                if args.device != "cpu":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
        for way, times in seen.items():
            low, middle, high = min(times[1:]), statistics.median(times[1:]), max(times[1:])
            print(f"{name}, {way}: {low:.4f} s, median {middle:.4f}, largest {high:.4f}")
        alone = min(seen[WAYS[0]][1:])
        figures += [
            Figure(
                name=f"update, {what}, {SEQUENCES} sequences, {name}: {way}",
                unit="s",
                value=min(seen[way][1:]),
                peer=WAYS[0],
                peer_value=alone,
                aim=0.98,
                lower_is_better=True,
            )
            for way in WAYS[1:]
        ]
    report("redraw" if args.device == "cpu" else "gpu-redraw", figures, write=not args.no_write)


if __name__ == "__main__":
    main()
