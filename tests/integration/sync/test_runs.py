"""Whose versions: a replica follows one run, a store has one, and of its publishers the last."""

from __future__ import annotations

import time

import msgspec
import pytest

from rlloop.errors import ConfigError
from rlloop.launch.regions import run_id_of
from rlloop.rollout.fleet.external_trainer import Publishing
from rlloop.sync.manifest import Head, Refused
from rlloop.sync.publisher import Publisher
from rlloop.sync.replica import Replica, State
from rlloop.sync.store import Conflict, FolderStore
from rlloop.sync.target import MemoryTarget
from tests.support.weight_history import KEY, PUBLIC, first_weights, history, next_weights, same


class Address:
    """A store that is another one's from some time on, as at a trainer's address when a new run begins."""

    def __init__(self, store: FolderStore) -> None:
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)


@pytest.fixture
def runs(tmp_path):
    """Run a at version 3, run b at version 0, under one key; and an address that is a's."""
    stores = {name: FolderStore(tmp_path / name) for name in "ab"}
    for step, weights in enumerate(history(3)):
        Publisher(stores["a"], KEY, "a").publish(weights, step)
    Publisher(stores["b"], KEY, "b").publish(first_weights(seed=7), 0)
    return stores, Address(stores["a"])


def test_a_replica_follows_the_first_run_that_it_meets_and_no_other(runs):
    stores, address = runs
    target = MemoryTarget()
    replica = Replica(address, PUBLIC, target)
    assert replica.poll()
    address.store = stores["b"]
    assert not replica.poll()
    assert replica.error == "the store has run b, and this engine follows run a alone until it is started anew"
    assert (replica.state, replica.ready, target.version) == (State.error, True, 3)  # the old one serves
    assert same(target.state, history(3)[3])
    address.store = stores["a"]
    Publisher(stores["a"], KEY, "a").publish(next_weights(history(3)[3], 4), 4)
    assert replica.poll()
    assert replica.applied.version == "a/4"


def test_a_head_that_lies_about_the_run_changes_nothing(runs):
    stores, address = runs
    target = MemoryTarget()
    replica = Replica(address, PUBLIC, target)
    assert replica.poll()
    other = Publisher(stores["b"], KEY, "b")
    for step in range(1, 6):  # further than a is
        other.publish(next_weights(first_weights(seed=7), step), step)
    other.anchor()
    assert other.head is not None
    address.store = stores["b"]
    with pytest.raises(Refused, match="version b/5 is offered, and this engine follows run a alone"):
        replica.advance_to(head=msgspec.structs.replace(other.head, run_id="a"))
    assert (target.version, replica.run_id) == (3, "a")


def test_one_that_is_named_is_waited_for(runs):
    stores, address = runs
    target = MemoryTarget()
    replica = Replica(address, PUBLIC, target, run_id="b")
    assert not replica.poll()
    assert "the store has run a, and this engine follows run b" in replica.error
    assert (target.version, replica.ready) == (-1, False)
    address.store = stores["b"]
    assert replica.poll()
    assert replica.applied.version == "b/0"


def test_where_any_run_is_wanted_each_begins_anew(runs):
    stores, address = runs
    target = MemoryTarget()
    replica = Replica(address, PUBLIC, target, any_run=True)
    assert replica.poll()
    address.store = stores["b"]
    assert replica.poll()  # though its numbers are lower
    assert (replica.applied.version, replica.run_id, target.version) == ("b/0", "b", 0)
    assert same(target.state, first_weights(seed=7))
    old = Head.decode(stores["b"].latest())
    publisher = Publisher(stores["b"], KEY, "b")
    publisher.publish(next_weights(first_weights(seed=7), 1), 1)
    assert replica.poll()
    with pytest.raises(Refused, match="sequence 0 is older than 1"):
        replica.advance_to(head=old)
    with pytest.raises(Refused, match="version b/0 is older than b/1"):  # whatever the head calls it
        replica.advance_to(head=msgspec.structs.replace(old, run_id="c"))
    assert target.version == 1


def test_live_weights_that_change_by_themselves_do_not_free_a_replica_from_its_run(runs):
    stores, address = runs
    target = MemoryTarget()
    replica = Replica(address, PUBLIC, target)
    assert replica.poll()
    target.state["model.norm.weight"].array[0] ^= 1
    assert replica.audit() == ["model.norm.weight"]
    address.store = stores["b"]
    assert not replica.poll()
    assert "follows run a alone" in replica.error
    address.store = stores["a"]
    assert replica.poll()


def test_a_store_has_one_run(runs):
    stores, _ = runs
    with pytest.raises(ConfigError, match="has the versions of run a, and this is run b: give it a store of its own"):
        Publisher(stores["a"], KEY, "b")


def test_a_run_keeps_its_name_where_its_folder_moves_and_another_never_has_it(tmp_path):
    (tmp_path / "run").mkdir()
    name = run_id_of(tmp_path / "run")
    assert name.startswith("run-")
    assert "/" not in name
    (tmp_path / "run").rename(tmp_path / "moved")
    assert run_id_of(tmp_path / "moved") == name
    (tmp_path / "run").mkdir()
    assert run_id_of(tmp_path / "run") != name


def test_terms_only_grow_whatever_the_clock_says(tmp_path, monkeypatch):
    store = FolderStore(tmp_path)
    publisher = Publisher(store, KEY, "run")
    assert publisher.claim() == 1  # nothing to fence off yet
    publisher.publish(first_weights(), 0)
    terms = []
    for hour in range(3):
        monkeypatch.setattr(time, "time", lambda hour=hour: 1e9 - 3600 * hour)  # each an hour before the last one
        terms.append(Publishing(store, KEY, "run", anchor_every=50).term)
    assert terms == [2, 3, 4]


def test_who_claims_a_store_fences_off_who_has_it(tmp_path):
    store, versions = FolderStore(tmp_path), history(4)
    first = Publisher(store, KEY, "run")
    first.claim()
    first.publish(versions[0], 0)
    second, third = Publisher(store, KEY, "run"), Publisher(store, KEY, "run")
    assert second.claim() == 2
    for late in (lambda: first.publish(versions[1], 1), first.anchor, third.claim):
        with pytest.raises(Conflict):
            late()
    second.publish(versions[1], 1)
    second.anchor()
    second.squash(0)
    assert Head.decode(store.latest()).term == 2  # through every kind of publication
    assert Publisher(store, KEY, "run").claim() == 3
    replica, target = Replica(store, PUBLIC, target := MemoryTarget()), target
    assert replica.poll()
    assert same(target.state, versions[1])
