"""A whole step of reinforcement learning on one GPU, end to end: sample, score, learn, and serve the new weights.

    python benchmarks/gpu_step.py [--vllm] [--only dense] [--quick]

256 requests of 128 tokens in and 256 out, a random Qwen3 of the 0.6B shape and a 12-layer mixture of experts, in
bfloat16, AdamW on float32 masters.

- rlloop: one process, one copy of the compute weights, `parity.mode=require` in effect: every logprob is compared.
- with `--vllm`, the same with vLLM's default mode and transformers (SDPA): vLLM in a process of its own samples,
  PyTorch learns as in gpu_train.py, `torch.optim.AdamW` (fused) steps. vLLM is not even sent the weights, which helps,
  and its requests have no seeds, which is its faster way.

Both learn from the same number of tokens in micro-batches of 16,384. Medians of three steps, after two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gpu_shapes import MODELS, make_folder
from results_schema import Figure, report, table

REQUESTS, PROMPT, NEW = 256, 128, 256
BUDGET, WARM, STEPS, LR = 16384, 2, 3, 1e-6
VLLM_CACHE_BYTES = 24 << 30  # of keys and values: all requests at once, with room to spare
Step = Callable[[int], tuple[float, int]]  # returns (k3 of the trainer from the engine, how many logprobs differ)


def prompts_of(seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(3, 150000, (REQUESTS, PROMPT)).tolist()


def advantages() -> np.ndarray:
    return np.random.default_rng(1).normal(size=REQUESTS).astype(np.float32)


def apart(mine: np.ndarray, theirs: np.ndarray) -> tuple[float, int]:
    d = mine.astype(np.float64) - theirs
    return float(np.mean(np.expm1(d) - d)), int((mine.view(np.int32) != theirs.view(np.int32)).sum())


def ours(folder: Path) -> Step:
    import rlloop
    from rlloop.algorithms import get_loss
    from rlloop.config.trainer import TrainerConfig
    from rlloop.trainer import Trainer, TrainSequence

    model = rlloop.load_model(folder, dtype="bfloat16", device="cuda")
    engine = rlloop.Engine(model, max_cache_tokens=REQUESTS * 512)
    trainer = Trainer(model, TrainerConfig(lr=LR, max_batch_tokens=BUDGET))

    def run(index: int) -> tuple[float, int]:
        sampling = [rlloop.SamplingParams(NEW, seed=1000 * index + i, ignore_eos=True) for i in range(REQUESTS)]
        made = engine.generate(prompts_of(index), sampling)
        batch = [
            TrainSequence(
                token_ids=[*each.prompt_ids, *each.token_ids], predict=range(PROMPT, PROMPT + NEW),
                advantages=np.full(NEW, advantage, np.float32), rollout_logprobs=each.logprobs,
            )
            for each, advantage in zip(made, advantages(), strict=True)
        ]  # fmt: skip
        result = trainer.forward_backward(batch, get_loss("grpo"))
        trainer.optim_step()
        engine.set_version(index + 1)
        return apart(np.stack(result.logprobs), np.stack([each.logprobs for each in made]))

    return run


def theirs(folder: Path) -> Step:
    import torch
    import vllm
    from transformers import AutoModelForCausalLM

    engine = vllm.LLM(
        str(folder), dtype="bfloat16", max_model_len=1024, skip_tokenizer_init=True, max_num_seqs=REQUESTS,
        logprobs_mode="processed_logprobs", gpu_memory_utilization=0.2, kv_cache_memory_bytes=VLLM_CACHE_BYTES,
        disable_log_stats=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").cuda()
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)
    weights, count = torch.from_numpy(advantages()).cuda(), BUDGET // (PROMPT + NEW)

    def run(index: int) -> tuple[float, int]:
        prompts = prompts_of(index)
        sampling = vllm.SamplingParams(max_tokens=NEW, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False)
        made = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        outputs = [request.outputs[0] for request in made]
        old = np.array(
            [[place[id].logprob for place, id in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs],
            np.float32,
        )
        tokens = torch.tensor([ids + list(o.token_ids) for ids, o in zip(prompts, outputs, strict=True)]).cuda()
        before, scored = torch.from_numpy(old).cuda(), []
        for begin in range(0, REQUESTS, count):
            part = tokens[begin : begin + count]
            hidden = model.model(part, use_cache=False).last_hidden_state[:, PROMPT - 1 : -1]
            logprobs = model.lm_head(hidden).float().log_softmax(-1).gather(-1, part[:, PROMPT:, None])[..., 0]
            scored.append(logprobs.detach())
            ratio, advantage = (logprobs - before[begin : begin + count]).exp(), weights[begin : begin + count, None]
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / (REQUESTS * NEW)
            loss.backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float()
            p.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        return apart(torch.cat(scored).cpu().numpy(), old)

    return run


def measure(what: str, folder: Path) -> list[float]:
    """k3 of the first step, and seconds of each that counts."""
    import torch

    run = {"rlloop": ours, "peer": theirs}[what](folder)
    first, times = 0.0, []
    for index in range(WARM + STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        found = run(index)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        print(f"{what}, step {index}: {times[-1]:.2f} s, k3 {found[0]:.3g}, {found[1]} differ", file=sys.stderr)
        first = first if index else found[0]
    return [first, *times[WARM:]]


def in_child(what: str, folder: Path) -> list[float]:
    command = [sys.executable, __file__, "--child", what, str(folder)]
    environment = {**os.environ, "VLLM_PLUGINS": "none"}  # the peer as it comes
    out = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(next(line for line in reversed(out.stdout.splitlines()) if line.startswith("[")))


def figures_of(model: str, vllm: bool) -> list[Figure]:
    with tempfile.TemporaryDirectory() as name:
        make_folder(model, Path(name))
        mine = in_child("rlloop", Path(name))
        peer = in_child("peer", Path(name)) if vllm else None
    work = f"RL step, {MODELS[model][0]} bf16"
    names, tokens = ("rlloop", "vLLM default + transformers"), REQUESTS * NEW
    speeds = [[tokens / seconds for seconds in side[1:]] if side else None for side in (mine, peer)]
    title = f"{work}, {REQUESTS} x ({PROMPT} in, {NEW} out)"
    figures = [Figure.of_rounds(title, "new tokens/s", speeds[0] or [], names[1] if peer else None, speeds[1], aim=1.0)]
    return figures + [
        Figure(name=f"k3 of {name}, {work}", unit="nats", value=side[0])
        for name, side in zip(names, (mine, peer), strict=True)
        if side
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", action="store_true", help="measure the peer too")
    parser.add_argument("--only", choices=MODELS, action="append", help="of the models")
    parser.add_argument("--quick", action="store_true", help="nothing recorded")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child[0], Path(args.child[1]))))
        return
    figures = [figure for model in args.only or MODELS for figure in figures_of(model, args.vllm)]
    if args.quick:
        print(table(figures))
    else:
        report("gpu-step", figures, packages=("triton", "transformers", *(("vllm",) if args.vllm else ())))


if __name__ == "__main__":
    main()
