"""An engine's cache can be given back while its trainer works: the memory really goes, and the bits stay."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from rlloop.config.algorithm import CriticConfig
from rlloop.config.numerics import ProfileConfig
from rlloop.config.rollout import RolloutConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError
from rlloop.launch.make import make_engine, take_turns
from rlloop.models import Model, load_model
from rlloop.rollout.engine import cache_memory
from rlloop.rollout.engine.cache_memory import DevicePages, Driver
from rlloop.rollout.engine.engine import Engine
from rlloop.trainer import Trainer
from rlloop.trainer.critic import Critic
from rlloop.trainer.history import WeightHistory
from rlloop.types import Sample, SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.image_models import inputs, make_image_checkpoint
from tests.support.samples import as_sample
from tests.support.traffic import bits, traffic

MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, "qwen3", vocab_size=300)
    return load_model(folder)


def resident() -> int:
    """This process's bytes in memory."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_moe"])
def test_an_engine_that_slept_has_the_same_bits(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family, vocab_size=300)
    model = load_model(tmp_path)
    prompts, sampling = traffic(24)
    engine = Engine(model, max_running=8, sleep=True)
    expected = [bits(each) for each in Engine(model).generate(prompts, sampling)]
    for _ in range(2):
        assert [bits(each) for each in engine.generate(prompts, sampling)] == expected
        engine.sleep()
        engine.sleep()
    assert [each.tobytes() for each in engine.prefill_logprobs(prompts[:4])] == [
        each.tobytes() for each in Engine(model).prefill_logprobs(prompts[:4])
    ]


def test_features_of_images_go_too(tmp_path: Path) -> None:
    make_image_checkpoint(tmp_path)
    model, (prompt, _) = load_model(tmp_path), inputs()[0]
    engine, sampling = Engine(model, sleep=True), SamplingParams(4, seed=1, ignore_eos=True)
    [made] = engine.generate([prompt], sampling)
    assert engine._images._kept
    engine.sleep()
    assert not engine._images._kept
    assert bits(engine.generate([prompt], sampling)[0]) == bits(made)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says how much memory a process has")
def test_the_memory_goes_and_comes_back_as_zeros_at_the_same_addresses(model: Model) -> None:
    engine = Engine(model, max_cache_tokens=1 << 18, max_running=4, sleep=True)
    stores = [store for layer in engine._cache.stores for store in layer.values()]
    size, addresses = sum(store.nbytes for store in stores), [store.data_ptr() for store in stores]
    assert size >= 100 * MIB
    for store in stores:
        store.fill_(1)
    awake = resident()
    engine.sleep()
    assert awake - resident() > 0.95 * size
    engine.wake_up()
    assert [store.data_ptr() for store in stores] == addresses
    assert not any(store.any() for store in stores)


def test_what_was_cached_is_forgotten(model: Model) -> None:
    engine, sampling = Engine(model, sleep=True), SamplingParams(2, seed=1, ignore_eos=True)
    prompt = list(range(3, 53))
    cached = []
    for _ in range(2):
        engine.generate([prompt], sampling)
        cached.append(engine.stats().cached_tokens)
    assert cached[1] > cached[0] == 0
    engine.sleep()
    engine.generate([prompt], sampling)
    assert engine.stats().cached_tokens == cached[1]


def test_what_cannot_sleep_says_so(model: Model) -> None:
    with pytest.raises(ConfigError, match="has to be made with sleep=True"):
        Engine(model).sleep()
    engine = Engine(model, sleep=True)
    engine.add_request([5, 6, 7], SamplingParams(4, seed=0))
    engine.step()
    with pytest.raises(ConfigError, match=r"1 requests are in flight; call abort_all\(\) first"):
        engine.sleep()
    engine.abort_all()
    engine.sleep()


def test_the_engine_beside_a_trainer_sleeps_while_that_works(model: Model) -> None:
    def made(sleep: bool | None, beside: bool = True) -> Engine:
        engine = make_engine(model, ProfileConfig(), RolloutConfig(sleep=sleep), beside=beside)
        assert isinstance(engine, Engine)
        return engine

    engine, trainer = made(True), Trainer(model, TrainerConfig(lr=1e-2))
    take_turns([made(None), made(False), made(True, beside=False)], trainer)
    assert trainer.neighbours == []  # by default, on a GPU alone
    take_turns([engine], trainer)
    prompts, sampling = traffic(6)
    plain = Engine(model)
    for step in range(2):
        samples = [as_sample(i, each, float(i % 3)) for i, each in enumerate(engine.generate(prompts, sampling))]
        assert [bits(each.completion) for each in samples] == [bits(e) for e in plain.generate(prompts, sampling)]
        assert not engine._asleep
        trainer.forward_backward(samples, lambda batch: _sum(batch))
        assert engine._asleep
        trainer.optim_step()
        for each in (engine, plain):
            each.set_version(step + 1)


def test_the_engine_sleeps_while_a_critic_or_past_weights_compute(model: Model) -> None:
    engine, settings, trainer = Engine(model, sleep=True), TrainerConfig(), Trainer(model, TrainerConfig())
    critic = Critic(deepcopy(model), CriticConfig(lr=1e-3), settings)
    history = WeightHistory(model, 1, settings.max_batch_tokens, trainer.moe)
    history.remember(0)
    take_turns([engine], trainer, None, critic, history)
    prompts, sampling = traffic(2)
    works: list[Callable[[list[Sample]], object]] = [critic.values, critic.advantages, critic.update, history.recompute]
    for work in works:
        samples = [as_sample(i, each, 1.0) for i, each in enumerate(engine.generate(prompts, sampling))]
        assert not engine._asleep
        work(samples)
        assert engine._asleep, work


def _sum(batch):
    from rlloop.algorithms import LossOutput

    return LossOutput((batch.logprobs * batch.advantages).sum(), {})


# --------------------------------------------------------------------------------------- the GPU's pages, and a driver


class FakeDriver:
    """CUDA's driver over this process's memory, with `free` grains of 2 MiB."""

    GRAIN = 2 * MIB

    def __init__(self, free: int) -> None:
        self.free, self.calls = free, list[str]()
        self._ranges: dict[int, ctypes.Array] = {}
        self._physical: dict[int, int] = {}  # grains, by handle
        self._mapped: dict[int, int] = {}  # handle, by address
        for name in cache_memory.SIGNATURES:
            setattr(self, name, self._logged(name))

    def _logged(self, name: str):
        def function(*arguments) -> int:
            self.calls.append(name.removeprefix("cuMem"))
            return getattr(self, f"_{name}")(*arguments)

        return function

    def _cuMemGetAllocationGranularity(self, grain, properties, flags) -> int:
        assert properties._obj.kind == properties._obj.location.kind == 1
        grain._obj.value = self.GRAIN
        return 0

    def _cuMemAddressReserve(self, address, size, alignment, hint, flags) -> int:
        room = (ctypes.c_ubyte * size)()
        address._obj.value = ctypes.addressof(room)
        self._ranges[ctypes.addressof(room)] = room
        return 0

    def _cuMemAddressFree(self, address, size) -> int:
        assert address not in self._mapped
        del self._ranges[address]
        return 0

    def _cuMemCreate(self, handle, size, properties, flags) -> int:
        if size // self.GRAIN > self.free:
            return 2
        handle._obj.value = len(self.calls)
        self._physical[handle._obj.value] = size // self.GRAIN
        self.free -= size // self.GRAIN
        return 0

    def _cuMemMap(self, address, size, offset, handle, flags) -> int:
        assert address in self._ranges
        ctypes.memset(address, 0x7F, size)  # whatever was there
        self._mapped[address] = handle.value
        return 0

    def _cuMemRelease(self, handle) -> int:
        assert handle.value in self._mapped.values()
        return 0

    def _cuMemSetAccess(self, address, size, access, count) -> int:
        assert (access._obj.flags, count) == (3, 1)
        return 0

    def _cuMemUnmap(self, address, size) -> int:
        self.free += self._physical.pop(self._mapped.pop(address))
        return 0


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[FakeDriver]:
    """A GPU that is none. `torch.cuda.empty_cache` gives these drivers 64 grains once."""
    drivers: list[FakeDriver] = []

    def empty_cache() -> None:
        while drivers:
            drivers.pop().free += 64

    def as_tensor(owner, device):
        described = owner.__cuda_array_interface__
        [size], (address, read_only) = described["shape"], described["data"]
        assert (described["typestr"], read_only) == ("|u1", False)
        room = type("Room", (ctypes.c_ubyte * size,), {}).from_address(address)
        room.owner = owner  # which a tensor of torch keeps
        return torch.frombuffer(room, dtype=torch.uint8)

    for name, fake in {
        "device": lambda device: nullcontext(), "synchronize": lambda: None, "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False, "empty_cache": empty_cache,
        "mem_get_info": lambda: (3 << 30, 80 << 30),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    return drivers


def test_the_gpus_pages_are_unmapped_and_mapped_at_the_same_address(emptied: list[FakeDriver]) -> None:
    fake = FakeDriver(free=8)
    pages = DevicePages(5 * MIB, torch.device("cpu"), Driver(fake))
    assert fake.free == 5  # three grains
    store, other = pages.zeros((3, 1000), torch.bfloat16), pages.zeros((7,), torch.float32)
    assert other.data_ptr() - store.data_ptr() == 6144  # aligned
    assert not store.any()
    assert not other.any()
    store.fill_(2)
    pages.release()
    pages.release()
    assert fake.free == 8
    pages.restore()
    pages.restore()
    assert fake.free == 5
    assert not store.any()
    assert fake.calls[1:] == ["AddressReserve", "Create", "Map", "Release", "SetAccess", "Unmap", "Create", "Map",
                              "Release", "SetAccess"]  # fmt: skip


def test_memory_that_torch_keeps_is_asked_for_and_a_full_gpu_is_an_error(emptied: list[FakeDriver]) -> None:
    fake = FakeDriver(free=4)
    pages = DevicePages(8 * MIB, torch.device("cpu"), Driver(fake))
    pages.release()
    fake.free = 0  # the trainer has it
    emptied.append(fake)
    pages.restore()
    assert fake.free == 60
    pages.release()
    fake.free = 0
    with pytest.raises(ConfigError, match=r"0\.0 GiB, which does not fit in memory: 3\.0 of the GPU's 80\.0 GiB are"):
        pages.restore()
    fake.free = 4
    pages.restore()
    assert fake.free == 0


def test_the_range_ends_with_its_last_tensor(emptied: list[FakeDriver]) -> None:
    fake = FakeDriver(free=4)
    pages = DevicePages(MIB, torch.device("cpu"), Driver(fake))
    store = pages.zeros((10,), torch.uint8)
    del pages
    assert "AddressFree" not in fake.calls
    del store
    assert fake.calls[-2:] == ["Unmap", "AddressFree"]
    assert fake.free == 4


def test_a_range_that_ends_while_a_graph_is_recorded_is_freed_later(
    emptied: list[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeDriver(free=1)
    with monkeypatch.context() as recording:
        recording.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        DevicePages(MIB, torch.device("cpu"), Driver(fake))
        assert fake.free == 0
    DevicePages(MIB, torch.device("cpu"), Driver(fake))
    assert fake.calls.count("AddressFree") == 2
    assert fake.free == 1


def test_structures_have_the_drivers_sizes() -> None:
    assert ctypes.sizeof(cache_memory._Properties) == 32
    assert ctypes.sizeof(cache_memory._Access) == 12


def test_other_errors_of_the_driver_are_named() -> None:
    fake = FakeDriver(free=1)
    fake.cuMemUnmap = lambda address, size: 1
    with pytest.raises(RuntimeError, match="cuMemUnmap failed with CUDA's error 1"):
        Driver(fake).call("cuMemUnmap", 0, 0)
