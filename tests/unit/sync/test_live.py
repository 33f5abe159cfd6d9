"""Live parameters as targets: bits in and out of fused, strided and tied tensors; engines of the embedded kind."""

import numpy as np
import pytest
import torch

from rlloop.errors import SyncError
from rlloop.models import new_model
from rlloop.rollout import Engine
from rlloop.sync.bits import UNSIGNED, WIDTH, Bits
from rlloop.sync.bundle import BundlePublisher, BundleReplica
from rlloop.sync.live import NAMES, LiveTarget, bits_of, named_weights, split, tensors_of
from rlloop.sync.replica import Replica
from rlloop.sync.target import TORN
from rlloop.types import SamplingParams
from tests.support.weight_history import PUBLIC

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 32, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 32,
    "tie_word_embeddings": True, "attention_bias": False, "initializer_range": 0.5, "eos_token_id": 0,
}  # fmt: skip
MIXTURE = {
    **CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip


def random_bits(dtype: str, shape: tuple[int, ...]) -> Bits:
    rng = np.random.default_rng(0)
    return Bits(dtype, rng.integers(0, 2 ** (8 * WIDTH[dtype] - 1), shape, UNSIGNED[WIDTH[dtype]], endpoint=True))


@pytest.mark.parametrize("kind", [kind for kind in NAMES if kind is not torch.bool], ids=str)
def test_every_bit_of_every_type_goes_in_and_out(kind):
    dtype = NAMES[kind]
    wanted = random_bits(dtype, (6, 5))
    for tensor in (
        torch.zeros(6, 5, dtype=torch.uint8).to(kind),
        torch.zeros(5, 6, dtype=torch.uint8).to(kind).t(),
        torch.zeros(12, 10, dtype=torch.uint8).to(kind)[::2, 1::2],
    ):
        target = LiveTarget({"w": tensor}.items(), lambda version: None)
        target.write("w", wanted)
        assert target.read("w").same(wanted)
        assert bits_of(tensor).same(wanted)


def test_fused_and_stacked_tensors_are_written_through_their_parts():
    fused, experts = torch.zeros(8, 4, dtype=torch.bfloat16), torch.zeros(3, 2, 4, dtype=torch.bfloat16)
    parts = split(fused, {"q_proj": 4, "k_proj": 2, "v_proj": 2})
    parts |= {f"experts.{index}.weight": expert for index, expert in enumerate(experts.unbind(0))}
    target = LiveTarget(parts.items(), lambda version: None)
    assert target.layout()["k_proj"] == ("BF16", (2, 4))
    whole = random_bits("BF16", (8, 4))
    for name, rows in (("q_proj", slice(0, 4)), ("k_proj", slice(4, 6)), ("v_proj", slice(6, 8))):
        target.write(name, Bits("BF16", whole.array[rows]))
    assert bits_of(fused).same(whole)
    target.write("experts.1.weight", Bits("BF16", whole.array[:2]))
    assert bits_of(experts[1]).same(Bits("BF16", whole.array[:2]))
    assert not experts[0].any()


def test_a_type_that_has_no_name_is_refused():
    with pytest.raises(SyncError, match="complex64"):
        bits_of(torch.zeros(2, dtype=torch.complex64))


def test_names_are_those_of_a_checkpoint():
    tied, mixture = new_model(CONFIG, 0), new_model(MIXTURE, 0)
    tensors, aliases = tensors_of(named_weights(tied).items())
    assert aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert tensors.keys() == {name for name, _ in tied.named_parameters()}
    tensors, aliases = tensors_of(named_weights(mixture).items())
    assert aliases == {}
    assert tensors["model.layers.0.mlp.experts.3.up_proj.weight"].shape == (8, 16)
    assert not any("gate_up_proj" in name for name in tensors)


@pytest.mark.parametrize("config", [CONFIG, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_follows_a_trainer_bit_for_bit_with_its_caches_dropped(config, dtype):
    trained, served = new_model(config, 0, dtype=dtype), new_model(config, 1, dtype=dtype)
    engine, twin = Engine(served, page_size=2), Engine(trained)
    publisher = BundlePublisher("run")
    replica = BundleReplica(LiveTarget(named_weights(served).items(), engine.set_version))
    memory = {name: parameter.data_ptr() for name, parameter in served.named_parameters()}
    prompt, sampling = [5, 6, 7, 8, 9], SamplingParams(8, seed=3, ignore_eos=True)
    for version in range(3):
        tensors, aliases = tensors_of(named_weights(trained).items())
        metrics = replica.apply(publisher.publish(tensors, version, aliases))
        assert metrics["sync/pause_seconds"] >= 0
        twin.set_version(version)
        [mine], [theirs] = engine.generate([prompt], sampling), twin.generate([prompt], sampling)
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs.tobytes() == theirs.logprobs.tobytes()
        assert mine.policy_version == version
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.mul_(1 + 2.0**-6)
    assert memory == {name: parameter.data_ptr() for name, parameter in served.named_parameters()}


def test_a_replica_that_missed_a_version_says_so_and_joins_anew():
    trained = new_model(CONFIG, 0)
    publisher, tensors = BundlePublisher("run"), lambda: tensors_of(named_weights(trained).items())[0]
    served = new_model(CONFIG, 1)
    versions = []
    replica = BundleReplica(LiveTarget(named_weights(served).items(), versions.append))
    replica.apply(publisher.publish(tensors(), 0, {}))
    bundles = []
    for version in (1, 2):
        with torch.no_grad():
            next(trained.parameters()).add_(1)
        bundles.append(publisher.publish(tensors(), version, {}))
    with pytest.raises(SyncError, match="no route leads"):
        replica.apply(bundles[1])
    assert versions == [TORN, 0]
    replica.apply(publisher.joining())
    assert versions == [TORN, 0, TORN, 2]
    assert len(publisher._store.held) == 2  # manifest and listing: nothing is kept for who may never ask
    for name, weight in named_weights(trained).items():
        assert torch.equal(named_weights(served)[name], weight)


def test_an_adapter_goes_under_the_same_manifest(tmp_path):
    """LoRA: names of its own, full tensors, the same checks."""
    from rlloop.sync.publisher import Publisher
    from rlloop.sync.store import FolderStore
    from tests.support.weight_history import KEY

    names = [f"base_model.model.layers.0.self_attn.q_proj.lora_{half}.weight" for half in "AB"]
    trained = {name: torch.randn(4, 8) for name in names}
    served = {name: torch.zeros(4, 8) for name in names}
    store = FolderStore(tmp_path)
    Publisher(store, KEY, "adapter").publish(*tensors_of(trained.items())[:1], step=1)
    replica = Replica(store, PUBLIC, LiveTarget(served.items(), lambda version: None))
    assert replica.poll()
    assert all(torch.equal(served[name], trained[name]) for name in names)
    elsewhere = Replica(store, PUBLIC, LiveTarget({"other": torch.zeros(4, 8)}.items(), lambda version: None))
    assert not elsewhere.poll()
    assert "unknown here" in elsewhere.error
