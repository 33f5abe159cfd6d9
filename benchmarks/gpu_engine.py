"""Tokens per second of sampling on a GPU, bfloat16, with logprobs, in five regimes and twelve shapes of models.

    python benchmarks/gpu_engine.py [--vllm] [--sglang FOLDER] [--cells '8B/*' 'mixture/one'] [--seconds 540] [--list]

Cells are `SHAPE/WORK`. Work: `crowd` 256 requests of 128 tokens in and 256 out, `few` 32 of them, `one` of them,
`groups` 64 prompts of 64 to 512 tokens, 8 completions each of 32 to 1,024, and `long` 32 of 8,192 in and 256 out.

With `--vllm` the same requests go through vLLM in processes of its own: in its default mode, batch-invariant, and
around rlloop's model (`rollout.engine=vllm`). Where all engines fit on the GPU together they have started before the
first runs and take turns, so a host that others slow down for a while slows all; larger models run one engine after
the other. A round to warm up, then five, each on new prompts: medians count, least and most stand beside them. The
roofline is that of `roofline.py`.

vLLM is set up to be as fast as it can be: its requests have no seeds (its runner for mixtures draws seeded ones one by
one; `--seeded` gives them seeds, and its name says so), no statistics, no detokenisation, no tokenizer, CUDA graphs and
prefix caching as they come, as many sequences at once as there are requests, room for all their keys and values (or
what the GPU has left: the same for every engine), and `flat_logprobs`, which spare its host an object a token. rlloop's
requests have seeds, which cost it nothing.

With `--sglang` they go through SGLang too, unseeded, from a folder with its packages (`engine_sglang.py` says how it is
set up, and what that folder needs).

An engine that ends in the middle is left out, and what it and its processes wrote last is printed; rlloop's figures are
recorded all the same. A peer is started again alone, after the others, with the next of its `SETUPS` that fits the
shape, and its name says which (`--setup` begins with one of vLLM's; `--in-process` keeps vLLM's engine in the process
that asks it, so that its errors come with their own traceback; `--logs FOLDER` keeps all that engines write). Figures
are recorded work by work.

Then the trainer scores some of each engine's last round: k3 is the mean of exp(d) - d - 1, d its logprob less the
engine's. A model of more than 32 GB is not written to the disk: peers make weights of their own, and have no k3.
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
import engine_sglang
import numpy as np
from children import Child, Ended, Rounds, answer, in_turns
from engine_sides import AS_IT_COMES, SETUPS, STATES, Run, model_of, rlloop_side, setups_of, vllm_side, written
from gpu_shapes import EVERY, RECURRENT, SHAPES, TINIES, bytes_of, make_folder
from results_schema import Figure, device_name, need_gpus, report
from roofline import device_rates, engine_speed

ROUNDS, SCORED = 5, 32768  # tokens that the trainer scores at least
WRITTEN = 32e9  # bytes of the largest checkpoint that is written
RUNNING = 512  # requests at once
RECURRENT_SIDES = ["rlloop", "vLLM default"]  # the others do not run recurrent layers
LOGS = {"VLLM_LOGGING_STREAM": "ext://sys.stderr"}  # stdout, its default, has the answers
SIDES = {  # name -> (who runs, environment)
    "rlloop": ("rlloop", {}),
    "vLLM default": ("vllm", {**LOGS, "VLLM_PLUGINS": "none"}),
    "vLLM batch-invariant": ("vllm", {**LOGS, "VLLM_PLUGINS": "none", "VLLM_BATCH_INVARIANT": "1"}),
    "rlloop's model inside vLLM": ("tier1", LOGS),
    engine_sglang.NAME: (engine_sglang.KIND, {}),  # and what its folder needs
}
PEERS = "vllm", engine_sglang.KIND  # with weights of their own where none are written
AIMS = {"vLLM default": 1.0, "vLLM batch-invariant": 1.25, engine_sglang.NAME: 1.0}
WORKS = {
    "crowd": "256 x (128 in, 256 out)", "few": "32 x (128 in, 256 out)", "one": "1 x (128 in, 256 out)",
    "groups": "64 x 8 (64 to 512 in, 32 to 1,024 out)", "long": "32 x (8,192 in, 256 out)",
}  # fmt: skip
CELLS = [f"{shape}/{work}" for shape in (*SHAPES, *RECURRENT) for work in WORKS]
SHARED = {"groups": 8}  # completions of one prompt, where there are several
Speeds = dict[str, Rounds]  # work -> engine -> rounds
Setups = dict[tuple[str, str], str | None]  # (work, engine) -> the one of `SETUPS` that ran it; None: none did


def sizes_of(work: str, index: int) -> list[tuple[int, int]]:
    """(tokens in, tokens out) of each request of a round."""
    count, prompt, new = {"crowd": (256, 128, 256), "few": (32, 128, 256), "one": (1, 128, 256)}.get(
        work, (32, 8192, 256)
    )
    if work != "groups":
        return [(prompt, new)] * count
    rng = np.random.default_rng([index, 1])
    lengths = np.repeat(rng.integers(64, 513, 64), SHARED[work])
    return list(zip(lengths.tolist(), rng.integers(32, 1025, len(lengths)).tolist(), strict=True))


def requests_of(work: str, index: int, most: int = 150000) -> tuple[list[list[int]], list[int]]:
    """(prompts, new tokens of each) of a round: the same for every engine, and of `groups` in a row alike. Token ids
    are below `most`."""
    sizes, shared = sizes_of(work, index), SHARED.get(work, 1)
    rng = np.random.default_rng([index, 0])
    drawn = [rng.integers(3, most, length).tolist() for length, _ in sizes[::shared]]
    return [drawn[at // shared] for at in range(len(sizes))], [new for _, new in sizes]


def cache_bytes(shape: str, works: list[str], engines: int, memory: float) -> int:
    """Bytes of keys and values: all requests of the largest work at once, or an engine's share of what weights leave.
    vLLM's have the recurrent states as well."""
    weights, token, state = bytes_of(shape)
    sizes = [sizes_of(work, 0) for work in works]
    needed = max(
        sum(prompt + new + 16 for prompt, new in each) * 1.2 * token + STATES * len(each) * state for each in sizes
    )
    left = 0.85 * memory / engines - weights - (3 << 30)  # graphs, activations
    return int(min(needed, left))


def together(shape: str, names: list[str], works: list[str], memory: float) -> bool:
    """True if all engines fit on the GPU at once with the caches that they would have alone."""
    alone, beside = (cache_bytes(shape, works, count, memory) for count in (1, len(names)))
    return alone == beside


def serve(name: str, folder: Path, settings: dict[str, Any]) -> None:
    """A round for each line on stdin (`work index`); some of what the last one made stays in the folder."""
    kind = SIDES[name][0]
    if kind == engine_sglang.KIND:
        run: Run = engine_sglang.side(folder, settings)
    else:
        run = vllm_side(folder, settings) if kind == "vllm" else rlloop_side(folder, kind, settings)

    def round_of(line: str) -> float:
        work, index = line.split()
        prompts, new = requests_of(work, int(index), settings["most"])
        begin = time.perf_counter()
        made = run(prompts, new, int(index))
        speed = sum(new) / (time.perf_counter() - begin)
        if [len(logprobs) for _, logprobs in made] != new:
            raise RuntimeError(f"{name} made completions of other lengths than it was asked for")
        what = f"round {index}" if int(index) else "warm-up"
        print(f"{name}, {settings['shape']}/{work}, {what}: {speed:,.0f} tokens/s", file=sys.stderr, flush=True)
        kept, tokens = [], 0
        for prompt, (ids, logprobs) in zip(prompts, made, strict=True):
            if tokens < SCORED:
                kept.append([prompt, list(map(int, ids)), list(map(float, logprobs))])
                tokens += len(prompt) + len(ids)
        (folder / f"{list(SIDES).index(name)} {work}.json").write_text(json.dumps(kept))
        return speed

    answer(round_of)


def mismatch(folder: Path, settings: dict[str, Any], names: list[str]) -> dict[str, dict[str, float]]:
    """k3 of each engine from the trainer's own path, by work."""
    import torch

    import rlloop

    config = EVERY[settings["shape"]][1]
    model = model_of(folder, config)
    found: dict[str, dict[str, float]] = {work: {} for work in settings["works"]}
    for work in found:
        for name in names:
            made = folder / f"{list(SIDES).index(name)} {work}.json"
            if (not written(folder) and SIDES[name][0] in PEERS) or not made.exists():
                continue
            kept = json.loads(made.read_text())
            with torch.no_grad():
                rows = rlloop.token_logprobs(model, [(prompt, ids) for prompt, ids, _ in kept], max_tokens=16384)
            scored = torch.cat(rows).cpu().numpy()
            theirs = np.concatenate([np.array(logprobs, np.float32) for *_, logprobs in kept])
            d = scored.astype(np.float64) - theirs
            different = int((scored.view(np.int32) != theirs.view(np.int32)).sum())
            found[work][name] = float(np.mean(np.expm1(d) - d))
            print(
                f"{name}, {work}: k3 {found[work][name]:.3g}, {different} of {d.size} logprobs differ", file=sys.stderr
            )
    return found


def mismatches(folder: Path, settings: dict[str, Any], names: list[str]) -> dict[str, dict[str, float]]:
    """`mismatch` in a process of its own, so that the next engines have the whole GPU."""
    command = [sys.executable, __file__, "--child", str(folder), json.dumps(settings), "k3", *names]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(out.stdout.splitlines()[-1])


def speeds(
    folder: Path, settings: dict[str, Any], names: list[str], rounds: int, turns: bool,
    environment: dict[str, str], known: Callable[[str, Speeds, Setups], None], logs: Path | None,
) -> tuple[Speeds, Setups]:  # fmt: skip
    """Tokens per second of each engine's rounds, by work, and how peers were set up. `turns`: all start, and then take
    turns. `known` gets a work and all so far whenever there is more of it. Raises `SystemExit` where rlloop ends."""
    found: Speeds = {work: {} for work in settings["works"]}
    setups: Setups = {}
    errors: list[str] = []

    def started(name: str, setup: str) -> Child:
        command = [sys.executable, __file__, "--child", str(folder), json.dumps({**settings, "setup": setup}), name]
        return Child(name, command, {**SIDES[name][1], **environment}, None if logs is None else logs / f"{name}.log")

    def ways(name: str) -> list[str]:
        kind = SIDES[name][0]
        if kind == "vllm":
            return setups_of(settings["shape"], settings["setup"])
        return list(engine_sglang.SETUPS) if kind == engine_sglang.KIND else [AS_IT_COMES]

    def measured(by_name: dict[str, str], works: list[str]) -> None:
        def ended(child: Child, error: Ended) -> None:
            if child.name == "rlloop":
                raise error
            setup = by_name[child.name]
            print(f"{setup and f'{setup}: '}{error}", file=sys.stderr, flush=True)
            errors.append("\n    ".join([f"{child.name} ended{setup and f' ({setup})'}", *error.errors]))

        def more(work: str, by_side: Rounds) -> None:
            if not by_side:
                return
            found[work] |= by_side
            setups.update({(work, name): by_name[name] for name in by_side})
            known(work, found, setups)

        in_turns([started(*each) for each in by_name.items()], works, rounds, more, ended)

    for group in [names] if turns else [[name] for name in names]:
        measured({name: ways(name)[0] for name in group}, settings["works"])
        for name in group:
            tries = iter(ways(name)[1:])
            while left := [work for work in settings["works"] if name not in found[work]]:
                if (setup := next(tries, None)) is None:
                    setups.update({(work, name): None for work in left})
                    break
                print(f"{name}: once more, alone: {setup}", file=sys.stderr, flush=True)
                measured({name: setup}, left)
    for each in errors:  # once more, where they are seen
        print(each, file=sys.stderr, flush=True)
    return found, setups


def title_of(shape: str, work: str) -> str:
    return f"engine, {EVERY[shape][0]} bf16, {WORKS[work]}, logprobs"


def speed_figures(shape: str, work: str, found: Rounds, setups: Setups, seeded: bool) -> list[Figure]:
    """Figures of one workload: each engine of rlloop's beside each peer."""
    import torch

    config, rates = EVERY[shape][1], device_rates(device_name()) if torch.cuda.is_available() else None
    bounded = rates is not None and shape in SHAPES
    bound = engine_speed(config, sizes_of(work, 1), SHARED.get(work, 1), rates) if bounded else None
    figures = []
    peers = [peer for peer in AIMS if (work, peer) in setups]
    for name in (name for name in found if name not in AIMS):
        for peer in peers or [None]:
            said = None
            if peer is not None:
                setup = setups[work, peer]
                seeds = "seeded" if seeded and SIDES[peer][0] == "vllm" else "unseeded"
                how = [peer, seeds, *([setup] if setup else [])]
                said = f"{peer}: it ended" if setup is None else ", ".join(how)
            figures.append(
                Figure.of_rounds(
                    title_of(shape, work) + ("" if name == "rlloop" else f", {name}"), "tokens/s", found[name], said,
                    found.get(peer or ""), aim=AIMS.get(peer or ""), roofline=bound,
                )
            )  # fmt: skip
    return figures


def figures_of(
    shape: str, works: list[str], names: list[str], rounds: int, seeded: bool,
    record: Callable[[list[Figure]], object], setup: str = AS_IT_COMES, environment: dict[str, str] | None = None,
    logs: Path | None = None,
) -> None:  # fmt: skip
    """Record a shape's figures, those of a work once its rounds are over."""
    import torch

    words, config = EVERY[shape]
    names = [name for name in names if name in RECURRENT_SIDES or not bytes_of(shape)[2]]
    memory = 1 << 40 if shape in TINIES else torch.cuda.get_device_properties(0).total_memory
    turns = together(shape, names, works, memory)
    sizes = [sizes_of(work, index) for work in works for index in range(rounds + 1)]
    settings = {
        "shape": shape, "works": works, "seeded": seeded, "running": min(RUNNING, max(map(len, sizes))),
        "cache": cache_bytes(shape, works, len(names) if turns else 1, memory), "token": bytes_of(shape)[1],
        "most": min(150000, config.get("text_config", config)["vocab_size"]),
        "longest": max(sum(size) for each in sizes for size in each) + 16, "setup": setup,
    }  # fmt: skip

    def known(work: str, found: Speeds, setups: Setups) -> None:
        record(speed_figures(shape, work, found[work], setups, seeded))

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if bytes_of(shape)[0] <= WRITTEN:
            make_folder(shape, folder)
        else:
            (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
        found, setups = speeds(folder, settings, names, rounds, turns, environment or {}, known, logs)
        for work in works:
            if any(setups.get((work, name), "") is None for name in names):
                known(work, found, setups)  # with the names of engines that ended
        apart = mismatches(folder, settings, names)
    record([
        Figure(
            name=f"k3 of {name} from the trainer, {words} bf16" + ("" if work == "crowd" else f", {WORKS[work]}"),
            unit="nats", value=k3,
        )
        for work in works
        for name, k3 in apart[work].items()
        if name in found[work]
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", action="store_true", help="measure vLLM too")
    parser.add_argument("--sglang", type=Path, metavar="FOLDER", help="measure SGLang too, whose packages are there")
    parser.add_argument("--seeded", action="store_true", help="vLLM's requests have seeds, as rlloop's do")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="nothing recorded")
    parser.add_argument(
        "--tiny", nargs="?", const="tiny", choices=TINIES, help="a toy on a CPU, one request, nothing recorded"
    )
    parser.add_argument("--without", choices=list(SIDES), action="append", default=[], help="of the engines")
    parser.add_argument("--setup", choices=[each for each in SETUPS if each], default=AS_IT_COMES, help="of vLLM")
    parser.add_argument(
        "--in-process", action="store_true", help="vLLM's engine has no process of its own; its errors have tracebacks"
    )
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="for all that the engines write")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    cells.add_arguments(parser)
    args = parser.parse_args()
    if args.child:
        folder, settings, what, *more = args.child
        if what == "k3":
            print(json.dumps(mismatch(Path(folder), json.loads(settings), more)))
        else:
            serve(what, Path(folder), json.loads(settings))
        return
    if not (args.tiny or args.list):
        need_gpus(instead="--tiny runs a toy on a CPU")
    asked = ["rlloop", *(["vllm", "tier1"] if args.vllm else []), *([engine_sglang.KIND] if args.sglang else [])]
    names = [name for name, (kind, _) in SIDES.items() if kind in asked and name not in args.without]
    packages = ["triton", *(["vllm"] if args.vllm else [])]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if args.in_process else {}
    if args.sglang is not None:
        engine_sglang.check(args.sglang)
        sys.path.append(str(args.sglang))  # its version is read there
        SIDES[engine_sglang.NAME][1].update(engine_sglang.environment(args.sglang))
        packages.append("sglang")
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)

    def record(figures: list[Figure]) -> None:
        report("gpu-engine", figures, packages=tuple(packages), part=True, write=not (args.quick or args.tiny))

    def measure(shape: str, works: list[str], rounds: int) -> None:
        figures_of(shape, works, names, rounds, args.seeded, record, args.setup, environment, args.logs)

    if args.tiny:
        measure(args.tiny, ["one"], 2)
        return
    picked = [cell.split("/") for cell in cells.chosen(CELLS, args.cells)]
    works = {shape: [work for each, work in picked if each == shape] for shape, _ in picked}
    if args.list:
        print("\n".join(map("/".join, picked)))
        return
    for shape in cells.within({shape: [f"{shape}/{work}" for work in works[shape]] for shape in works}, args.seconds):
        measure(shape, works[shape], args.rounds)


if __name__ == "__main__":
    main()
