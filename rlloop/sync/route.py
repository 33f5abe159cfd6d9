"""The cheapest route from a replica's version to another: single deltas, squashed ones, or an anchor and deltas."""

from __future__ import annotations

from rlloop.sync.manifest import Head, Link, Refused


def route(head: Head, position: tuple[int, bytes] | None, sequence: int) -> list[Link]:
    """Links to follow in turn: those with the fewest bytes, then the fewest versions.

    `position`: sequence and manifest hash of the applied version, if any. Raises `Refused` if no route leads there.
    """
    identity = {link.sequence: link.manifest for link in head.chain}
    best: dict[int, tuple[int, int, list[Link]]] = {}  # sequence -> bytes, number of links, links
    if position is not None and identity.get(position[0], position[1]) == position[1]:
        best[position[0]] = (0, 0, [])
    least = -1 if position is None else position[0]
    for link in sorted((*head.chain, *head.shortcuts), key=lambda link: link.sequence):
        if link.sequence <= least or link.sequence > sequence:
            continue
        before = (0, 0, []) if link.base is None else best.get(link.base)
        if before is None:
            continue
        candidate = (before[0] + link.wire_bytes, before[1] + 1, [*before[2], link])
        if link.sequence not in best or candidate[:2] < best[link.sequence][:2]:
            best[link.sequence] = candidate
    if sequence not in best:
        here = "nothing" if position is None else f"sequence {position[0]}"
        raise Refused(
            f"no route leads from {here} to sequence {sequence}; the head has {head.chain[0].sequence} to "
            f"{head.newest.sequence} and {sum(link.base is None for link in (*head.chain, *head.shortcuts))} anchors"
        )
    return best[sequence][2]


def match(head: Head, root: bytes) -> Link | None:
    """The newest version of the chain with this root, if any."""
    return next((link for link in reversed(head.chain) if link.root == root), None)
