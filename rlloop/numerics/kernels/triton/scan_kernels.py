"""Kernels of `scan`, whose notation and formulas are there. A state is stored transposed, [V, K], and so are tiles of
values, [V, 16]: a warp then has 16 columns of S alone, and no other warp's numbers stand between two chunks. Along K,
tiles come in pieces of `PIECE` numbers, so that registers hold the parts of few of them at a time.

Equal bits need the same instructions in all kernels: `mma.sync` of 16 x 8 x 8, whose K slots have the same numbers. So
no product has 64 rows or more, and nothing that is multiplied comes from `tl.join` (Triton then sets kWidth = 2)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CUT = tl.constexpr(False)  # `_split` cuts in place of rounding


@triton.jit
def _split(x):
    """x = high + low, of which a tensor core reads 11 bits each: `high` is rounded to them, ties away from zero."""
    bits = x.to(tl.int32, bitcast=True)
    if CUT:
        high = (bits & -0x2000).to(tl.float32, bitcast=True)
    else:
        high = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def _turned(n):
    """A product's column n has the number `_turned(n)` (a key's, or a token): 0 4 1 5 2 6 3 7 of each eight."""
    return (n & -8) | ((n & 1) << 2) | ((n & 6) >> 1)


@triton.jit
def _straight(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BACK: tl.constexpr = False):
    """Columns that were `_turned`, in order; `BACK`: those in order, `_turned`. A lane has numbers 2 i and 2 i + 1 of eight columns of a product, but
    multiplies i and i + 4: turned, they are the same, and no number goes to another lane."""
    if BACK:
        x = x.reshape(ROWS, COLUMNS // 8, 2, 4)
    else:
        x = x.reshape(ROWS, COLUMNS // 8, 4, 2)
    return x.permute(0, 1, 3, 2).reshape(ROWS, COLUMNS)


@triton.jit
def _blocks(x, BLOCKS: tl.constexpr):
    """Rows in blocks of 16, of which a warp has one or more; 0: the compiler parts rows and columns among warps."""
    return x if BLOCKS == 0 else x.reshape(BLOCKS, 16, x.shape[1])


@triton.jit
def _for_blocks(x, BLOCKS: tl.constexpr):
    return x if BLOCKS == 0 else tl.broadcast_to(x[None, :, :], (BLOCKS, x.shape[0], x.shape[1]))


@triton.jit
def _nothing(ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr = 0):
    zeros = _blocks(tl.zeros((ROWS, COLUMNS), tl.float32), BLOCKS)
    return zeros, zeros, zeros


@triton.jit
def _plus(sums, high, low, to_high, to_low, BLOCKS: tl.constexpr = 0):
    """Sums of their own for each kind of term: three short chains at a time in place of a long one."""
    high, low = _blocks(high, BLOCKS), _blocks(low, BLOCKS)
    to_high, to_low = _for_blocks(to_high, BLOCKS), _for_blocks(to_low, BLOCKS)
    # That many inexact sums are allowed is meant for other types: here it keeps the compiler from chaining the three.
    return (
        tl.dot(low, to_high, sums[0], input_precision="tf32", max_num_imprecise_acc=16),
        tl.dot(high, to_low, sums[1], input_precision="tf32", max_num_imprecise_acc=16),
        tl.dot(high, to_high, sums[2], input_precision="tf32", max_num_imprecise_acc=16),
    )


@triton.jit
def _whole(sums, BLOCKS: tl.constexpr = 0):
    x = (sums[0] + sums[1]) + sums[2]
    return x if BLOCKS == 0 else x.reshape(BLOCKS * 16, x.shape[2])


@triton.jit
def _times(high, low, to_high, to_low, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr = 0):
    """A product over the 16 tokens of a chunk."""
    return _whole(_plus(_nothing(ROWS, COLUMNS, BLOCKS), high, low, to_high, to_low, BLOCKS), BLOCKS)


@triton.jit
def _written(high, low, keys, BLOCKS: tl.constexpr = 0):
    """x^T k, which a whole chunk adds to a piece of a state, at its end: a tensor core cuts its sums off, which long sums
    must not be."""
    to_high, to_low = _split(keys)
    high, low = _blocks(high, BLOCKS), _blocks(low, BLOCKS)
    to_high, to_low = _for_blocks(to_high, BLOCKS), _for_blocks(to_low, BLOCKS)
    sums = tl.dot(low, to_high, input_precision="tf32", max_num_imprecise_acc=16)
    sums = tl.dot(high, to_low, sums, input_precision="tf32", max_num_imprecise_acc=16)
    sums = tl.dot(high, to_high, sums, input_precision="tf32", max_num_imprecise_acc=16)
    return sums if BLOCKS == 0 else sums.reshape(BLOCKS * 16, sums.shape[2])


@triton.jit(do_not_specialize=["has_states", "sequences"])
def prepare(
    q, k, decay, beta, query_start, context, rows, states, made, begun, has_states, sequences, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, KEY: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, CHUNK: tl.constexpr,
    CORRECTS: tl.constexpr, KEYS: tl.constexpr, INVERSES: tl.constexpr, FADES: tl.constexpr, SINCE: tl.constexpr,
    SIZE: tl.constexpr, MADE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of a chunk and each head of a group, what does not depend on the state: T, W, a and D's last row to `made`.
    A chunk that was begun in an earlier step has rows of the state, and its keys go to `begun`."""
    SHARE: tl.constexpr = HEADS // GROUPS
    SQUARE: tl.constexpr = CHUNK * CHUNK
    slot, group = tl.program_id(0), tl.program_id(1)
    sequence, length = slot * 0, sequences
    while length > 1:
        half = length // 2
        base = tl.load(query_start + sequence + half) // CHUNK + 2 * (sequence + half)
        sequence = tl.where(base <= slot, sequence + half, sequence)
        length -= half
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    known = begin * 0
    mine = states
    if has_states != 0:
        known = tl.load(context + sequence)
        mine = states + tl.load(rows + sequence) * SIZE
    end = known + count
    start = (known // CHUNK + slot - begin // CHUNK - 2 * sequence) * CHUNK
    if (count > 0) & (start < end):
        old = tl.maximum(known - start, 0).to(tl.int32)
        upto = tl.minimum(end - start, CHUNK).to(tl.int32)
        n, i = tl.arange(0, CHUNK), tl.arange(0, PIECE)
        row, column = n[:, None], n[None, :]
        is_old, is_new = n < old, (n >= old) & (n < upto)
        # Rows are put where they are a product's `_turned` columns.
        turned = ((row & -8) | ((row & 3) << 1) | ((row & 4) >> 2)) * CHUNK + column
        first = begin + start - known
        at = row * (GROUPS * KEY) + i[None, :]
        new_at = ((first * GROUPS + group) * KEY) + at
        kept_at = mine + KEYS + group * (CHUNK * KEY) + row * KEY + i[None, :]
        keys_at = tl.where(is_old[:, None], kept_at, k + new_at)
        begun_at = begun + (sequence.to(tl.int64) * CHUNK * GROUPS + group) * KEY + at
        asked_sums = _nothing(CHUNK, CHUNK)
        alike_sums = asked_sums
        for piece in tl.range(PIECES, num_stages=STAGES):
            of_key = (piece * PIECE + i < KEY)[None, :]
            keys = tl.load(keys_at + piece * PIECE, (n < upto)[:, None] & of_key, 0.0)
            queries = tl.load(q + new_at + piece * PIECE, is_new[:, None] & of_key, 0.0)
            tl.store(begun_at + piece * PIECE, keys, of_key & (row >= 0) & (old > 0))
            to_high, to_low = _split(keys.T)
            high, low = _split(queries)
            asked_sums = _plus(asked_sums, high, low, to_high, to_low)
            if CORRECTS:
                key_high, key_low = _split(keys)
                alike_sums = _plus(alike_sums, key_high, key_low, to_high, to_low)
        asked, alike = _whole(asked_sums), _whole(alike_sums)
        for member in range(SHARE):
            head = group * SHARE + member
            to = made + (slot.to(tl.int64) * HEADS + head) * MADE
            gate_at = first * HEADS + head + n * HEADS
            last = tl.load(mine + FADES + head * SQUARE + (old - 1) * CHUNK + n, is_old, 1.0)
            before = tl.load(mine + SINCE + head * CHUNK + old - 1, old > 0, 1.0)
            fades, since = tl.broadcast_to(last[None, :], (CHUNK, CHUNK)), tl.where(n >= 0, before, 1.0)
            for t in tl.static_range(CHUNK):  # in this order
                factor = tl.load(decay + (first + t) * HEADS + head, (t >= old) & (t < upto), 1.0)
                fades *= tl.where((column < t) & (row >= t), factor, 1.0)
                since *= tl.where(n >= t, factor, 1.0)
            fades = tl.where(row >= column, fades, 0.0)
            tl.store(to + SQUARE + turned, asked * fades)
            tl.store(to + 2 * SQUARE + n, since)
            tl.store(to + 2 * SQUARE + CHUNK + column + 0 * row, fades, row == CHUNK - 1)
            if CORRECTS:
                betas = tl.load(beta + gate_at, is_new, 0.0)
                lower = tl.where(row > column, alike * fades * betas[:, None], 0.0)
                lower_high, lower_low = _split(_straight(lower.T, CHUNK, CHUNK, True))
                # T^T [j, t], in whose columns the tokens are turned.
                token = _turned(n)[None, :]
                inverse = tl.load(mine + INVERSES + head * SQUARE + token * CHUNK + row, (token < old) & (row >= 0), 0.0)
                for t in range(old, upto):
                    high, low = _split(_straight(inverse, CHUNK, CHUNK))
                    product = _times(high, low, lower_high, lower_low, CHUNK, CHUNK)
                    inverse = tl.where(token == t, tl.where(row == t, 1.0, 0.0) - product, inverse)
                tl.store(to + column * CHUNK + row, inverse)


@triton.jit
def _chunk(
    state, q, k, to, values, betas, given, is_old, there, keys_there, whole, KEY: tl.constexpr, STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, CHUNK: tl.constexpr,
    CORRECTS: tl.constexpr,
):  # fmt: skip
    """-> the state after it (the same where it is not whole), outputs and r, both [V, 16]. r of old rows is `given`.

    `there`: rows that have a query; those that are old or there have a key, `keys_there` in order. All else is
    `_turned`."""
    SQUARE: tl.constexpr = CHUNK * CHUNK
    i, n = tl.arange(0, PIECE), tl.arange(0, CHUNK)
    token, has_key = _turned(n), is_old | there
    square = n[None, :] * CHUNK + n[:, None]
    weights, since = tl.load(to + SQUARE + square), tl.load(to + 2 * SQUARE + token)
    to_end = tl.where(whole, tl.load(to + 2 * SQUARE + CHUNK + token), 0.0)
    total = tl.where(whole, tl.load(to + 2 * SQUARE + CHUNK - 1), 1.0)
    read_sums = _nothing(COLUMNS, CHUNK, BLOCKS)
    asked_sums = read_sums
    for piece in tl.static_range(PIECES):
        of_key = (piece * PIECE + i < KEY)[:, None]
        at = token[None, :] * STRIDE + piece * PIECE + i[:, None]
        high, low = _split(state[piece])
        if CORRECTS:
            to_high, to_low = _split(tl.load(k + at, has_key[None, :] & of_key, 0.0))
            read_sums = _plus(read_sums, high, low, to_high, to_low, BLOCKS)
        to_high, to_low = _split(tl.load(q + at, there[None, :] & of_key, 0.0))
        asked_sums = _plus(asked_sums, high, low, to_high, to_low, BLOCKS)
    if CORRECTS:
        r = (values - since[None, :] * _whole(read_sums, BLOCKS)) * betas[None, :]
        r = tl.where(is_old[None, :], given, r)
        r_high, r_low = _split(_straight(r, COLUMNS, CHUNK))
        to_high, to_low = _split(tl.load(to + square))
        u = _times(r_high, r_low, to_high, to_low, COLUMNS, CHUNK, BLOCKS)
    else:
        r = tl.where(is_old[None, :], given, values * betas[None, :])
        u = r
    u_high, u_low = _split(_straight(u, COLUMNS, CHUNK))
    to_high, to_low = _split(weights)
    output = since[None, :] * _whole(asked_sums, BLOCKS)
    output += _times(u_high, u_low, to_high, to_low, COLUMNS, CHUNK, BLOCKS)
    u_high, u_low = _split(_straight(u * to_end[None, :], COLUMNS, CHUNK))
    after = ()
    for piece in tl.static_range(PIECES):
        of_key = (piece * PIECE + i < KEY)[None, :]
        keys = tl.load(k + n[:, None] * STRIDE + piece * PIECE + i[None, :], keys_there[:, None] & of_key, 0.0)
        keys = _straight(keys, CHUNK, PIECE, True)
        added = _straight(_written(u_high, u_low, keys, BLOCKS), COLUMNS, PIECE)
        after = after + (state[piece] * total + added,)  # noqa: RUF005
    return after, output, r


@triton.jit
def _pieces(at, mask, of_key, KEY: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr):
    """Tiles [., PIECE] side by side. `of_key`: the numbers of a piece."""
    tiles = ()
    for piece in tl.static_range(PIECES):
        inside = (piece * PIECE + of_key < KEY)[None, :]
        tiles = tiles + (tl.load(at + piece * PIECE, mask & inside, 0.0),)  # noqa: RUF005
    return tiles


@triton.jit(do_not_specialize=["has_states"])
def scan_chunks(
    q, k, v, beta, query_start, context, rows, states, made, begun, out, has_states, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, CORRECTS: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, INVERSES: tl.constexpr, FADES: tl.constexpr, SINCE: tl.constexpr, SIZE: tl.constexpr,
    MADE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has some columns of a head's state, and a sequence's chunks in turn."""
    SQUARE: tl.constexpr = CHUNK * CHUNK
    SHARE: tl.constexpr = HEADS // GROUPS
    STRIDE: tl.constexpr = GROUPS * KEY
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = head // SHARE
    begin = tl.load(query_start + sequence)
    count = (tl.load(query_start + sequence + 1) - begin).to(tl.int32)
    known = begin * 0
    mine = states
    if has_states != 0:
        known = tl.load(context + sequence)
        mine = states + tl.load(rows + sequence) * SIZE
    # Tokens are counted from the first chunk's begin: those of this step are `old` and on, up to `end`.
    old = (known % CHUNK).to(tl.int32)
    end = tl.where(count > 0, old + count, 0)
    i, j, n = tl.arange(0, PIECE), block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, CHUNK)
    of_value = (j < WIDTH)[:, None]
    state_at = mine + (head * WIDTH + j)[:, None] * KEY + i[None, :]
    state = _pieces(state_at, of_value & (known >= CHUNK), i, KEY, PIECES, PIECE)
    token = _turned(n)
    kept_at = mine + VALUES + (head * CHUNK + token)[None, :] * WIDTH + j[:, None]
    to = made + ((begin // CHUNK + 2 * sequence) * HEADS + head) * MADE
    q += ((begin - old) * GROUPS + group) * KEY
    k += ((begin - old) * GROUPS + group) * KEY
    v += ((begin - old) * HEADS + head) * WIDTH
    out += ((begin - old) * HEADS + head) * WIDTH
    beta += (begin - old) * HEADS + head
    value_at = token[None, :] * (HEADS * WIDTH) + j[:, None]
    keys = k
    if old > 0:
        keys = begun + (sequence * CHUNK * GROUPS + group) * KEY
    for chunk in tl.range(0, end, CHUNK, num_stages=STAGES):
        is_old, there = chunk + token < old, (chunk + token >= old) & (chunk + token < end)
        is_new = there[None, :] & of_value
        values = tl.load(v + value_at, is_new, 0.0)
        betas = tl.load(beta + token * HEADS, there, 0.0)
        given = tl.load(kept_at, is_old[None, :] & of_value, 0.0)
        state, output, r = _chunk(
            state, q, keys, to, values, betas, given, is_old, there, chunk + n < end, chunk + CHUNK <= end, KEY, STRIDE,
            COLUMNS, BLOCKS, PIECES, PIECE, CHUNK, CORRECTS,
        )  # fmt: skip
        tl.store(out + value_at, output, is_new)
        tl.store(kept_at, r, is_new & (has_states != 0) & (end < chunk + CHUNK))
        to += HEADS * MADE
        q += CHUNK * STRIDE
        k += CHUNK * STRIDE
        v += CHUNK * HEADS * WIDTH
        out += CHUNK * HEADS * WIDTH
        beta += CHUNK * HEADS
        keys = k
    if has_states != 0:
        if end >= CHUNK:
            for piece in tl.static_range(PIECES):
                tl.store(state_at + piece * PIECE, state[piece], of_value & (piece * PIECE + i < KEY)[None, :])
        upto = end % CHUNK
        if (block == 0) & (upto > 0):  # nothing of this is read in this launch
            to -= HEADS * MADE
            k -= CHUNK * STRIDE
            row, column = n[:, None], n[None, :]
            if CORRECTS:
                inverse = tl.load(to + row * CHUNK + column)
                tl.store(mine + INVERSES + head * SQUARE + token[:, None] * CHUNK + column, inverse)
            faded, since = tl.load(to + 2 * SQUARE + CHUNK + n), tl.load(to + 2 * SQUARE + CHUNK - 1)
            tl.store(mine + FADES + head * SQUARE + (upto - 1) * CHUNK + n, faded)
            tl.store(mine + SINCE + head * CHUNK + upto - 1, since)
            is_new = (n < upto) & ((end >= CHUNK) | (n >= old)) & (head % SHARE == 0)
            kept = mine + KEYS + group * (CHUNK * KEY) + n[:, None] * KEY + i[None, :]
            for piece in tl.static_range(PIECES):
                mask = is_new[:, None] & (piece * PIECE + i < KEY)[None, :]
                fresh = tl.load(k + n[:, None] * STRIDE + piece * PIECE + i[None, :], mask, 0.0)
                tl.store(kept + piece * PIECE, fresh, mask)


@triton.jit
def _queries(q, k, at, inside, is_key, CORRECTS: tl.constexpr):
    """A tile of which one row or column is the key's and every other the query's."""
    x = tl.load(q + at, inside, 0.0)
    return tl.where(is_key, tl.load(k + at, inside, 0.0), x) if CORRECTS else x


@triton.jit
def _rows(
    q, k, keys_at, inverse_at, fades, factor, t, KEY: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
    CHUNK: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """Row t of W, in every row but t, and rows up to t of T."""
    i, n = tl.arange(0, PIECE), tl.arange(0, CHUNK)
    row, column = n[:, None], n[None, :]
    across = row * 0 + i[None, :]
    is_key = (row == t) & (across >= 0)
    inverse = tl.zeros((CHUNK, CHUNK), tl.float32)
    if CORRECTS:
        inverse = tl.load(inverse_at, (row < t) & (column >= 0), 0.0)
    sums = _nothing(CHUNK, CHUNK)
    for piece in tl.static_range(PIECES):
        inside = (piece * PIECE + i < KEY)[None, :]
        keys = tl.load(keys_at + piece * PIECE, (n <= t)[:, None] & inside, 0.0)
        high, low = _split(_queries(q, k, across + piece * PIECE, inside & (row >= 0), is_key, CORRECTS))
        to_high, to_low = _split(keys.T)
        sums = _plus(sums, high, low, to_high, to_low)
    weights = _whole(sums) * fades[None, :]
    if CORRECTS:
        high, low = _split(tl.where((row == t) & (column < t), weights * factor, 0.0))
        to_high, to_low = _split(inverse)
        product = _times(high, low, to_high, to_low, CHUNK, CHUNK)
        inverse = tl.where(row == t, tl.where(row == column, 1.0, 0.0) - product, inverse)
    return weights, inverse


@triton.jit
def decode(
    q, k, v, decay, beta, context, rows, states, out, GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr, CORRECTS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, INVERSES: tl.constexpr,
    FADES: tl.constexpr, SINCE: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One token of each sequence, row t of its chunk, by `BLOCKS` times `COLUMNS` columns of one head. Of tiles of 16
    rows, row t is the key's and every other the query's; whatever is stored here is row t, which no program reads.
    `EARLY`: this launch has begun before the one before it is done."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    SQUARE: tl.constexpr = CHUNK * CHUNK
    SHARE: tl.constexpr = HEADS // GROUPS
    part, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = head // SHARE
    known = tl.load(context + sequence)
    mine = states + tl.load(rows + sequence) * SIZE
    t = (known % CHUNK).to(tl.int32)
    i, n = tl.arange(0, PIECE), tl.arange(0, CHUNK)
    row, column = n[:, None], n[None, :]
    token = _turned(column)
    q += (sequence * GROUPS + group) * KEY
    k += (sequence * GROUPS + group) * KEY
    fade, factor = tl.load(decay + sequence * HEADS + head), tl.load(beta + sequence * HEADS + head)
    across = row * 0 + i[None, :]
    keys_at = tl.where(row == t, k + across, mine + KEYS + group * (CHUNK * KEY) + row * KEY + across)
    fades_at = mine + FADES + head * SQUARE + t * CHUNK + n
    fades = tl.where(n < t, tl.load(fades_at - CHUNK, n < t, 0.0) * fade, tl.where(n == t, 1.0, 0.0))
    since_at = mine + SINCE + head * CHUNK + t
    since = tl.load(since_at - 1, t > 0, 1.0) * fade
    inverse_at = mine + INVERSES + head * SQUARE + row * CHUNK + column
    inverse = tl.zeros((CHUNK, CHUNK), tl.float32)
    if BLOCKS > 1:
        weights, inverse = _rows(
            q, k, keys_at, inverse_at, fades, factor, t, KEY, PIECES, PIECE, CHUNK, CORRECTS
        )  # fmt: skip
    # Columns of a product come in eights, of which the second has what the first has.
    eight = tl.arange(0, 8)[None, :]
    down = i[:, None] + 0 * eight
    is_key = (_turned(eight) == t % 8) & (down >= 0)
    of_state = ()
    for piece in tl.static_range(PIECES):
        of_key = (piece * PIECE + i < KEY)[:, None] & (eight >= 0)
        of_state = of_state + (_queries(q, k, down + piece * PIECE, of_key, is_key, CORRECTS),)  # noqa: RUF005
    for block in tl.range(part * BLOCKS, part * BLOCKS + BLOCKS, num_stages=STAGES):
        j = block * COLUMNS + tl.arange(0, COLUMNS)
        of_value = (j < WIDTH)[:, None]
        state_at = mine + (head * WIDTH + j)[:, None] * KEY + i[None, :]
        state = _pieces(state_at, of_value & (known >= CHUNK), i, KEY, PIECES, PIECE)
        r_at = mine + VALUES + (head * CHUNK + token) * WIDTH + j[:, None]
        r = tl.load(r_at, of_value & (token < t), 0.0)
        value_at = (sequence * HEADS + head) * WIDTH + j[:, None]
        values = tl.load(v + value_at, of_value, 0.0)
        if BLOCKS == 1:  # here, so that the state is on its way meanwhile
            weights, inverse = _rows(
                q, k, keys_at, inverse_at, fades, factor, t, KEY, PIECES, PIECE, CHUNK, CORRECTS
            )  # fmt: skip
        read_sums = _nothing(COLUMNS, 8)
        for piece in tl.static_range(PIECES):
            high, low = _split(state[piece])
            to_high, to_low = _split(of_state[piece])
            read_sums = _plus(read_sums, high, low, to_high, to_low)
        read = tl.broadcast_to(_whole(read_sums)[:, None, :], (COLUMNS, 2, 8)).reshape(COLUMNS, CHUNK)
        if CORRECTS:
            r = tl.where(token == t, (values - since * read) * factor, r)
            high, low = _split(_straight(r, COLUMNS, CHUNK))
            to_high, to_low = _split(_straight(inverse.T, CHUNK, CHUNK, True))
            u = _times(high, low, to_high, to_low, COLUMNS, CHUNK)
        else:
            r = tl.where(token == t, values * factor, r)
            u = r
        high, low = _split(_straight(u, COLUMNS, CHUNK))
        to_high, to_low = _split(_straight(weights.T, CHUNK, CHUNK, True))
        output = since * read + _times(high, low, to_high, to_low, COLUMNS, CHUNK)
        tl.store(out + value_at + 0 * column, output, of_value & (token == (t + 1) % CHUNK))
        tl.store(r_at, r, of_value & (token == t))
    if t == CHUNK - 1:
        tl.debug_barrier()
        inverse_high, inverse_low = _split(inverse.T)
        for block in range(part * BLOCKS, part * BLOCKS + BLOCKS):
            j = block * COLUMNS + tl.arange(0, COLUMNS)
            of_value = (j < WIDTH)[:, None]
            state_at = mine + (head * WIDTH + j)[:, None] * KEY + i[None, :]
            r_at = mine + VALUES + (head * CHUNK + n)[None, :] * WIDTH + j[:, None]
            u = tl.load(r_at, of_value & (column >= 0), 0.0)
            if CORRECTS:
                u_high, u_low = _split(u)
                u = _times(u_high, u_low, inverse_high, inverse_low, COLUMNS, CHUNK)
            u_high, u_low = _split(u * fades[None, :])
            for piece in tl.static_range(PIECES):
                of_piece = (piece * PIECE + i < KEY)[None, :]
                chunk_keys = tl.load(keys_at + piece * PIECE, of_piece & (row >= 0), 0.0)
                before = tl.load(state_at + piece * PIECE, of_value & of_piece & (known >= CHUNK), 0.0)
                after = before * since + _written(u_high, u_low, chunk_keys)
                tl.store(state_at + piece * PIECE, after, of_value & of_piece)
    elif part == 0:
        if CORRECTS:
            tl.store(inverse_at, inverse, (row == t) & (column >= 0))
        tl.store(fades_at, fades)
        tl.store(since_at, since)
        if head % SHARE == 0:
            for piece in tl.static_range(PIECES):
                of_row = piece * PIECE + i < KEY
                numbers = tl.load(k + piece * PIECE + i, of_row, 0.0)
                tl.store(mine + KEYS + (group * CHUNK + t) * KEY + piece * PIECE + i, numbers, of_row)
