"""The paged key-value cache: allocation of blocks, and the tensors that they index.

A block is `page_size` consecutive slots; a slot holds one token's keys and values in every layer. Full blocks are named
by a digest (`block_name`) of everything that decides their contents, so equal names mean equal contents, and
requests with a common prefix share blocks. A prompt's end that fills part of a block, its tail, has such a name, too:
its block's request goes on writing behind it, so others copy it into a block of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from math import prod

import numpy as np
import torch
from torch import Tensor

from rlloop.errors import ConfigError
from rlloop.numerics.layout import RecurrentState
from rlloop.rollout.engine.cache_memory import cache_memory, room_for
from rlloop.types import ModelInput


@dataclass(frozen=True)
class SequenceKey:
    """Everything besides its tokens that decides a sequence's keys and values."""

    policy_version: int
    adapter: str | None = None

    def name(self) -> bytes:
        adapter = b"" if self.adapter is None else b", adapter " + self.adapter.encode()
        return blake2b(b"policy version %d" % self.policy_version + adapter, digest_size=16).digest()


def block_name(parent: bytes, tokens: bytes, content: bytes = b"") -> bytes:
    """The name of a block, from everything that decides its keys and values: its tokens and everything before them.

    `parent`: the name of the block before it; of the first one, the sequence's. `tokens`: their ids, int64, of a tail
    fewer than of a block. `content`: their `ModelInput.content_key`; b"" for text.
    """
    length = len(tokens).to_bytes(8, "little")  # so that neither tokens nor content can be taken for the other
    return blake2b(tokens + content, digest_size=16, key=parent, salt=length).digest()


class BlockManager:
    """Allocates blocks, counts references, and keeps named blocks for reuse after the last reference is gone.

    A block is in exactly one of three states: in use (references > 0), free but remembered (its name can still be
    matched; the least recently freed is evicted first) or blank.
    """

    def __init__(self, num_blocks: int, page_size: int, *, prefix_caching: bool, policy_version: int = 0) -> None:
        self.num_blocks = num_blocks
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.references = [0] * num_blocks
        self.evictions = 0
        self._blank = list(range(num_blocks))[::-1]
        self._remembered: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._block_of: dict[bytes, int] = {}
        self._names_of: dict[int, list[bytes]] = {}  # of what it holds whole, and of a tail that it begins with
        self.forget(policy_version)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, remembered ones included."""
        return len(self._blank) + len(self._remembered)

    def chain(
        self,
        hashes: list[bytes],
        token_ids: np.ndarray,
        count: int,
        model_input: ModelInput | None = None,
        adapter: str | None = None,
    ) -> list[bytes]:
        """Extend `hashes`, in place, to the names of the first `count` blocks of `token_ids`.

        `model_input`: contents of the tokens; None for text. `adapter`: the one that computes them.
        """
        size, known = self.page_size, len(hashes)
        if known < count:
            hashes += self._names(hashes, token_ids[known * size : count * size], known * size, model_input, adapter)
        return hashes

    def tail(
        self,
        hashes: list[bytes],
        token_ids: np.ndarray,
        model_input: ModelInput | None = None,
        adapter: str | None = None,
    ) -> bytes:
        """The name of what `token_ids` has after its whole blocks, at least one token. `hashes`: names of those."""
        whole = len(token_ids) // self.page_size
        begin = whole * self.page_size
        return self._names(hashes[:whole], token_ids[begin:], begin, model_input, adapter)[0]

    def _names(
        self,
        before: list[bytes],
        token_ids: np.ndarray,
        begin: int,
        model_input: ModelInput | None,
        adapter: str | None,
    ) -> list[bytes]:
        """Of blocks of tokens from position `begin` on, the last of which may be a tail."""
        name = before[-1] if before else SequenceKey(self._version, adapter).name()
        size, end = self.page_size, begin + len(token_ids)
        tokens, step = token_ids.tobytes(), size * token_ids.itemsize
        names, content = [], b""
        for at in range(begin, end, size):
            if model_input is not None:
                content = model_input.content_key(at, min(at + size, end))
            first = (at - begin) // size * step
            name = block_name(name, tokens[first : first + step], content)
            names.append(name)
        return names

    def holder(self, name: bytes) -> int | None:
        """The block of this name."""
        return self._block_of.get(name)

    def match(self, hashes: list[bytes]) -> list[int]:
        """The longest run of leading blocks that are still cached."""
        matched = []
        for name in hashes if self.prefix_caching else ():
            block = self._block_of.get(name)
            if block is None:
                break
            matched.append(block)
        return matched

    def can_allocate(self, shared: list[int], count: int) -> bool:
        """True where `allocate` with the same arguments would succeed. Unused shared blocks stop being free by it."""
        revived = sum(self.references[block] == 0 for block in shared)
        return count + revived <= self.num_free

    def allocate(self, shared: list[int], count: int) -> list[int]:
        """Take the matched blocks `shared` once more, and `count` new ones after them."""
        for block in shared:
            if self.references[block] == 0:
                del self._remembered[block]
            self.references[block] += 1
        return shared + [self._take() for _ in range(count)]

    def may_append(self, count: int) -> bool:
        """True where `count` running requests can each get one more block."""
        return count <= self.num_free

    def append(self) -> int:
        """One more block for a running request."""
        return self._take()

    def deallocate(self, blocks: list[int]) -> None:
        """Release one request's blocks. The last ones are evicted first: a chain is of no use without its head."""
        for block in reversed(blocks):
            self.references[block] -= 1
            assert self.references[block] >= 0, f"block {block} was released more often than taken"
            if self.references[block] == 0:
                if block in self._names_of:
                    self._remembered[block] = None
                else:
                    self._blank.append(block)

    def remember(self, block: int, name: bytes) -> None:
        """Name a block that holds what the name says, or will before it is read. It stays unnamed if another block has
        the name."""
        if self.prefix_caching and name not in self._block_of:
            self._block_of[name] = block
            self._names_of.setdefault(block, []).append(name)

    def forget(self, policy_version: int) -> None:
        """Drop every name: cached contents are not those of `policy_version`."""
        self._version = policy_version
        self._block_of.clear()
        self._names_of.clear()
        self._blank.extend(reversed(self._remembered))
        self._remembered.clear()

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._remembered.popitem(last=False)
            for name in self._names_of.pop(block):
                del self._block_of[name]
            self.evictions += 1
        self.references[block] = 1
        return block


class PagedCache:
    """The stores of all layers. `slots` are those of the current step's tokens. What fills up a step on a GPU uses
    slots from `spare` on, and a `spare_row` of states, which are never read.

    Built from `Model.cache_spec()` (keys and values, latents, or other data per token) and `Model.state_spec()`
    (recurrent states, for `num_rows` sequences at a time). `rows` are those of the current step's sequences.
    """

    def __init__(
        self,
        spec: list[dict[str, tuple[int, ...]]],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        states: list[dict[str, tuple[int, ...]]] | None = None,
        num_rows: int = 0,
        spare: int = 0,
        sleeps: bool = False,
    ) -> None:
        """`sleeps`: `memory` can be given back; on a CPU it always can. Raises `ConfigError` where it does not fit."""
        self.spare, self.spare_row = num_slots, num_rows
        num_slots, num_rows = num_slots + spare, num_rows + (spare > 0)
        kinds = [(num_slots, dtype, spec), (num_rows, torch.float32, states or [])]
        self.memory, zeros = None, partial(torch.zeros, device=device)
        if sleeps or device.type == "cpu":
            size = sum(room_for((count, *shape), kind) for count, kind, layers in kinds for shape in _shapes(layers))
            try:
                self.memory = cache_memory(size, device)
            except ConfigError as error:
                raise ConfigError(f"a key-value cache of {num_slots:,} tokens: {error}") from error
            zeros = self.memory.zeros
        self.stores, self.states = (
            [{name: zeros((count, *shape), dtype=kind) for name, shape in layer.items()} for layer in layers]
            for count, kind, layers in kinds
        )
        self.slots = torch.empty(0, dtype=torch.int64, device=device)
        self.rows = torch.empty(0, dtype=torch.int64, device=device)

    def carried(self, layer: int, name: str) -> RecurrentState:
        """A recurrent layer's states of this step's sequences; zeros for sequences that begin.

        Settled: a layer's projections stand between its states and whatever wrote to them.
        """
        return RecurrentState(self.states[layer][name], self.rows, settled=True)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies rows of all states, each (from, to); no row is both."""
        if not pairs:
            return
        source, target = torch.tensor(pairs, device=self.rows.device).T
        for layer in self.states:
            for store in layer.values():
                store.index_copy_(0, target, store.index_select(0, source))

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Copies slots [N] int64 of all stores. All are read before any is written."""
        for layer in self.stores:
            for store in layer.values():
                rows = store.view(len(store), -1)
                rows.index_copy_(0, target, rows.index_select(0, source))

    def places(self, layer: int, *names: str) -> tuple[Tensor, ...]:
        """The slots [T] that `write` would use for this step's tokens, and the stores of these names."""
        return self.slots, *(self.stores[layer][name] for name in names)

    def write(self, layer: int, **tensors: Tensor) -> tuple[Tensor, ...]:
        """Store this step's tensors [T, ...] of one layer into their slots; returns the whole stores, in that order."""
        stores = self.stores[layer]
        for name, tensor in tensors.items():
            store = stores[name]
            # Flat rows: twice as fast as the same copy with three dimensions.
            store.view(len(store), -1).index_copy_(0, self.slots, tensor.reshape(len(tensor), -1))
        return tuple(stores[name] for name in tensors)


def slots_of_copies(copies: Sequence[tuple[int, int, int]], page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Slots [N] int64 to copy from and to, for each (from block, to block, leading slots of it)."""
    source, target, counts = np.array(copies, dtype=np.int64).T
    within = np.concatenate([np.arange(count) for count in counts])
    return np.repeat(source, counts) * page_size + within, np.repeat(target, counts) * page_size + within


def bytes_per_token(spec: list[dict[str, tuple[int, ...]]], dtype: torch.dtype) -> int:
    return sum(prod(shape) for shape in _shapes(spec)) * dtype.itemsize


def _shapes(layers: list[dict[str, tuple[int, ...]]]) -> list[tuple[int, ...]]:
    return [shape for layer in layers for shape in layer.values()]
