import numpy as np
import torch

from rlloop.config.trainer import TrainerConfig
from rlloop.models import load_model, save_model
from rlloop.models.fp8 import as_stored
from rlloop.rollout import Engine
from rlloop.trainer import Trainer
from rlloop.trainer.history import WeightHistory
from rlloop.trainer.moe import MoeTraining
from rlloop.types import Example, RewardResult, Sample, SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.tiny_models import tiny_qwen3


def test_samples_are_scored_under_the_weights_that_made_them(tmp_path):
    model = tiny_qwen3(64)
    engine, history = Engine(model), WeightHistory(model, 2, 64, MoeTraining(model, TrainerConfig()))
    samples = []
    for version in range(4):
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(version)))
        engine.set_version(version)
        history.remember(version)
        sampling = [SamplingParams(max_tokens=9, seed=version * 10 + i, temperature=0.8) for i in range(5)]
        made = engine.generate([[3, 4 + i] for i in range(5)], sampling)
        samples += [Sample(f"{version}/{i}/0", Example("e", [3], "", {}), each, "", RewardResult(0.0), i)
                    for i, each in enumerate(made)]  # fmt: skip
    assert len({sample.completion.logprobs.tobytes() for sample in samples}) == 20
    kept = samples[5:][::-1]  # of versions 1 to 3, in an order of their own
    live = [weight.detach().clone() for weight in model.parameters()]
    for again in range(2):
        found = history.recompute(kept)
        assert found.redrawn is not None
        assert [each.tolist() for each in found.redrawn] == [sample.completion.token_ids for sample in kept]
        for sample, logprobs in zip(kept, found.logprobs, strict=True):
            assert np.array_equal(logprobs.view(np.int32), sample.completion.logprobs.view(np.int32)), again
        history.save(tmp_path)
        history = WeightHistory(model, 2, 64, MoeTraining(model, TrainerConfig()))
        history.restore(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(live, model.parameters(), strict=True))


def test_weights_in_8_bits_are_kept_byte_for_byte(tmp_path):
    save_model(tiny_qwen3(64), tmp_path / "model")
    model = load_model(tmp_path / "model", dtype="bfloat16", quantize="fp8")
    history, resumed = (WeightHistory(model, 2, 64, MoeTraining(model, TrainerConfig())) for _ in range(2))
    for version in range(2):
        history.remember(version)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(-2.3 * weight)
    history.save(tmp_path)
    resumed.restore(tmp_path)
    assert resumed._versions.keys() == {0, 1}
    for version, weights in history._versions.items():
        for name, weight in weights.items():
            stored = as_stored(name, weight), as_stored(name, resumed._versions[version][name])
            assert stored[0].keys() == stored[1].keys()
            for kept, read in zip(*(each.values() for each in stored), strict=True):
                assert torch.equal(kept.view(torch.uint8), read.view(torch.uint8)), name


def test_choices_are_compared_and_replayed_under_those_weights_too(tmp_path):
    make_checkpoint(tmp_path, "qwen3_moe")
    model = load_model(tmp_path)
    trainer = Trainer(model, TrainerConfig())
    history = WeightHistory(model, 1, 999, trainer.moe)
    history.remember(0)
    sampling = [SamplingParams(max_tokens=9, seed=i) for i in range(3)]
    made = Engine(model).generate([[3, 4 + i] for i in range(3)], sampling)
    samples = [Sample(str(i), Example("e", [3], "", {}), each, "", RewardResult(0.0), i) for i, each in enumerate(made)]
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(-1)
    trainer.logprobs(samples)
    assert trainer.routing()["parity/router_different"] > 0  # of the weights as they are now
    scored = history.recompute(samples).logprobs
    assert trainer.routing() == {"parity/router_different": 0.0}
    for sample in samples:
        sample.completion.routed_experts[:] = [0, 1]
    trainer.replay_experts(True)
    replayed = history.recompute(samples).logprobs
    assert trainer.routing() == {"parity/router_different": 0.0}
    assert not any(np.array_equal(a, b) for a, b in zip(scored, replayed, strict=True))
