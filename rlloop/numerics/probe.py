"""Start-up check that this machine keeps the numerical contract, in well under a second once compiled.

The contracts hold by construction; a broken vector unit, a miscompiled kernel or a stock operation in the profile would
still break them, and a run that claims zero KL must know before it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rlloop.numerics.layout import AttentionLayout, LogitsProcessing
from rlloop.numerics.ops import Ops
from rlloop.numerics.routing import Routing

ROWS = 67  # past every tile edge, and odd
SHAPES = ((64, 96), (96, 256), (200, 72))  # (K, N) of matrix products


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shapes, types and bits: −0 is not +0, and a NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()] if a.is_floating_point() else a.dtype
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def probe(ops: Ops, dtype: torch.dtype, device: str | torch.device = "cpu") -> dict[str, str]:
    """The operations that vary, by profile knob, and how; empty if the contract holds.

    Each operation runs on 67 rows and on some of them alone, with all of torch's threads and with one; attention also
    as decode over a paged cache against prefill. Less common operations are checked only if they are outside modules'.
    On a GPU, products run on up to 1300 rows, past every tile's edge.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    broken: dict[str, str] = {}
    with torch.inference_mode():
        for name, work in _cases(ops, draw):
            whole = work(slice(0, ROWS))
            for begin, end in ((0, 1), (ROWS - 1, ROWS), (3, 19), (1, ROWS)):
                if not same_bits(work(slice(begin, end)), whole[begin:end]):
                    broken[name] = f"rows {begin} to {end - 1} of {ROWS} have other bits alone than together"
            with _one_thread():
                if not same_bits(work(slice(0, ROWS)), whole):
                    broken[name] = "one thread gives other bits than several"
        if torch.device(device).type == "cuda":
            x, weight = draw(1300, 1024), draw(512, 1024)
            for product in (ops.linear, ops.logits):
                whole = product(x, weight)
                for rows in (1, 16, 33, 65, 128, 256, 300, 513, 1024):
                    if not same_bits(product(x[:rows], weight), whole[:rows]):
                        broken["linear"] = f"{rows} rows of 1300 have other bits alone than together"
        if not same_bits(*_prefill_and_decode(ops, draw, device)):
            broken["attention"] = "decode has other bits than prefill"
        if ops.fuses:
            for name, together, alone in _fused(ops, draw):
                if not same_bits(together, alone):
                    broken[name] = "has other bits in one kernel with the operations around it"
    return broken


Draw = Callable[..., Tensor]


def _cases(ops: Ops, draw: Draw) -> Iterator[tuple[str, Callable[[slice], Tensor]]]:
    for width, outputs in SHAPES:
        x, weight, bias = draw(ROWS, width), draw(outputs, width), draw(outputs)
        yield "linear", lambda rows, x=x, weight=weight, bias=bias: ops.linear(x[rows], weight, bias)
    x, residual, weight = draw(ROWS, 200), draw(ROWS, 200), draw(200)
    yield "rms_norm", lambda rows: torch.cat(ops.rms_norm(x[rows], weight, 1e-6, residual[rows]), -1)
    gate, up = draw(ROWS, 72), draw(ROWS, 72)
    yield "activation", lambda rows: ops.silu_mul(gate[rows], up[rows])
    heads, table = draw(ROWS, 2, 24), draw(ROWS, 12).float()
    positions = torch.arange(ROWS, device=heads.device)
    yield "rope", lambda rows: ops.rope(heads[rows], positions[rows], table, table)
    hidden, head = draw(ROWS, 64), draw(300, 64)
    targets = torch.arange(ROWS, device=hidden.device)
    yield "token_logprob", lambda rows: ops.token_logprob(hidden[rows], head, targets[rows], LogitsProcessing())[0]
    yield from ((knob, work) for knob, work in _further_cases(ops, draw) if knob in ops.profile.outside)


def _further_cases(ops: Ops, draw: Draw) -> Iterator[tuple[str, Callable[[slice], Tensor]]]:
    """The operations of modules from outside that are not checked as it is, by knob. A row may be a sequence."""
    x, heads, weight = draw(ROWS, 48), draw(ROWS, 4, 24), draw(8, 48)
    yield "linear", lambda rows: ops.head_linear(heads[rows], weight.view(4, 4, 24), True)
    yield "activation", lambda rows: ops.sigmoid_mul(x[rows], x[rows])
    yield "activation", lambda rows: ops.gelu(x[rows], True)
    yield "token_logprob", lambda rows: ops.logits(x[rows], weight)
    yield "router", lambda rows: ops.router_logits(x[rows], weight, True)
    scores = draw(ROWS, 8).float()
    yield "router", lambda rows: ops.route(scores[rows], None, Routing(2))[0]
    at = torch.arange(ROWS, device=x.device)
    chosen, shares, slots = torch.stack((at % 8, 7 - at % 7), -1), draw(ROWS, 2).float(), draw(ROWS, 2, 48)
    up, down = draw(8, 32, 48), draw(8, 48, 16)
    yield "experts", lambda rows: ops.experts(x[rows], up, down, chosen[rows])
    yield "combine", lambda rows: ops.combine(slots[rows], chosen[rows], shares[rows])
    yield "indexer", lambda rows: ops.index_weights(x[rows], weight)
    yield "indexer", lambda rows: ops.layer_norm(x[rows], weight[0], weight[1], 1e-6)
    yield "recurrent", lambda rows: torch.cat(ops.recurrent_gates(x[rows], weight[0], weight[1]), -1)

    length = 5
    tokens, taps = draw(ROWS, length, 4, 24), draw(96, 1, 4)
    decay, some = draw(ROWS, length, 4).float().sigmoid(), torch.tensor([0, 1, 2]).to(x.device)
    some = torch.where(some <= torch.arange(length, device=x.device)[:, None], some, -1)  # [length, 3]

    def flat(source: Tensor, rows: slice) -> tuple[AttentionLayout, Tensor]:
        count = len(source[rows])
        return AttentionLayout.of_sequences([length] * count, x.device), source[rows].flatten(0, 1)

    def attended(rows: slice) -> Tensor:
        layout, q = flat(tokens, rows)
        selected = some.repeat(len(layout.context), 1)
        return ops.sparse_attention(q, q[:, :1], q[:, :1], selected, layout, 0.2).unflatten(0, (-1, length))

    def seen(rows: slice) -> Tensor:
        layout, q = flat(tokens, rows)
        return ops.full_attention(q, q, q, layout, 0.2).unflatten(0, (-1, length))

    def selected(rows: slice) -> Tensor:
        layout, q = flat(tokens, rows)
        return ops.select(q, q[:, :1], q[:, :, 0].float(), layout, 0.2, 3).unflatten(0, (-1, length))

    def convolved(rows: slice) -> Tensor:
        layout, q = flat(tokens, rows)
        return ops.causal_conv(q.flatten(1), taps, None, layout, None).unflatten(0, (-1, length))

    def scanned(rows: slice) -> Tensor:
        layout, q = flat(tokens, rows)
        fade = decay[rows].flatten(0, 1)
        return ops.scan(q, q, q, fade, fade, False, layout, None).unflatten(0, (-1, length))

    yield from (
        ("attention", seen),
        ("attention", attended),
        ("indexer", selected),
        ("recurrent", convolved),
        ("recurrent", scanned),
    )


def _prefill_and_decode(ops: Ops, draw: Draw, device: str | torch.device) -> tuple[Tensor, Tensor]:
    """Outputs of a sequence's tokens: from one prefill, and decoded over scattered pages of 16."""
    length, page, q, k, v = 140, 16, draw(140, 4, 24), draw(140, 2, 24), draw(140, 2, 24)
    whole = ops.attention(q, k, v, AttentionLayout.of_sequences([length], device), 0.2)
    blocks = torch.randperm(-(-length // page), generator=torch.Generator().manual_seed(1)).to(device)
    at = torch.arange(length, device=device)
    slots = blocks[at // page] * page + at % page
    keys, values = (torch.zeros(len(blocks) * page, 2, 24, dtype=k.dtype, device=device) for _ in range(2))
    keys[slots], values[slots] = k, v
    later = at[1:]  # not as many rows as the prefill has, since an implementation may go by their number
    layout = AttentionLayout(
        query_start=torch.arange(length, device=device),
        context=later,
        block_start=(blocks * page).repeat(length - 1, 1),
        block_size=page,
        contiguous=False,
    )
    return whole[later], ops.attention(q[later], keys, values, layout, 0.2)


def _fused(ops: Ops, draw: Draw) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(knob, its result in a kernel with other operations, and its result alone)"""
    x, first, second, third = draw(ROWS, 128), draw(256, 128), draw(128, 128), draw(128, 128)
    for together, weight in zip(ops.qkv_linear(x, first, second, third), (first, second, third), strict=True):
        yield "linear", together, ops.linear(x, weight)
    yield "activation", ops.gated_linear(x, second, third), ops.silu_mul(ops.linear(x, second), ops.linear(x, third))
    q, k, v, table, norms = draw(ROWS, 4, 64), draw(ROWS, 2, 64), draw(ROWS, 2, 64), draw(ROWS, 32).float(), draw(2, 64)
    positions = torch.arange(ROWS, device=q.device)
    keys, values = torch.zeros_like(k), torch.zeros_like(v)
    slots = positions.flip(0)
    entered = ops.qkv_cache_write(q, k, v, (norms[0], norms[1]), 1e-6, positions, (table, table), slots, keys, values)
    yield "rope", entered, ops.rope(ops.rms_norm(q, norms[0], 1e-6)[0], positions, table, table)
    yield "rope", keys[slots], ops.rope(ops.rms_norm(k, norms[1], 1e-6)[0], positions, table, table)
    yield "attention", values[slots], v


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
