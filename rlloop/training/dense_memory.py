"""Memory of attention, of a dense MLP and of the head, from their shapes: of training them on a GPU.

D: width; Q, K: numbers of a token's queries and of its keys; H, G: their heads; F: of the MLP; V: vocabulary; b: bytes
of a number. A layer's gradient arrives as D numbers a token; an MLP's backward ends before attention's begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlloop.models.architecture import ModelConfig
from rlloop.models.row_blocks import ROWS
from rlloop.parallel.layout import Layout
from rlloop.trainer.gradients import IN_FLIGHT

WIDE = 4  # bytes of a float32
LOGITS_ROWS, LOGITS_BYTES, STEP = 2048, 2 << 30, 256  # those of `kernels.triton.token_logprob`, which needs Triton
KEPT_BYTES = 5 << 30  # that of `kernels.triton.kept_logits`


@dataclass(frozen=True)
class Heads:
    """Attention of one layer, by own tokens. Of `tp` ranks each has a share of the heads."""

    queries: int  # Q
    keys: int  # K
    read: int  # K of the keys that are exchanged: several ranks may have copies of a head
    normed: int  # heads whose queries and keys are normed, H + G; 0: none are
    heads: int  # H
    gated: bool
    spread: bool  # tokens are divided (cp), and attention exchanges them for heads

    @classmethod
    def of(cls, config: ModelConfig, layout: Layout) -> Heads:
        heads, groups = (-(-count // layout.tp) for count in (config.num_heads, config.num_kv_heads))
        return cls(
            queries=heads * config.head_dim,
            keys=groups * config.head_dim,
            read=max(groups, layout.cp) * config.head_dim,
            normed=heads + groups if config.qk_norm else 0,
            heads=heads,
            gated=config.output_gate,
            spread=layout.cp > 1,
        )

    def saved(self, itemsize: int) -> int:
        """Bytes of an own token that attention saves, but for its input: what a norm reads of queries and keys Q + K
        and its scales; queries, keys and values as they are read Q + 2 K, the output Q and its log-sum-exp 4 H; of
        tokens that are divided the output once more; of a gate itself and its product 2 Q."""
        numbers = (2 + self.spread + 2 * self.gated) * self.queries + 2 * self.read
        normed = itemsize * (self.queries + self.keys) + WIDE * self.normed if self.normed else 0
        return itemsize * numbers + normed + WIDE * self.heads

    def backward(self, itemsize: int) -> int:
        """Bytes of an own token, beside them, of the backward where it holds most: the gradients of output, queries,
        keys and values 2 Q + 2 K, and twice 4 H.

        A gate's comes before: five float32 numbers of Q (of float32 four), and what its sigmoid read, which Python may
        free later. Of tokens that are divided the largest of three, of which the first two no longer have the output's
        copy: those gradients; the output's gradient as it comes and three copies of it in an exchange; and when
        attention is made again, what was exchanged Q + 2 K and two copies of the output's Q."""
        queries, keys = self.queries, self.read
        numbers = 2 * queries + 2 * keys
        if self.spread:
            numbers = max(queries + 2 * keys, 3 * queries, 2 * queries + 2 * self.keys)
        gate = WIDE * (7 if itemsize < WIDE else 5) * queries if self.gated else 0
        return max(itemsize * numbers + 2 * WIDE * self.heads, gate)


def mlp_backward(width: int, inner: int, rows: int, itemsize: int, shares: int, trains: bool) -> int:
    """Bytes of a dense MLP's backward, its activations included: gate, up and the gradients of both and of their
    product, 5 b F a row, of all rows or of a block of them; with blocks also the input's gradient, a block's result,
    which nothing reads, and the weights' gradients in float32, summed and of one block."""
    inner = -(-inner // shares)
    blocks = itemsize * (rows + ROWS) * width + 2 * WIDE * 3 * width * inner * trains if rows > ROWS else 0
    return itemsize * 5 * inner * min(rows, ROWS) + blocks


def head_backward(
    width: int, vocabulary: int, rows: int, itemsize: int, layout: Layout, trains: bool, packed: bool
) -> int:
    """Bytes of the head's backward: the last sums, hidden states and their gradient 3 b D a row, and the largest of its
    work. Where the logits' gradients are kept (not of a packed weight, nor by a loss of entropies, which this does not
    know), those of all rows, b V a row (of a frozen weight hidden states in their place), and the larger of one chunk's
    logits in float32 and, behind them, the weight's gradient and float32 products of a row. Else the weight's gradient
    in float32; and of one chunk of rows the larger of its logits in float32 with their gradient, and that with the
    chunk's part of the weight's. Of ranks that share the vocabulary (tp) each also holds the whole weight. Of those
    that divide tokens (cp) each has, later, its own gradient of the weight, their sum in float32, and pieces of all."""
    held = -(-vocabulary // layout.tp)
    step = min(LOGITS_ROWS, max(1, LOGITS_BYTES // (WIDE * vocabulary)))
    chunk = min(rows, step // STEP * STEP or step) * held
    weight = held * width * trains
    work = WIDE * weight + itemsize * chunk + WIDE * max(chunk, weight)
    kept = itemsize * rows * (vocabulary if trains else width)
    if layout.tp == 1 and itemsize < WIDE and not packed and not (trains and kept > KEPT_BYTES):
        behind = itemsize * weight + (WIDE + itemsize) * rows * width
        work = kept + max((WIDE + itemsize * (not trains)) * chunk, behind)
    work += itemsize * vocabulary * width if layout.tp > 1 else 0
    gathered = weight * (itemsize + WIDE) + min(IN_FLIGHT, weight * itemsize * layout.cp) if layout.cp > 1 else 0
    return 3 * itemsize * rows * width + max(work, gathered)
