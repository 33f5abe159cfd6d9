"""For small tensors: every element coded with a probability that is learned on the way, so that no tables are sent.

An element is *changed or not*, with a probability of its old exponent's class (`rlloop.sync.steps`). A class that was
not met before begins from a neighbour's, since weights half as large change twice as often. A change is a sign and a
size: up to `UNARY` by one learned answer each to "still larger?", above that by a learned number of bits. Answers go
through a binary arithmetic coder of 32 bits.

It looks at each element for some ten nanoseconds, which is why large tensors go another way. This is the reference;
`adaptive_fast` equals it byte for byte.
"""

from __future__ import annotations

from itertools import zip_longest

import numpy as np

from rlloop.sync.steps import Ordering, classes_of, ordered, patterns_of

UNARY = 15
BITS = 17  # of a size above that, at most
CONTEXTS = UNARY + BITS + 1  # of a class: changed or not; each step of the size; each bit of its length
ONE = 1 << 32  # a probability of 1
FIRST, LARGER = ONE // 50, ONE // 4  # chances of a change where nothing is known, and of a larger size
SURE = 4  # answers that a first guess at a class counts for
MOST = 4096  # answers after which a chance moves no slower
RATES = [(2 << 30) // (2 * seen + 3) for seen in range(MOST + 1)]  # how far a chance moves, of 2^30
NEIGHBOURS = 3  # classes to look for a first guess in, each way
_MASK = ONE - 1


def encode(old: np.ndarray, new: np.ndarray, ordering: Ordering, limit: int) -> bytes | None:
    """What turns `old` into `new`, [n] patterns each, in fewer than `limit` bytes; None where it takes more."""
    coder = _Coder(None, limit)
    steps = ordered(new, ordering) - ordered(old, ordering)
    _walk(classes_of(old, ordering).tolist(), steps.tolist(), coder)
    content = coder.end()
    return content if len(content) < limit else None


def decode(old: np.ndarray, content: bytes, ordering: Ordering) -> np.ndarray | None:
    """`old` after the changes; None where they leave the type, or where no encoder ends so."""
    coder = _Coder(content, len(content))
    steps = np.array(_walk(classes_of(old, ordering).tolist(), (), coder), np.int64)
    values, sign = ordered(old, ordering) + steps, 1 << (ordering.bits - 1)
    if coder.end() != content or (len(values) and (values.min() < -sign or values.max() >= sign)):
        return None
    return patterns_of(values, ordering)


class _Coder:
    """Writes answers, or reads them off `content`. Probabilities are of "yes", of `ONE`."""

    def __init__(self, content: bytes | None, limit: int) -> None:
        self.content, self.limit, self.made = content, limit, bytearray()
        self.low, self.high, self.ahead, self.place = 0, _MASK, 0, 0
        if content is not None:
            for _ in range(4):
                self._read()

    def code(self, answer: int, chance: int) -> int:
        """`answer`, or what was written in its place."""
        middle = self.low + ((self.high - self.low) * min(max(chance >> 16, 1), 65535) >> 16)
        if self.content is not None:
            answer = int(self.ahead <= middle)
        if answer:
            self.high = middle
        else:
            self.low = middle + 1
        while self.low >> 24 == self.high >> 24:
            self.made.append(self.low >> 24)
            self.low, self.high = self.low << 8 & _MASK, self.high << 8 & _MASK | 255
            self._read()
        return answer

    def end(self) -> bytes:
        """All that was written, with the fewest bytes that end in the last interval when zeros follow."""
        tail, shift = 0, 32
        while tail < self.low or tail > self.high:
            shift -= 8
            tail = (self.low + (1 << shift) - 1) >> shift << shift
        return bytes(self.made) + tail.to_bytes(4)[: (32 - shift) // 8]

    def _read(self) -> None:
        if self.content is not None:
            following = self.content[self.place] if self.place < len(self.content) else 0
            self.ahead, self.place = self.ahead << 8 & _MASK | following, self.place + 1


class _Chances:
    """What is known of the answers of each class that was met."""

    def __init__(self) -> None:
        self.chance: dict[int, list[int]] = {}
        self.seen: dict[int, list[int]] = {}

    def ask(self, coder: _Coder, which: int, context: int, answer: int) -> int:
        if which not in self.chance:
            self.chance[which] = [self._guess(which), LARGER] + [ONE // 2] * (CONTEXTS - 2)
            self.seen[which] = [SURE] + [0] * (CONTEXTS - 1)
        known, seen = self.chance[which], self.seen[which]
        answer = coder.code(answer, known[context])
        known[context] += ((ONE if answer else 0) - known[context]) * RATES[seen[context]] >> 30
        seen[context] = min(seen[context] + 1, MOST)
        return answer

    def _guess(self, which: int) -> int:
        for away in range(1, NEIGHBOURS + 1):
            if which + away in self.chance:
                return min(ONE - ONE // 10, self.chance[which + away][0] << away)
            if which - away in self.chance:
                return self.chance[which - away][0] >> away
        return FIRST


def _walk(classes: list[int], steps: list[int] | tuple[()], coder: _Coder) -> list[int]:
    """Code each element's step, or as many as fit the coder's limit; returns them."""
    chances, made = _Chances(), []
    for which, step in zip_longest(classes, steps, fillvalue=0):
        if not chances.ask(coder, which, 0, int(step != 0)):
            made.append(0)
            continue
        negative = coder.code(int(step < 0), ONE // 2)
        wanted, size = abs(step), 1
        while size <= UNARY and chances.ask(coder, which, size, int(wanted > size)):
            size += 1
        if size > UNARY:
            wanted, bits = wanted - UNARY, 1
            while bits < BITS and chances.ask(coder, which, UNARY + bits, int(wanted >> bits > 0)):
                bits += 1
            size = 1
            for bit in range(bits - 2, -1, -1):
                size = size << 1 | coder.code(wanted >> bit & 1, ONE // 2)
            size += UNARY
        made.append(-size if negative else size)
        if coder.content is None and len(coder.made) >= coder.limit:
            break
    return made
