"""The faults of a seed: which, where, after which step, for how long. A pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

ENGINES = ("engine/eu", "engine/us")
RELAYS = ("relay/eu", "relay/us")
PROCESSES = ("trainer", *ENGINES, *RELAYS, "api")
# Links by who asks whom; each is a proxy. The engine `us` is named to the trainer, the other one joins by itself.
LINKS = (
    "trainer>engine/eu", "trainer>engine/us", "engine/eu>relay/eu", "engine/us>relay/us", "relay/eu>trainer",
    "relay/us>trainer", "engine/eu>trainer", "engine/us>trainer", "client>api",
)  # fmt: skip
# A flipped bit in a client's request to the training API is another request: its protocol has no digest, TLS has.
DIGESTED = tuple(link for link in LINKS if link != "client>api")

KINDS: dict[str, tuple[str, ...]] = {
    "kill": PROCESSES,  # -9, and started again later
    "pause": PROCESSES,  # SIGSTOP, SIGCONT
    "kill in a write": ("trainer", *RELAYS, "api"),  # before the n-th fsync from now
    "kill in a commit": ENGINES,  # between two tensors of a version
    "disk full": ("trainer", *RELAYS, "api"),
    "disk slow": ("trainer", *RELAYS, "api"),
    "clock jump": PROCESSES,
    "wrong key": ENGINES,  # it trusts another signer
    "wrong token": ENGINES,
    "cache damaged": RELAYS,  # a bit of every file
    "partition": LINKS,
    "requests lost": LINKS,  # a partition one way, and the other
    "answers lost": LINKS,
    "delay": LINKS,
    "loss": LINKS,  # connections are reset, before or after the request went through
    "reorder": LINKS,
    "duplicate": LINKS,
    "truncate": LINKS,
    "flip": DIGESTED,
    "false head": ("engine/eu>relay/eu", "engine/us>relay/us"),  # a malicious relay
    "false blobs": ("engine/eu>relay/eu", "engine/us>relay/us"),
    "false logprobs": ("trainer>engine/eu", "trainer>engine/us"),  # a malicious engine
    "false version": ("trainer>engine/eu", "trainer>engine/us"),
    "false tokens": ("trainer>engine/eu", "trainer>engine/us"),
    "replayed answers": ("trainer>engine/eu", "trainer>engine/us"),
}


class Fault(msgspec.Struct, frozen=True, order=True):
    step: int  # records of the run after which it begins; 0: at once
    later: float  # seconds after those
    kind: str
    where: str  # a process, or a link
    seconds: float  # that it lasts
    number: int  # decides what the kind leaves open: which bytes, which write, which way

    def __str__(self) -> str:
        return f"{self.kind} {self.where} ({self.seconds:g} s, after record {self.step} + {self.later:g} s)"


def draw(seed: int, steps: int) -> list[Fault]:
    """Two to six faults. Consecutive seeds go through all kinds; the rest is by chance."""
    dice = random.Random(seed)
    kinds = [list(KINDS)[seed % len(KINDS)], *dice.choices(list(KINDS), k=dice.randint(1, 5))]
    return sorted(
        Fault(
            step=dice.randint(0, steps - 1),
            later=round(dice.uniform(0, 0.3), 2),
            kind=kind,
            where=dice.choice(KINDS[kind]),
            seconds=round(dice.uniform(0.2, 2.0), 1),
            number=dice.randrange(1 << 16),
        )
        for kind in kinds
    )


def shrink(faults: Sequence[Fault], fails: Callable[[list[Fault]], bool]) -> list[Fault]:
    """A smallest part of a schedule that still fails: no fault of it can be left out. `fails` runs a schedule."""
    left, parts = list(faults), 2
    while len(left) > 1:
        size = -(-len(left) // parts)
        cuts = [left[:start] + left[start + size :] for start in range(0, len(left), size)]
        smaller = next((cut for cut in cuts if cut and fails(cut)), None)
        if smaller is not None:
            left, parts = smaller, 2
        elif size == 1:
            break
        else:
            parts = min(2 * parts, len(left))
    return left
