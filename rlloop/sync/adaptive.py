"""Adaptive arithmetic coder for small tensors: probabilities are learned while coding, so no tables are sent.

Each element is coded as *changed or not*, with the probability of its old exponent's class (`rlloop.sync.steps`). A new
class starts from a neighbour's probability, since weights half as large change twice as often. A change is a sign and a
size: up to `UNARY` in unary ("larger still?", each answer with a learned probability), above that by a learned number
of bits. Answers go through a binary arithmetic coder of 32 bits.

It takes some ten nanoseconds an element, too slow for large tensors. This is the reference; `adaptive_fast` equals it
byte for byte.
"""

from __future__ import annotations

from itertools import zip_longest

import numpy as np

from rlloop.sync.steps import Ordering, classes_of, ordered, patterns_of

UNARY = 15
BITS = 17  # at most, of a size above that
CONTEXTS = UNARY + BITS + 1  # of each class: changed or not; each unary digit of a size; each bit of its length
ONE = 1 << 32  # a probability of 1
FIRST, LARGER = ONE // 50, ONE // 4  # initial probabilities of a change, and of a larger size
SURE = 4  # answers that a class's first guess counts as
MOST = 4096  # answers after which the learning rate stays the same
RATES = [(2 << 30) // (2 * seen + 3) for seen in range(MOST + 1)]  # learning rate after `seen` answers, in 2^-30
NEIGHBOURS = 3  # classes on either side in which a first guess is looked for
_MASK = ONE - 1


def encode(old: np.ndarray, new: np.ndarray, ordering: Ordering, limit: int) -> bytes | None:
    """The changes from `old` to `new`, [n] patterns each; None if they take `limit` bytes or more."""
    coder = _Coder(None, limit)
    steps = ordered(new, ordering) - ordered(old, ordering)
    _walk(classes_of(old, ordering).tolist(), steps.tolist(), coder)
    content = coder.end()
    return content if len(content) < limit else None


def decode(old: np.ndarray, content: bytes, ordering: Ordering) -> np.ndarray | None:
    """`old` after the changes; None if they leave the dtype's range, or if `content` does not end as an encoder's."""
    coder = _Coder(content, len(content))
    steps = np.array(_walk(classes_of(old, ordering).tolist(), (), coder), np.int64)
    values, sign = ordered(old, ordering) + steps, 1 << (ordering.bits - 1)
    if coder.end() != content or (len(values) and (values.min() < -sign or values.max() >= sign)):
        return None
    return patterns_of(values, ordering)


class _Coder:
    """Binary arithmetic coder: writes answers, or reads them from `content`. Probabilities are of a 1, in `ONE`."""

    def __init__(self, content: bytes | None, limit: int) -> None:
        self.content, self.limit, self.written = content, limit, bytearray()
        self.low, self.high, self.ahead, self.offset = 0, _MASK, 0, 0
        if content is not None:
            for _ in range(4):
                self._read()

    def code(self, answer: int, chance: int) -> int:
        """Code `answer`; when decoding, return the one that was written."""
        middle = self.low + ((self.high - self.low) * min(max(chance >> 16, 1), 65535) >> 16)
        if self.content is not None:
            answer = int(self.ahead <= middle)
        if answer:
            self.high = middle
        else:
            self.low = middle + 1
        while self.low >> 24 == self.high >> 24:
            self.written.append(self.low >> 24)
            self.low, self.high = self.low << 8 & _MASK, self.high << 8 & _MASK | 255
            self._read()
        return answer

    def end(self) -> bytes:
        """The bytes written, ended by the fewest that lie in the last interval when followed by zeros."""
        tail, shift = 0, 32
        while tail < self.low or tail > self.high:
            shift -= 8
            tail = (self.low + (1 << shift) - 1) >> shift << shift
        return bytes(self.written) + tail.to_bytes(4)[: (32 - shift) // 8]

    def _read(self) -> None:
        if self.content is not None:
            following = self.content[self.offset] if self.offset < len(self.content) else 0
            self.ahead, self.offset = self.ahead << 8 & _MASK | following, self.offset + 1


class _Chances:
    """Learned probabilities of each class met so far."""

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
    """Code each element's step, or as many as fit the coder's limit. Returns the steps."""
    chances, coded = _Chances(), list[int]()
    for class_, step in zip_longest(classes, steps, fillvalue=0):
        if not chances.ask(coder, class_, 0, int(step != 0)):
            coded.append(0)
            continue
        negative = coder.code(int(step < 0), ONE // 2)
        wanted, size = abs(step), 1
        while size <= UNARY and chances.ask(coder, class_, size, int(wanted > size)):
            size += 1
        if size > UNARY:
            wanted, bits = wanted - UNARY, 1
            while bits < BITS and chances.ask(coder, class_, UNARY + bits, int(wanted >> bits > 0)):
                bits += 1
            size = 1
            for bit in range(bits - 2, -1, -1):
                size = size << 1 | coder.code(wanted >> bit & 1, ONE // 2)
            size += UNARY
        coded.append(-size if negative else size)
        if coder.content is None and len(coder.written) >= coder.limit:
            break
    return coded
