"""Ranks that encode a version together, over gloo: the store has the bytes of one rank's, and any engine reads it."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch

from rlloop import Engine, SamplingParams, load_model
from rlloop.models import Model, new_model, save_model
from rlloop.models.parameters import ParameterStore
from rlloop.sync import manifest, packing, stream
from rlloop.sync.live import LiveTarget, named_weights
from rlloop.sync.manifest import Head
from rlloop.sync.packing import listing_from
from rlloop.sync.replica import Replica
from rlloop.sync.shares import spread
from rlloop.sync.store import FolderStore
from tests.support.rank_updates import DENSE, MIXTURE
from tests.support.rank_versions import PIECE, SMALL, model_of, published, step, stored
from tests.support.ranks import run_ranks
from tests.support.weight_history import PUBLIC

CPU = torch.device("cpu")
LAYOUTS = {
    2: {"dense": [{"dp_shard": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}],
        "mixture": [{"dp_shard": 2, "ep": 2}, {"tp": 2}],
        "adapter": [{"tp": 2}, {"dp_shard": 2, "ep": 2}, {"pp": 2}],
        "fp8": [{"dp_shard": 2}]},
    3: {"mixture": [{"dp_shard": 3, "ep": 3}, {"dp_replicate": 3}]},
    4: {"dense": [{"pp": 2, "tp": 2}],
        "mixture": [{"dp_shard": 2, "tp": 2, "ep": 4}, {"pp": 2, "dp_shard": 2, "ep": 2}]},
}  # fmt: skip
PROMPTS = [[5, 7, 9, 11], [4, 6], [8] * 9]
SAMPLING = SamplingParams(max_tokens=6, seed=3)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for module, name, value in ((packing, "JOINED", SMALL), (stream, "PIECE", PIECE), (manifest, "PIECE", PIECE)):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def folder(tmp_path):
    for name, config in (("dense", DENSE), ("mixture", MIXTURE)):
        model = new_model(config, seed=1, dtype="bfloat16")
        save_model(ParameterStore(model).snapshot(), tmp_path / name, config=model.config)
    return tmp_path


def all_published(folder: Path, cases: Mapping[str, list[dict[str, int]]]) -> list[list[str]]:
    return [
        published(folder, case, layout, folder / f"{case} {layout}", range(5))
        for case, layouts in cases.items()
        for layout in layouts
    ]


def replica_of(store: Path, model: Model) -> Replica:
    target = LiveTarget(named_weights(model).items(), lambda version: None)
    return Replica(FolderStore(store), PUBLIC, target, threads=1)


@pytest.mark.parametrize("size", LAYOUTS)
def test_ranks_store_the_bytes_of_one(folder, size):
    for case in LAYOUTS[size]:
        published(folder, case, {}, folder / f"{case} alone", range(5))
    kept = run_ranks(size, all_published, folder, LAYOUTS[size])
    runs = [(case, layout) for case, layouts in LAYOUTS[size].items() for layout in layouts]
    for (case, layout), *shares in zip(runs, *kept, strict=True):
        assert stored(folder / f"{case} {layout}") == stored(folder / f"{case} alone"), layout
        large = [name for share in shares for name in share]
        assert len(large) == len(set(large)), "one rank encodes a tensor"
        assert all(shares) or case == "adapter", f"{layout}: each rank encodes some"
        model, expected = model_of(folder, case), model_of(folder, case)
        late = replica_of(folder / f"{case} {layout}", model)
        assert late.poll()
        for version in range(5):
            step(expected, version)
        made = [Engine(each).generate(PROMPTS, SAMPLING) for each in (model, expected)]
        assert [(each.token_ids, each.logprobs.tobytes()) for each in made[0]] == [
            (each.token_ids, each.logprobs.tobytes()) for each in made[1]
        ]


@pytest.mark.parametrize("sizes", [(2, 3), (1, 3), (3, 1)])
def test_a_publisher_goes_on_with_another_number_of_ranks(folder, sizes):
    """The base of each rank's share comes from the store."""

    def publish(store: Path, size: int, versions: range) -> None:
        layout = {"dp_shard": size} if size > 1 else {}
        arguments = folder, "mixture", layout, store, versions
        run_ranks(size, published, *arguments) if size > 1 else published(*arguments)

    for size, versions in zip(sizes, (range(4), range(3, 6)), strict=True):
        publish(folder / "store", size, versions)
    for versions in (range(4), range(3, 6)):
        publish(folder / "alone", 1, versions)
    assert stored(folder / "store") == stored(folder / "alone")


def test_a_kill_of_the_first_rank_while_it_publishes_leaves_a_store_that_goes_on(folder):
    with pytest.raises(BrokenProcessPool):
        run_ranks(2, published, folder, "mixture", {"tp": 2}, folder / "store", range(5), "dies")
    assert replica_of(folder / "store", model := load_model(folder / "mixture", dtype="bfloat16")).poll()
    assert Head.decode(FolderStore(folder / "store").latest()).newest.step == 3
    expected = load_model(folder / "mixture", dtype="bfloat16")
    for version in range(4):
        step(expected, version)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))
    run_ranks(2, published, folder, "mixture", {"dp_shard": 2, "ep": 2}, folder / "store", range(4, 6))
    for versions in (range(4), range(4, 6)):
        published(folder, "mixture", {}, folder / "alone", versions)
    heads = [Head.decode(FolderStore(folder / name).latest()) for name in ("store", "alone")]
    assert heads[0].chain == heads[1].chain


def test_a_version_that_the_store_did_not_take_is_published_again(folder):
    """What other ranks had sent for it is not taken for the next one's."""
    run_ranks(3, published, folder, "mixture", {"dp_shard": 3, "ep": 3}, folder / "store", range(4), "fails")
    published(folder, "mixture", {}, folder / "alone", range(4))
    chains = [Head.decode(FolderStore(folder / name).latest()).chain for name in ("store", "alone")]
    assert chains[0] == chains[1]


def test_large_tensors_are_spread_over_the_ranks_that_hold_them():
    tensors = [("a", "BF16", (600,)), ("b", "BF16", (400,)), ("c", "F32", (300,)), ("d", "BF16", (299,))]
    listing = listing_from(tensors, {})
    every = {name: range(3) for name, _, _ in tensors}
    assert spread(listing, every, 3) == {"a": 0, "b": 1, "c": 2}
    assert spread(listing, {**every, "c": [1]}, 3) == {"a": 0, "b": 1, "c": 1}
