"""Optimizer state in host memory gives the bits that state on the device gives."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlloop.algorithms import LossBatch, LossOutput, get_loss
from rlloop.config.algorithm import AlgorithmConfig
from rlloop.config.run import RunConfig
from rlloop.config.trainer import MASTERS_STAY, TrainerConfig
from rlloop.errors import ConfigError
from rlloop.metrics import is_timing
from rlloop.models import new_model
from rlloop.models.adapter_weights import Adapter, choose_targets, fresh_weights
from rlloop.trainer import Trainer, offload, optimizer
from rlloop.trainer.offload import BLOCKS, BlockStream, HostMemory
from tests.support.rank_updates import DENSE, digests
from tests.support.train_sequences import make_batch

SMALL = 4096  # bytes of a block: every tensor of note is cut, and every block holds parts of several


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "BlockStream", lambda device: BlockStream(device, SMALL))


def make(kind: str, dtype: str, where: str) -> Trainer:
    model = new_model(DENSE, seed=0, dtype=dtype)
    if kind == "adapter":
        targets = choose_targets(model.requires_grad_(False).adapter_targets(), ["all-linear", "lm_head"])
        model = model.with_adapter(Adapter(fresh_weights(targets, 4, 6.0, seed=1), targets))
    config = TrainerConfig(lr=1e-2, grad_clip=0.5, max_batch_tokens=60, weight_decay=0.01, offload=where)
    return Trainer(model, config)


def digest(trainer: Trainer) -> str:
    sums = hashlib.sha256()
    for tensors in (dict(trainer.compute_copy()), trainer.masters):
        for name, tensor in tensors.items():
            sums.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()


def train(trainer: Trainer, steps: range) -> list[str]:
    """The digest of all weights after each step."""
    found = []
    for step in steps:
        trainer.forward_backward(make_batch(count=3, seed=step), get_loss("grpo"))
        trainer.optim_step()
        found.append(digest(trainer))
    return found


def infinite(batch: LossBatch) -> LossOutput:
    out = get_loss("grpo")(batch)
    return dataclasses.replace(out, loss=out.loss * torch.inf)


@pytest.mark.parametrize(
    ("kind", "dtype", "settings", "steps"),
    [
        ("full", "bfloat16", ("masters", "moments", "none", "masters"), 20),
        ("adapter", "bfloat16", ("masters", "none", "moments"), 6),
        ("full", "float32", ("moments", "none"), 4),
        ("adapter", "float32", ("none", "moments"), 4),
    ],
)
def test_steps_and_checkpoints_have_the_bits_of_state_on_the_device(
    tmp_path: Path, kind: str, dtype: str, settings: tuple[str, ...], steps: int
) -> None:
    """A run that changes its setting at each checkpoint, against one without."""
    here = make(kind, dtype, "none")
    expected = train(here, range(steps))
    assert len(set(expected)) == steps
    found, folder = [], None
    for index, where in enumerate(settings):
        trainer = make(kind, dtype, where)
        if folder is not None:
            trainer.restore(folder)
        found += train(trainer, range(steps)[index * steps // len(settings) : (index + 1) * steps // len(settings)])
        (folder := tmp_path / str(index)).mkdir()
        trainer.save(folder)
    assert found == expected
    assert folder is not None
    (tmp_path / "here").mkdir()
    here.save(tmp_path / "here")
    assert digests(folder) == digests(tmp_path / "here")


def test_hosted_masters_are_not_on_the_device_and_metrics_say_what_moved() -> None:
    trainer = make("full", "bfloat16", "masters")
    shards = list(trainer._masters.shards.values())
    assert all(shard.hosted and not shard.shares_memory for shard in shards)
    assert not any(shard.hosted for shard in make("full", "bfloat16", "moments")._masters.shards.values())
    trainer.forward_backward(make_batch(count=3), get_loss("grpo"))
    metrics = trainer.optim_step()
    numbers = sum(shard.flat.numel() for shard in shards)
    assert metrics["memory/host_bytes"] == numbers * 3 * 4
    assert metrics["memory/streamed_bytes"] == 2 * metrics["memory/host_bytes"]
    assert metrics["memory/stream_seconds"] > 0
    assert all(is_timing(name) for name in metrics if name.startswith("memory/"))
    trainer.forward_backward(make_batch(count=3), infinite)
    refused = trainer.optim_step()
    assert refused["trainer/refused"] == 1.0
    assert "memory/streamed_bytes" not in refused


def test_a_parameter_without_a_gradient_is_left_out() -> None:
    """Its step is not counted, as on the device: the bias correction of its first update shows it."""
    trainers = make("full", "bfloat16", "masters"), make("full", "bfloat16", "none")
    name = "model.layers.1.mlp.down_proj.weight"
    for trainer in trainers:
        for step in range(3):
            trainer.forward_backward(make_batch(count=3, seed=step), get_loss("grpo"))
            masters, sum_gradients = trainer._masters, trainer._masters.sum_gradients

            def without(masters=masters, sum_gradients=sum_gradients, step=step) -> None:
                sum_gradients()
                if step == 1:
                    del masters.sums[name]

            masters.sum_gradients = without
            trainer.optim_step()
            masters.sum_gradients = sum_gradients
    assert digest(trainers[0]) == digest(trainers[1])
    assert trainers[0]._optimizer._steps[name] == 2


def test_masters_that_are_the_compute_copy_cannot_be_offloaded() -> None:
    with pytest.raises(ConfigError, match=r"offload=masters.*float32.*offload=moments"):
        make("full", "float32", "masters")
    with pytest.raises(ConfigError, match=r"trainer\.offload"):
        TrainerConfig(offload="disk")
    with pytest.raises(ConfigError) as error:
        RunConfig(
            trainer=TrainerConfig(offload="masters"), algorithm=AlgorithmConfig(loss="grpo", advantage="group_norm")
        )
    assert str(error.value) == MASTERS_STAY.format("float32")


def test_blocks_come_ahead_and_go_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is worked on the next is there already, and no more than `BLOCKS` are on the device."""
    home = HostMemory(10 * 64, torch.device("cpu"))
    blocks = [[home.zeros_like(torch.zeros(16))] for _ in range(10)]
    for index, (tensor,) in enumerate(blocks):
        tensor.fill_(index)
    copies: list[tuple[str, int]] = []
    copy = BlockStream._copy

    def noted(
        stream: BlockStream, sources: list[Tensor], targets: list[Tensor], beside: torch.cuda.Stream | None
    ) -> object:
        copies.append(("there" if targets[0].data_ptr() not in hosts else "back", int(sources[0][0])))
        return copy(stream, sources, targets, beside)

    hosts = {tensor.data_ptr() for (tensor,) in blocks}
    monkeypatch.setattr(BlockStream, "_copy", noted)
    stream, addresses = BlockStream(torch.device("cpu"), 64), set()
    for index, (here,) in enumerate(stream.each(blocks)):
        assert ("there", min(index + 1, 9)) in copies
        assert ("back", 100 + index) not in copies
        addresses.add(here.data_ptr())
        here.add_(100)
    assert [int(tensor[0]) for (tensor,) in blocks] == list(range(100, 110))
    assert [value for way, value in copies if way == "back"] == list(range(100, 110))
    assert len(addresses) == BLOCKS
    assert stream.counts.bytes == 2 * 10 * 64
    assert offload.BLOCK_BYTES > SMALL
