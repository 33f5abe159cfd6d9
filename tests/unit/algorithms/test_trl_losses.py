"""Losses against TRL's own code (1.16), on the same logits: equal to 1e-6, and so are their gradients."""

from __future__ import annotations

from collections import defaultdict
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlloop.algorithms import LossBatch, get_loss

pytest.importorskip("trl")

VOCABULARY, LENGTH = 11, 7
CLOSE = {"rtol": 1e-6, "atol": 1e-9}


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch) -> None:
    """TRL takes the folder tests/vllm for it."""
    monkeypatch.setattr(import_module("trl.import_utils"), "is_vllm_available", lambda **_: False)


class Batch:
    """B sequences of prompts and completions over given logits, the policy's, the reference's and old ones."""

    def __init__(self, count: int = 6, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)

        def logits() -> Tensor:
            return 2 * torch.randn(count, LENGTH, VOCABULARY, generator=random, dtype=torch.float64)

        self.ids = torch.randint(0, VOCABULARY, (count, LENGTH), generator=random)
        lengths = torch.randint(1, LENGTH - 2, (count,), generator=random)
        at = torch.arange(LENGTH)
        self.mask = (at >= 2) & (at < 2 + lengths[:, None])  # [B, L]: the completion's tokens, after a prompt of two
        self.logits = {"policy": logits(), "ref": logits(), "old": logits()}
        self.logits["old"] = self.logits["policy"] + 0.2 * self.logits["old"]  # ratios on both sides of the clips
        self.logits["policy"].requires_grad_()
        self.advantages = torch.randn(count, generator=random, dtype=torch.float64)

    def logps(self, which: str) -> Tensor:
        """[B, L − 1]: of each token but the first; 0 outside the completion."""
        scored = self.logits[which][:, :-1].log_softmax(-1).gather(2, self.ids[:, 1:, None])[..., 0]
        return torch.where(self.mask[:, 1:], scored, 0.0)

    def ours(self, order: list[int] | None = None, advantages: Tensor | None = None) -> LossBatch:
        """The completion's tokens alone, end to end; sequences in `order`."""
        order = list(range(len(self.ids))) if order is None else order
        mask = self.mask[:, 1:][order]

        def flat(which: str) -> Tensor:
            return self.logps(which)[order][mask]

        sequence = torch.arange(len(order))[:, None].expand_as(mask)[mask]
        values = self.advantages[order] if advantages is None else advantages
        return LossBatch(
            logprobs=flat("policy"), entropy=torch.zeros(len(sequence)), old_logprobs=flat("old").detach(),
            rollout_logprobs=flat("old").detach(), ref_logprobs=flat("ref").detach(), advantages=values[sequence],
            sequence=sequence, mask=torch.ones(len(sequence), dtype=torch.bool), total_tokens=len(sequence),
            total_sequences=len(order),
        )  # fmt: skip

    def model(self, which: str) -> Any:
        """Stand-in for the model that TRL calls: its fused head's output for these logits."""

        class Model(torch.nn.Module):  # accelerate looks into its modules
            is_gradient_checkpointing = False

            def forward(model, **_: Any) -> SimpleNamespace:
                zeros = torch.zeros(len(self.ids), LENGTH - 1)
                return SimpleNamespace(log_probs=self.logps(which), entropy=zeros, mean_logits=zeros, is_top1=zeros > 0)

        return Model().eval()


class Accelerator:
    device, num_processes = torch.device("cpu"), 1

    def gather(self, value: Any) -> Any:
        return value

    gather_for_metrics = gather

    def reduce(self, value: Any, reduction: str) -> Any:
        return value


def trainer(batch: Batch, **settings: Any) -> SimpleNamespace:
    """As much of a TRL trainer as its loss reads."""
    return SimpleNamespace(
        model=batch.model("policy"), ref_model=batch.model("ref"), accelerator=Accelerator(), aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, precompute_ref_logps=False,
        **settings,
    )  # fmt: skip


def agree(ours: Tensor, theirs: Tensor, batch: Batch) -> None:
    """Equal values, and equal gradients by the logits."""
    torch.testing.assert_close(ours, theirs, **CLOSE)
    mine, other = (torch.autograd.grad(each, batch.logits["policy"], retain_graph=True)[0] for each in (ours, theirs))
    torch.testing.assert_close(mine, other, **CLOSE)


@pytest.mark.parametrize(
    ("loss_type", "name", "args", "settings"),
    [
        ("grpo", "grpo", {}, {}),
        ("grpo", "grpo", {"kl_coef": 0.04}, {"beta": 0.04}),
        ("grpo", "gspo", {"clip_low": 0.1, "clip_high": 0.15}, {"level": "sequence", "low": 0.1, "high": 0.15}),
        ("bnpo", "ppo", {}, {}),
        ("dapo", "dapo", {"clip_high": 0.28}, {"high": 0.28}),
        ("dr_grpo", "dr_grpo", {"max_tokens": 9}, {}),
        ("cispo", "cispo", {"clip_low": 1.0, "clip_high": 0.3}, {"high": 1.3}),  # TRL gives the bound itself
    ],
)
def test_policy_losses(loss_type, name, args, settings):
    from trl import GRPOTrainer

    batch = Batch()
    beta, level = settings.get("beta", 0.0), settings.get("level", "token")
    made = trainer(
        batch, top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level=level, beta=beta,
        loss_type=loss_type, epsilon_low=settings.get("low", 0.2), epsilon_high=settings.get("high", 0.2),
        use_vllm=False, max_completion_length=9, current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        use_adaptive_entropy=False, args=SimpleNamespace(use_bias_correction_kl=False, delta=None),
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            batch.logps("policy"), torch.zeros(len(batch.ids), LENGTH - 1), None,
        ),
    )  # fmt: skip
    mask = batch.mask[:, 1:].double()
    inputs = {
        "prompt_ids": batch.ids[:, :1], "prompt_mask": torch.ones_like(batch.ids[:, :1]),
        "completion_ids": batch.ids[:, 1:], "completion_mask": mask, "advantages": batch.advantages,
        "old_per_token_logps": batch.logps("old"), "ref_per_token_logps": batch.logps("ref"),
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    agree(get_loss(name, **args)(batch.ours()).loss, GRPOTrainer._compute_loss(made, made.model, inputs), batch)


@pytest.mark.parametrize("variant", ["sigmoid", "ipo", "hinge"])
def test_dpo(variant):
    from trl import DPOTrainer

    batch = Batch()
    made = trainer(
        batch, ld_alpha=None, f_divergence_type="reverse_kl", loss_types=[variant], loss_weights=[1.0], beta=0.3,
        use_weighting=False, args=SimpleNamespace(gradient_checkpointing_kwargs=None),
    )  # fmt: skip
    inputs = {"input_ids": batch.ids, "completion_mask": batch.mask.long()}
    theirs = DPOTrainer._compute_loss(made, made.model, inputs, False)
    pairs = batch.ours([0, 3, 1, 4, 2, 5], torch.tensor([1.0, -1.0] * 3))  # TRL: all chosen, then all rejected
    agree(get_loss("dpo", kl_coef=0.3, variant=variant)(pairs).loss, theirs, batch)


def test_kto():
    from trl import KTOTrainer

    batch = Batch()
    labels = torch.tensor([True, False, True, True, False, False])

    def total(model: Any, _: Any) -> Tensor:  # the divergence's completions: the step's own, as our loss takes them
        return model().log_probs.sum(-1)

    made = trainer(
        batch, loss_type="kto", calculate_KL=True, beta=0.3, desirable_weight=1.5, undesirable_weight=0.5,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None), _compute_kl_logps=total,
    )  # fmt: skip
    inputs = {"input_ids": batch.ids, "completion_mask": batch.mask.long(), "label": labels}
    ours = get_loss("kto", kl_coef=0.3, desirable=1.5, undesirable=0.5)(batch.ours(advantages=labels * 2.0 - 1))
    agree(ours.loss, KTOTrainer._compute_loss(made, made.model, inputs, False), batch)


@pytest.mark.parametrize("center", [0.0, 0.01])
def test_reward_model(center):
    from trl import RewardTrainer

    batch = Batch()
    made = trainer(batch, args=SimpleNamespace(center_rewards_coefficient=center or None))

    def model(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=batch.logps("policy").sum(-1, keepdim=True))

    theirs = RewardTrainer.compute_loss(made, model, {})
    pairs = batch.ours([0, 3, 1, 4, 2, 5], torch.tensor([1.0, -1.0] * 3))
    agree(get_loss("bradley_terry", center_coef=center)(pairs).loss, theirs, batch)


@pytest.mark.filterwarnings("ignore")  # of a module that is said to be experimental
def test_distillation_has_the_gradient_of_trls_sampled_reverse_kl():
    """On policy, without TRL's weights by position. The surrogates differ by a constant: log π where ours has π / π."""
    from trl.experimental.iw_opd import IWOPDTrainer

    batch = Batch()
    batch.logits["old"] = batch.logits["policy"].detach()
    made = trainer(batch, temperature=1.0, iw_opd_gamma=0.0, iw_opd_epsilon=1e-8)
    scored, mask = batch.ids[:, 1:], batch.mask[:, 1:]
    theirs = IWOPDTrainer._compute_iw_opd_loss(
        made, batch.logits["policy"][:, :-1], scored, scored.masked_fill(~mask, -100), batch.logps("ref").detach()
    )
    ours = get_loss("distillation")(batch.ours()).loss
    mine, other = (torch.autograd.grad(each, batch.logits["policy"], retain_graph=True)[0] for each in (ours, theirs))
    assert mine.abs().max() > 1e-3
    torch.testing.assert_close(mine, other, **CLOSE)


def test_sft_is_the_cross_entropy_that_transformers_computes_for_trl():
    from transformers.loss.loss_utils import ForCausalLMLoss

    batch = Batch()
    labels = batch.ids.masked_fill(~batch.mask, -100)
    theirs = ForCausalLMLoss(batch.logits["policy"], labels, VOCABULARY)
    torch.testing.assert_close(get_loss("sft")(batch.ours()).loss.float(), theirs, **CLOSE)
