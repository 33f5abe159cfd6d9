"""The trainer: `forward_backward(batch, loss)`, `optim_step()`, `save(folder)`, `restore(folder)`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlloop.algorithms import Loss, LossOutput
from rlloop.algorithms.kl import sequence_kl
from rlloop.config.trainer import KEEPS_OWN, MASTERS_STAY, TrainerConfig
from rlloop.errors import ConfigError, RunError
from rlloop.metrics import Reduction, Sum, merge, settled
from rlloop.models import Model, ScoreRow, read_state, save_model, score
from rlloop.models.adapter_files import read_adapter, save_adapter
from rlloop.models.prompt_scores import score_prompt
from rlloop.models.shared_prompts import why_not_shared
from rlloop.trainer.batching import MicroBatch, StepBatch, TrainSequence, make_step_batch
from rlloop.trainer.leaves import Leaf, all_leaves, forward, forwards, joined, recomputed, rounds, short
from rlloop.trainer.master_weights import MasterWeights, Rounding
from rlloop.trainer.moe import MoeTraining
from rlloop.trainer.neighbours import BesideEngines
from rlloop.trainer.optimizer import WEIGHTS_ALONE, ShardedAdamW
from rlloop.trainer.pipeline import one_forward_one_backward
from rlloop.trainer.schedule import learning_rate
from rlloop.trainer.settings import apply_settings
from rlloop.trainer.shard import NARROW
from rlloop.trainer.update_result import UpdateResult
from rlloop.types import ModelInput, Recomputed, Sample

Batch = Sequence[Sample | TrainSequence]
STATE, FORMAT = "trainer.json", 1


class Trainer(BesideEngines):
    """Trains `model`: owns its masters; an engine may share its parameters (the compute copy).

    A gradient is a function of the batch alone: denominators are those of the whole `forward_backward`, so
    `max_batch_tokens` changes memory and speed, and in the gradient only the order of float32 sums, as
    `share_prompts` does. Gradients of several `forward_backward` calls add up until `optim_step`, each under its own
    denominators.
    """

    def __init__(
        self,
        model: Model,
        config: TrainerConfig,
        *,
        reference: Model | None = None,
        redraws: bool = True,
        apart: bool = False,
    ) -> None:
        """`reference`: a model with weights of its own that is only scored, for KL terms. One that was loaded on
        another device, such as the host's, is moved to the trainer's for each use and back.

        `redraws`: draw an engine's tokens again, to compare them. `apart`: no master is a live parameter, even of a
        model that computes in float32, so that `round_weights` may round those.

        Which layers of `model` are recomputed, and whether its vision tower is frozen, is set as the configuration says
        (`apply_settings`). Raises `ConfigError` for settings that the model does not support.
        """
        self.model = model
        self.config = config
        self.reference = reference
        apply_settings(model, config)
        self.updates = 0  # optimizer steps taken or refused
        self._ranks = model.context.ranks("dp")
        sharded = config.shard == "parameters" and model.context.ranks("dp_shard").size > 1
        in_layers = sharded and model.adapter is None  # what an adapter leaves frozen stays whole
        if config.offload == "masters" and model.dtype not in NARROW:
            raise ConfigError(MASTERS_STAY.format(str(model.dtype).removeprefix("torch.")))
        if config.share_prompts and (reason := why_not_shared(model, trains=True)) is not None:
            raise ConfigError(f"trainer.share_prompts: {reason}; set it to false")
        if config.checkpoint_keep_attention and model.profile.attention != "rlloop":
            raise ConfigError(KEEPS_OWN.format(model.profile.attention))
        self._masters = MasterWeights(model, shard_layers=in_layers, hosted=config.offload == "masters", apart=apart)
        self._optimizer = ShardedAdamW(self._masters, config)
        self._has_gradient = False
        self.moe = MoeTraining(model, config)
        self.redraws = redraws

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """The weights that train, float32, by Hugging Face name: the rows that this rank owns."""
        return self._masters.tensors

    @property
    def sharded(self) -> MasterWeights | None:
        """The masters, where the layers' compute copy has memory only while they compute (`shard="parameters"`)."""
        return None if self._masters.layers is None else self._masters

    def round_weights(self, rounding: Rounding) -> None:
        """Compute with `rounding(name, weight)` in each weight's place from now on. Gradients by the rounded weights go
        straight through to the masters, which stay as exact as they are."""
        assert not any(shard.shares_memory for shard in self._masters.shards.values())
        assert self._masters.layers is None
        self._masters.rounding = rounding
        self._masters.publish()

    def recompute(self, batch: Batch) -> Recomputed:
        """[P] a sequence, without training: the bits that `forward_backward` would report now."""
        step = self._flatten(batch, share=why_not_shared(self.model, trains=False) is None)
        self.moe.begin()
        leaves = self._score(step)
        self.moe.gather(self._ranks)
        return recomputed(step, leaves)

    def logprobs(self, batch: Batch) -> Sequence[np.ndarray]:
        """[P] float32 a sequence, those of `recompute`."""
        return self.recompute(batch).logprobs

    def prompt_logprobs(self, prompt: ModelInput) -> np.ndarray:
        """[P - 1] float32: of a prompt's tokens but the first, at temperature 1."""
        return score_prompt(self.model, prompt).logprobs

    def replay_experts(self, on: bool) -> None:
        """Make the policy's forwards use the experts that the engine recorded, or their own (`on=False`)."""
        self.moe.replay = on

    def routing(self) -> dict[str, float]:
        """`parity/router_different` and `parity/indexer_different` of the batch scored last; empty where the model has
        no such choices or the samples record none."""
        return self.moe.counts.metrics()

    def reference_kl(self, batch: Sequence[Sample], kind: str) -> list[float]:
        """KL(policy ‖ reference) of each completion in nats, summed over its tokens, from its rollout logprobs."""
        step = self._flatten(batch)
        leaves = all_leaves(self._reference_leaves(step), self.model)
        scored = step.split(joined(leaves, "logprobs"))
        return [sequence_kl(each.completion.logprobs, ref, kind) for each, ref in zip(batch, scored, strict=True)]

    def forward_backward(
        self, batch: Batch, loss: Loss, *, old_logprobs: Sequence[np.ndarray] | None = None
    ) -> UpdateResult:
        """One forward and one backward for each micro-batch; the loss uses the logprobs of that same forward.

        A loss with the attribute `whole_step` compares sequences with each other: `forward_backward_custom`.

        `old_logprobs`, [P] a sequence, anchor the policy ratio; None: this forward's, so that the ratio is 1.
        """
        if getattr(loss, "whole_step", False):
            return self.forward_backward_custom(batch, loss, old_logprobs=old_logprobs)
        began = time.perf_counter()
        step = self._flatten(batch, old_logprobs)
        self._begin()
        self.moe.begin()
        scored: list[Leaf] = []
        references = iter(self._reference_leaves(step))
        of_entropy = getattr(loss, "entropy_term", False)

        def work(micro: MicroBatch) -> Callable[[], None]:
            anchor = None if self.reference is None else next(references).logprobs
            leaf = forward(self.model, step, micro, self.moe, redraws=self.redraws, of_entropy=of_entropy)
            penalty = self.moe.penalty(len(step.rows))
            if not self.model.stage.last:  # what it differentiates comes from the next stage
                return (leaf.logprobs.sum() + penalty).backward
            out = loss(step.loss_batch(micro, leaf.logprobs, leaf.entropy, anchor))
            scored.append(replace(leaf.to(self.model.context.device), metrics=_metrics(out)))
            return (out.loss + penalty).backward

        self._collect(step, work)
        scored = [replace(leaf, metrics=settled(leaf.metrics)) for leaf in scored]
        leaves = all_leaves(scored, self.model)
        metrics = merge(leaf.metrics for leaf in leaves)
        return UpdateResult.of(self.model, step, leaves, metrics, began)

    def forward_backward_custom(
        self, batch: Batch, fn: Loss, *, old_logprobs: Sequence[np.ndarray] | None = None
    ) -> UpdateResult:
        """`forward_backward` for any function of the whole step's logprobs, at the cost of a second forward.

        `fn` gets one `LossBatch` with every token of the step, over all micro-batches, so it can do what a
        micro-batch's loss cannot, such as rank all sequences. A pass without a graph scores the tokens; the gradients
        of `fn` by logprob and entropy then weight a second, differentiable pass:
        d loss / d theta = sum over tokens of (d loss / d logprob) (d logprob / d theta).
        """
        began = time.perf_counter()
        step = self._flatten(batch, old_logprobs)
        self._begin()
        self.moe.begin()
        leaves = self._score(step)
        reference = all_leaves(self._reference_leaves(step), self.model)
        outputs = logprobs, entropy = [joined(leaves, name).requires_grad_() for name in ("logprobs", "entropy")]
        anchors = joined(reference, "logprobs") if reference else None
        out = fn(step.loss_batch(step.whole, logprobs, entropy, anchors))
        out.loss.backward()

        def work(micro: MicroBatch) -> Callable[[], None]:
            leaf = forward(self.model, step, micro, self.moe, redraws=None, of_entropy=entropy.grad is not None)
            again = zip((leaf.logprobs, leaf.entropy), outputs, strict=True)
            used = [(output, whole.grad[micro.tokens]) for output, whole in again if whole.grad is not None]
            if isinstance(penalty := self.moe.penalty(len(step.rows)), Tensor):
                used.append((penalty, torch.ones_like(penalty)))
            return partial(torch.autograd.backward, *map(list, zip(*used, strict=True)))

        self._collect(step, work)
        return UpdateResult.of(self.model, step, leaves, settled(_metrics(out)), began)

    def score(self, rows: Sequence[ScoreRow]) -> Tensor:
        """[N] float32: logprobs of the rows' predicted tokens, to be differentiated in `accumulate`. For one rank."""
        with self._masters.gradients.apart():
            return score(self.model, rows)[0]

    def accumulate(self, work: Callable[[], None]) -> None:
        """Add the gradient of one micro-batch that the caller made: `work` differentiates what `score` returned.

        Micro-batches add up in a tree over their index, until `optim_step`. For one rank.
        """
        assert self._ranks.size == 1
        assert self.model.stage.whole
        self._begin()
        self._masters.gradients.collect(1, work)
        self._has_gradient = True

    def drop_gradient(self) -> None:
        """Drop the gradient accumulated since the last step, and the loads of its experts."""
        self._masters.zero_grad()
        self.moe.forget()
        self._has_gradient = False

    def optim_step(self) -> dict[str, float]:
        """Clip, update the masters, and round them into the live parameters.

        Returns `loss/grad_norm` (before clipping), `trainer/lr`, `trainer/refused` (1 where the norm was not finite)
        and metrics of the experts' loads. A refused step leaves weights and optimizer unchanged, drops the gradient
        and counts in the schedule. Raises `ConfigError` without a gradient.
        """
        if not self._has_gradient:
            raise ConfigError("optim_step has no gradient to apply; call forward_backward first")
        self._masters.sum_gradients()
        norm = self._masters.gradient_norm()
        finite = math.isfinite(norm)
        lr = learning_rate(self.updates, self.config)
        if finite:
            if self.config.grad_clip > 0:
                self._masters.clip_gradient(self.config.grad_clip, norm)
            self._optimizer.step(lr, self.config)
            self._masters.publish()
        self._masters.zero_grad()
        self._has_gradient = False
        self.updates += 1
        return {
            "loss/grad_norm": norm,
            "trainer/lr": lr,
            "trainer/refused": float(not finite),
            **self.moe.update(self._ranks, refused=not finite),
            **(self._optimizer.measured() if finite else {}),
            **_peak(self.model.context.device),
        }

    def save(self, folder: Path) -> None:
        """Write masters and frozen weights as a Hugging Face folder, or an adapter as a PEFT folder; beside them the
        optimizer's state.

        Collective; the first rank writes, and the files do not know the layout.
        """
        self.save_weights(folder)
        writes = self.model.context.rank == 0
        if writes:
            (folder / STATE).write_text(json.dumps({"format": FORMAT, "updates": self.updates}, indent=1) + "\n")
        self._optimizer.save(folder, writes=writes)

    def save_weights(self, folder: Path) -> None:
        """`save` without the optimizer's state. Collective."""
        writes = self.model.context.rank == 0
        state = {name: tensor.cpu() for name, tensor in self._masters.gathered() if writes}
        if self.model.adapter is not None:
            weights = self.model.adapter.weights_of(state) if writes else self.model.adapter.exact
            save_adapter(self.model, weights, folder)
        elif writes:
            save_model(state, folder, self.model.source_path, config=self.model.config)

    def restore(self, folder: Path, *, optimizer: bool = True) -> None:
        """Restore what `save` wrote under any layout, bit for bit; an engine that shares the parameters has the weights
        at once. Without `optimizer`, weights alone; the optimizer begins anew. Collective.

        Raises `RunError` for another format or a damaged file, `ModelError` for another model's weights; nothing is
        restored then.
        """
        updates = _updates(folder / STATE) if optimizer else 0
        adapter = self.model.adapter
        stored = read_state(folder) if adapter is None else adapter.state_of(read_adapter(self.model, folder))
        self._masters.check(stored)
        if optimizer:
            self._optimizer.check(folder)
        self._masters.load(stored)
        if optimizer:
            self._optimizer.restore(folder)
        else:
            self._optimizer.reset()
        self.drop_gradient()
        self.updates = updates

    def fingerprint(self) -> dict[str, Any]:
        """Everything besides the weights that decides the bits of logprobs; equal to the engine's where they agree."""
        return self.model.fingerprint()

    def _flatten(
        self, batch: Batch, old_logprobs: Sequence[np.ndarray] | None = None, *, share: bool | None = None
    ) -> StepBatch:
        """Pack a batch into micro-batches, before which engines beside the trainer give their caches back. `share`:
        prompts of a group; None: as the configuration says."""
        self.put_neighbours_to_sleep()
        share = (self.config.share_prompts if share is None else share) and not self.moe.replay
        budget, device = self.config.max_batch_tokens, self.model.context.device
        return make_step_batch(
            batch, max_batch_tokens=budget, multiple=self.config.micro_batch_multiple, old_logprobs=old_logprobs,
            device=device, share=share,
        )  # fmt: skip

    def _begin(self) -> None:
        if not self._has_gradient:
            self.drop_gradient()  # others may have differentiated through the shared model
        self._has_gradient = False  # until the whole gradient is summed; an exception before leaves none

    def _collect(self, step: StepBatch, work: Callable[[MicroBatch], Callable[[], None]]) -> None:
        """Differentiate this rank's micro-batches, and sum all ranks' gradients. `work` does the forward of one and
        returns its backward."""
        gradients, stage = self._masters.gradients, self.model.stage
        for count, micro in rounds(step.micro_batches, self._ranks) if stage.whole else ():
            if micro is None and self._masters.layers is not None:
                gradients.collect(count, lambda: short(self.model, step).sum().backward(), idle=True)
            else:
                gradients.collect(count, None if micro is None else partial(_both, work, micro))

        def begin(count: int, micro: MicroBatch | None) -> tuple[int, Callable[[], None] | None, bool]:
            if micro is not None:
                return count, work(micro), False
            zero = self.model.without_tokens()
            return count, zero.backward if zero.requires_grad else None, True

        begun = (partial(begin, *each) for each in rounds(step.micro_batches, self._ranks) if not stage.whole)
        with gradients.apart():
            for count, backward, idle in one_forward_one_backward(begun, stage.ahead):
                gradients.collect(count, backward, idle=idle)
        self.moe.gather(self._ranks)
        self._has_gradient = True

    def compute_copy(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights whole, one at a time, in the compute type, for engines that hold other parts of them.
        Collective."""
        return self._masters.compute_copy()

    @torch.no_grad()
    def _score(self, step: StepBatch) -> list[Leaf]:
        """The policy's forwards over all micro-batches, without a graph. Collective."""
        work = partial(forward, self.model, step, moe=self.moe, redraws=self.redraws)
        idle = self.model.without_tokens if self._masters.layers is None else partial(short, self.model, step)
        leaves = forwards(step.micro_batches, self._ranks, work, idle)
        return all_leaves(leaves, self.model)

    @torch.no_grad()
    def _reference_leaves(self, step: StepBatch) -> list[Leaf]:
        """The reference's forwards over this rank's micro-batches; empty without a reference."""
        if self.reference is None:
            return []
        home = self.reference.context.device
        self.reference.to(self.model.context.device)
        reference = self.reference

        def work(micro: MicroBatch) -> Leaf:
            return Leaf(*score(reference, step.rows[micro.sequences]))

        leaves = forwards(step.micro_batches, self._ranks, work, reference.without_tokens)
        self.reference.to(home)
        return leaves


def _updates(path: Path) -> int:
    """The number of updates in a checkpoint's state."""
    try:
        state = json.loads(path.read_text())
        version, updates = state["format"], state["updates"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"{path} is no trainer's state: {error!r}; {WEIGHTS_ALONE}") from error
    if version != FORMAT:
        raise RunError(f"{path} has format {version}; this version reads {FORMAT}")
    return updates


def _peak(device: torch.device) -> dict[str, float]:
    """Peak memory of tensors on a GPU since the last call."""
    if device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"memory/device_peak_bytes": float(peak)}


def _both(work: Callable[[MicroBatch], Callable[[], None]], micro: MicroBatch) -> None:
    work(micro)()


def _metrics(out: LossOutput) -> dict[str, Reduction]:
    return {**out.metrics, "loss/total": Sum(out.loss.detach())}
