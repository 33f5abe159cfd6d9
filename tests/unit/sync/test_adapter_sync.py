"""A replica follows an adapter that trains: its tensors alone are published, and it samples the trainer's bits."""

import numpy as np

from rlloop import Engine, load_model
from rlloop.algorithms import get_loss
from rlloop.config.run import LoraSection, TrainerConfig
from rlloop.launch.workers import with_lora
from rlloop.models import save_model
from rlloop.sync.bundle import BundlePublisher, BundleReplica
from rlloop.sync.live import LiveTarget, named_weights, tensors_of
from rlloop.trainer import Trainer
from rlloop.types import SamplingParams
from tests.support.samples import as_sample, different
from tests.support.tiny_models import tiny_qwen3
from tests.support.traffic import bits

LORA = LoraSection(rank=4, alpha=6.0, targets=["all-linear", "lm_head"])
PROMPTS = [[3 + index, 5] for index in range(8)]
SAMPLING = [SamplingParams(max_tokens=8, seed=index, ignore_eos=True) for index in range(8)]


def test_deltas_of_an_adapter_bring_a_replica_to_the_trainers_bits(tmp_path):
    save_model(tiny_qwen3(dtype="bfloat16"), tmp_path / "base")
    trained, served = (with_lora(load_model(tmp_path / "base", dtype="bfloat16"), LORA, 0) for _ in range(2))
    trainer, engine, replica = Trainer(trained, TrainerConfig(lr=1e-2)), Engine(trained), Engine(served)
    publisher = BundlePublisher("node", 1)
    follower = BundleReplica(LiveTarget(named_weights(served).items(), replica.set_version), 1)
    weights = sum(tensor.nbytes for tensor in named_weights(trained.with_adapter(None)).values())
    rng = np.random.default_rng(0)
    for version in range(3):
        tensors, aliases = tensors_of(named_weights(trained).items())
        assert all(".lora_" in name for name in tensors)
        assert aliases == {}
        engine.set_version(version)
        bundle = publisher.publish(tensors, version, aliases)
        follower.apply(bundle)
        assert sum(bits.array.nbytes for bits in tensors.values()) < weights
        made, theirs = (each.generate(PROMPTS, SAMPLING) for each in (engine, replica))
        assert list(map(bits, made)) == list(map(bits, theirs))
        samples = [as_sample(index, each, float(rng.normal())) for index, each in enumerate(theirs)]
        assert different(samples, list(trainer.forward_backward(samples, get_loss("grpo")).logprobs)) == 0
        assert trainer.optim_step()["loss/grad_norm"] > 0
