"""Effect of router replay for each kind of engine drift: the table of docs/parity.md.

    python -m tests.support.replay_cases

Every drift is one that engines have: weights rounded, the experts' bias held in a narrow type (it decides who is chosen
and weighs nothing), the indexer's weights in fp8.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from rlloop.config.trainer import TrainerConfig
from rlloop.models import Model, load_model
from rlloop.numerics.profile import Drift
from rlloop.parity.monitor import compare
from rlloop.rollout import Engine
from rlloop.study.drifted import DriftedSync, drifted_copy
from rlloop.study.quantize import quantized
from rlloop.trainer import Trainer
from rlloop.types import Example, RewardResult, Sample, SamplingParams
from tests.support.checkpoints import make_checkpoint

PROMPTS = [list(range(3, 40)), list(range(3, 40)), [5, 9], list(range(50, 90)), [7]] * 2
SAMPLING = [SamplingParams(max_tokens=24, seed=seed, ignore_eos=True) for seed in range(len(PROMPTS))]


def samples_of(engine: Engine) -> list[Sample]:
    return [
        Sample(str(i), Example(str(i), made.prompt_ids, "", {}), made, "", RewardResult(0.0), 0, float((-1) ** i))
        for i, made in enumerate(engine.generate(PROMPTS, SAMPLING))
    ]


def trainer_of(model: Model) -> Trainer:
    return Trainer(model, TrainerConfig(lr=2e-2, max_batch_tokens=160))


DRIFTS = {
    "weights int8": ("qwen3_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"),
    "weights int5": ("qwen3_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"),
    "expert bias e4m3": ("deepseek_v3", "deepseek_v32", "glm_moe_dsa"),
    "indexer fp8": ("deepseek_v32", "glm_moe_dsa"),
    "expert bias e4m3, indexer fp8": ("deepseek_v32", "glm_moe_dsa"),
}


def engine_of(model: Model, drift: str) -> Engine:
    if drift.startswith("weights"):
        profile = dataclasses.replace(model.profile, drift=Drift(weights=drift.split()[1]))
        engine = Engine(drifted_copy(model).with_profile(profile))
        DriftedSync(model, engine).publish(0)
        return engine
    own = drifted_copy(model)
    for name, weight in own.named_parameters():
        if "e_score" in name and "bias" in drift:
            weight.copy_(_e4m3(weight))
        if "indexer" in name and weight.ndim == 2 and "indexer" in drift:
            weight.copy_(quantized(weight, "fp8", "channel"))
    return Engine(own)


def _e4m3(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


@dataclasses.dataclass(frozen=True)
class Found:
    k3: float
    replayed: float  # k3, when the trainer takes the engine's experts
    different: int  # tokens whose logprob has other bits, then
    experts: float  # fraction of expert choices that are others, without replay
    selections: float | None  # fraction of the indexer's that are others, with replay


def measure(model: Model, drift: str) -> Found:
    trainer, samples = trainer_of(model), samples_of(engine_of(model, drift))
    plain = compare(samples, trainer.logprobs(samples)).metrics["parity/k3"]
    experts = trainer.routing()["parity/router_different"]
    trainer.replay_experts(True)
    again = compare(samples, trainer.logprobs(samples))
    selections = trainer.routing().get("parity/indexer_different")
    return Found(plain, again.metrics["parity/k3"], again.tokens_different, experts, selections)


def main() -> None:
    head = ["family", "the engine's drift", "experts that differ", "k3", "k3 with replay", "selections that differ"]
    print("\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head))))
    for drift, families in DRIFTS.items():
        for family in families:
            with tempfile.TemporaryDirectory() as place:
                make_checkpoint(Path(place), family)
                found = measure(load_model(place), drift)
            selections = "" if found.selections is None else f"{found.selections:.1%}"
            replayed = f"{found.replayed:.1e}" if found.different else "0, bit for bit"
            print(f"| `{family}` | {drift} | {found.experts:.1%} | {found.k3:.1e} | {replayed} | {selections} |")


if __name__ == "__main__":
    main()
