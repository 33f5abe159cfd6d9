"""Float32 master weights, sharded over dp_shard, and rounded in place into the compute copy that an engine shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from rlloop.errors import ConfigError, ModelError
from rlloop.models import Model, read_state
from rlloop.models.checkpoint_names import EMBEDDING, TOWER
from rlloop.models.experts import Experts
from rlloop.models.fp8 import is_quantised
from rlloop.models.parameters import ParameterStore
from rlloop.models.safetensors_io import StoredWeights
from rlloop.numerics.fp8 import Fp8Weight
from rlloop.numerics.kernels import kernels_for
from rlloop.numerics.tree import tree_sum
from rlloop.parallel.collectives import Ranks
from rlloop.trainer.gradients import GradientSum
from rlloop.trainer.offload import HostMemory
from rlloop.trainer.shard import Shard, hosted_bytes, make_shard, padded, share_rows
from rlloop.trainer.sharded_layers import ShardedLayers

Rounding = Callable[[str, Tensor], Tensor]  # name and weight -> what is computed with


class MasterWeights:
    """The weights that train, by Hugging Face name; a tied weight once, frozen ones left out.

    A rank owns `shares` of each parameter's rows (of dimension 0), along the layout's dp_shard. The compute copy is
    whole on each rank, or (`layers`) sharded as well.

    For models that compute in float32 or float64, masters are the model's parameters (if they fill whole vectors). For
    bfloat16 or float16, a master is a separate float32 tensor (`hosted`: in host memory), and `publish` rounds it to
    nearest into the live parameter, in place: an engine that reads the same parameter has the new weights, and there is
    no second rounding that could differ. Such masters start from the stored weights of the model's folder, which may be
    more exact, if these round to the live ones; otherwise (new or changed weights) from the live ones.
    """

    def __init__(self, model: Model, *, shard_layers: bool = False, hosted: bool = False, apart: bool = False) -> None:
        """`shard_layers`: the layers' compute copy has memory only while they compute; see `ShardedLayers`. `hosted`:
        masters of another type than the compute copy's lie in host memory. `apart`: no master is a live parameter."""
        if shard_layers and is_quantised(model):
            raise ConfigError("trainer.shard=parameters is not for quantize=fp8, whose blocks are whole; use optimizer")
        self.parameters = ParameterStore(model)
        self.stage, self.device, self._sees = model.stage, model.context.device, model.config.vision is not None
        self._context, self._ranks = model.context, model.context.ranks("dp_shard")
        trained = {name: entry for name, entry in self.parameters.entries.items() if entry.trains}
        owners = {name: self._owners(model, name) for name in trained}
        self.home: HostMemory | None = None
        if hosted:
            size = sum(hosted_bytes(entry.live, owners[name][0]) for name, entry in trained.items())
            self.home = HostMemory(size, self.device)
        self.shards = {
            name: make_shard(name, entry.live, *owners[name], entry.scale, apart=shard_layers or apart, home=self.home)
            for name, entry in trained.items()
        }
        self.sums: dict[
            str, Tensor
        ] = {}  # gradients of the masters, as `Shard.flat`; absent: no micro-batch reached it
        self.rounding: Rounding | None = None  # of the compute copy, beyond its type; for masters that are apart
        self._rounded: set[str] = set()  # hosted masters whose values `round_piece` has published
        self.gradients = GradientSum(model, self.shards, in_step=shard_layers)
        self.layers: ShardedLayers | None = None
        self._read_exact(model)
        if shard_layers:
            self.layers = ShardedLayers(model, self.shards)

    def _owners(self, model: Model, name: str) -> tuple[Ranks, int]:
        """The ranks that share the rows of a parameter, and the micro-batches that it has gradients of in a round."""
        if model.adapter is not None:  # NAME.lora_A.weight, of a module NAME or a parameter NAME of experts
            name = name.removesuffix(".weight").rpartition(".")[0]
            if name not in model.adapter.targets or model.adapter.targets[name].experts is None:
                return self._ranks, 1
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, Experts) and module.leaves > 1:
            return self._context.ranks("expert_shard"), module.leaves
        return self._ranks, 1

    @property
    def tensors(self) -> dict[str, Tensor]:
        """This rank's rows of the masters, where they lie."""
        return {name: shard.master for name, shard in self.shards.items()}

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """All weights whole, one at a time: masters, and the live values of frozen parameters. Collective."""

        def whole(name: str) -> Tensor:
            entry = self.parameters.entries[name]
            return entry.whole(self.part(name, self.shards[name].master) if name in self.shards else None)

        yield from self.parameters.from_all_stages(whole)

    def compute_copy(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that `publish` wrote, whole, one at a time, in the compute type. Collective."""

        def whole(name: str) -> Tensor:
            kept = None if self.layers is None else self.layers.rows(name)
            return self.parameters.entries[name].whole() if kept is None else self.gather(name, kept)

        yield from self.parameters.from_all_stages(whole)

    def gather(self, name: str, rows: Tensor) -> Tensor:
        """The whole of a parameter, or of another tensor of its shape, from each rank's rows. Collective."""
        return self.parameters.entries[name].whole(self.part(name, rows))

    def part(self, name: str, rows: Tensor) -> Tensor:
        """`gather` of the part that this rank computes with. Collective."""
        shard = self.shards[name]
        return shard.ranks.gather(rows.to(self.device), 0, shard.sizes)

    def zero_grad(self) -> None:
        self.gradients.clear()
        self.sums = {}
        for shard in self.shards.values():
            shard.live.grad = None

    def sum_gradients(self) -> None:
        """Set the masters' gradients to the sums of what was collected. Collective."""
        for name, total in self.gradients.totals().items():
            if total is not None:
                scale = self.shards[name].scale
                self.sums[name] = padded(total.view(-1) if scale == 1.0 else total.view(-1) * scale)

    def gradient_norm(self) -> float:
        """L2 norm of the gradient of all masters: squares summed in float64 within each row, then in one tree over all
        rows, neither of which knows the shards. Collective."""
        squares, by_owner, by_part = {}, {}, {}
        for name, shard in self.shards.items():
            width = shard.live.shape[-1] if shard.live.ndim > 1 else 1
            each = math.prod(shard.live.shape[1:]) // width  # rows of numbers in a row of dimension 0
            rows = shard.sizes[shard.ranks.rank] * each
            if name not in self.sums:
                squares[name] = torch.zeros(rows, dtype=torch.float64, device=self.device)
            else:
                gradient = shard.of(self.sums[name]).reshape(rows, width)
                squares[name] = kernels_for(gradient.device).squares_of_rows(gradient)
            by_owner.setdefault(shard.ranks, {})[name] = [size * each for size in shard.sizes]
            division = self.parameters.entries[name].division
            if division is not None:
                by_part.setdefault(division.ranks, {})[name] = [size * each for size in division.sizes]
        for ranks, counts in (*by_owner.items(), *by_part.items()):
            squares |= _end_to_end(ranks, squares, counts)
        for counts in by_part.values():
            for name in counts:
                division = self.parameters.entries[name].division
                assert division is not None
                rows = squares[name].unflatten(0, (sum(division.sizes), -1))
                squares[name] = division.ordered(rows, 0).flatten()
        if not self.stage.first:
            squares.pop(EMBEDDING, None)  # a tied weight counts on the first stage
        nothing = torch.zeros(0, dtype=torch.float64, device=self.device)
        parts = [list(squares.values())]
        if self._sees:  # the tower is last, also where its stage is the first
            tower = [squares.pop(name) for name in list(squares) if name.startswith(TOWER)]
            parts = [list(squares.values()), tower]
        return float(tree_sum(torch.cat([self.stage.joined(torch.cat([nothing, *each])) for each in parts])).sqrt())

    def clip_gradient(self, limit: float, norm: float) -> None:
        """Scale a gradient of norm `norm` down to `limit`."""
        if (scale := limit / (norm + 1e-6)) < 1:
            for gradient in self.sums.values():
                gradient.mul_(scale)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the live parameters: each rank its own rows, which are then copied. Collective."""
        if self.layers is not None:
            self.layers.free()
        rounded, self._rounded = self._rounded, set()
        for name, shard in self.shards.items():
            if isinstance(shard.live, Fp8Weight):  # blocks may have rows of several ranks, so each quantises all
                shard.live.write(self.part(name, shard.master))
                continue
            if not shard.shares_memory and name not in rounded:
                self._published(shard).copy_(shard.scaled)
        self._share()
        if self.rounding is not None:
            for name, shard in self.shards.items():
                shard.live.copy_(self.rounding(name, shard.live.detach()))

    def _share(self) -> None:
        """Copy each rank's rows of what is whole on all to the others. Collective."""
        whole = (each for each in self.shards.values() if self.layers is None or self.layers.rows(each.name) is None)
        share_rows((shard, shard.live.detach()) for shard in whole)

    def rows(self) -> dict[str, Tensor]:
        """Copies of the compute copy, as much of it as this rank owns, and of frozen parameters, by name."""
        owned = {name: self._published(shard) for name, shard in self.shards.items()}
        entries = self.parameters.entries.items()
        return {name: owned.get(name, entry.live.detach()).clone() for name, entry in entries}

    @torch.no_grad()
    def write_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Compute with what `rows` returned once; masters that share memory with it are written, too. Collective."""
        if self.layers is not None:
            self.layers.free()
        for name, entry in self.parameters.entries.items():
            live = self._published(self.shards[name]) if name in self.shards else entry.live.detach()
            live.copy_(rows[name])
        self._share()

    def _published(self, shard: Shard) -> Tensor:
        """This rank's rows of the compute copy, to write into."""
        kept = None if self.layers is None else self.layers.rows(shard.name)
        return shard.rows if kept is None else kept

    @torch.no_grad()
    def round_piece(self, shard: Shard, begin: int, values: Tensor) -> None:
        """Publish new values of hosted masters, [begin, begin + len(values)) of the shard, from the device's copy of
        them; the last piece of a shard ends it. `publish` then only copies between ranks. Weights in 8 bits wait for
        it: a scale is of a whole block."""
        if isinstance(shard.live, Fp8Weight):
            return
        rows = self._published(shard).view(-1)[begin : begin + len(values)]  # the rest is padding
        values = values[: len(rows)]
        rows.copy_(values if shard.scale == 1.0 else values * shard.scale)
        self._rounded.add(shard.name)

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raises `ModelError` unless names and shapes are exactly the model's."""
        shapes = self.parameters.shapes()
        missing, unknown = shapes.keys() - state.keys(), state.keys() - shapes.keys()
        if missing or (unknown and self.stage.whole):
            raise ModelError(
                f"these weights are of another model: missing {sorted(missing)}, unknown {sorted(unknown)}"
            )
        for name, shape in shapes.items():
            if state[name].shape != shape:
                raise ModelError(f"{name} has shape {list(state[name].shape)}; the model's is {list(shape)}")

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the values of `state`, whole weights, which are checked before. Collective."""
        self.check(state)
        for name, entry in self.parameters.entries.items():
            if (shard := self.shards.get(name)) is None:
                entry.live.copy_(entry.part(state[name]))
            else:
                shard.master.copy_(entry.part(state[name])[shard.begin : shard.end])
        self._rounded = set()
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
        own = all(shard.live.dtype == shard.flat.dtype for shard in self.shards.values())
        if (kinds == {model.dtype} or own) and not is_quantised(model):
            return
        stored, entries = read_state(model.source_path), self.parameters.entries.items()
        pairs = ((entry.part(stored[name]), entry.live.detach()) for name, entry in entries)
        equal = all(_rounds_to(shard, live) for shard, live in pairs)
        if all(self._context.ranks("world").gather_objects(equal)):
            self.load(stored)


def _rounds_to(stored: Tensor, live: Tensor) -> bool:
    if not isinstance(live, Fp8Weight):
        return torch.equal(stored.to(device=live.device, dtype=live.dtype), live)
    return torch.equal(Fp8Weight.of(stored.to(live.device), live.span, live.dtype).dequantised(), live.dequantised())


def _end_to_end(ranks: Ranks, own: Mapping[str, Tensor], counts: Mapping[str, list[int]]) -> dict[str, Tensor]:
    """Each name's tensors of all ranks, concatenated; rank r has `counts[name][r]` numbers. One copy for all names."""
    by_rank = list(zip(*counts.values(), strict=True))
    gathered = ranks.gather(torch.cat([own[name] for name in counts]), 0, [sum(each) for each in by_rank])
    pieces = gathered.split([count for each in by_rank for count in each])
    return {name: torch.cat(pieces[at :: len(counts)]) for at, name in enumerate(counts)}
