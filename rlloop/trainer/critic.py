"""PPO's critic: a second copy of the model with a value head, its own masters, optimizer and learning rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

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
from rlloop.trainer.master_weights import MasterWeights
from rlloop.trainer.optimizer import MOMENTS, ShardedAdamW
from rlloop.types import Sample

FILE = "critic.safetensors"


class Critic:
    """Values of the states before each of the policy's tokens, and the advantages that follow from them.

    `model` is the trunk, which no engine shares; the head is a float32 vector and bias, 0 at first. Both train with
    `config.lr`. In one process: a layout of several ranks is refused by the configuration.
    """

    def __init__(self, model: Model, config: CriticConfig, trainer: TrainerConfig) -> None:
        self.model, self.config = model, config
        self._grad_clip, self._budget = trainer.grad_clip, trainer.max_batch_tokens
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
        step = self._flatten(samples)
        return step.split(torch.cat([self._values(step, micro) for micro in step.micro_batches]))

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
        """Write masters, head and moments; a part of a checkpoint."""
        state = self._head_optimizer.state.get(self.head) or {}
        head = {f"head.{key}": value for key, value in state.items()}
        trunk = {f"master.{name}": tensor for name, tensor in self._masters.tensors.items()}
        moments = {
            f"{key}.{name}": self._optimizer.moment(name, key) for name in self._masters.tensors for key in MOMENTS
        }
        steps = torch.tensor(self._optimizer.steps)
        tensors = {"head": self.head.detach(), **head, **trunk, **moments, "steps": steps}
        save_file({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, folder / FILE)

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Read what `save` wrote, bit for bit."""
        stored = load_file(folder / FILE)
        self.head.copy_(stored["head"])
        state = {key.removeprefix("head."): value for key, value in stored.items() if key.startswith("head.")}
        if state:
            moved = {key: value if key == "step" else value.to(self.head.device) for key, value in state.items()}
            self._head_optimizer.state[self.head] = moved
        for name, master in self._masters.tensors.items():
            master.copy_(stored[f"master.{name}"])
            for key in MOMENTS:
                self._optimizer.moment(name, key).copy_(stored[f"{key}.{name}"])
        self._optimizer.set_steps(int(stored["steps"]))
        self._masters.publish()

    def _flatten(self, samples: Sequence[Sample]) -> StepBatch:
        return make_step_batch(samples, max_batch_tokens=self._budget, device=self.model.device)

    def _values(self, step: StepBatch, micro: MicroBatch) -> Tensor:
        """[n] float32, differentiable."""
        hidden = hidden_states(self.model, step.rows[micro.sequences]).float()
        return hidden @ self.head[:-1] + self.head[-1]

    def _epoch(self, step: StepBatch, targets: Tensor) -> tuple[float, float]:
        """The gradient of the mean loss over the step's tokens; returns that loss and the share of clipped tokens."""
        self._masters.zero_grad()
        self.head.grad = None
        total, cut = 0.0, 0

        def work(micro: MicroBatch) -> None:
            nonlocal total, cut
            old, returns = targets[:, micro.tokens]
            by_token, clipped = value_loss(self._values(step, micro), old, returns, clip=self.config.clip)
            loss = by_token.sum() / step.total_tokens
            loss.backward()
            total, cut = total + loss.item(), cut + int(clipped.sum())

        for micro in step.micro_batches:
            self._masters.gradients.collect(1, lambda micro=micro: work(micro))
        return total, cut / step.total_tokens

    def _apply(self) -> float:
        """One step of both optimizers, clipped by the norm of both gradients, which is returned."""
        self._masters.sum_gradients()
        assert self.head.grad is not None
        norm = float(np.hypot(self._masters.gradient_norm(), float(self.head.grad.norm())))
        if np.isfinite(norm):
            if self._grad_clip > 0:
                self._masters.clip_gradient(self._grad_clip, norm)
                self.head.grad.mul_(min(1.0, self._grad_clip / (norm + 1e-6)))
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
