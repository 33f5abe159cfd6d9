"""A replica follows an adapter that trains: its tensors alone are published, and it samples the trainer's bits."""

import numpy as np

from rlloop import Engine, load_model
from rlloop.algorithms import get_loss
from rlloop.config.model import LoraSection
from rlloop.config.trainer import TrainerConfig
from rlloop.launch.make import with_lora
from rlloop.models import save_model
from rlloop.sync.bundle import BundlePublisher, BundleReplica
from rlloop.sync.live import LiveTarget, named_weights, tensors_of
from rlloop.sync.publisher import Publisher
from rlloop.sync.replica import Replica
from rlloop.sync.store import open_store
from rlloop.trainer import Trainer
from rlloop.trainer.history import WeightHistory
from rlloop.types import SamplingParams
from tests.support.samples import as_sample, different
from tests.support.tiny_models import tiny_qwen3
from tests.support.traffic import bits
from tests.support.weight_history import KEY, PUBLIC

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


def test_a_store_brings_an_adapter_to_engines_elsewhere(tmp_path):
    """Adapters of `fleet=regions`; an engine that follows whole weights refuses them by name."""
    save_model(tiny_qwen3(dtype="bfloat16"), tmp_path / "base")
    base = load_model(tmp_path / "base", dtype="bfloat16")
    trained, served = (with_lora(load_model(tmp_path / "base", dtype="bfloat16"), LORA, seed) for seed in (0, 1))
    trainer, engine, theirs = Trainer(trained, TrainerConfig(lr=1e-2)), Engine(trained), Engine(served)
    store = open_store(str(tmp_path / "store"))
    publisher, sizes = Publisher(store, KEY, "run", anchor_every=2), []
    publisher.claim()
    replica = Replica(store, PUBLIC, LiveTarget(named_weights(served).items(), theirs.set_version))
    for version in range(4):
        tensors, aliases = tensors_of(named_weights(trained).items())
        sizes.append(publisher.publish(tensors, version, aliases=aliases).metrics["sync/wire_bytes"])
        if publisher.anchor_due():
            publisher.anchor()
        engine.set_version(version)
        assert replica.poll(), replica.error
        assert theirs.policy_version == version
        made, found = (each.generate(PROMPTS, SAMPLING) for each in (engine, theirs))
        assert list(map(bits, made)) == list(map(bits, found))
        samples = [as_sample(index, each, index - 3.5) for index, each in enumerate(made)]
        trainer.forward_backward(samples, get_loss("grpo"))
        trainer.optim_step()
    assert max(sizes[1:]) < sum(each.nbytes for each in named_weights(base).values()) / 4
    whole = Replica(store, PUBLIC, LiveTarget(named_weights(base).items(), Engine(base).set_version))
    assert not whole.poll()
    assert "lora_A" in whole.error or "model.embed_tokens.weight" in whole.error


def test_versions_of_an_adapter_are_kept_and_scored_over_one_base(tmp_path):
    """`fleet.max_version_lag` with model.lora: past adapters, no second copy of the base."""
    save_model(tiny_qwen3(), tmp_path / "base")
    model = with_lora(load_model(tmp_path / "base"), LORA, 0)
    trainer, engine = Trainer(model, TrainerConfig(lr=1e-2)), Engine(model)
    history, samples = WeightHistory(model, 1, 64, trainer.moe), []
    assert history._past.model.model.layers is model.model.layers
    for version in range(2):
        engine.set_version(version)
        history.remember(version)
        made = engine.generate(PROMPTS, SAMPLING)
        fresh = [as_sample(8 * version + index, each, index - 3.5) for index, each in enumerate(made)]
        trainer.forward_backward(fresh, get_loss("grpo"))
        trainer.optim_step()
        samples += fresh
    assert different(samples[:8], list(trainer.logprobs(samples[:8]))) > 0
    assert different(samples, list(history.recompute(samples).logprobs)) == 0
