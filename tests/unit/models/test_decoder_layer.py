"""A decoder layer made in one launch has the bits of its operations one by one."""

import numpy as np
import pytest
import torch

import rlloop
from rlloop.models import new_model
from rlloop.models.decoder import Layer

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 72,
    "intermediate_size": 250,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
LLAMA = CONFIG | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def sampled(config, count, dtype=torch.float32):
    rng = np.random.default_rng(count)
    prompts = [rng.integers(3, 64, rng.integers(1, 100)).tolist() for _ in range(count)]
    engine = rlloop.Engine(new_model(config, seed=0).to(dtype))
    made = engine.generate(prompts, [rlloop.SamplingParams(4 + i % 3, seed=i, ignore_eos=True) for i in range(count)])
    return [(each.token_ids, each.logprobs.tobytes()) for each in made]


@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["qwen3", "llama"])
@pytest.mark.parametrize("count", [1, 5, 130, 400])
def test_one_launch_has_the_bits_of_many(config, count, threads, monkeypatch):
    decoded, whole = [], Layer._decoded

    def counted(*args):
        made = whole(*args)
        decoded.append(made is not None)
        return made

    monkeypatch.setattr(Layer, "_decoded", counted)
    together = sampled(config, count)
    assert any(decoded)
    monkeypatch.setattr(Layer, "_decoded", lambda *_: None)
    assert together == sampled(config, count)


def test_other_types_are_made_one_by_one(monkeypatch):
    whole = Layer._decoded
    monkeypatch.setattr(Layer, "_decoded", lambda *args: pytest.fail("fused") if whole(*args) else None)
    assert sampled(CONFIG, 3, torch.bfloat16)
