"""Weight sync on the device: what is encoded, hashed and applied there is byte-equal with what the CPU makes of it."""

import numpy as np
import pytest
import torch
from blake3 import blake3

from rlloop.sync import codec, packing
from rlloop.sync.bits import UNSIGNED, WIDTH, Bits
from rlloop.sync.bundle import MemoryStore
from rlloop.sync.live import LiveTarget, device_tensors_of
from rlloop.sync.publisher import Publisher
from rlloop.sync.replica import Replica
from rlloop.sync.steps import Changes
from tests.support.weight_history import KEY, PUBLIC

CHUNK = 1 << 16
KINDS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(codec, "CHUNK", CHUNK)
    monkeypatch.setattr(codec, "SMALL", 0)
    monkeypatch.setattr(packing, "JOINED", 1000)


def pair(dtype: str, count: int, rate: float, spread: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Patterns before and after; of all classes with `spread`, else mostly of a few."""
    rng, bits = np.random.default_rng(count), 8 * WIDTH[dtype]
    old = rng.integers(0, 1 << bits, count, np.uint64).astype(UNSIGNED[WIDTH[dtype]])
    if dtype == "BF16" and not spread:
        old = (rng.standard_normal(count) * 0.02).astype("<f4").view("<u4").__rshift__(16).astype("<u2")
    flips = rng.random(count) < rate
    by = np.where(rng.random(count) < 0.9, 1, rng.integers(1, 1 << bits, count, np.uint64)).astype(old.dtype)
    return old, np.where(flips, old + by, old).astype(old.dtype)


def on_gpu(dtype: str, patterns: np.ndarray):
    from rlloop.sync.device import DeviceBits

    return DeviceBits(dtype, torch.from_numpy(patterns.view(f"i{patterns.itemsize}").copy()).cuda())


@pytest.mark.parametrize("size", [0, 1, 3, 64, 65, 1024, 1025, 2048, 5 * 1024 + 6, 1_000_003])
def test_digests_are_blake3s(size):
    from rlloop.numerics.kernels.triton import blake3 as kernels

    content = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    other = torch.randint(0, 256, (70_000,), dtype=torch.uint8, device="cuda")
    expected = [blake3(each.cpu().numpy().tobytes()).digest() for each in (content, other, content[1:])]
    assert kernels.digests([content, other, content[1:]]) == expected


@pytest.mark.parametrize("dtype", sorted(KINDS))
@pytest.mark.parametrize(("count", "rate"), [(3 * CHUNK + 777, 0.01), (CHUNK, 0.8), (9 * CHUNK, 0.0001), (5000, 1.0)])
def test_changes_are_the_cpus(dtype, count, rate):
    from rlloop.sync import device

    steps = codec.fast().steps
    for spread in (False, True):
        old, new = pair(dtype, count, rate, spread)
        was, now = on_gpu(dtype, old), on_gpu(dtype, new)
        found = [changes() for changes in device.find_changes(was, now)]
        expected = [
            steps.find_changes(old[at : at + CHUNK], new[at : at + CHUNK], codec.ORDERINGS[dtype])[0]
            for at in range(0, count, CHUNK)
        ]
        for one, other in zip(found, expected, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        patch = device.patch_of(found, was)
        assert len(patch.places) == np.count_nonzero(old != new)
        assert device.patched(was, patch).same(now)
        assert device.Writes([(was.tensor, patch)]).done()
        assert was.same(now)


def test_changes_outside_of_the_tensor_are_refused():
    from rlloop.sync import device

    old = on_gpu("BF16", np.full(1000, 0x3F80, np.uint16))
    counts = np.zeros(256, np.int64)
    for class_, gap in ((0x3F80 >> 7, 1000), (0x3F80 >> 7, 2**32 - 1), (3, 0)):
        counts[:] = 0
        counts[class_] = 1
        patch = device.patch_of([Changes(counts, np.array([gap], np.uint32), np.array([0], np.uint32))], old)
        hashing = device.Digests()
        hashing.add_patched("weight", old, patch)
        with pytest.raises(codec.CodecError, match="outside"):
            hashing.all()


def test_what_memory_does_not_hold_is_noticed():
    from rlloop.numerics.kernels.triton import changes as kernels

    tensor = torch.zeros(100, dtype=torch.int16, device="cuda")
    addresses = torch.tensor([0, 2, 0], device="cuda") + tensor.data_ptr()
    values = torch.tensor([1, 2, 3], dtype=torch.int16, device="cuda")
    assert int(kernels.put(addresses, values)) == 1, "two values for one place"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_publisher_and_replica_on_the_device_are_the_cpus(dtype):
    """Versions published from the device and from the CPU are the same bytes; engines on both follow either."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator) * 0.02

    masters = {"a": draw(300, 700), "b": draw(1000), "c": draw(17), "d": draw(64, 1024)}
    versions = []
    for _ in range(4):
        versions.append({name: master.to(dtype, copy=True) for name, master in masters.items()})
        for name in ("a", "b", "c"):
            masters[name] += 1e-5 * draw(*masters[name].shape) * 50
    stores = [MemoryStore(), MemoryStore()]
    publishers = [Publisher(store, KEY, "run", threads=3) for store in stores]
    served = {name: torch.zeros_like(tensor) for name, tensor in versions[0].items()}
    on_host = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in versions[0].items()}
    seen: list[int] = []
    replicas = [
        Replica(stores[0], PUBLIC, LiveTarget(on_host.items(), seen.append)),
        Replica(stores[1], PUBLIC, LiveTarget(served.items(), seen.append)),
    ]
    late = {name: torch.zeros_like(tensor) for name, tensor in versions[0].items()}
    for step, weights in enumerate(versions):
        host, _ = device_tensors_of(weights.items())
        given = {name: bits.host() for name, bits in host.items()}
        [one, other] = publishers[0].publish(given, step), publishers[1].publish(host, step)
        assert one.manifest.pieces == other.manifest.pieces
        assert one.hash == other.hash
        for replica, live in zip(replicas, (on_host, served), strict=True):
            assert replica.poll(), replica.error
            assert all(torch.equal(live[name].cpu(), tensor.cpu()) for name, tensor in weights.items())
            assert replica.audit() == []
    assert {entry.codec for entry in publishers[1].last.tensors} >= {"changes"}
    joiner = Replica(stores[1], PUBLIC, LiveTarget(late.items(), seen.append))  # the whole chain at once
    assert joiner.poll(), joiner.error
    assert all(torch.equal(late[name], tensor) for name, tensor in versions[-1].items())
    served["a"][3, 4] += 1
    publishers[1].publish(device_tensors_of(versions[0].items())[0], 9)
    assert not replicas[1].poll(), "a weight that changed by itself"
    assert replicas[1].poll()
    assert torch.equal(served["a"], versions[0]["a"])


def test_a_publisher_goes_on_from_a_store_and_squashes_on_the_device():
    """What it rebuilds from the store is in the host's memory, what it publishes on the device."""
    generator = torch.Generator("cuda").manual_seed(0)
    weights = {
        name: 0.02 * torch.randn(size, device="cuda", generator=generator).bfloat16()
        for name, size in (("a", 300_000), ("b", 70_000), ("c", 17))
    }
    stores = [MemoryStore(), MemoryStore()]
    served = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    replica = Replica(stores[0], PUBLIC, LiveTarget(served.items(), lambda version: None))
    for step in range(6):
        publishers = [Publisher(store, KEY, "run", threads=3) for store in stores]  # each a new process's
        on_device, _ = device_tensors_of(weights.items())
        on_host = {name: bits.host() for name, bits in on_device.items()}
        expected = {name: tensor.clone() for name, tensor in weights.items()}
        one, other = publishers[0].publish(on_device, step), publishers[1].publish(on_host, step)
        assert one.hash == other.hash
        if step == 0:
            assert replica.poll(), replica.error
        for tensor in weights.values():
            tensor += 1e-4 * torch.randn(tensor.shape, device="cuda", generator=generator).bfloat16()
    assert publishers[0].squash(0).hash == publishers[1].squash(0).hash
    assert replica.poll(), replica.error
    assert all(torch.equal(served[name], tensor) for name, tensor in expected.items())


def test_bits_of_any_kind_come_back():
    for dtype, kind in KINDS.items():
        patterns = pair(dtype, 1000, 0.5)[0]
        assert on_gpu(dtype, patterns).host().same(Bits(dtype, patterns))
        tensor = torch.from_numpy(patterns.view(f"i{patterns.itemsize}")).cuda().view(kind)
        target = LiveTarget({"w": tensor}.items(), lambda version: None)
        target.write("w", Bits(dtype, patterns[::-1].copy()))
        assert target.read("w").host().same(Bits(dtype, patterns[::-1].copy()))
