"""AdamW over the shards of master weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.optim.adamw import adamw

from rlloop.config.trainer import TrainerConfig
from rlloop.errors import RunError
from rlloop.models.safetensors_io import write_tensors
from rlloop.models.stages import in_order
from rlloop.trainer.master_weights import MasterWeights
from rlloop.trainer.offload import BlockStream, HostMemory
from rlloop.trainer.shard import VECTOR, Shard

FILE = "optimizer.safetensors"
WEIGHTS_ALONE = "restore(optimizer=False) takes the weights alone"
MOMENTS = ("exp_avg", "exp_avg_sq")


class Piece(NamedTuple):
    """Numbers [begin, end) of a shard, in whole vectors, and their master and moments on the device."""

    shard: Shard
    begin: int
    end: int
    master: Tensor
    moments: tuple[Tensor, Tensor]


class ShardedAdamW:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) with zeroed state, without weight decay for norms and biases.

    Masters are padded to whole vectors, so an element's bits do not depend on the ends of shards or blocks: state in
    host memory (`config.offload`) is copied to the device in blocks, updated there by the same kernel, and copied back.
    """

    def __init__(self, masters: MasterWeights, config: TrainerConfig) -> None:
        self._masters, self._config, shards = masters, config, masters.shards
        self._decayed = {name for name, each in shards.items() if each.live.ndim >= 2 and not name.endswith("bias")}
        self._home: HostMemory | None = None
        self._stream: BlockStream | None = None
        if config.offload != "none":
            size = sum(len(MOMENTS) * HostMemory.bytes_of(each.flat) for each in shards.values())
            self._home, self._stream = HostMemory(size, masters.device), BlockStream(masters.device)
        zeros_like = torch.zeros_like if self._home is None else self._home.zeros_like
        self._moments = {name: {key: zeros_like(each.flat) for key in MOMENTS} for name, each in shards.items()}
        self._steps = {name: torch.zeros((), device=masters.device) for name in shards}

    def reset(self) -> None:
        """Zero the state: that of an optimizer which has taken no step."""
        for name, moments in self._moments.items():
            for each in (*moments.values(), self._steps[name]):
                each.zero_()

    @property
    def steps(self) -> int:
        """Updates so far."""
        return int(max((float(each) for each in self._steps.values()), default=0.0))

    def set_steps(self, count: int) -> None:
        for each in self._steps.values():
            each.fill_(count)

    @torch.no_grad()
    def step(self, lr: float, config: TrainerConfig | None = None) -> None:
        """Update the masters by their gradients. `config`: other betas, eps and weight decay than the first."""
        config = config or self._config
        for pieces in [self._resident()] if self._stream is None else self._streamed(self._stream):
            for decays in (True, False):
                self._update(
                    [each for each in pieces if (each.shard.name in self._decayed) is decays], lr, decays, config
                )
            for shard, begin, _, master, _ in pieces:
                if shard.hosted:
                    self._masters.round_piece(shard, begin, master)

    def measured(self) -> dict[str, float]:
        """`memory/*` of the last step; empty where nothing is offloaded."""
        if self._stream is None:
            return {}
        homes = (self._home, self._masters.home)
        return {
            "memory/host_bytes": float(sum(home.size for home in homes if home is not None)),
            "memory/streamed_bytes": float(self._stream.counts.bytes),
            "memory/stream_seconds": self._stream.counts.seconds,
        }

    def moment(self, name: str, key: str) -> Tensor:
        """This rank's rows of a moment, of `MOMENTS`, where they lie."""
        return self._masters.shards[name].of(self._moments[name][key])

    def save(self, folder: Path, *, writes: bool) -> None:
        """Write the whole state, a tensor at a time; only a rank that `writes` touches the file. Collective."""

        def whole(entry: str) -> Tensor:
            key, _, name = entry.partition(".")
            return self._masters.gather(name, self.moment(name, key)) if key in MOMENTS else self._steps[name]

        own, stage = self._entries(), self._masters.stage
        entries = {name: entry for stage_own in stage.gather_objects(own) for name, entry in stage_own.items()}
        entries = {name: entries[name] for name in in_order(entries)}
        tensors = (tensor for _, tensor in stage.all(own, whole))
        if writes:
            write_tensors(folder / FILE, entries, tensors)
        else:
            for _ in tensors:
                pass

    def _entries(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Types and whole shapes of this stage's part of the state, by name in the file."""
        entries = {}
        for name, shard in self._masters.shards.items():
            shape = self._masters.parameters.entries[name].shape
            entries |= {
                f"step.{name}": (torch.float32, ()),
                **{f"{key}.{name}": (shard.flat.dtype, shape) for key in MOMENTS},
            }
        return entries

    def check(self, folder: Path) -> None:
        """Raises `RunError` unless `restore` can read the file, which is whole and of these weights."""
        try:
            with safe_open(folder / FILE, framework="pt") as file:
                found = {entry: tuple(file.get_slice(entry).get_shape()) for entry in self._entries()}
        except (SafetensorError, OSError) as error:
            raise RunError(f"{folder / FILE} cannot be restored: {error}; {WEIGHTS_ALONE}") from error
        for entry, (_, shape) in self._entries().items():
            if found[entry] != shape:
                raise RunError(
                    f"{folder / FILE} has {entry} of shape {list(found[entry])}; the model's is {list(shape)}; "
                    f"{WEIGHTS_ALONE}"
                )

    def restore(self, folder: Path) -> None:
        """Read this rank's rows of what `save` wrote."""
        with safe_open(folder / FILE, framework="pt") as file:
            for name, shard in self._masters.shards.items():
                self._steps[name].copy_(file.get_tensor(f"step.{name}"))
                division = self._masters.parameters.entries[name].division
                for key in MOMENTS:
                    stored = file.get_slice(f"{key}.{name}")
                    if division is None:
                        rows = stored[shard.begin : shard.end]
                    else:
                        held = [stored[begin:end] for begin, end in division.own]
                        rows = torch.cat(held)[shard.begin : shard.end]
                    self.moment(name, key).copy_(rows)

    def _reached(self) -> list[Shard]:
        """The parameters with a gradient, in order."""
        return [shard for name, shard in self._masters.shards.items() if name in self._masters.sums]

    def _resident(self) -> list[Piece]:
        moments = ((self._moments[shard.name][key] for key in MOMENTS) for shard in self._reached())
        return [
            Piece(shard, 0, shard.flat.numel(), shard.flat, (first, second))
            for shard, (first, second) in zip(self._reached(), moments, strict=True)
        ]

    def _streamed(self, stream: BlockStream) -> Iterator[list[Piece]]:
        """Update block by block; changed parts are copied back."""
        blocks = list(_blocks(self._reached(), stream.block_bytes))

        def hosted(shard: Shard, begin: int, end: int) -> list[Tensor]:
            moments = [self._moments[shard.name][key] for key in MOMENTS]
            return [each[begin:end] for each in ([shard.flat] if shard.hosted else []) + moments]

        hosts = ([each for cut in block for each in hosted(*cut)] for block in blocks)
        for here, block in zip(stream.each(hosts), blocks, strict=True):
            tensors, pieces = iter(here), list[Piece]()
            for shard, begin, end in block:
                master = next(tensors) if shard.hosted else shard.flat[begin:end]
                pieces.append(Piece(shard, begin, end, master, (next(tensors), next(tensors))))
            yield pieces

    def _update(self, pieces: list[Piece], lr: float, decays: bool, config: TrainerConfig) -> None:
        if not pieces:
            return
        steps = [self._steps[shard.name] for shard, *_ in pieces]  # incremented by its shard's last piece
        last = [each.end == each.shard.flat.numel() for each in pieces]
        beta1, beta2 = config.betas
        adamw(
            [each.master for each in pieces],
            [self._masters.sums[each.shard.name][each.begin : each.end] for each in pieces],
            [each.moments[0] for each in pieces],
            [each.moments[1] for each in pieces],
            [],
            [step if own else step.clone() for step, own in zip(steps, last, strict=True)],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=config.weight_decay if decays else 0.0,
            eps=config.eps,
            maximize=False,
        )


def _blocks(shards: list[Shard], room: int) -> Iterator[list[tuple[Shard, int, int]]]:
    """The shards cut into blocks of which at most `room` bytes lie in host memory."""
    block, left = list[tuple[Shard, int, int]](), room
    for shard in shards:
        begin, width = 0, shard.flat.itemsize * (len(MOMENTS) + shard.hosted)  # bytes of a number
        if not shard.flat.numel():
            block.append((shard, 0, 0))  # a rank without rows of it counts its steps all the same
        while begin < shard.flat.numel():
            if (count := left // width // VECTOR * VECTOR) == 0:
                yield block
                block, left = [], room
                continue
            end = min(shard.flat.numel(), begin + count)
            block.append((shard, begin, end))
            begin, left = end, left - (end - begin) * width
    if block:
        yield block
