"""Memory of recurrent layers, from their shapes: of training a layer, and of an engine's states.

C: channels of the convolution; H: heads, G: key heads; K, V: numbers of a key and of a value; W = H V. The scan, its
gates and the convolution are float32 whatever the model's type (b bytes a number).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from rlloop.models.architecture import ModelConfig

WIDE = 4  # bytes of a float32
KEPT = 16  # tokens of an unfinished chunk, which a GPU's states keep (`kernels.triton.scan`)
CHUNK, LEAST, NUMBERS = 64, (128, 64), 1 << 28  # those of `kernels.triton.recurrence_backward`, which needs Triton
PIECE = 64  # numbers of a key at a time in its `of_keys`


@dataclass(frozen=True)
class Recurrence:
    """The heads of one recurrent layer on a rank of `shares` ranks that divide them."""

    heads: int  # H
    groups: int  # G
    key_dim: int  # K
    width: int  # V
    taps: int  # of the convolution
    layers: tuple[int, ...]
    corrects: bool  # a gated delta network; else Mamba-2

    @classmethod
    def of(cls, config: ModelConfig, shares: int = 1) -> Recurrence | None:
        """None for a model without recurrent layers. A rank with copies of key heads has a few more than `shares`
        says."""

        def own(count: int) -> int:
            return -(-count // shares)

        if (delta := config.delta) is not None:
            heads, groups = own(delta.num_heads), own(delta.num_key_heads)
            return cls(heads, groups, delta.key_dim, delta.value_dim, delta.conv_width, delta.layers, True)
        if (mamba := config.mamba) is not None and config.blocks is not None:
            heads, groups = own(mamba.num_heads), own(mamba.num_groups)
            layers = tuple(index for index, kind in enumerate(config.blocks) if kind == "linear_attention")
            return cls(heads, groups, mamba.state_dim, mamba.head_dim, mamba.conv_width, layers, False)
        return None

    @property
    def channels(self) -> int:
        """C = 2 G K + H V: queries, keys and values."""
        return 2 * self.groups * self.key_dim + self.heads * self.width

    def saved(self, itemsize: int) -> int:
        """Bytes a token that one layer saves for its backward, but for its input.

        Both: the convolution's input, sums and the activation's second factor 12 C; the scan's q, k, v 4 C; its gates.
        Delta: queries and keys before their norm 8 G K; the read values, their norm, the gate and the output 4 b W;
        12 numbers a head of gates and scales, and 2 a key head.
        Mamba-2: the activated channels b C (in float32 the scan's are views of them); gate, read and gated values 12 W;
        their norm and the output 2 b W; 4 numbers a head, and 1 a key head.
        """
        channels, inner = self.channels, self.heads * self.width
        if self.corrects:
            lengths = 2 * self.groups * (self.key_dim + 1)
            return WIDE * (4 * channels + lengths + 8 * self.heads) + 4 * itemsize * inner
        activated = itemsize * channels if itemsize < WIDE else 0
        return WIDE * (4 * channels + 3 * inner + 4 * self.heads + self.groups) + activated + 2 * itemsize * inner

    def gradients(self) -> int:
        """Bytes a token of the scan's backward: gradients of q, k, v, decays and beta, and of its output."""
        return WIDE * (self.channels + 2 * self.heads + self.heads * self.width)

    def backward(self, tokens: int, sequences: int = 1) -> int:
        """Bytes that the scan's backward on a GPU works in, of as many key heads at a time as it takes.

        With P chunks of 64 tokens, K and V filled up to powers of two (128 and 64 at least), parts of two bfloat16:
        of a key head: queries and keys 2 x 256 P K, pairs of tokens 2 x 4 x 64^2 P; of a head: logs 512 P, states
        and their gradients 2 x 4 P K V, gradients of pairs 4 x 2 x 64^2 P, sums of gates 1,024 P for each 64 of K; with
        the delta rule inverses 4 x 64^2 P, slopes 256 P V, written and solved 2 x 256 P V.
        """
        keys, values = _filled(self.key_dim, LEAST[0]), _filled(self.width, LEAST[1])
        chunks, share = tokens // CHUNK + sequences, self.heads // self.groups
        groups = min(self.groups, max(1, NUMBERS // (chunks * share * keys * values)))
        of_group = 2 * 4 * CHUNK * keys + 2 * WIDE * CHUNK**2
        of_head = 8 * CHUNK + 2 * 4 * keys * values + 4 * 2 * CHUNK**2 + keys // PIECE * 4 * WIDE * CHUNK
        if self.corrects:
            of_head += 4 * CHUNK**2 + WIDE * CHUNK * values + 2 * 4 * CHUNK * values
        return chunks * groups * (of_group + share * of_head)

    def state(self) -> int:
        """Bytes of one sequence's states in one layer of an engine on a GPU: 4 (taps - 1) C of the convolution, 4 H K V
        of the scan, and of up to 16 tokens since its last whole chunk keys, values and two matrices."""
        kept = self.groups * KEPT * self.key_dim + self.heads * KEPT * (self.width + 2 * KEPT + 1)
        return WIDE * (prod((self.taps - 1, self.channels)) + self.heads * self.key_dim * self.width + kept)


def _filled(count: int, least: int) -> int:
    return max(least, 1 << (count - 1).bit_length())
