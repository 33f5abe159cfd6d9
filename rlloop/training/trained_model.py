"""One model that trains: its open micro-batch, its trainer, and its comparisons with sampled sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError, RlloopError
from rlloop.models import Model, score
from rlloop.models.adapter_weights import HEAD, Target
from rlloop.models.parameters import ParameterStore
from rlloop.trainer import Trainer
from rlloop.training.calls import Item, LossCall
from rlloop.training.provenance import Comparison, FrozenWeights, SampledSequences, compare
from rlloop.training.types import AdamParams, GetInfoResponse, LoraConfig, OptimStepResponse

ATTENTION = ("self_attn.", "linear_attn.", "mixer.q_proj", "mixer.k_proj", "mixer.v_proj", "mixer.o_proj")
RECURRENT = ("mixer.in_proj", "mixer.out_proj")


@dataclass
class Counts:
    """Of one model since it was created, for dashboards."""

    updates: int = 0
    datums: int = 0
    tokens: int = 0
    leaves: int = 0
    tokens_checked: int = 0
    tokens_different: int = 0


class TrainedModel:
    """A model, its trainer and its open micro-batch. For one thread."""

    def __init__(
        self,
        info: GetInfoResponse,
        model: Model,
        *,
        leaf_tokens: int,
        sequences: SampledSequences,
        view: Callable[[FrozenWeights], Model],
        checkpoint_layers: int = 0,
    ) -> None:
        self.info, self.model, self._budget = info, model, leaf_tokens
        self.trainer = Trainer(model, TrainerConfig(checkpoint_layers=str(checkpoint_layers or "none")))
        self.frozen: FrozenWeights | None = None  # the current weights, if frozen
        self.counts = Counts()
        self.loads = 0  # of weights; with the updates it numbers versions
        self._sequences, self._view = sequences, view
        self._leaf: list[Item] = []
        self._graph: Tensor | None = None  # logprobs of the whole leaf, to be differentiated
        self._lost: str | None = None  # reason why the gradient since the last step was dropped

    # ------------------------------------------------------------------------------------------------ leaves

    @property
    def open(self) -> bool:
        return bool(self._leaf)

    @property
    def unanswered(self) -> bool:
        return any(item.gradient is None and not item.call.over for item in self._leaf)

    @property
    def held(self) -> int:
        """Tokens of the leaf whose graph is kept."""
        return 0 if self._graph is None else sum(item.tokens for item in self._leaf)

    def take(self, call: LossCall) -> bool:
        """Move data of a call into the open leaf. False: the next one does not fit, so the leaf must be done first."""
        filled = sum(item.tokens for item in self._leaf)
        while call.waiting:
            if self._leaf and filled + call.waiting[0].tokens > self._budget:
                return False
            item = call.waiting.popleft()
            self._leaf.append(item)
            filled += item.tokens
        return True

    def answer(self) -> None:
        """Forward of data in the open leaf whose calls wait for it. If that is the whole leaf, its graph is
        kept: if no data are added, its backward needs no second forward."""
        items = [item for item in self._leaf if item.gradient is None and not item.call.over]
        if len(items) < len(self._leaf) or self._lost is not None:
            with torch.no_grad():
                self._judge(items, score(self.model, [item.row for item in items])[0])
            return
        graph = self.trainer.score([item.row for item in items])
        self._judge(items, graph)
        self._graph = graph

    def drop_graph(self) -> None:
        self._graph = None

    def finish_leaf(self) -> None:
        """Forward and backward of the open leaf, as one pack."""
        items, self._leaf, graph, self._graph = self._leaf, [], self._graph, None
        whole = graph is not None and len(graph) == sum(item.targets.size for item in items)
        if self._lost is not None:
            if waiting := [item for item in items if item.gradient is None and not item.call.over]:
                with torch.no_grad():
                    self._judge(waiting, score(self.model, [item.row for item in waiting])[0])
            return

        def work() -> None:
            logprobs = graph if whole and graph is not None else self.trainer.score([item.row for item in items])
            self._judge([item for item in items if item.gradient is None], logprobs, items)
            if self._lost is not None:
                raise _Lost
            gradients = [item.gradient for item in items if item.gradient is not None]
            torch.autograd.backward([logprobs], [torch.cat(gradients).to(logprobs.device)])

        try:
            self.trainer.accumulate(work)
        except _Lost:
            self.trainer.drop_gradient()
        except BaseException:
            self._leaf = items
            raise
        self.counts.leaves += 1

    def forward(self, call: LossCall) -> None:
        """The forward of the next data of a call without a gradient, as many as fit a leaf."""
        items, filled = [], 0
        while call.waiting and (not items or filled + call.waiting[0].tokens <= self._budget):
            items.append(call.waiting.popleft())
            filled += items[-1].tokens
        with torch.no_grad():
            self._judge(items, score(self.model, [item.row for item in items])[0])

    def _judge(self, items: Sequence[Item], logprobs: Tensor, scored: Sequence[Item] | None = None) -> None:
        """Answer data by the logprobs of `scored` (None: of these), after comparison with the sampled sequences. A
        datum that fails makes its call fail; if it trains, the gradient is dropped."""
        scored = items if scored is None else scored
        per_item = logprobs.detach().cpu().split([item.targets.size for item in scored])
        by_item = {id(item): values for item, values in zip(scored, per_item, strict=True)}
        flat = [by_item[id(item)] for item in items]
        comparisons = compare(items, [each.numpy() for each in flat], self.frozen, self._sequences, self._view)
        for item, values, comparison in zip(items, flat, comparisons, strict=True):
            try:
                if isinstance(comparison, ConfigError):
                    raise comparison
                if self.info.parity == "require":
                    comparison.require()
                item.call.answer(item, values.view(item.targets.shape), comparison.checked, comparison.different)
                self._count(item, comparison)
            except RlloopError as error:
                item.call.fail(error)
                if item.call.trains:
                    self._lose(f"forward_backward failed: {error}")

    def _count(self, item: Item, comparison: Comparison) -> None:
        counts = self.counts
        counts.datums, counts.tokens = counts.datums + 1, counts.tokens + item.tokens
        counts.tokens_checked += comparison.checked
        counts.tokens_different += comparison.different

    def lose(self, error: BaseException) -> set[LossCall]:
        """Drop the gradient and the open leaf after an error; returns the calls of that leaf."""
        calls = {item.call for item in self._leaf}
        self._leaf, self._graph = [], None
        self._lose(f"a micro-batch failed: {error}")
        return calls

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        self.trainer.drop_gradient()

    # ------------------------------------------------------------------------------------------------ steps

    def optim_step(self, params: AdamParams) -> OptimStepResponse:
        """Raises `ConfigError` without a gradient, for one that was lost, and for one that is not finite."""
        lost, self._lost = self._lost, None
        if lost is not None:
            raise ConfigError(f"optim_step has no gradient: it was dropped, and weights did not change. {lost}")
        trainer = self.trainer
        trainer.config = replace(
            trainer.config, lr=params.learning_rate, betas=(params.beta1, params.beta2), eps=params.eps,
            weight_decay=params.weight_decay, grad_clip=params.grad_clip_norm,
        )  # fmt: skip
        metrics = trainer.optim_step()
        if metrics.pop("trainer/refused"):
            raise ConfigError(
                f"optim_step refused a gradient of norm {metrics['loss/grad_norm']}: it was dropped, and weights "
                "did not change; look for advantages and weights that are too large"
            )
        self.changed()
        self.counts.updates += 1
        self.info = replace(self.info, updates=self.info.updates + 1)
        renamed = {"loss/grad_norm": "optim/grad_norm", "trainer/lr": "optim/lr"}
        return OptimStepResponse({renamed.get(key, key): value for key, value in metrics.items()})

    def changed(self) -> None:
        """Mark the weights as changed, and the gradient as used."""
        self.frozen, self._graph, self._lost = None, None, None

    def forget(self) -> None:
        """Drop the gradient and the open leaf, after its calls have been answered."""
        if self.unanswered:
            self.answer()
        self._leaf, self._graph, self._lost = [], None, None
        self.trainer.drop_gradient()

    def freeze(self) -> FrozenWeights:
        """The current weights, frozen; the same object until they change."""
        if self.frozen is None:
            adapter = self.model.adapter
            if adapter is None:
                self.frozen = FrozenWeights(state=ParameterStore(self.model).snapshot())
            else:
                masters = {name: tensor.detach().cpu().clone() for name, tensor in self.trainer.masters.items()}
                self.frozen = FrozenWeights(adapter=adapter.weights_of(masters))
        return self.frozen


class _Lost(Exception):
    """A datum of the micro-batch failed; its call has the error."""


def adam_checked(params: AdamParams) -> AdamParams:
    """Raises `ConfigError` for settings out of range."""
    allowed: dict[str, tuple[Callable[[float], bool], str]] = {
        "learning_rate": (lambda x: x >= 0, "0 or more"),
        "beta1": (lambda x: 0 <= x < 1, "from 0 to below 1"),
        "beta2": (lambda x: 0 <= x < 1, "from 0 to below 1"),
        "eps": (lambda x: x > 0, "above 0"),
        "weight_decay": (lambda x: x >= 0, "0 or more"),
        "grad_clip_norm": (lambda x: x >= 0, "0 (not clipped) or more"),
    }
    for name, (good, words) in allowed.items():
        value = getattr(params, name)
        if isinstance(value, (bool, str)) or not np.isreal(value) or not math.isfinite(value) or not good(value):
            raise ConfigError(f"AdamParams.{name} is {value!r}; it must be {words}")
    return params


def check_lora(lora: LoraConfig, most: int) -> None:
    """Raises `ConfigError` for a rank, alpha or seed out of range."""
    if isinstance(lora.rank, bool) or not isinstance(lora.rank, int) or not 0 < lora.rank <= most:
        raise ConfigError(
            f"LoraConfig.rank is {lora.rank!r}; it must be 1 to {most} here (max_lora_rank of the service), or 0 for "
            "full training"
        )
    if not lora.alpha > 0:
        raise ConfigError(f"LoraConfig.alpha is {lora.alpha!r}; it must be above 0")
    if lora.seed is not None and not 0 <= lora.seed < 2**63:
        raise ConfigError(f"LoraConfig.seed is {lora.seed!r}; it must be 0 to 2**63 - 1, or None")


def lora_targets(targets: dict[str, Target], lora: LoraConfig) -> dict[str, Target]:
    """The weights that a configuration's `train_*` name. Raises `ConfigError` where it names none."""

    def trains(name: str) -> bool:
        if name == HEAD:
            return lora.train_unembed
        attention = any(module in f"{name}." for module in ATTENTION + RECURRENT)
        return lora.train_attn if attention else lora.train_mlp

    chosen = {name: target for name, target in targets.items() if trains(name)}
    if not chosen:
        raise ConfigError("LoraConfig trains nothing of this model; set train_attn, train_mlp or train_unembed to true")
    return chosen
