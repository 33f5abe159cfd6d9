"""The cheapest way from where a replica stands to a version: deltas one by one, squashed ones, or an anchor first."""

from __future__ import annotations

from rlloop.sync.manifest import Head, Link, Refused


def route(head: Head, standing: tuple[int, bytes] | None, sequence: int) -> list[Link]:
    """Links to follow in turn, of the fewest bytes, then of the fewest versions.

    `standing`: sequence and manifest hash of what is applied. Raises `Refused` where no way leads there.
    """
    identity = {link.sequence: link.manifest for link in head.chain}
    best: dict[int, tuple[int, int, list[Link]]] = {}  # sequence -> bytes, links, way
    if standing is not None and identity.get(standing[0], standing[1]) == standing[1]:
        best[standing[0]] = (0, 0, [])
    least = -1 if standing is None else standing[0]
    for link in sorted((*head.chain, *head.shortcuts), key=lambda link: link.sequence):
        if link.sequence <= least or link.sequence > sequence:
            continue
        before = (0, 0, []) if link.base is None else best.get(link.base)
        if before is None:
            continue
        found = (before[0] + link.wire_bytes, before[1] + 1, [*before[2], link])
        if link.sequence not in best or found[:2] < best[link.sequence][:2]:
            best[link.sequence] = found
    if sequence not in best:
        here = "nothing" if standing is None else f"sequence {standing[0]}"
        raise Refused(
            f"no way leads from {here} to sequence {sequence}; the head has {head.chain[0].sequence} to "
            f"{head.newest.sequence} and {sum(link.base is None for link in (*head.chain, *head.shortcuts))} anchors"
        )
    return best[sequence][2]


def match(head: Head, root: bytes) -> Link | None:
    """The newest version of the chain whose state has this root."""
    return next((link for link in reversed(head.chain) if link.root == root), None)
