"""AdamW over the shards of master weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rlloop.config.run import TrainerConfig
from rlloop.models.safetensors_io import write_tensors
from rlloop.trainer.master_weights import MasterWeights

FILE = "optimizer.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) with zeroed state, without weight decay for norms and biases.

    Masters are padded to whole vectors, so an element's bits do not know where its shard ends.
    """

    def __init__(self, masters: MasterWeights, config: TrainerConfig) -> None:
        self._masters, shards = masters, masters.shards
        decayed = {name for name, each in shards.items() if each.live.ndim >= 2 and not name.endswith("bias")}
        groups = [
            {"params": [shards[name].flat for name in shards if name in decayed], "weight_decay": config.weight_decay},
            {"params": [shards[name].flat for name in shards if name not in decayed], "weight_decay": 0.0},
        ]
        beta1, beta2 = config.betas
        self._adamw = torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, fused=True)
        for shard in shards.values():
            moments = {key: torch.zeros_like(shard.flat, requires_grad=False) for key in MOMENTS}
            self._adamw.state[shard.flat] = {"step": torch.zeros((), device=shard.flat.device), **moments}

    def step(self, lr: float) -> None:
        """Update the masters by their gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()

    @property
    def steps(self) -> int:
        """Updates so far."""
        return int(max((float(state["step"]) for state in self._adamw.state.values()), default=0.0))

    def set_steps(self, count: int) -> None:
        for state in self._adamw.state.values():
            state["step"].fill_(count)

    def moment(self, name: str, key: str) -> Tensor:
        """This rank's rows of a moment, of `MOMENTS`."""
        shard = self._masters.shards[name]
        return shard.of(self._adamw.state[shard.flat][key])

    def save(self, folder: Path, *, writes: bool) -> None:
        """Write the whole state, a tensor at a time; only a rank that `writes` touches the file. Collective."""

        def whole(entry: str) -> Tensor:
            key, _, name = entry.partition(".")
            if key in MOMENTS:
                return self._masters.gather(name, self.moment(name, key))
            return self._adamw.state[self._masters.shards[name].flat][key]

        own, stage = {}, self._masters.stage
        for name, shard in self._masters.shards.items():
            shape = self._masters.parameters.entries[name].shape
            own |= {
                f"step.{name}": (torch.float32, ()),
                **{f"{key}.{name}": (shard.flat.dtype, shape) for key in MOMENTS},
            }
        entries = {name: entry for stage_own in stage.gather_objects(own) for name, entry in stage_own.items()}
        tensors = (tensor for _, tensor in stage.all(own, whole))
        if writes:
            write_tensors(folder / FILE, entries, tensors)
        else:
            for _ in tensors:
                pass

    def restore(self, folder: Path) -> None:
        """Read this rank's rows of what `save` wrote."""
        with safe_open(folder / FILE, framework="pt") as file:
            for name, shard in self._masters.shards.items():
                self._adamw.state[shard.flat]["step"].copy_(file.get_tensor(f"step.{name}"))
                division = self._masters.parameters.entries[name].division
                for key in MOMENTS:
                    stored = file.get_slice(f"{key}.{name}")
                    if division is None:
                        rows = stored[shard.begin : shard.end]
                    else:
                        held = [stored[begin:end] for begin, end in division.own]
                        rows = torch.cat(held)[shard.begin : shard.end]
                    self.moment(name, key).copy_(rows)
