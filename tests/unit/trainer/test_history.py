import numpy as np
import torch

from rlloop.rollout import Engine
from rlloop.trainer.history import WeightHistory
from rlloop.types import Example, RewardResult, Sample, SamplingParams
from tests.parity.models import tiny_qwen3


def test_samples_are_scored_under_the_weights_that_made_them(tmp_path):
    model = tiny_qwen3(64)
    engine, history = Engine(model), WeightHistory(model, keep=2, max_batch_tokens=64)
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
        found = history.logprobs(kept)
        for sample, logprobs in zip(kept, found, strict=True):
            assert np.array_equal(logprobs.view(np.int32), sample.completion.logprobs.view(np.int32)), again
        history.save(tmp_path)
        history = WeightHistory(model, keep=2, max_batch_tokens=64)
        history.restore(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(live, model.parameters(), strict=True))
