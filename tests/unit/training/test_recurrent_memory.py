"""Memory predicted for recurrent layers: what they save, what a scan's backward works in, and an engine's states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlloop import token_logprobs
from rlloop.models import new_model
from rlloop.models.recurrent import DeltaNet, Mamba
from rlloop.parallel.layout import Layout
from rlloop.rollout.engine.engine import STATE_BYTES
from rlloop.training.dense_memory import Heads
from rlloop.training.memory import predict
from rlloop.training.recurrent_memory import Recurrence
from tests.support.memory_use import saved_by
from tests.support.rank_updates import DELTA, MAMBA

WIDER = {"hidden_size": 64, "max_position_embeddings": 512}
MODELS = {
    "delta": {**DELTA, **WIDER, "linear_key_head_dim": 32, "linear_value_head_dim": 48},
    "mamba": {**MAMBA, **WIDER, "mamba_head_dim": 48, "ssm_state_size": 32},
}
TOKENS = 200


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_what_a_layer_saves_is_predicted_within_a_hundredth(name: str, dtype: str) -> None:
    model = new_model(MODELS[name], seed=0, dtype=dtype)
    recurrence = Recurrence.of(model.config)
    assert recurrence is not None
    layers = saved_by(model, (DeltaNet, Mamba), lambda: token_logprobs(model, [([3] * (TOKENS - 7), [4] * 8)]))
    assert len(layers) == len(recurrence.layers) > 0
    for found in layers:
        assert found == pytest.approx(TOKENS * recurrence.saved(model.dtype.itemsize), rel=0.01)


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize(("groups", "heads", "key", "width"), [(16, 32, 128, 128), (8, 64, 128, 64), (2, 4, 12, 20)])
def test_room_of_a_scans_backward(
    groups: int, heads: int, key: int, width: int, corrects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `scan_backward` allocates for the heads that it takes at a time, without running it."""
    pytest.importorskip("triton", reason="the module has Triton's kernels")
    from rlloop.numerics.kernels.triton import recurrence_backward as module

    class Launch:
        arg_names: tuple[str, ...] = ()

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: None

    for kernel in list(module.TILES):
        launch = Launch()
        monkeypatch.setattr(module, kernel.__name__, launch)
        monkeypatch.setitem(module.TILES, launch, module.TILES[kernel])
    monkeypatch.setattr(module, "aligned", lambda x: x)
    monkeypatch.setattr(module, "hopper", lambda device: False)
    tokens, rounds = 1 << 16, list[int]()

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.empty.memory_format and rounds:
                rounds[-1] += made.nbytes
            return made

    some_heads = module._some_heads

    def counted(*args: Any) -> None:
        rounds.append(0)
        some_heads(*args)

    monkeypatch.setattr(module, "_some_heads", counted)
    q, v, gate = (torch.empty(tokens, *shape, device="meta") for shape in ((groups, key), (heads, width), (heads,)))
    with Allocations():
        module.scan_backward(q, q, v, gate, gate, corrects, torch.empty(2, dtype=torch.int64, device="meta"), v)
    recurrence = Recurrence(heads, groups, key, width, 4, (0,), corrects)
    assert max(rounds) == recurrence.backward(tokens)


@pytest.mark.parametrize("name", MODELS)
def test_states_are_those_of_a_sequence(name: str) -> None:
    """The CPU's, and on a GPU's also an unfinished chunk's."""
    model = new_model(MODELS[name], seed=0)
    recurrence = Recurrence.of(model.config)
    assert recurrence is not None
    [spec, *_] = [each for each in model.state_spec() if each]
    numbers = sum(torch.Size(shape).numel() for shape in spec.values())
    kept = 16 * (recurrence.groups * recurrence.key_dim + recurrence.heads * (recurrence.width + 33))
    assert recurrence.state() == 4 * (numbers + kept)
    parts = predict(model.config, Layout(), torch.bfloat16, TOKENS).parts
    assert parts["states"] == (512 + 64) * len(recurrence.layers) * recurrence.state() < STATE_BYTES


def test_recurrent_layers_add_what_they_need() -> None:
    config = new_model(MODELS["delta"], seed=0).config
    recurrence = Recurrence.of(config)
    assert recurrence is not None
    assert config.delta is not None
    without = replace(config, delta=None)
    one, other = (predict(each, Layout(), torch.bfloat16, 4096).parts["activations"] for each in (config, without))
    heads = Heads.of(config, Layout())
    attended = 4096 * (heads.saved(2) + heads.backward(2))
    of_layer = 4096 * (recurrence.saved(2) + recurrence.gradients()) + recurrence.backward(4096)
    assert one - other == of_layer - attended > 0
