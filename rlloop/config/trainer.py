"""The section `trainer`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rlloop.config.layout import LayoutConfig
from rlloop.config.limits import (
    BELOW_ONE,
    POSITIVE,
    ZERO_OR_MORE,
    at_least,
    check_limits,
    limited,
    one_of,
    require,
    zero_or_more,
)

MASTERS_STAY = (
    "trainer.offload=masters: a model that computes in {} has no masters apart from the weights it computes with; set "
    "trainer.offload=moments, or model.dtype=bfloat16"
)

KEEPS_OWN = (
    "trainer.checkpoint_keep_attention keeps what rlloop's attention makes, and model.profile.attention is {}; set one "
    "of them back to its default"
)


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class TrainerConfig:
    num_steps: int = limited(100, at_least(1))  # steps: rollout batches, each with its update
    lr: float = limited(1e-5, ZERO_OR_MORE)  # peak learning rate of AdamW
    schedule: Schedule = Schedule.constant  # schedule of the learning rate after the warm-up
    warmup_steps: int = limited(0, zero_or_more("off"))  # optimizer steps of linear warm-up
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's betas
    eps: float = limited(1e-8, POSITIVE)  # AdamW's epsilon
    weight_decay: float = limited(0.0, ZERO_OR_MORE)  # decoupled weight decay of AdamW
    grad_clip: float = limited(1.0, zero_or_more("off"))  # limit of the gradient's global norm
    max_batch_tokens: int = limited(16384, at_least(2))  # tokens of a micro-batch (one forward and backward)
    micro_batch_multiple: int = limited(
        1, at_least(1)
    )  # a step has a multiple of so many micro-batches, of even size: no rank idle in the last round, docs/ranks.md
    share_prompts: bool = False  # train a group on one forward of its prompt, pictures too; rounding: docs/numerics.md
    encode_on_device: bool = True  # weights on a GPU: find deltas there, beside a copy of the last published weights
    num_minibatches: int = limited(1, at_least(1))  # optimizer steps per rollout batch, which is split by whole groups
    balance_coef: float = limited(0.0, zero_or_more("off"))  # coefficient of the experts' load-balancing loss
    expert_bias_rate: float = limited(
        0.0, BELOW_ONE
    )  # update step of the experts' routing biases towards even loads; 0: off
    shard: str = limited(
        "optimizer", one_of("optimizer", "parameters")
    )  # state sharded over layout.dp_shard: docs/ranks.md
    offload: str = limited(
        "none", one_of("none", "moments", "masters")
    )  # optimizer state kept in host memory, with the same bits: AdamW's moments, or the masters too
    checkpoint_layers: str = (
        "none"  # layers recomputed in the backward pass to save memory: none, all, or n for every n-th
    )
    checkpoint_keep_attention: bool = False  # keep recomputed layers' attention: for long sequences, docs/gpu.md
    checkpoint_offload: bool = False  # what is kept of recomputed layers waits in host memory
    freeze_vision_tower: bool = False  # a vision model's tower, its mergers too, stays as it is: docs/images.md
    layout: LayoutConfig = field(default_factory=LayoutConfig)

    def __post_init__(self) -> None:
        require(
            "trainer.betas", self.betas, len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "two numbers, from 0 to below 1",
        )  # fmt: skip
        self.betas = (self.betas[0], self.betas[1])  # OmegaConf hands over a list
        self.checkpoint_layers = str(self.checkpoint_layers)
        good = self.checkpoint_layers in ("none", "all") or self.checkpoint_every > 0
        require("trainer.checkpoint_layers", self.checkpoint_layers, good, "none, all, or a whole number n from 1 on")
        require(
            "trainer.checkpoint_keep_attention", self.checkpoint_keep_attention,
            not self.checkpoint_keep_attention or self.checkpoint_every > 0,
            "false while trainer.checkpoint_layers is none, which keeps all of every layer",
        )  # fmt: skip
        require(
            "trainer.checkpoint_offload", self.checkpoint_offload,
            not self.checkpoint_offload or self.checkpoint_every > 0,
            "false while trainer.checkpoint_layers is none: only what recomputed layers keep is offloaded",
        )  # fmt: skip
        check_limits("trainer", self)
        self.layout.checked("trainer")

    @property
    def checkpoint_every(self) -> int:
        """`checkpoint_layers` as a number: every n-th layer; 0: none."""
        text = {"none": "0", "all": "1"}.get(self.checkpoint_layers, self.checkpoint_layers)
        return int(text) if text.isdecimal() else 0
