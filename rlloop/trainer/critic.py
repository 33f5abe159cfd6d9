"""PPO's critic: a second copy of the model with a value head, its own masters, optimizer and learning rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial, reduce
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlloop.algorithms.values import explained_variance, gae, value_loss
from rlloop.config.algorithm import CriticConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.models import Model
from rlloop.models.scoring import hidden_states
from rlloop.trainer.batching import MicroBatch, StepBatch, make_step_batch
from rlloop.trainer.leaves import forwards, rounds
from rlloop.trainer.master_weights import MasterWeights
from rlloop.trainer.neighbours import BesideEngines
from rlloop.trainer.optimizer import MOMENTS, ShardedAdamW
from rlloop.trainer.settings import apply_settings
from rlloop.types import Sample

FILE = "critic.safetensors"
T = TypeVar("T")


class Critic(BesideEngines):
    """Values of the states before each of the policy's tokens, and the advantages that follow from them.

    `model` is the trunk, which no engine shares; the head is a float32 vector and bias, 0 at first. Both train with
    `config.lr`. Of several ranks each computes the values of its micro-batches, and has the whole head; all methods
    are collective. A pipeline is refused by the configuration.
    """

    def __init__(self, model: Model, config: CriticConfig, trainer: TrainerConfig) -> None:
        self.model, self.config = model, config
        apply_settings(model, trainer)
        self._trainer, self._ranks = trainer, model.context.ranks("dp")
        settings = dataclasses.replace(trainer, lr=config.lr)
        self._masters = MasterWeights(model)
        self._optimizer = ShardedAdamW(self._masters, settings)
        width = model.config.hidden_size
        self.head = torch.zeros(width + 1, device=model.device, requires_grad=True)  # weights, then the bias
        beta1, beta2 = settings.betas
        self._head_optimizer = torch.optim.AdamW(
            [self.head], lr=config.lr, betas=(beta1, beta2), eps=settings.eps, weight_decay=0.0
        )
        self._targets: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # by uid: values and returns, [T] each

    @torch.no_grad()
    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """[T] float32 a sample: the value before each of the policy's tokens."""
        step, model = self._flatten(samples), self.model
        own = forwards(
            step.micro_batches, self._ranks, lambda micro: self._values(step, micro).cpu(), model.without_tokens
        )
        return step.split(torch.cat(self._of_all(own)))

    def advantages(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with `token_advantages` [T], normalised over all tokens where `config.normalize` says so.

        A sample's `advantage` is its shaped reward; the part not earned by its turns is given at its last token.
        """
        estimates, self._targets = list[np.ndarray](), {}
        for sample, values in zip(samples, self.values(samples), strict=True):
            rewards = token_rewards(sample)
            advantages, returns = gae(rewards, values, gamma=self.config.gamma, lam=self.config.lam)
            self._targets[sample.uid] = values, returns
            estimates.append(advantages)
        if self.config.normalize:
            flat = np.concatenate(estimates)
            estimates = [(each - flat.mean()) / (flat.std() + 1e-8) for each in estimates]
        return [
            dataclasses.replace(sample, token_advantages=each.astype(np.float32))
            for sample, each in zip(samples, estimates, strict=True)
        ]

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Move the values of `samples`, which `advantages` has seen, towards their returns; returns `critic/*`."""
        step = self._flatten(samples)
        old, returns = (
            np.concatenate([self._targets[sample.uid][index] for sample in samples]).astype(np.float32)
            for index in (0, 1)
        )
        targets = torch.from_numpy(np.stack([old, returns])).to(self.model.device)
        losses, clipped, norms = [], [], []
        for _ in range(self.config.epochs):
            loss, cut = self._epoch(step, targets)
            losses.append(loss)
            clipped.append(cut)
            norms.append(self._apply())
        return {
            "critic/loss": float(np.mean(losses)),
            "critic/clipped": float(np.mean(clipped)),
            "critic/grad_norm": float(np.mean(norms)),
            "critic/value_mean": float(old.mean()),
            "critic/return_mean": float(returns.mean()),
            "critic/explained_variance": explained_variance(old, returns),  # of the values that made the advantages
        }

    def save(self, folder: Path) -> None:
        """Write masters, head and moments; a part of a checkpoint, which does not know the layout. The first rank
        writes."""
        state, writes = self._head_optimizer.state.get(self.head) or {}, self.model.context.rank == 0
        tensors = {"head": self.head, **{f"head.{key}": value for key, value in state.items()}}
        tensors["steps"] = torch.tensor(self._optimizer.steps)
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        for name, master in self._masters.tensors.items():
            moments = {f"{key}.{name}": self._optimizer.moment(name, key) for key in MOMENTS}
            for key, rows in {f"master.{name}": master, **moments}.items():
                whole = self._masters.gather(name, rows)
                if writes:
                    tensors[key] = whole.detach().cpu().clone()
        if writes:
            save_file(tensors, folder / FILE)

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Read this rank's rows of what `save` wrote under any layout, bit for bit."""
        stored = load_file(folder / FILE)
        self.head.copy_(stored["head"])
        state = {key.removeprefix("head."): value for key, value in stored.items() if key.startswith("head.")}
        if state:
            moved = {key: value if key == "step" else value.to(self.head.device) for key, value in state.items()}
            self._head_optimizer.state[self.head] = moved
        for name, shard in self._masters.shards.items():
            entry = self._masters.parameters.entries[name]
            moments = {f"{key}.{name}": self._optimizer.moment(name, key) for key in MOMENTS}
            for key, rows in {f"master.{name}": shard.master, **moments}.items():
                rows.copy_(entry.part(stored[key])[shard.begin : shard.end])
        self._optimizer.set_steps(int(stored["steps"]))
        self._masters.publish()

    def _flatten(self, samples: Sequence[Sample]) -> StepBatch:
        self.put_neighbours_to_sleep()
        budget, multiple = self._trainer.max_batch_tokens, self._trainer.micro_batch_multiple
        return make_step_batch(samples, max_batch_tokens=budget, multiple=multiple, device=self.model.device)

    def _of_all(self, own: list[T]) -> list[T]:
        """The results of every rank's micro-batches, in order, from those of this rank's."""
        count, lists = self._ranks.size, self._ranks.gather_objects(own)
        return [lists[at % count][at // count] for at in range(sum(map(len, lists)))]

    def _values(self, step: StepBatch, micro: MicroBatch) -> Tensor:
        """[n] float32, differentiable. Each is a product's chain, whose bits depend on nothing but its token's."""
        hidden = hidden_states(self.model, step.rows[micro.sequences]).float()
        return self.model.ops.linear(hidden, self.head[None, :-1], self.head[-1:])[:, 0]

    def _epoch(self, step: StepBatch, targets: Tensor) -> tuple[float, float]:
        """The gradient of the mean loss over the step's tokens; returns that loss and the share of clipped tokens."""
        self._masters.zero_grad()
        own: list[tuple[float, int, Tensor]] = []

        def work(micro: MicroBatch) -> None:
            self.head.grad = None
            old, returns = targets[:, micro.tokens]
            by_token, clipped = value_loss(self._values(step, micro), old, returns, clip=self.config.clip)
            loss = by_token.sum() / step.total_tokens
            loss.backward()
            assert self.head.grad is not None
            own.append((loss.item(), int(clipped.sum()), self.head.grad.cpu()))

        for count, micro in rounds(step.micro_batches, self._ranks):
            self._masters.gradients.collect(count, None if micro is None else partial(work, micro))
        losses, cut, gradients = zip(*self._of_all(own), strict=True)
        self.head.grad = reduce(torch.add, gradients).to(self.head.device)  # in order of micro-batches
        return sum(losses), sum(cut) / step.total_tokens

    def _apply(self) -> float:
        """One step of both optimizers, clipped by the norm of both gradients, which is returned."""
        self._masters.sum_gradients()
        assert self.head.grad is not None
        norm = float(np.hypot(self._masters.gradient_norm(), float(self.head.grad.norm())))
        if np.isfinite(norm):
            if (limit := self._trainer.grad_clip) > 0:
                self._masters.clip_gradient(limit, norm)
                self.head.grad.mul_(min(1.0, limit / (norm + 1e-6)))
            self._optimizer.step(self.config.lr)
            self._head_optimizer.step()
            self._masters.publish()
        self._masters.zero_grad()
        return norm


def token_rewards(sample: Sample) -> np.ndarray:
    """[T] float64: each turn's reward at its last token; the rest of `sample.advantage`, the reward as shaped, at the
    last token of all."""
    completion = sample.completion
    rewards = np.zeros(len(completion.logprobs))
    turns = completion.turns or ((0, len(completion.token_ids)),)
    episode = sample.example.data.get("episode")
    conversation = episode.get("conversation", ()) if isinstance(episode, dict) else ()
    turn_rewards = [entry.get("reward", 0.0) for entry in conversation] or [0.0] * len(turns)
    ends = np.cumsum([end - start for start, end in turns]) - 1
    for end, reward in zip(ends, turn_rewards, strict=True):
        rewards[end] += reward
    rewards[-1] += sample.advantage - sum(turn_rewards)
    return rewards
