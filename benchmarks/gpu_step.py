"""A whole step of reinforcement learning on one GPU, end to end, beside the sum of its parts: sample, learn, update,
serve the new weights.

    python benchmarks/gpu_step.py [--vllm] [--only dense] [--rounds 5] [--seconds 540] [--quick] [--tiny]

256 requests of 128 tokens in and 256 out, a random Qwen3 of the 0.6B shape and a 12-layer mixture of experts, in
bfloat16, AdamW on float32 masters.

- rlloop: one process, one copy of the compute weights, `parity.mode=require` in effect: every logprob is compared.
- with `--vllm`, the same with vLLM's default mode and transformers: vLLM in a process of its own samples, the compiled
  peer of gpu_train.py learns (train_peers.py), `torch.optim.AdamW` (fused) steps. vLLM is not even sent the weights,
  which helps, and its requests have no seeds, which is its faster way.

Both learn from the same number of tokens in micro-batches of 16,384. After two steps, whole steps are timed, then each
part alone, over and over: the rollout; learning, forward and backward, with the comparison of all logprobs; the update
of masters and compute weights; publishing them to the engine. The aim is that the sum of the parts, each by its fastest
round, is at least 0.9 of the median step. Scoring alone is timed too and not added: a step of one minibatch has its
logprobs from learning's forward. Values are medians, beside least and most. The device's idle share of a step is what
torch.profiler's kernels and copies leave of it, for rlloop, whose process has all of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cells
import numpy as np
from children import tell, told
from gpu_shapes import EVERY, MODELS, bytes_of, make_folder
from results_schema import Figure, need_gpus, report
from train_peers import Peer, Row, timed

WARM, ROUNDS, LR = 2, 5, 1e-6
AIM, TO_SUM = 1.0, 0.9
PEER = "vLLM default + transformers"  # which ones exactly: `Theirs.name`
PARTS = {"rollout": "rollout", "learn": "forward + backward", "update": "update", "publish": "publishing"}
LIMIT = 3600.0  # seconds of a child


@dataclass(frozen=True)
class Size:
    requests: int
    prompt: int
    new: int
    budget: int  # tokens of a micro-batch

    def __str__(self) -> str:
        return f"{self.requests} x ({self.prompt} in, {self.new} out)"

    @property
    def room(self) -> int:
        """Tokens of keys and values for all requests at once, and pages to spare."""
        return self.requests * (self.prompt + self.new + 128)

    def prompts(self, seed: int) -> list[list[int]]:
        return np.random.default_rng(seed).integers(3, 150000, (self.requests, self.prompt)).tolist()

    def advantages(self) -> list[float]:
        return np.random.default_rng(1).normal(size=self.requests).tolist()


FULL, SMALL = Size(256, 128, 256, 16384), Size(4, 6, 8, 32)


def apart(mine: np.ndarray, theirs: np.ndarray) -> tuple[float, int]:
    """k3 of the trainer from the engine, and how many logprobs differ."""
    d = mine.astype(np.float64) - theirs
    return float(np.mean(np.expm1(d) - d)), int((mine.view(np.int32) != theirs.view(np.int32)).sum())


class Ours:
    name = "rlloop"

    def __init__(self, folder: Path, size: Size, device: str) -> None:
        import rlloop
        from rlloop.config.trainer import TrainerConfig
        from rlloop.trainer import Trainer

        self.size = size
        self.model = rlloop.load_model(folder, dtype="bfloat16", device=device)
        self.engine = rlloop.Engine(self.model, max_cache_tokens=size.room)
        self.trainer = Trainer(self.model, TrainerConfig(lr=LR, max_batch_tokens=size.budget))

    def rollout(self, index: int) -> Any:
        import rlloop

        count, new = self.size.requests, self.size.new
        sampling = [rlloop.SamplingParams(new, seed=1000 * index + i, ignore_eos=True) for i in range(count)]
        return self.engine.generate(self.size.prompts(index), sampling)

    def learn(self, made: Any) -> tuple[float, int]:
        from rlloop.algorithms import get_loss

        result = self.trainer.forward_backward(self._batch(made), get_loss("grpo"))
        return apart(np.stack(result.logprobs), np.stack([each.logprobs for each in made]))

    def score(self, made: Any) -> None:
        self.trainer.recompute(self._batch(made))

    def update(self) -> None:
        self.trainer.optim_step()

    def publish(self, index: int) -> None:
        self.engine.set_version(index + 1)

    def _batch(self, made: Any) -> list[Any]:
        from rlloop.trainer import TrainSequence

        prompt, new = self.size.prompt, self.size.new
        return [
            TrainSequence(
                token_ids=[*each.prompt_ids, *each.token_ids], predict=range(prompt, prompt + new),
                advantages=np.full(new, advantage, np.float32), rollout_logprobs=each.logprobs,
            )
            for each, advantage in zip(made, self.size.advantages(), strict=True)
        ]  # fmt: skip


class Theirs:
    """`generate(prompts, new)` of an engine, and a peer's trainer with float32 masters."""

    def __init__(self, folder: Path, size: Size, device: str, engine: str, generate: Callable[..., Any]) -> None:
        import torch

        self.size, self.device, self.engine, self.generate = size, device, engine, generate
        self.peer = Peer(folder, device, packed=False, compiled=True)  # all have one length: nothing is padded
        self.parameters = list(self.peer.model.parameters())
        self.masters = [each.detach().float() for each in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.tuned = False

    @property
    def name(self) -> str:
        return f"{self.engine} + {self.peer.name}"

    def rollout(self, index: int) -> list[Row]:
        prompts = self.size.prompts(index)
        made = zip(prompts, self.generate(prompts, self.size.new), self.size.advantages(), strict=True)
        return [
            Row(np.array([*prompt, *ids]), len(prompt), advantage, np.array(logprobs, np.float32))
            for prompt, (ids, logprobs), advantage in made
        ]

    def learn(self, made: list[Row]) -> tuple[float, int]:
        import torch

        parts = self.peer.lay_out(made, self.size.budget)
        if not self.tuned:
            self.peer.tune(parts)
            self.tuned = True
        scored = torch.cat(self.peer.forward_backward(parts)[1]).cpu().numpy()
        return apart(scored, np.concatenate([row.old for row in made]))

    def update(self) -> None:
        import torch

        for master, each in zip(self.masters, self.parameters, strict=True):
            assert each.grad is not None
            master.grad, each.grad = each.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)

    def publish(self, index: int) -> None:
        """vLLM keeps its first weights."""


def vllm_generate(folder: Path, size: Size, model: str) -> Callable[..., Any]:
    import vllm

    engine = vllm.LLM(
        str(folder), dtype="bfloat16", max_model_len=1024, skip_tokenizer_init=True, max_num_seqs=size.requests,
        logprobs_mode="processed_logprobs", gpu_memory_utilization=0.2, disable_log_stats=True,
        kv_cache_memory_bytes=size.room * bytes_of(shape_of(model))[1],
    )  # fmt: skip

    def generate(prompts: list[list[int]], new: int) -> Iterable[tuple[list[int], list[float]]]:
        sampling = vllm.SamplingParams(
            max_tokens=new, temperature=1.0, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False
        )
        made = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        for output in (request.outputs[0] for request in made):
            pairs = zip(output.logprobs, output.token_ids, strict=True)
            yield list(output.token_ids), [place[id].logprob for place, id in pairs]

    return generate


def shape_of(model: str) -> str:
    return {"dense": "0.6B"}.get(model, model)


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Total time that the intervals cover; overlaps count once."""
    covered, end = 0.0, -np.inf
    for begin, until in sorted(spans):
        covered += max(0.0, until - max(begin, end))
        end = max(end, until)
    return covered


def idle_share(run: Callable[[], object], device: str) -> float | None:
    """Share of `run`'s time under the profiler in which the GPU runs no kernel, copy or fill."""
    from torch.profiler import ProfilerActivity, profile

    if device != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        took = timed(run, device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        found.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    on_device = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    worked = busy((each["ts"], each["ts"] + each["dur"]) for each in on_device) / 1e6  # from microseconds
    print(f"profiled step: {took:.3f} s, of {len(on_device)} kernels and copies {worked:.3f} s", file=sys.stderr)
    return 1 - worked / took


def measure(side: Any, device: str, rounds: int) -> dict[str, Any]:
    """Seconds of whole steps and of their parts alone, k3 of the first step, and the device's idle share."""
    index, found = 0, (0.0, 0)

    def step() -> None:
        nonlocal index, found
        made = side.rollout(index)
        found = side.learn(made)
        side.update()
        index += 1
        side.publish(index)

    whole, first = [], 0.0
    for number in range(WARM + rounds):
        whole.append(timed(step, device))
        print(f"step {number}: {whole[-1]:.3f} s, k3 {found[0]:.3g}, {found[1]} differ", file=sys.stderr, flush=True)
        first = first if number else found[0]
    made, numbers = side.rollout(index), range(index + 1, index + 1 + rounds)
    parts = {"rollout": [timed(partial(side.rollout, number), device) for number in numbers]}
    if hasattr(side, "score"):
        parts["score"] = [timed(partial(side.score, made), device) for _ in numbers]
    both = [(timed(partial(side.learn, made), device), timed(side.update, device)) for _ in numbers]
    parts["learn"], parts["update"] = map(list, zip(*both, strict=True))  # each update has a gradient of its own
    parts["publish"] = [timed(partial(side.publish, number), device) for number in numbers]
    index = numbers[-1] + 1
    idle = idle_share(step, device) if side.name == "rlloop" else None
    return {"name": side.name, "whole": whole[WARM:], "parts": parts, "k3": first, "idle": idle}


def child(what: str, folder: Path, model: str, rounds: int) -> None:
    device, size = ("cpu", SMALL) if model == "tiny" else ("cuda", FULL)
    if what == "rlloop":
        side: Any = Ours(folder, size, device)
    else:
        side = Theirs(folder, size, device, "vLLM default, unseeded", vllm_generate(folder, size, model))
    tell(**measure(side, device, rounds))


def in_child(what: str, folder: Path, model: str, rounds: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", what, str(folder), model, str(rounds)]
    made = list(told(command, LIMIT, {"VLLM_PLUGINS": "none"}))  # the peer as it comes
    return made[-1]


def figures_of(words: str, size: Size, mine: Mapping[str, Any], peer: Mapping[str, Any] | None) -> list[Figure]:
    work, tokens = f"RL step, {words} bf16", size.requests * size.new
    title, sides = f"{work}, {size}", {"rlloop": mine, **({PEER: peer} if peer is not None else {})}
    name = None if peer is None else peer["name"]

    def speeds(side: Mapping[str, Any] | None) -> list[float] | None:
        return None if side is None else [tokens / seconds for seconds in side["whole"]]

    figures = [Figure.of_rounds(title, "new tokens/s", speeds(mine) or [], name, speeds(peer), aim=AIM)]
    figures += [Figure(name=f"k3 of {each}, {work}", unit="nats", value=side["k3"]) for each, side in sides.items()]
    for each, side in sides.items():
        total = sum(min(side["parts"][part]) for part in PARTS)
        figures.append(
            Figure.of_rounds(
                f"{title}: {each}", "s", side["whole"], "the sum of its parts alone, each at its best", [total],
                aim=TO_SUM if side is mine else None, lower_is_better=True,
            )
        )  # fmt: skip
    for part, said in PARTS.items():
        theirs = None if peer is None or part == "publish" else peer["parts"][part]
        figures.append(
            Figure.of_rounds(
                f"{said} alone, {title}", "s", mine["parts"][part], name if theirs else None, theirs,
                lower_is_better=True,
            )
        )  # fmt: skip
    figures.append(Figure.of_rounds(f"scoring alone, not in the sum, {title}", "s", mine["parts"]["score"]))
    if mine["idle"] is not None:
        figures.append(Figure(name=f"idle share of the device, {title}", unit="of a step", value=mine["idle"]))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", action="store_true", help="measure the peer too")
    parser.add_argument("--only", choices=MODELS, action="append", help="of the models")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, help="begin no model that would likely end later")
    parser.add_argument("--quick", action="store_true", help="nothing recorded")
    parser.add_argument("--tiny", action="store_true", help="a toy on a CPU, nothing recorded")
    parser.add_argument("--child", nargs=4, metavar=("WHAT", "FOLDER", "MODEL", "ROUNDS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        what, folder, model, rounds = args.child
        child(what, Path(folder), model, int(rounds))
        return 0
    if not args.tiny:
        need_gpus(instead="--tiny runs a toy on a CPU")
    models, failed = ["tiny"] if args.tiny else args.only or list(MODELS), False
    for model in cells.within({model: [model] for model in models}, args.seconds, option="--only"):
        words, size = EVERY[shape_of(model)][0], SMALL if args.tiny else FULL

        def record(mine: dict[str, Any], peer: dict[str, Any] | None) -> None:
            figures = figures_of(words, size, mine, peer)  # noqa: B023
            packages = ("triton", "transformers", *(("vllm",) if args.vllm else ()))
            report("gpu-step", figures, packages=packages, part=True, write=not (args.quick or args.tiny))

        with tempfile.TemporaryDirectory() as place:
            make_folder(shape_of(model), Path(place))
            mine = in_child("rlloop", Path(place), model, args.rounds)
            record(mine, None)
            try:
                if args.vllm:
                    record(mine, in_child("peer", Path(place), model, args.rounds))
            except subprocess.CalledProcessError as error:
                print(f"the peer ended with code {error.returncode} (see above)", file=sys.stderr)
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
