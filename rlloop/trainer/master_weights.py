"""Float32 master weights, sharded over dp_shard, and rounded in place into the compute copy that an engine shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlloop.errors import ModelError
from rlloop.models import Model, read_state
from rlloop.models.parameters import ParameterStore
from rlloop.models.safetensors_io import StoredWeights
from rlloop.numerics.kernels import kernels_for
from rlloop.numerics.tree import tree_sum
from rlloop.parallel.cut import shares
from rlloop.trainer.gradients import GradientSum, Rows

VECTOR = 16  # numbers: AdamW's kernels take another path for what is left over by their vectors, with other bits


@dataclass(frozen=True, eq=False)
class Shard(Rows):
    """One rank's rows of a parameter, and their masters: flat, and padded with zeros to whole vectors."""

    begin: int
    end: int
    flat: nn.Parameter
    shares_memory: bool  # with the live parameter
    scale: float = 1.0  # the live value is the master's times this, rounded

    @property
    def rows(self) -> Tensor:
        """This rank's rows of the compute copy."""
        return self.live.detach()[self.begin : self.end]

    @property
    def master(self) -> Tensor:
        return self.of(self.flat.detach())

    def of(self, flat: Tensor) -> Tensor:
        """A tensor as long as `flat`, such as a moment or a gradient, in the shape of the rows; a view."""
        return flat[: self.rows.numel()].view(self.rows.shape)


class MasterWeights:
    """The weights that train, by Hugging Face name; a tied weight once, frozen ones left out.

    A rank owns `shares` of each parameter's rows (of dimension 0), along the layout's dp_shard. The compute copy is
    whole on each rank.

    Where the model computes in float32 or float64, masters lie in its own parameters (if they make whole vectors).
    Where it computes in bfloat16 or float16, a master is a separate float32 tensor, and `publish` rounds it to nearest
    into the live parameter, in place: an engine that reads the same parameter has the new weights, and there is no
    second rounding that could differ. Such masters start from the stored weights of the model's folder, which may be
    more exact, if these round to the live ones; otherwise (new or changed weights) from the live ones.
    """

    def __init__(self, model: Model) -> None:
        self.parameters = ParameterStore(model)
        self._context, self._ranks = model.context, model.context.ranks("dp_shard")
        self.shards = {
            name: _shard(entry.live, self._ranks.size, self._ranks.rank, entry.scale)
            for name, entry in self.parameters.entries.items()
            if entry.trains
        }
        self.gradients = GradientSum(model, self.shards)
        self._read_exact(model)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """This rank's rows of the masters."""
        return {name: shard.master for name, shard in self.shards.items()}

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """All weights whole, one at a time: masters, and the live values of frozen parameters. Collective."""
        for name, entry in self.parameters.entries.items():
            yield name, entry.live.detach() if name not in self.shards else self.gather(name, self.shards[name].master)

    def gather(self, name: str, rows: Tensor) -> Tensor:
        """The whole of a parameter, or of another tensor of its shape, from each rank's rows. Collective."""
        return self._ranks.gather(rows, 0, self.shards[name].sizes)

    def zero_grad(self) -> None:
        self.gradients.clear()
        for shard in self.shards.values():
            shard.flat.grad = shard.live.grad = None

    def sum_gradients(self) -> None:
        """Set the masters' gradients to the sums of what was collected. Collective."""
        for name, total in self.gradients.totals().items():
            if total is not None:
                shard = self.shards[name]
                shard.flat.grad = _padded(total.view(-1) if shard.scale == 1.0 else total.view(-1) * shard.scale)

    def gradient_norm(self) -> float:
        """L2 norm of the gradient of all masters: squares summed in float64 within each row, then in one tree over all
        rows, neither of which knows the shards. Collective."""
        squares, counts = [], []  # of each parameter; on each rank, of each parameter
        for shard in self.shards.values():
            width = shard.live.shape[-1] if shard.live.ndim > 1 else 1
            counts.append([size * (shard.live[0].numel() // width) for size in shard.sizes])
            rows = counts[-1][self._ranks.rank]
            if shard.flat.grad is None:
                squares.append(torch.zeros(rows, dtype=torch.float64, device=shard.flat.device))
            else:
                gradient = shard.of(shard.flat.grad).reshape(rows, width)
                squares.append(kernels_for(gradient.device).squares_of_rows(gradient))
        by_rank = list(zip(*counts, strict=True))
        found = self._ranks.gather(torch.cat(squares), 0, [sum(each) for each in by_rank])
        pieces = found.split([count for each in by_rank for count in each])
        ordered = [piece for at in range(len(counts)) for piece in pieces[at :: len(counts)]]
        return float(tree_sum(torch.cat(ordered)).sqrt())

    def clip_gradient(self, limit: float, norm: float) -> None:
        """Scale a gradient of norm `norm` down to `limit`."""
        if (scale := limit / (norm + 1e-6)) < 1:
            for shard in self.shards.values():
                if shard.flat.grad is not None:
                    shard.flat.grad.mul_(scale)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the live parameters: each rank its own rows, which are then copied. Collective."""
        for shard in self.shards.values():
            if not shard.shares_memory:
                shard.rows.copy_(shard.master if shard.scale == 1.0 else shard.master * shard.scale)
            self._ranks.share_rows(shard.live.detach(), shard.sizes)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the values of `state`, whole weights. Raises `ModelError` unless names and shapes are exactly the
        model's. Collective."""
        shapes = self.parameters.shapes()
        missing, unknown = shapes.keys() - state.keys(), state.keys() - shapes.keys()
        if missing or unknown:
            raise ModelError(
                f"these weights are of another model: missing {sorted(missing)}, unknown {sorted(unknown)}"
            )
        for name, shape in shapes.items():
            if state[name].shape != shape:
                raise ModelError(f"{name} has shape {list(state[name].shape)}; the model's is {list(shape)}")
        for name, entry in self.parameters.entries.items():
            if (shard := self.shards.get(name)) is None:
                entry.live.copy_(state[name])
            else:
                shard.master.copy_(state[name][shard.begin : shard.end])
        self.publish()

    def _read_exact(self, model: Model) -> None:
        """Start from the stored weights if they are wider than the live ones, and round to them; from the values that
        an adapter was made of."""
        if model.adapter is not None:
            self.load(model.adapter.exact_state())
            return
        if model.source_path is None:
            return
        kinds = {tensor.dtype for tensor in StoredWeights.open(model.source_path).tensors.values()}
        if kinds == {model.dtype} or all(shard.live.dtype == shard.flat.dtype for shard in self.shards.values()):
            return
        stored, live = read_state(model.source_path), self.parameters.tensors()
        if all(torch.equal(stored[name].to(device=x.device, dtype=x.dtype), x) for name, x in live.items()):
            self.load(stored)


def _shard(live: nn.Parameter, ranks: int, rank: int, scale: float) -> Shard:
    sizes = tuple(shares(len(live), ranks))
    begin, end = sum(sizes[:rank]), sum(sizes[: rank + 1])
    rows = live.detach()[begin:end].reshape(-1)
    narrow = live.dtype in (torch.bfloat16, torch.float16)
    in_place = (
        not narrow
        and scale == 1.0
        and rows.numel() % VECTOR == 0
        and rows.data_ptr() % VECTOR == 0
        and live.is_contiguous()
    )
    if not in_place:
        rows = _padded(rows.float() if narrow else rows.clone())
    return Shard(live, sizes, begin, end, nn.Parameter(rows), in_place, scale)


def _padded(flat: Tensor) -> Tensor:
    """With zeros up to whole vectors; itself where it has them."""
    rest = -flat.numel() % VECTOR
    return nn.functional.pad(flat, (0, rest)) if rest else flat
