"""Full training of the Qwen3 8B shape on several GPUs, bfloat16: the trainer beside transformers with FSDP2.

    python benchmarks/ranks_train.py [--gpus 2] [--layers 36] [--weak] [--quick] [--only rlloop] [--shard parameters]

A step is forward, backward and AdamW over 8 sequences of 2,048 tokens a GPU; all layers are recomputed in the backward
(without that, the peer does not fit). Weights are random, all tokens are trained.

- rlloop: `trainer.layout.dp_shard` is the number of GPUs; masters, moments and gradients are sharded, the compute copy
  is whole, as an engine beside the trainer needs it (`--shard parameters`: sharded like the peer's). Every parity
  guarantee is on; gradients are exchanged as bits.
- peer: transformers' model with SDPA under `fully_shard`, float32 masters, bfloat16 compute, float32 reduction.

Each has processes of its own, one after the other; medians of the rounds count. The share of the exchange is the
part of a step that it does not take where the same numbers are taken from the rank itself in place of the network.
`--weak` adds rlloop on one GPU with one GPU's sequences, so it needs `--layers` that fit there.

`--tiny` runs a toy shape on CPUs over gloo, which shows that the script works and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from results_schema import Figure, need_gpus, report

if TYPE_CHECKING:
    from rlloop.parallel.layout import Layout

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 151645,
}
SMALL = {
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": 1,
}
WARM, ROUNDS = 2, 4
FOUND = "found.json"


class Setting:
    """One rank's part of the work."""

    def __init__(self, rank: int, size: int, tiny: bool, shard: str, layers: int) -> None:
        self.rank, self.size, self.shard, self.tiny, self.layers = rank, size, shard, tiny, layers
        self.device = torch.device("cpu") if tiny else torch.device("cuda", rank)
        self.config = {**QWEN3_8B, **(SMALL if tiny else {"num_hidden_layers": layers})}
        self.sequences, self.length = (2, 16) if tiny else (8, 2048)

    def tokens(self) -> torch.Tensor:
        """[size x sequences, length]: the whole step's."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.size * self.sequences, self.length)
        return torch.randint(3, self.config["vocab_size"] - 1, shape, generator=generator)


def our_model(setting: Setting, layout: Layout | None = None) -> Any:
    """A random model, drawn on this rank's GPU, sharded as `trainer.layout.dp_shard` has it, or by another layout."""
    from rlloop.models import Model
    from rlloop.models.config import parse_config
    from rlloop.models.parameters import ParameterStore
    from rlloop.models.ropes import RopeTable
    from rlloop.parallel.context import join
    from rlloop.parallel.layout import Layout

    context, config = join(setting.device, layout or Layout(dp_shard=setting.size)), parse_config(setting.config)
    with torch.device("meta"):
        model = Model(config, None, context)
    generator = torch.Generator(setting.device).manual_seed(0)
    state = {}
    for name, shape in ParameterStore(model).shapes().items():
        state[name] = torch.empty(shape, dtype=torch.bfloat16, device=setting.device)
        state[name].fill_(1.0) if len(shape) == 1 else state[name].normal_(0, 0.02, generator=generator)
    model.load_state_dict(state, assign=True)
    model.rope = RopeTable(config, "cpu").to(setting.device)
    return model


def ours(setting: Setting) -> tuple[Callable[[], None], Callable[[], None]]:
    """(a step, the same without the network)."""
    from rlloop.algorithms import get_loss
    from rlloop.config.trainer import TrainerConfig
    from rlloop.parallel.collectives import Ranks
    from rlloop.trainer import Trainer, TrainSequence

    budget = setting.sequences * setting.length
    settings = TrainerConfig(lr=1e-6, max_batch_tokens=budget, checkpoint_layers="all", shard=setting.shard)
    trainer = Trainer(our_model(setting), settings)
    batch = [TrainSequence.supervised(row[:1], row[1:]) for row in setting.tokens().tolist()]
    loss = get_loss("sft")

    def step() -> None:
        trainer.forward_backward(batch, loss)
        trainer.optim_step()

    def alone() -> None:
        sums = trainer._masters.gradients
        ranks, sums._shards = sums._shards, _Silent(setting.size, setting.rank)
        try:
            step()
        finally:
            sums._shards = ranks

    class _Silent(Ranks):
        """Ranks that move as many bytes in memory, and none over the network."""

        def exchange(self, x: torch.Tensor, sends: Any, receives: Any) -> torch.Tensor:
            rows = x.split(list(sends))[self.rank]
            return torch.cat([rows[:count] for count in receives])

    return step, alone


def peer_model(setting: Setting) -> Any:
    """transformers' model under FSDP2, with random weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM, Qwen3Config

    kept = {name: value for name, value in setting.config.items() if name not in ("architectures", "model_type")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**kept), dtype=torch.float32, attn_implementation="sdpa")
    mesh = init_device_mesh(setting.device.type, (setting.size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=setting.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
        half = torch.arange(0, setting.config["head_dim"], 2, device=setting.device).float()
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(1.0 / (setting.config["rope_theta"] ** (half / setting.config["head_dim"])))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def peers(setting: Setting) -> Callable[[], None]:
    model = peer_model(setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    first = setting.rank * setting.sequences
    tokens = setting.tokens()[first : first + setting.sequences].to(setting.device)

    def step() -> None:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def round_seconds(setting: Setting, step: Callable[[], None], rounds: int) -> list[float]:
    """Seconds of a step of all ranks in each round."""
    import torch.distributed as dist

    found = []
    for index in range(WARM + rounds):
        _finish(setting)
        dist.barrier()
        begin = time.perf_counter()
        step()
        _finish(setting)
        dist.barrier()
        found.append(time.perf_counter() - begin)
        if setting.rank == 0:
            print(f"round {index}: {found[-1]:.3f} s", file=sys.stderr, flush=True)
    return found[WARM:]


def _finish(setting: Setting) -> None:
    if setting.device.type == "cuda":
        torch.cuda.synchronize()


def child(what: str, setting: Setting, address: str, out: Path) -> None:
    """One rank; the first writes seconds and GiB."""
    from rlloop.parallel.start import process_group

    with process_group(setting.device, address, setting.rank, setting.size):
        found = {}
        if what == "rlloop":
            step, alone = ours(setting)
            found["seconds"] = round_seconds(setting, step, ROUNDS)
            found["bytes"] = _peak(setting)
            found["alone"] = round_seconds(setting, alone, ROUNDS) if setting.size > 1 else found["seconds"]
        else:
            found["seconds"] = round_seconds(setting, peers(setting), ROUNDS)
            found["bytes"] = _peak(setting)
        if setting.rank == 0:
            out.write_text(json.dumps(found))


def _peak(setting: Setting) -> float:
    return torch.cuda.max_memory_allocated() if setting.device.type == "cuda" else 1.0


def in_children(what: str, setting: Setting) -> dict[str, Any]:
    command = [__file__, "--gpus", str(setting.size), "--shard", setting.shard, "--layers", str(setting.layers)]
    command += [*(["--tiny"] if setting.tiny else []), "--child", what]
    with tempfile.TemporaryDirectory() as folder:
        if codes := run_ranks(command, setting.size, Path(folder)):
            raise SystemExit(f"{what}: ranks ended with {codes}")
        return json.loads((Path(folder) / FOUND).read_text())


def run_ranks(command: list[str], size: int, folder: Path) -> list[int]:
    """A process for each rank, of a script whose last arguments are RANK, ADDRESS and the file that the first writes.
    Codes of those that failed: none if none did."""
    more = [f"file://{folder / 'meeting'}", str(folder / FOUND)]
    ranks = [subprocess.Popen([sys.executable, *command, str(rank), *more]) for rank in range(size)]
    while any(rank.poll() is None for rank in ranks):
        time.sleep(0.2)
        if any(rank.poll() for rank in ranks):  # the others would wait for it
            for rank in ranks:
                rank.kill()
    return [rank.returncode for rank in ranks if rank.returncode]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="as many ranks; all that there are by default")
    parser.add_argument("--quick", action="store_true", help="nothing recorded")
    parser.add_argument("--tiny", action="store_true", help="a toy on CPUs, nothing recorded")
    parser.add_argument("--layers", type=int, default=QWEN3_8B["num_hidden_layers"], help="of the model")
    parser.add_argument("--weak", action="store_true", help="rlloop on one GPU as well, with one GPU's sequences")
    parser.add_argument("--shard", choices=["optimizer", "parameters"], default="optimizer", help="trainer.shard")
    parser.add_argument("--only", choices=["rlloop", "peer"], help="one of the two; nothing recorded")
    parser.add_argument("--child", nargs=4, metavar=("WHAT", "RANK", "ADDRESS", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = args.gpus or (2 if args.tiny else torch.cuda.device_count())
    if args.child:
        what, rank, address, out = args.child
        torch.set_num_threads(1 if args.tiny else 4)
        child(what, Setting(int(rank), size, args.tiny, args.shard, args.layers), address, Path(out))
        return
    if not args.tiny:
        need_gpus(max(size, 1), "--tiny runs a toy on a CPU")
    setting = Setting(0, size, args.tiny, args.shard, args.layers)
    mine = in_children("rlloop", setting) if args.only != "peer" else None
    theirs = in_children("peer", setting) if args.only != "rlloop" else None
    figures = compared(setting, mine, theirs)
    if args.weak and mine:
        alone = Setting(0, 1, args.tiny, args.shard, args.layers)
        figures.append(weak_scaling(setting, mine, alone, in_children("rlloop", alone)))
    name = f"ranks-train-{size}{'-parameters' * (args.shard == 'parameters')}"
    write = not (args.quick or args.tiny or args.only)
    report(name, figures, packages=("triton", "transformers"), write=write)


def shape_of(setting: Setting) -> str:
    layers = setting.config["num_hidden_layers"]
    cut = f" ({layers} layers)" if layers != QWEN3_8B["num_hidden_layers"] else ""
    sharded = ", parameters sharded" if setting.shard == "parameters" else ""
    return f"8B shape{cut}, {setting.size} GPUs, {setting.sequences} x {setting.length} a GPU{sharded}"


def weak_scaling(setting: Setting, mine: dict[str, Any], alone: Setting, one: dict[str, Any]) -> Figure:
    rates = [
        [each.sequences * each.length / taken for taken in found["seconds"]]
        for each, found in ((setting, mine), (alone, one))
    ]
    name, unit = f"weak scaling of training, {shape_of(setting)}", "tokens/s a GPU"
    return Figure.of_rounds(name, unit, rates[0], "itself on 1 GPU", rates[1], aim=0.9)


def compared(setting: Setting, mine: dict[str, Any] | None, theirs: dict[str, Any] | None) -> list[Figure]:
    tokens, gib = setting.size * setting.sequences * setting.length, 2**30
    shape = shape_of(setting)
    found, peer = mine or theirs, theirs if mine is not None else None
    assert found is not None
    speeds, others = ([tokens / each for each in (side or {"seconds": []})["seconds"]] for side in (found, peer))
    figures = [
        Figure.of_rounds(
            f"training, {shape}", "tokens/s", speeds, "transformers, FSDP2", others, aim=1.1
        ),
        Figure(
            name=f"memory of training, {shape}", unit="GiB", value=found["bytes"] / gib, peer="transformers, FSDP2",
            peer_value=None if peer is None else peer["bytes"] / gib, aim=1.0, lower_is_better=True,
        ),
    ]  # fmt: skip
    if mine is None:
        return [replace(figure, peer=None, name=f"transformers, FSDP2: {figure.name}") for figure in figures]
    alone, whole = (statistics.median(mine[which]) for which in ("alone", "seconds"))
    share = 100 * max(0.0, 1 - alone / whole)
    return [*figures, Figure(name=f"gradient exchange's share of a step (aim: 3), {shape}", unit="%", value=share)]


if __name__ == "__main__":
    main()
