"""The update: `forward_backward(batch, loss)`, `optim_step()`, `save(folder)`, `restore(folder)`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlloop.algorithms import Loss, LossOutput
from rlloop.algorithms.kl import sequence_kl
from rlloop.config.run import TrainerConfig
from rlloop.errors import ConfigError, RunError
from rlloop.metrics import Mean, Reduction, Sum, merge
from rlloop.models import Model, RedrawRecord, read_state, save_model, score
from rlloop.trainer.batching import MicroBatch, StepBatch, TrainSequence, make_step_batch
from rlloop.trainer.master_weights import MasterWeights
from rlloop.trainer.mfu import utilisation
from rlloop.trainer.moe import MoeTraining
from rlloop.trainer.schedule import learning_rate
from rlloop.types import Recomputed, Sample

Batch = Sequence[Sample | TrainSequence]

OPTIMIZER, STATE, FORMAT = "optimizer.safetensors", "trainer.json", 1
ADAM = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of one tensor


@dataclass(frozen=True)
class UpdateResult:
    """Results of one `forward_backward`."""

    recomputed: Recomputed  # [P] a sequence, in batch order, before the update
    metrics: dict[str, Reduction]  # the loss's own and `loss/total`, over the whole step
    tokens: int  # trained
    sequences: int  # with at least one trained token
    forward_tokens: int  # of all sequences, prompts included
    micro_batches: int

    @property
    def logprobs(self) -> Sequence[np.ndarray]:
        """[P] float32 a sequence."""
        return self.recomputed.logprobs


class Trainer:
    """Trains `model`: owns its masters; an engine may share its parameters (the compute copy).

    A gradient is a function of the batch alone: denominators are those of the whole `forward_backward`, so
    `max_batch_tokens` changes memory and speed, and in the gradient only the order of float32 sums. Gradients of
    several `forward_backward` calls add up until `optim_step`, each under its own denominators.
    """

    def __init__(
        self, model: Model, config: TrainerConfig, *, reference: Model | None = None, redraws: bool = True
    ) -> None:
        """`reference`: a model with weights of its own that is only scored, for KL terms. One that was loaded on
        another device, such as the host's, is moved to the trainer's for each use and back.

        `redraws`: draw an engine's tokens again, to compare them.

        Sets `model.checkpoint_layers` to `config.checkpoint_layers`.
        """
        self.model = model
        self.config = config
        self.reference = reference
        model.checkpoint_layers = config.checkpoint_every
        self.updates = 0  # optimizer steps taken or refused
        self._masters = MasterWeights(model)
        self._optimizer = _adamw(self._masters.tensors, config)
        self._has_gradient = False
        self.moe = MoeTraining(model, config)
        self.redraws = redraws

    @property
    def masters(self) -> Mapping[str, torch.nn.Parameter]:
        """The weights that train, float32, by Hugging Face name."""
        return self._masters.tensors

    def recompute(self, batch: Batch) -> Recomputed:
        """[P] a sequence, without training: the bits that `forward_backward` would report now."""
        step = self._flatten(batch)
        record = step.redraw_record(self.redraws)
        return step.recomputed(self._logprobs(step, record)[0], record)

    def logprobs(self, batch: Batch) -> Sequence[np.ndarray]:
        """[P] float32 a sequence, those of `recompute`."""
        return self.recompute(batch).logprobs

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
        scored = step.split(self._reference_logprobs(step))
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
        scored, metrics, moe, record = [], [], self.moe, step.redraw_record(self.redraws)
        reference = None if self.reference is None else self._reference_logprobs(step)
        for micro in step.micro_batches:
            rows, anchored = step.rows[micro.sequences], None if reference is None else reference[micro.tokens]
            logprobs, entropy = score(self.model, rows, replay=moe.replay, watch=moe.watch, record=record)
            out = loss(step.loss_batch(micro, logprobs, entropy, anchored))
            (out.loss + moe.penalty(len(step.rows))).backward()
            self._masters.collect()
            scored.append(logprobs.detach())
            metrics.append(_metrics(out))
        self._has_gradient = True
        return self._result(began, step, step.recomputed(torch.cat(scored), record), merge(metrics))

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
        record, moe = step.redraw_record(self.redraws), self.moe
        leaves = self._logprobs(step, record)
        reference = None if self.reference is None else self._reference_logprobs(step)
        logprobs, entropy = (leaf.requires_grad_() for leaf in leaves)
        out = fn(step.loss_batch(step.whole, logprobs, entropy, reference))
        out.loss.backward()
        for micro in step.micro_batches:
            again = score(self.model, step.rows[micro.sequences], replay=moe.replay, watch=moe.watch)
            used = [(output, leaf.grad) for output, leaf in zip(again, leaves, strict=True) if leaf.grad is not None]
            gradients: list[Tensor | None] = [grad[micro.tokens] for _, grad in used]
            if isinstance(penalty := moe.penalty(len(step.rows)), Tensor):
                used.append((penalty, penalty))
                gradients.append(None)
            torch.autograd.backward([output for output, _ in used], gradients)
            self._masters.collect()
        self._has_gradient = True
        return self._result(began, step, step.recomputed(logprobs, record), _metrics(out))

    def optim_step(self) -> dict[str, float]:
        """Clip, update the masters, and round them into the live parameters.

        Returns `loss/grad_norm` (before clipping), `trainer/lr`, `trainer/refused` (1 where the norm was not finite)
        and metrics of the experts' loads. A refused step leaves weights and optimizer unchanged, drops the gradient
        and counts in the schedule. Raises `ConfigError` without a gradient.
        """
        if not self._has_gradient:
            raise ConfigError("optim_step has no gradient to apply; call forward_backward first")
        norm = self._masters.gradient_norm()
        finite = math.isfinite(norm)
        lr = learning_rate(self.updates, self.config)
        if finite:
            if self.config.grad_clip > 0:
                self._masters.clip_gradient(self.config.grad_clip, norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._masters.publish()
        self._masters.zero_grad()
        self._has_gradient = False
        self.updates += 1
        refused = float(not finite)
        return {"loss/grad_norm": float(norm), "trainer/lr": lr, "trainer/refused": refused, **self.moe.update()}

    def save(self, folder: Path) -> None:
        """Write masters and frozen weights as a Hugging Face folder, with the optimizer's state beside them."""
        save_model(self._masters.state(), folder, self.model.source_path, config=self.model.config)
        optimizer = {
            f"{key}.{name}": self._optimizer.state[tensor][key].cpu()
            for name, tensor in self.masters.items()
            for key in ADAM
        }
        save_file(optimizer, folder / OPTIMIZER)
        (folder / STATE).write_text(json.dumps({"format": FORMAT, "updates": self.updates}, indent=1) + "\n")

    def restore(self, folder: Path) -> None:
        """Restore what `save` wrote, bit for bit; an engine that shares the parameters has the weights at once.

        Raises `RunError` for another format, `ModelError` for another model's weights.
        """
        state = json.loads((folder / STATE).read_text())
        if state["format"] != FORMAT:
            raise RunError(f"{folder / STATE} has format {state['format']}; this version reads {FORMAT}")
        self._masters.load(read_state(folder))
        optimizer = load_file(folder / OPTIMIZER)
        for name, tensor in self.masters.items():
            for key in ADAM:
                self._optimizer.state[tensor][key].copy_(optimizer[f"{key}.{name}"])
        self._masters.zero_grad()
        self._has_gradient = False
        self.updates = state["updates"]

    def fingerprint(self) -> dict[str, Any]:
        """Everything besides the weights that decides the bits of logprobs; equal to the engine's where they agree."""
        return self.model.fingerprint()

    def _flatten(self, batch: Batch, old_logprobs: Sequence[np.ndarray] | None = None) -> StepBatch:
        budget, device = self.config.max_batch_tokens, self.model.context.device
        return make_step_batch(batch, max_batch_tokens=budget, old_logprobs=old_logprobs, device=device)

    def _begin(self) -> None:
        if not self._has_gradient:
            self._masters.zero_grad()  # others may have differentiated through the shared model
        self._has_gradient = False  # until the whole gradient is there; an exception on the way leaves none

    def _result(
        self, began: float, step: StepBatch, recomputed: Recomputed, metrics: dict[str, Reduction]
    ) -> UpdateResult:
        """Build the result. `recomputed` is on the host, so the device has finished and the time is complete."""
        lengths = [len(row.token_ids) for row in step.rows]
        return UpdateResult(
            recomputed=recomputed,
            metrics={
                **metrics,
                "loss/total": Mean(metrics["loss/total"].value, 1),  # a sum over micro-batches, a mean over updates
                **utilisation(self.model, lengths, time.perf_counter() - began),
            },
            tokens=step.total_tokens,
            sequences=step.total_sequences,
            forward_tokens=sum(lengths),
            micro_batches=len(step.micro_batches),
        )

    @torch.no_grad()
    def _logprobs(self, step: StepBatch, record: RedrawRecord | None) -> tuple[Tensor, Tensor]:
        """[N] each: the policy's logprobs and entropies of all predicted tokens, without a graph."""
        self.moe.begin()
        return _score(self.model, step, step.micro_batches, self.moe, record)

    def _reference_logprobs(self, step: StepBatch) -> Tensor:
        """[N] the reference's logprobs of all predicted tokens."""
        assert self.reference is not None
        home = self.reference.context.device
        self.reference.to(self.model.context.device)
        logprobs = _score(self.reference, step, step.micro_batches)[0]
        self.reference.to(home)
        return logprobs


@torch.no_grad()
def _score(
    model: Model,
    step: StepBatch,
    micro_batches: Sequence[MicroBatch],
    moe: MoeTraining | None = None,
    record: RedrawRecord | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of the predicted tokens of these micro-batches, without a graph."""
    watching: dict[str, Any] = {"record": record}
    if moe is not None:
        watching |= {"replay": moe.replay, "watch": moe.watch}
    scored = [score(model, step.rows[micro.sequences], **watching) for micro in micro_batches]
    return torch.cat([logprobs for logprobs, _ in scored]), torch.cat([entropy for _, entropy in scored])


def _metrics(out: LossOutput) -> dict[str, Reduction]:
    return {**out.metrics, "loss/total": Sum(out.loss.item())}


def _adamw(masters: Mapping[str, torch.nn.Parameter], config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW with zeroed state, without weight decay for norms and biases."""
    decayed = {name for name, tensor in masters.items() if tensor.ndim >= 2 and not name.endswith("bias")}
    groups = [
        {"params": [masters[name] for name in masters if name in decayed], "weight_decay": config.weight_decay},
        {"params": [masters[name] for name in masters if name not in decayed], "weight_decay": 0.0},
    ]
    beta1, beta2 = config.betas
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, fused=True)
    for tensor in masters.values():
        moments = {key: torch.zeros_like(tensor, requires_grad=False) for key in ADAM[1:]}
        optimizer.state[tensor] = {"step": torch.zeros((), device=tensor.device), **moments}
    return optimizer
