"""A whole step of reinforcement learning over the GPUs of a host, end to end: sample, score, learn, serve new weights.

    python benchmarks/ranks_step.py [--gpus 2] [--layers 16] [--vllm] [--quick] [--tiny]

Qwen3-8B's shape, bfloat16, full training with AdamW on float32 masters, all layers recomputed in the backward; 128
requests of 128 tokens in and 256 out for each GPU, with logprobs. `--layers`: as many as both sides hold together.

- rlloop: `trainer.layout.dp_shard=N`, an engine of its own on each GPU that reads the trainer's compute copy; every
  logprob of the trainer is compared with the engine's. On one GPU too, with one GPU's requests (weak scaling).
- with `--vllm`: vLLM's default mode with `tensor_parallel_size=N`, and transformers (SDPA) under FSDP2 in processes of
  their own, which stay on the GPUs together. vLLM is not even sent the new weights, which helps, and its requests have
  no seeds, which is its faster way.

Both learn from the same number of tokens, in micro-batches of 32 sequences, so that every GPU has as many. Medians of
five steps, after four, are recorded as soon as a side is done, or as an interrupt (or SIGTERM) ends it after two. Of
our side's steps the parts are printed: sampling (of the slowest rank as well), exchange of what was sampled, which
waits for that rank, gradients, and the update of the weights.
`--tiny` runs toys on CPUs without the peer, which shows that the script works and measures nothing.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from children import LEAST, Child, answer, interrupted_by_terms
from gpu_shapes import save_random
from ranks_train import Setting, our_model, peer_model
from results_schema import Figure, need_gpus, report

REQUESTS, PROMPT, NEW = 128, 128, 256  # for each GPU
BUDGET, WARM, STEPS, LR = 32 * (PROMPT + NEW), 4, 5, 1e-6
VLLM_CACHE_BYTES = 10 << 30  # of keys and values on each GPU: all requests at once, with room to spare
Answer = dict[str, Any]  # how many logprobs the trainer `compared`, how many `differ`, and `seconds` by part
Step = Callable[[int], Answer]  # of a step's index


class Work:
    """The requests of a step: those of GPU r follow those of GPU r - 1."""

    def __init__(self, setting: Setting) -> None:
        count, self.prompt, self.new = (3, 9, 7) if setting.tiny else (REQUESTS, PROMPT, NEW)
        self.own, self.count = count, count * setting.size
        self.mine = slice(setting.rank * count, (setting.rank + 1) * count)
        self.vocab = setting.config["vocab_size"]
        self.advantages = np.random.default_rng(1).normal(size=self.count).astype(np.float32)

    def prompts(self, index: int) -> list[list[int]]:
        return np.random.default_rng(index).integers(3, self.vocab - 3, (self.count, self.prompt)).tolist()


def ours(setting: Setting) -> Step:
    import rlloop
    from rlloop.algorithms import get_loss
    from rlloop.config.trainer import TrainerConfig
    from rlloop.trainer import Trainer, TrainSequence

    work, model = Work(setting), our_model(setting)
    length = work.prompt + work.new
    engine = rlloop.Engine(model, max_cache_tokens=work.own * 2 * length)
    trainer = Trainer(model, TrainerConfig(lr=LR, max_batch_tokens=BUDGET, checkpoint_layers="all"))
    ranks = model.context.ranks("dp_shard")

    def run(index: int) -> Answer:
        seconds, begin = dict[str, float](), time.perf_counter()

        def done(part: str) -> None:
            if setting.device.type == "cuda":
                torch.cuda.synchronize()
            seconds[part] = time.perf_counter() - begin - sum(seconds.values())

        numbers = range(work.count)[work.mine]
        sampling = [rlloop.SamplingParams(work.new, seed=1000 * index + i, ignore_eos=True) for i in numbers]
        made = engine.generate(work.prompts(index)[work.mine], sampling)
        done("sampling")
        kept = [([*each.prompt_ids, *each.token_ids], each.logprobs) for each in made]
        everything = [each for share in ranks.gather_objects(kept) for each in share]
        done("exchange")
        batch = [
            TrainSequence(
                token_ids=ids, predict=range(work.prompt, length), rollout_logprobs=logprobs,
                advantages=np.full(work.new, advantage, np.float32),
            )
            for (ids, logprobs), advantage in zip(everything, work.advantages, strict=True)
        ]  # fmt: skip
        result = trainer.forward_backward(batch, get_loss("grpo"))
        done("gradients")
        trainer.optim_step()
        engine.set_version(index + 1)
        done("update")
        pairs = list(zip(result.logprobs, (logprobs for _, logprobs in everything), strict=True))
        return {
            "compared": sum(len(one) for one, _ in pairs),
            "differ": sum(int((one != other).sum()) for one, other in pairs),
            "seconds": seconds,
        }

    return run


def theirs(setting: Setting, sampled: Path) -> Callable[[int], None]:
    """Learns from what vLLM has written to `sampled`."""
    work, model = Work(setting), peer_model(setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    advantages = torch.from_numpy(work.advantages[work.mine]).to(setting.device)
    count = BUDGET // (work.prompt + work.new)

    def run(index: int) -> None:
        found = np.load(sampled / f"{index}.npz")
        tokens = torch.from_numpy(found["tokens"][work.mine]).to(setting.device)
        before = torch.from_numpy(found["logprobs"][work.mine]).to(setting.device)
        for begin in range(0, len(tokens), count):
            part, old, weight = (each[begin : begin + count] for each in (tokens, before, advantages[:, None]))
            logits = model(part, use_cache=False, logits_to_keep=work.new + 1).logits[:, :-1]
            logprobs = logits.float().log_softmax(-1).gather(-1, part[:, work.prompt :, None])[..., 0]
            ratio = (logprobs - old).exp()
            loss = -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight).sum() / (len(tokens) * work.new)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def sampler(setting: Setting, folder: Path, sampled: Path) -> Callable[[int], None]:
    import vllm

    work = Work(setting)
    engine = vllm.LLM(
        str(folder), dtype="bfloat16", max_model_len=1024, skip_tokenizer_init=True, max_num_seqs=work.count,
        tensor_parallel_size=setting.size, logprobs_mode="processed_logprobs", gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=VLLM_CACHE_BYTES, disable_log_stats=True,
    )  # fmt: skip
    wanted = vllm.SamplingParams(
        max_tokens=work.new, temperature=1.0, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False
    )

    def run(index: int) -> None:
        prompts = work.prompts(index)
        made = engine.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
        outputs = [request.outputs[0] for request in made]
        tokens = np.array([ids + list(o.token_ids) for ids, o in zip(prompts, outputs, strict=True)])
        logprobs = [[place[id].logprob for place, id in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs]
        np.savez(sampled / f"{index}.npz", tokens=tokens, logprobs=np.array(logprobs, np.float32))

    return run


def child(what: str, setting: Setting, folder: Path) -> None:
    """Answers each line on stdin, a step's index; all ranks read the same."""
    from rlloop.launch.garbage import collect_rarely
    from rlloop.parallel.start import process_group

    def serve(run: Callable[[int], Any]) -> None:
        def step(line: str) -> Any:
            found = run(int(line))
            if setting.device.type == "cuda":
                torch.cuda.synchronize()
            return found

        answer(step)

    if what == "vllm":
        serve(sampler(setting, folder, folder))
        return
    address = f"file://{folder}/{what}-{setting.size}"
    with ExitStack() as stack, process_group(setting.device, address, setting.rank, setting.size):
        collect_rarely(stack)
        serve(ours(setting) if what == "rlloop" else theirs(setting, folder))


class Processes:
    """The processes of one side."""

    def __init__(self, what: str, setting: Setting, folder: Path) -> None:
        command = [sys.executable, __file__, "--gpus", str(setting.size), "--layers", str(setting.layers)]
        command += [*(["--tiny"] if setting.tiny else []), "--child", what]
        ranks, environment = (1, {"VLLM_PLUGINS": "none"}) if what == "vllm" else (setting.size, {})
        self._all = [Child(what, [*command, str(rank), str(folder)], environment) for rank in range(ranks)]

    def answers(self) -> list[Any]:
        return [process.wait() for process in self._all]

    def step(self, index: int) -> list[Any]:
        for process in self._all:
            process.send(str(index))
        return self.answers()

    def close(self) -> None:
        for process in self._all:
            process.close()


def split_of(answers: list[Answer]) -> str:
    """Seconds of the first rank by part, and the slowest rank's sampling."""
    seconds = [each["seconds"] for each in answers]
    slowest = max(each["sampling"] for each in seconds)
    return ", ".join(f"{part} {taken:.3f}" for part, taken in seconds[0].items()) + f"; slowest sampling {slowest:.3f}"


def measured(name: str, setting: Setting, parts: list[str]) -> tuple[list[float], list[Any], bool]:
    """Seconds of each step that counts, what the last part's ranks answered in it, and whether it was interrupted."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if "vllm" in parts:
            save_random(setting.config, folder)
        sides = [Processes(part, setting, folder) for part in parts]
        seconds, found = [], list[Any]()
        try:
            with interrupted_by_terms():
                for side in sides:
                    side.answers()
                for index in range(WARM + STEPS):
                    begin = time.perf_counter()
                    marks, made = [begin], list[Any]()
                    for side in sides:
                        made = side.step(index)
                        marks.append(time.perf_counter())
                    seconds.append(marks[-1] - begin)
                    found = made
                    split = ", ".join(f"{b - a:.2f}" for a, b in itertools.pairwise(marks))
                    split += f" s: {split_of(found)}" if parts == ["rlloop"] else " s"
                    print(f"{name}, {setting.size} GPUs, step {index}: {split}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            if len(seconds) < WARM + LEAST:
                raise
            return seconds[WARM:], found, True
        finally:
            for side in sides:
                side.close()
    return seconds[WARM:], found, False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="as many ranks; all that there are by default")
    parser.add_argument("--layers", type=int, default=16, help="of the model")
    parser.add_argument("--vllm", action="store_true", help="measure the peer too")
    parser.add_argument("--quick", action="store_true", help="nothing recorded")
    parser.add_argument("--tiny", action="store_true", help="toys on CPUs, nothing recorded")
    parser.add_argument("--child", nargs=3, metavar=("WHAT", "RANK", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = args.gpus or (2 if args.tiny else torch.cuda.device_count())
    if args.child:
        what, rank, folder = args.child
        torch.set_num_threads(1 if args.tiny else 4)
        child(what, Setting(int(rank), size, args.tiny, "optimizer", args.layers), Path(folder))
        return
    if not args.tiny:
        need_gpus(max(size, 1), "--tiny runs a toy on a CPU")
    setting, alone = (Setting(0, ranks, args.tiny, "optimizer", args.layers) for ranks in (size, 1))
    runs = {"rlloop": (setting, ["rlloop"]), "vLLM + FSDP2": (setting, ["vllm", "fsdp"]), "alone": (alone, ["rlloop"])}
    if not args.vllm:
        del runs["vLLM + FSDP2"]
    seconds, answer = dict[str, list[float]](), Answer()
    for name, (where, parts) in runs.items():
        seconds[name], answers, interrupted = measured(name, where, parts)
        answer = answer or answers[0]
        figures = figures_of(setting, alone, seconds, answer)
        packages = ("triton", "transformers", *(("vllm",) if args.vllm else ()))
        report(f"ranks-step-{size}", figures, packages=packages, part=True, write=not (args.quick or args.tiny))
        if interrupted:
            raise KeyboardInterrupt


def figures_of(setting: Setting, alone: Setting, seconds: dict[str, list[float]], answer: Answer) -> list[Figure]:
    """Figures of what has been measured so far: seconds of steps by side, and what a rank of ours answered."""
    work = Work(setting)
    shape = f"8B shape ({setting.config['num_hidden_layers']} layers), {setting.size} GPUs"
    title = f"RL step, {shape}, {work.count} x ({work.prompt} in, {work.new} out)"
    speeds = {name: [work.count * work.new / taken for taken in each] for name, each in seconds.items()}
    peer = speeds.get("vLLM + FSDP2")
    named = None if peer is None else f"vLLM default TP {setting.size} + transformers, FSDP2"
    figures = [
        Figure.of_rounds(title, "new tokens/s", speeds["rlloop"], named, peer, aim=1.2),
        Figure(name=f"{title}: logprobs compared", unit="", value=answer["compared"]),
        Figure(name=f"{title}: logprobs that differ", unit="", value=answer["differ"]),
    ]
    if "alone" in seconds:
        weak = [
            [Work(each).count * work.new / each.size / taken for taken in seconds[name]]
            for name, each in (("rlloop", setting), ("alone", alone))
        ]
        title = f"weak scaling of an {title}"
        figures.append(Figure.of_rounds(title, "new tokens/s a GPU", weak[0], "itself on 1 GPU", weak[1], aim=0.9))
    return figures


if __name__ == "__main__":
    main()
