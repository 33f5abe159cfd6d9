"""The cheapest route from a replica's version to another: single deltas, a squashed one, or an anchor and deltas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlloop.sync.manifest import Head, Link, Refused

DECODED = 1e9  # bytes of an anchor that are decoded in a second, before any was
NEWER = 0.3  # weight of the last observation


class Cost:
    """Estimated seconds for a replica to follow a link, learned from earlier links; before the first, from bytes alone.

    A link costs its transfer and a pass over the weights, so many small deltas may take longer than one squashed
    delta, or on a fast connection an anchor, although they have fewer bytes.
    """

    def __init__(self) -> None:
        self._byte: float | None = None  # seconds of one on the line
        self._delta: float | None = None  # seconds to decode one
        self._anchor = 1 / DECODED  # seconds to decode a byte of one

    def __call__(self, link: Link) -> float:
        if self._byte is None or self._delta is None:
            return link.wire_bytes
        return link.wire_bytes * self._byte + (self._anchor * link.wire_bytes if link.base is None else self._delta)

    def learn(self, links: Sequence[Link], metrics: Mapping[str, float]) -> None:
        """Learn from the sync/* metrics of a version that was reached by `links`."""
        sent, staging = sum(link.wire_bytes for link in links), metrics["sync/stage_seconds"]
        self._byte = _mean(self._byte, metrics["sync/fetch_seconds"] / sent)
        if all(link.base is not None for link in links):
            self._delta = _mean(self._delta, staging / len(links))
        elif len(links) == 1:
            self._anchor = _mean(self._anchor, staging / sent)


def _mean(before: float | None, now: float) -> float:
    return now if before is None else (1 - NEWER) * before + NEWER * now


def route(
    head: Head,
    position: tuple[int, bytes] | None,
    sequence: int,
    cost: Callable[[Link], float] = lambda link: link.wire_bytes,
) -> list[Link]:
    """Links to follow in turn: those of the least cost, then the fewest.

    `position`: sequence and manifest hash of the applied version, if any. Raises `Refused` if no route leads there.
    """
    identity = {link.sequence: link.manifest for link in head.chain}
    best: dict[int, tuple[float, int, list[Link]]] = {}  # sequence -> cost, number of links, links
    if position is not None and identity.get(position[0], position[1]) == position[1]:
        best[position[0]] = (0, 0, [])
    least = -1 if position is None else position[0]
    for link in sorted((*head.chain, *head.shortcuts), key=lambda link: link.sequence):
        if link.sequence <= least or link.sequence > sequence:
            continue
        before = (0, 0, []) if link.base is None else best.get(link.base)
        if before is None:
            continue
        candidate = (before[0] + cost(link), before[1] + 1, [*before[2], link])
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
