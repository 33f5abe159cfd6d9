"""Publisher and replica over a folder: chains, anchors, squashes, collection, names."""

import os
import shutil
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard

from rlloop.errors import ConfigError
from rlloop.sync.bits import Bits, digest
from rlloop.sync.manifest import (
    Ed25519PrivateKey,
    Head,
    Listing,
    Manifest,
    Refused,
    load_key,
    load_or_make_key,
    public_hex,
    public_key,
    write_secret,
)
from rlloop.sync.publisher import Publisher, state_at
from rlloop.sync.replica import Replica, State
from rlloop.sync.route import route
from rlloop.sync.store import Conflict, FolderStore
from rlloop.sync.target import MemoryTarget
from tests.support.weight_history import KEY, PUBLIC, first_weights, history, next_weights, same


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path / "store")


def new_replica(store, weights=None, **options) -> tuple[Replica, MemoryTarget]:
    target = MemoryTarget(weights)
    return Replica(store, PUBLIC, target, **options), target


def zeros(weights):
    return {name: Bits(bits.dtype, np.zeros_like(bits.array)) for name, bits in weights.items()}


@pytest.mark.parametrize("threads", [1, 3])
def test_a_replica_follows_bit_for_bit(store, threads):
    versions = history(4)
    publisher = Publisher(store, KEY, "run", threads=threads)
    replica, target = new_replica(store, zeros(versions[0]), threads=threads)
    assert not replica.poll()
    assert not replica.ready
    for step, weights in enumerate(versions):
        published = publisher.publish(weights, step)
        assert published.manifest.version == f"run/{step}"
        assert replica.poll()
        assert same(target.state, weights)
        assert target.version == step
        assert replica.applied.version == f"run/{step}"
        assert (replica.state, replica.error, replica.ready) == (State.idle, "", True)
        assert replica.metrics["sync/wire_bytes"] == published.metrics["sync/wire_bytes"]
        assert not replica.poll()
    assert published.metrics["sync/ratio"] > 3
    assert 0.03 < published.metrics["sync/changed"] < 0.07
    kinds = {entry.name: entry.codec for entry in published.manifest.tensors}
    assert kinds["model.norm.weight"] == "unchanged"
    assert kinds["model.embed_tokens.weight"] == "adaptive"
    assert kinds["model.layers.0.bias"] == "changes"


def test_weights_without_elements_are_a_version_too(store):
    weights = {"buffer": Bits("BF16", np.zeros((3, 0), "<u2"))}
    published = Publisher(store, KEY, "run").publish(weights, 0)
    assert published.metrics["sync/changed"] == 0
    replica, target = new_replica(store, weights)
    assert replica.poll()
    assert target.version == 0


def test_only_changed_tensors_are_written(store):
    versions = history(1)
    publisher = Publisher(store, KEY, "run")
    replica, target = new_replica(store, versions[0])
    written = []
    write = target.write
    target.write = lambda name, bits: (written.append(name), write(name, bits))
    publisher.publish(versions[0], 0)
    replica.poll()
    assert written == []  # the model was loaded with these weights already
    publisher.publish(versions[1], 1)
    replica.poll()
    assert "model.embed_tokens.weight" in written
    assert "model.norm.weight" not in written


def test_the_same_version_again_changes_nothing(store):
    weights = first_weights()
    publisher = Publisher(store, KEY, "run")
    first = publisher.publish(weights, 3)
    assert publisher.publish(dict(weights), 3).hash == first.hash
    assert publisher.publish(weights, 4).manifest.sequence == 1


def test_staging_shares_no_memory_with_what_is_published_or_served(store):
    versions = history(2)
    publisher = Publisher(store, KEY, "run")
    given = {name: Bits(bits.dtype, bits.array.copy()) for name, bits in versions[0].items()}
    publisher.publish(given, 0)
    for bits in given.values():
        bits.array[...] ^= 1  # the trainer goes on in place
    publisher.publish(versions[1], 1)
    replica, target = new_replica(store)
    replica.poll()
    assert same(target.state, versions[1])


def test_a_trainer_that_resumes_rebuilds_what_was_published(store):
    versions = history(5)
    publisher = Publisher(store, KEY, "run")
    for step in range(4):
        publisher.publish(versions[step], step)
    replica, target = new_replica(store)
    replica.poll()
    resumed = Publisher(store, KEY, "run")
    assert resumed.last == publisher.last
    again = resumed.publish(versions[2], 2)  # from an older checkpoint: the step goes back, the sequence does not
    assert (again.manifest.sequence, again.manifest.step) == (4, 2)
    assert replica.poll()
    assert same(target.state, versions[2])
    assert target.version == 2
    with pytest.raises(Conflict):  # the one that was taken for dead
        publisher.publish(versions[4], 4)
    assert replica.poll() is False
    assert same(target.state, versions[2])


def test_joiners_take_the_cheapest_way(store):
    versions = history(9)
    publisher = Publisher(store, KEY, "run")
    for step in range(7):
        publisher.publish(versions[step], step)
    behind, behind_target = new_replica(store)
    behind.advance_to(2)
    assert same(behind_target.state, versions[2])
    squashed = publisher.squash(2)
    anchor = publisher.anchor()
    publisher.publish(versions[7], 7)
    head = publisher.head
    from_two = route(head, (2, head.chain[2].manifest), 7)
    assert [link.base for link in from_two] == [2, 6]
    assert [link.base for link in route(head, None, 7)] == [None, 6]
    assert from_two[0].wire_bytes == squashed.metrics["sync/wire_bytes"] < anchor.metrics["sync/wire_bytes"]
    committed = []
    behind_target.set_version = committed.append
    behind.poll()
    assert same(behind_target.state, versions[7])
    assert committed[-1] == 7  # in one commit, with no version in between
    assert committed.count(-1) == 1
    joiner, target = new_replica(store)
    joiner.poll()
    assert same(target.state, versions[7])
    publisher.publish(versions[8], 8)  # who came by a shortcut goes on along the chain
    assert joiner.poll()
    assert behind.poll()
    assert same(target.state, versions[8])
    assert same(behind_target.state, versions[8])


def test_a_replica_of_another_history_needs_an_anchor(store, tmp_path):
    versions = history(3)
    publisher = Publisher(store, KEY, "run")
    for step in range(3):
        publisher.publish(versions[step], step)
    head = publisher.head
    assert [link.sequence for link in route(head, (0, head.chain[0].manifest), 2)] == [1, 2]
    with pytest.raises(Refused, match="no route leads"):
        route(head, (1, b"x" * 32), 2)
    publisher.anchor()
    assert [link.base for link in route(publisher.head, (1, b"x" * 32), 2)] == [None]


def test_anchors_are_due_by_count_and_by_weight(store):
    weights = first_weights()
    publisher = Publisher(store, KEY, "run", anchor_every=3)
    due = []
    for step in range(8):
        publisher.publish(weights, step)
        weights = next_weights(weights, step)
        due.append(publisher.anchor_due())
        if due[-1]:
            publisher.anchor()
    assert due == [False, False, False, True, False, False, True, False]
    noisy = Publisher(store, KEY, "run", anchor_every=100)
    for step in range(8, 10):
        noisy.publish(first_weights(step), step)
    assert noisy.anchor_due()


def test_collection_keeps_two_whole_chains(store):
    versions = history(12)
    publisher = Publisher(store, KEY, "run")
    replica, target = new_replica(store)
    for step in range(12):
        publisher.publish(versions[step], step)
        if step == 1:
            replica.poll()
        if step in (4, 8):
            publisher._shortcut({}, None)
    stray = store.put(b"left by a publisher that was killed")
    before = set(store.blobs())
    publisher.collect()
    assert publisher.head.chain[0].sequence == 4
    assert not store.has(stray)
    assert set(store.blobs()) < before
    for sequence in range(4, 12):
        state, digests = state_at(store, KEY, publisher.head, sequence)
        assert same(state, versions[sequence])
        assert digests == {name: digest(bits.array) for name, bits in state.items()}
    assert replica.poll()  # its chain is pruned: an anchor leads on
    assert same(target.state, versions[11])
    assert not publisher.collect()


def test_another_layout_begins_anew(store):
    weights = first_weights()
    publisher = Publisher(store, KEY, "run")
    publisher.publish(weights, 0)
    grown = {**weights, "model.extra": Bits("BF16", np.ones(5, np.uint16))}
    published = publisher.publish(grown, 1)
    assert published.manifest.parent is None
    replica, target = new_replica(store)
    replica.poll()
    assert same(target.state, grown)
    assert same(Publisher(store, KEY, "run")._state.tensors, grown)


# ---------------------------------------------------------------------------------------------------- names


def test_every_name_must_reach_a_parameter_and_every_parameter_a_name(store):
    weights = first_weights()
    Publisher(store, KEY, "run").publish(weights, 0)
    without = {name: bits for name, bits in zeros(weights).items() if "experts" not in name}
    replica, _ = new_replica(store, without)
    assert not replica.poll()
    assert "unknown here ['model.layers.0.mlp.experts.7.up_proj.weight']" in replica.error
    replica, _ = new_replica(store, {**zeros(weights), "draft_head.weight": Bits("BF16", np.zeros(3, np.uint16))})
    assert not replica.poll()
    assert "missing ['draft_head.weight']" in replica.error
    for other in (Bits("BF16", np.zeros(41, np.uint16)), Bits("F16", np.zeros(40, np.uint16))):
        replica, target = new_replica(store, {**zeros(weights), "model.norm.weight": other})
        assert not replica.poll()
        assert "model.norm.weight" in replica.error
        assert target.version == -1
        assert replica.applied is None


HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("tied_here", [True, False])
@pytest.mark.parametrize("tied_there", [True, False])
def test_tied_weights(store, tied_there, tied_here):
    """A tied lm_head never goes stale, whichever side ties it."""
    versions = history(2)
    publisher = Publisher(store, KEY, "run")
    layout = zeros(versions[0])
    target = MemoryTarget(layout if tied_here else {**layout, HEAD: layout[EMBED]}, {HEAD: EMBED} if tied_here else {})
    replica = Replica(store, PUBLIC, target)
    for step, weights in enumerate(versions):
        if tied_there:
            publisher.publish(weights, step, aliases={HEAD: EMBED})
        else:
            publisher.publish({**weights, HEAD: weights[EMBED]}, step)
        moved = replica.poll()
        if tied_here and not tied_there:
            assert not moved
            assert "two tensors" in replica.error
        else:
            assert moved, replica.error
            assert target.state[EMBED].same(weights[EMBED])
            assert tied_here or target.state[HEAD].same(weights[EMBED])


# ---------------------------------------------------------------------------------------------------- signatures


def test_manifests_are_refused_where_anything_is_odd():
    weights = first_weights()
    publisher = Publisher(FolderStoreInMemory(), KEY, "run")
    manifest = publisher.publish(weights, 0).manifest
    signed = manifest.sign(KEY)
    listing = publisher._state.listing
    assert Manifest.verify(signed, PUBLIC, lambda _: listing) == manifest
    assert Listing.decode(listing.encode()) == listing
    assert len(signed) < 400
    rng = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(signed)
        damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
        with pytest.raises(Refused):
            Manifest.verify(
                bytes(damaged[: rng.integers(len(damaged))] if rng.random() < 0.2 else damaged),
                PUBLIC,
                lambda _: pytest.fail("a listing is looked for before the signature is found good"),
            )
    with pytest.raises(Refused, match="another key"):
        Manifest.verify(manifest.sign(Ed25519PrivateKey.generate()), PUBLIC, lambda _: listing)
    with pytest.raises(Refused, match="not a manifest of format 3: it begins with b'rlloop-manifest1'"):
        Manifest.verify(b"rlloop-manifest1" + signed[8:], PUBLIC, lambda _: listing)
    first, *entries = manifest.tensors
    change = msgspec.structs.replace
    for odd in (
        change(manifest, pieces=()),
        change(manifest, pieces=(b"short",)),
        change(manifest, root=b""),
        change(manifest, parent=b"short"),
        change(manifest, listing=b""),
        change(manifest, tensors=()),
        change(manifest, tensors=manifest.tensors[1:]),
        change(manifest, tensors=(first, first, *entries)),
        change(manifest, tensors=(change(first, size=-1), *entries)),
        change(manifest, tensors=(change(first, size=first.size + (8 << 20)), *entries)),
        change(manifest, tensors=(change(first, codec="joined"), *entries)),
        change(manifest, tensors=(change(first, codec="unchanged"), *entries)),
        change(manifest, tensors=(*manifest.tensors[:-1], change(manifest.tensors[-1], codec="joined"))),
    ):
        with pytest.raises(Refused):
            Manifest.verify(odd.sign(KEY), PUBLIC, lambda _: listing)


def test_listings_are_refused_where_anything_is_odd():
    listing = Listing((("a", "BF16", (2, 3)), ("b", "F32", ())), {"c": "a"})
    change = msgspec.structs.replace
    for odd in (
        change(listing, aliases={"x": "y"}),
        change(listing, aliases={"b": "a"}),
        change(listing, tensors=(("a", "F7", (2, 3)),)),
        change(listing, tensors=(("a", "F32", (-1,)),)),
        change(listing, tensors=(("a", "F32", (1 << 30, 1 << 30)),)),
        change(listing, tensors=(("a", "F32", ()), ("a", "F32", ()))),
    ):
        with pytest.raises(Refused):
            Listing.decode(odd.encode())
    content = listing.encode()
    assert Listing.decode(content) == listing
    bomb = zstandard.ZstdCompressor(3).compress(bytes(65 << 20))
    quiet = zstandard.ZstdCompressor(3, write_content_size=False).compress(bytes(65 << 20))
    for odd in (b"", content[:-1], content[:20], bomb, quiet):
        with pytest.raises(Refused, match=r"larger than|cannot be read"):
            Listing.decode(odd)


def test_a_manifest_costs_hashes_and_a_byte_a_tensor(store):
    """Names, types and shapes cross once; digests never."""
    many = {f"model.layers.{i}.norm.weight": Bits("BF16", np.full(8, i, np.uint16)) for i in range(1000)}
    publisher = Publisher(store, KEY, "run")
    publisher.publish(many, 0)
    replica, target = new_replica(store, zeros(many))
    assert replica.poll()
    asked: list[bytes] = []
    get, store.get = store.get, lambda digest, start=0: (asked.append(digest), get(digest, start))[1]
    many["model.layers.7.norm.weight"].array[3] ^= 1
    published = publisher.publish(many, 1)
    assert published.metrics["sync/wire_bytes"] < 400
    assert replica.poll()
    assert same(target.state, many)
    assert asked == [published.hash, *published.manifest.pieces]


def test_a_root_that_is_not_the_tensors_is_refused(store):
    weights = first_weights()
    publisher = Publisher(store, KEY, "run")
    publisher.publish(weights, 0)
    replica, target = new_replica(store)
    odd = msgspec.structs.replace(publisher.last, root=bytes(32))
    link = msgspec.structs.replace(publisher.head.newest, manifest=store.put(odd.sign(KEY)))
    with pytest.raises(Refused, match="another root"):
        replica.advance_to(head=Head("run", (link,)))
    assert target.state == {}
    assert replica.poll()


class FolderStoreInMemory:
    """Blobs in a dictionary."""

    def __init__(self) -> None:
        self.held, self.head = {}, None

    def latest(self):
        return self.head

    def get(self, digest, start=0):
        yield self.held[digest][start:]

    def put(self, blob):
        from rlloop.sync.manifest import hash_of

        self.held[hash_of(blob)] = blob
        return hash_of(blob)

    def swap_latest(self, expected, new):
        assert self.head == expected
        self.head = new


def test_an_odd_head_is_refused():
    for content in (b"", b"x", Head("run", ()).encode(), msgspec.msgpack.encode({"run_id": 3})):
        with pytest.raises(Refused):
            Head.decode(content)


def test_keys(tmp_path):
    key = load_or_make_key(tmp_path / "key")
    assert public_hex(load_or_make_key(tmp_path / "key")) == public_hex(key)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    text = (tmp_path / "key.pub").read_text()
    assert public_hex(public_key(text)) == text.strip() == public_hex(key)
    with pytest.raises(ConfigError, match=r"the signing key .*absent/key cannot be written: No such file or directory"):
        load_or_make_key(tmp_path / "absent" / "key")
    (tmp_path / "odd").write_text("no key")
    for wrong in (tmp_path / "odd", tmp_path / "absent"):
        with pytest.raises(ConfigError):
            load_key(wrong)
    with pytest.raises(ConfigError, match="64 hexadecimal"):
        public_key("abc")
    with pytest.raises(ConfigError, match=r"is a private key .its .pub file") as mistaken:  # nothing of which is told
        public_key((tmp_path / "key").read_text())
    assert "MC4C" not in str(mistaken.value)


def test_of_two_first_starts_at_once_one_makes_the_key(tmp_path, monkeypatch):
    path, link = tmp_path / "key", os.link
    other: list[str] = []

    def first(source, target):
        assert not path.exists()  # and nothing torn
        monkeypatch.setattr(os, "link", link)
        other.append(public_hex(load_or_make_key(path)))
        link(source, target)

    monkeypatch.setattr(os, "link", first)
    assert [public_hex(load_or_make_key(path))] == other
    assert (tmp_path / "key.pub").read_text().strip() == other[0]
    assert {file.name for file in tmp_path.iterdir()} == {"key", "key.pub"}


def test_a_key_can_lie_in_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError

    monkeypatch.setattr(os, "link", refused)
    key = load_or_make_key(tmp_path / "key")
    assert public_hex(load_or_make_key(tmp_path / "key")) == public_hex(key)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_a_secret_that_exists_is_found_in_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("known")
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", None)
    with pytest.raises(FileExistsError):
        write_secret(tmp_path / "token", b"new")
    assert (tmp_path / "token").read_text() == "known"


def test_a_key_whose_public_half_cannot_be_written_is_not_left(tmp_path):
    (tmp_path / "key.pub").mkdir()
    for _ in range(2):
        with pytest.raises(ConfigError, match="key cannot be written: Is a directory; choose another path"):
            load_or_make_key(tmp_path / "key")


def test_what_a_publisher_refuses(store):
    publisher = Publisher(store, KEY, "run")
    for wrong in (lambda: Publisher(store, KEY, "a/b"), lambda: Publisher(store, KEY, ""),
                  lambda: Publisher(store, KEY, "run", anchor_every=0), lambda: publisher.publish({}, 0),
                  publisher.anchor, lambda: publisher.squash(0)):  # fmt: skip
        with pytest.raises(ConfigError):
            wrong()
    with pytest.raises(ConfigError, match="step is -1"):  # which says that weights are of no version
        publisher.publish(first_weights(), -1)
    publisher.publish(first_weights(), 0)
    with pytest.raises(ConfigError, match="sequence 0"):
        publisher.squash(0)


def test_a_store_of_format_2_is_read_and_continued(tmp_path):
    """Written by the last rlloop of format 2: versions 0 to 3 of `history`, as `plain`, `steps` and `planes`."""
    shutil.unpack_archive(Path(__file__).parents[2] / "support" / "format2_store.zip", tmp_path / "store")
    store, versions = FolderStore(tmp_path / "store"), history(5)
    replica, target = new_replica(store, zeros(versions[0]))
    assert Head.decode(store.latest()).format == 2
    for sequence in (1, 2, 3):
        assert replica.advance_to(sequence)
        assert same(target.state, versions[sequence])
    kinds = {entry.codec for entry in replica._manifests.read(replica.applied.manifest).tensors}
    assert "steps" in kinds
    publisher = Publisher(store, KEY, "run")
    publisher.publish(versions[4], 4)
    assert replica.poll()
    assert same(target.state, versions[4])
    late, late_target = new_replica(store)
    assert late.poll(), late.error
    assert same(late_target.state, versions[4])
    assert publisher.head.format == 3
    publisher.anchor()
    publisher.publish(versions[5], 5)
    assert replica.poll()
    assert same(target.state, versions[5])
