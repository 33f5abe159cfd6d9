"""Tokens per second of forward and backward on a GPU, bfloat16: the trainer beside PyTorch, dense and with experts.

    python benchmarks/gpu_train.py [--cells '0.6B/*' 'moe/even'] [--seconds 540] [--quick] [--list]

Cells are `SHAPE/WORK`; without `--cells` those of the 0.6B shape and of `moe`. Work: `even` 64 sequences of 128 + 384
tokens, `long` 8 of 512 + 7,680, `ragged` 96 of 128 to 2,176, of which 64 are the prompt. All take the same sequences in
micro-batches of at most 16,384 tokens, with GRPO's clipped loss.

- rlloop: `forward_backward`, every parity guarantee on: invariant kernels, float64 losses with their metrics, the
  entropy of every token, logprobs handed back, gradients added up in float32.
- peers: transformers' own model, lm_head at completion positions only, log_softmax in float32, gradients added up in
  bfloat16, no metrics and no entropy. `SDPA` pads each micro-batch to its longest sequence, sorted so that little is
  padding; `SDPA, compiled` is the same under torch.compile, model and loss; `packed` has no padding: sequences end to
  end through FlashAttention 3 or 2 (varlen) where transformers finds it, else FlexAttention. Those that do not run on
  the machine are left out, with a word.

Each has a process of its own, one after the other: two rounds to warm up, then five, whose median counts, beside their
least and most. Tokens are those of the sequences, never padding. The roofline is three forwards at the peak rate.
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
from typing import Any

import cells
import numpy as np
from gpu_shapes import SHAPES, TINY, make_folder
from results_schema import Figure, device_name, report, table
from roofline import device_rates, train_speed

BUDGET, WARM, ROUNDS = 16384, 2, 5
OLD_LOGPROB = -float(np.log(151936))
WORKS = {"even": "64 x (128 + 384)", "long": "8 x (512 + 7,680)", "ragged": "96 x (64 + 64 to 2,112)"}
CELLS = [f"{shape}/{work}" for shape in SHAPES for work in WORKS]
USUAL = ["0.6B/*", "moe/*"]
PEERS = {"SDPA": "transformers, SDPA", "compiled": "transformers, SDPA, compiled", "packed": "transformers, packed"}
Row = tuple[np.ndarray, int, float]  # tokens, how many are the prompt, advantage
Flat = tuple[Any, ...]  # of a micro-batch: model's arguments, where completions are predicted, their tokens, weights


def sequences(work: str) -> list[Row]:
    rng = np.random.default_rng(0)
    sizes = {"even": [(128, 384)] * 64, "long": [(512, 7680)] * 8, "tiny": [(3, 5), (2, 9), (4, 4)]}.get(work)
    if sizes is None:
        sizes = [(64, int(new)) for new in rng.integers(64, 2113, 96)]
    advantages = np.random.default_rng(1).normal(size=len(sizes)).tolist()
    return [
        (rng.integers(3, 150000, prompt + new), prompt, advantage)
        for (prompt, new), advantage in zip(sizes, advantages, strict=True)
    ]


def micro_batches(batch: list[Row], budget: int, padded: bool) -> list[list[Row]]:
    """Longest first, so that a micro-batch's lengths are alike; `padded`: each counts as its longest."""
    made: list[list[Row]] = []
    room = 0
    for each in sorted(batch, key=lambda sequence: -len(sequence[0])):
        size = len(made[-1][0][0]) if made and padded else len(each[0])
        if not made or room < size:
            made.append([])
            room, size = budget, len(each[0])
        made[-1].append(each)
        room -= size
    return made


def ours(folder: Path, work: str, device: str) -> Callable[[], float]:
    import rlloop
    from rlloop.algorithms import get_loss
    from rlloop.config.trainer import TrainerConfig
    from rlloop.trainer import Trainer, TrainSequence

    model = rlloop.load_model(folder, dtype="bfloat16", device=device)
    trainer = Trainer(model, TrainerConfig(max_batch_tokens=BUDGET))
    batch = [
        TrainSequence(
            token_ids=ids.tolist(), predict=range(prompt, len(ids)),
            advantages=np.full(len(ids) - prompt, advantage, np.float32),
            rollout_logprobs=np.full(len(ids) - prompt, OLD_LOGPROB, np.float32),
        )
        for ids, prompt, advantage in sequences(work)
    ]  # fmt: skip
    old = [np.full(len(ids) - prompt, OLD_LOGPROB, np.float32) for ids, prompt, _ in sequences(work)]

    def run() -> float:
        return float(trainer.forward_backward(batch, get_loss("grpo"), old_logprobs=old).metrics["loss/total"].value)

    return run


def laid_out(part: list[Row], packed: bool, device: str) -> Flat:
    """(tokens, positions or None, lengths, indices before completion tokens, these tokens, their weights)."""
    import torch

    lengths = [len(ids) for ids, *_ in part]
    rows = np.zeros((1, sum(lengths)) if packed else (len(part), max(lengths)), np.int64)
    begins = [sum(lengths[:at]) if packed else at * max(lengths) for at in range(len(part))]
    positions = np.concatenate([np.arange(length) for length in lengths])[None] if packed else None
    before, targets, weights = [], [], []
    for begin, (ids, prompt, advantage) in zip(begins, part, strict=True):
        rows.reshape(-1)[begin : begin + len(ids)] = ids
        before.append(begin + np.arange(prompt - 1, len(ids) - 1))
        targets.append(ids[prompt:])
        count = len(ids) - prompt
        weights.append(np.full(count, advantage / count, np.float32))  # GRPO: the mean over sequences of their means
    arrays = (np.concatenate(each) for each in (before, targets, weights))
    return (
        torch.from_numpy(rows).to(device), None if positions is None else torch.from_numpy(positions).to(device),
        lengths, *(torch.from_numpy(array).to(device) for array in arrays),
    )  # fmt: skip


def best_packed() -> str:
    """transformers' fastest attention over packed sequences that this machine has."""
    from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

    if is_flash_attn_3_available():
        return "flash_attention_3"
    return "flash_attention_2" if is_flash_attn_2_available() else "flex_attention"


def theirs(folder: Path, work: str, device: str, what: str) -> tuple[Callable[[], float], str]:
    """(a round, the attention that runs)"""
    import torch
    from transformers import AutoModelForCausalLM

    attention = best_packed() if what == "packed" and device == "cuda" else "sdpa"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=attention)
    model.to(device)
    batch = sequences(work)
    budget = BUDGET if device == "cuda" else 20
    parts = [laid_out(part, what == "packed", device) for part in micro_batches(batch, budget, what != "packed")]

    def loss_of(tokens: Any, before: Any, targets: Any, weights: Any, more: dict[str, Any]) -> Any:
        hidden = model.model(tokens, use_cache=False, **more).last_hidden_state.flatten(0, 1)
        logprobs = model.lm_head(hidden[before]).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        ratio = (logprobs - OLD_LOGPROB).exp()
        return -torch.minimum(ratio * weights, ratio.clamp(0.8, 1.2) * weights).sum() / len(batch)

    step = torch.compile(loss_of) if what == "compiled" else loss_of

    def run() -> float:
        losses = []
        for tokens, positions, lengths, *rest in parts:
            more: dict[str, Any] = {} if positions is None else {"position_ids": positions}
            if attention.startswith("flash"):
                ends = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
                more |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
                more |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
            loss = step(tokens, *rest, more)
            loss.backward()
            losses.append(loss.detach())
        return float(sum(losses))

    return run, attention


def measure(what: str, folder: Path, work: str, device: str) -> dict[str, Any]:
    """Tokens per second of each round, the loss, and which attention ran."""
    import torch

    run, attention = (ours(folder, work, device), "") if what == "rlloop" else theirs(folder, work, device, what)
    tokens, speeds, loss = sum(len(ids) for ids, *_ in sequences(work)), [], 0.0
    for index in range(WARM + ROUNDS):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = run()
        if device == "cuda":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - begin
        print(f"{what}, {work}, round {index}: {elapsed:.3f} s, loss {loss:.4f}", file=sys.stderr)
        speeds.append(tokens / elapsed)
    if device == "cuda":
        print(f"{what}: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most", file=sys.stderr)
    return {"speeds": speeds[WARM:], "loss": loss, "attention": attention}


def in_child(what: str, folder: Path, work: str, device: str) -> dict[str, Any] | None:
    """`measure` in a process of its own; None where a peer does not run here."""
    command = [sys.executable, __file__, "--child", what, str(folder), work, device]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=what == "rlloop")
    if out.returncode:
        print(f"{PEERS[what]} does not run here (see above) and is left out", file=sys.stderr)
        return None
    return json.loads(out.stdout.splitlines()[-1])


def figures_of(shape: str, work: str) -> list[Figure]:
    words, config = {**SHAPES, "tiny": TINY}[shape]
    device = "cpu" if shape == "tiny" else "cuda"
    names = [what for what in PEERS if what != "compiled" or device == "cuda"]
    with tempfile.TemporaryDirectory() as place:
        make_folder(shape, Path(place))
        mine, *others = (in_child(what, Path(place), work, device) for what in ("rlloop", *names))
    assert mine is not None
    title = f"trainer forward + backward, {words} bf16, {WORKS.get(work, work)}"
    sizes, rates = [(len(ids), len(ids) - prompt) for ids, prompt, _ in sequences(work)], device_rates(device_name())
    bound, figures = rates and train_speed(config, sizes, rates[1]), []
    for what, other in zip(names, others, strict=True):
        if other is not None:
            peer = PEERS[what] + (f", {other['attention']}" if what == "packed" else "")
            figures.append(
                Figure.of_rounds(
                    title, "tokens/s", mine["speeds"], peer, other["speeds"], aim=1.0, roofline=bound
                )
            )  # fmt: skip
    return figures or [Figure.of_rounds(title, "tokens/s", mine["speeds"], roofline=bound)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="nothing recorded")
    parser.add_argument("--tiny", action="store_true", help="a toy on a CPU, nothing recorded")
    parser.add_argument("--child", nargs=4, metavar=("WHAT", "FOLDER", "WORK", "DEVICE"), help=argparse.SUPPRESS)
    cells.add_arguments(parser)
    args = parser.parse_args()
    if args.child:
        what, folder, work, device = args.child
        print(json.dumps(measure(what, Path(folder), work, device)))
        return
    if args.tiny:
        print(table(figures_of("tiny", "tiny")))
        return
    picked = cells.chosen(CELLS, args.cells or USUAL)
    if args.list:
        print("\n".join(picked))
        return
    for cell in cells.within({cell: [cell] for cell in picked}, args.seconds):
        figures = figures_of(*cell.split("/"))
        if args.quick:
            print(table(figures))
        else:
            report("gpu-train", figures, packages=("triton", "transformers"), part=True)


if __name__ == "__main__":
    main()
