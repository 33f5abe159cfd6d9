"""The check of published weights: the versions in a run's folder, against the key that signs them."""

from __future__ import annotations

from pathlib import Path

from rlloop.audit.history import Check, History
from rlloop.errors import SyncError
from rlloop.parity.witness import read_public_key
from rlloop.sync.manifest import PIECE, Head
from rlloop.sync.replica import Manifests
from rlloop.sync.store import FolderStore, fetch

WEIGHTS = "weights"  # of fleet=regions, in the run's folder


def check_versions(run: History) -> Check:
    """Each manifest that the head lists has the publisher's signature, and its version's number; its pieces are there
    with the bytes that it names. Decodes none."""
    store = FolderStore(run.path / WEIGHTS)
    key = run.path / "signing_key.pub"
    if not isinstance(run.built, str) and (given := run.built.fleet.signing_key) is not None:
        key = Path(f"{given}.pub")
    if not key.exists():
        return Check("versions", f"not checked: {key}, the signatures' public key, is not here")
    content = store.latest()
    while True:
        links, problems, pieces = (), list[str](), dict[bytes, int]()
        try:
            head = Head.decode(content or b"")
            links, manifests = (*head.chain, *head.shortcuts), Manifests(store, read_public_key(key))
            for link in links:
                manifest = manifests.read(link.manifest)
                if (manifest.sequence, manifest.step, manifest.root) != (link.sequence, link.step, link.root):
                    problems.append(f"the head's version {link.sequence} is another than its manifest's")
                pieces |= {piece: manifest.piece_size(index) for index, piece in enumerate(manifest.pieces)}
            for piece, size in pieces.items():
                fetch(store, piece, size, limit=PIECE)
        except SyncError as error:
            problems.append(str(error))
        checked, content = content, store.latest()
        if not problems or content == checked:  # else the run has published meanwhile, and dropped old versions
            break
    summary = f"{len(links)} signed manifests, {sum(pieces.values()):,} bytes of encoded weights"
    return Check("versions", summary, problems)
