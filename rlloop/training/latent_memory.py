"""Memory of latent attention and its indexer, from their shapes: of training a layer on a GPU.

H: heads; N, P, V: numbers of a head's query without rope, of its rope and of a value; R: of a latent; Q: of a query's
latent, 0 without; S: tokens that an indexer selects, 0 without one; b: bytes of a number.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlloop.models.architecture import ModelConfig
from rlloop.numerics.kernels.triton.wide_backward import SCORES
from rlloop.parallel.layout import Layout

WIDE, INDEX = 4, 8  # bytes of a float32 and of a selected token's index


@dataclass(frozen=True)
class Latents:
    """One layer of latent attention on a rank."""

    heads: int  # H, of this rank's tokens
    attending: int  # heads whose attention's backward runs on this rank
    apart: bool  # True (tp): that reads queries and outputs of heads that this rank did not save
    query_rank: int
    rank: int
    nope: int
    rope: int
    width: int  # V
    selected: int
    shared: int  # selections that a forward keeps: other layers read them

    @classmethod
    def of(cls, config: ModelConfig, layout: Layout) -> Latents | None:
        """None for a model without latent attention. Of ranks that divide heads (`tp`) one has the whole backward of a
        sequence, for all heads: here of all, as if the tokens were one sequence."""
        latent, heads = config.latent, config.num_heads
        if latent is None:
            return None
        indexer = latent.indexer
        indexed = () if indexer is None else indexer.layers
        return cls(
            heads=-(-heads // layout.tp),
            attending=-(-heads // layout.cp),
            apart=layout.tp > 1,
            query_rank=latent.q_rank or 0,
            rank=latent.kv_rank,
            nope=latent.nope_dim,
            rope=latent.rope_dim,
            width=latent.v_dim,
            selected=0 if indexer is None else indexer.top_k,
            shared=sum(layer + 1 not in indexed and layer + 1 < config.num_layers for layer in indexed),
        )

    def saved(self, itemsize: int, lora: int = 0) -> int:
        """Bytes of an own token that one layer saves for its backward, but for its input.

        Query latents before and after their norm 2 b Q; the projected latent and the key of it b 2 (R + P); queries
        b H (N + P), and in the latent space b H (R + P); what they read b H R and its log-sum-exp 4 H; values b H V;
        norms' scales; the selection 8 S. An adapter copies queries and what they read by heads, and saves z of each:
        b H (N + R + 2 r), and 16 H for the rows' slots, in place of b H (N + P); and z and slots of whole products.
        """
        by_head = 2 * self.rank + self.rope + self.width + self.nope
        extra = 0
        if lora:
            by_head += self.rank + 2 * lora
            extra = (itemsize * lora + INDEX) * (3 + (self.query_rank > 0)) + 2 * INDEX * self.heads
        else:
            by_head += self.rope
        whole = 2 * self.query_rank + 2 * (self.rank + self.rope)
        scales = WIDE * (1 + (self.query_rank > 0))
        numbers = itemsize * (whole + self.heads * by_head)
        return numbers + scales + WIDE * self.heads + INDEX * self.selected + extra

    def gathered(self, itemsize: int) -> int:
        """Bytes of another context-parallel rank's token that a rank holds: its key and selection."""
        return itemsize * (self.rank + self.rope) + INDEX * self.selected

    def kept(self) -> int:
        """Bytes of an own token's selection."""
        return INDEX * self.selected

    def choosing(self, tokens: int) -> int:
        """Bytes in which a selection becomes the slots that attention reads: four arrays of indices at a time."""
        return 4 * INDEX * tokens * self.selected

    def backward(self, itemsize: int, tokens: int) -> int:
        """Bytes of attention's backward over one sequence: the gradient of what is read, as it comes and, but for
        selected keys, aligned; the values, and `wide_backward`; of heads that are not the forward's also queries and
        what they read."""
        heads, key = self.attending, self.rank + self.rope
        arriving = itemsize * tokens * (heads * (1 if self.selected else 2) + 1) * self.rank
        if self.apart:
            arriving += tokens * heads * (itemsize * (key + self.rank) + WIDE)
        return arriving + wide_room(itemsize, tokens, heads, key, self.rank)


def wide_room(itemsize: int, tokens: int, heads: int, key: int, value: int) -> int:
    """Bytes that `wide_backward` allocates for one sequence at its peak, results included.

    Gradients of queries b T H K, and of keys and values in float32 4 T (K + V); then the largest of three: of up to
    2^27 pairs two float32 and, if narrower, b bytes, a mask, and copies of some of several heads; later 2 b bytes a
    pair, the mask and a chunk's gradient of keys or queries; last, gradients of keys and values as they are returned.
    """
    rows, some = max(1, min(tokens, SCORES // tokens)), min(heads, max(1, SCORES // tokens**2))
    pairs, narrow = rows * some * tokens, itemsize if itemsize < WIDE else 0
    copies = itemsize * rows * some * (key + value) if 1 < some < heads else 0
    scores = (2 * WIDE + narrow) * pairs + rows * tokens + copies
    added = 2 * itemsize * pairs + rows * tokens + itemsize * max(tokens, rows * some) * key + copies
    returned = narrow * tokens * (key + value)
    return itemsize * tokens * heads * key + WIDE * tokens * (key + value) + max(scores, added, returned)
