"""Kernels of `scan`, whose notation and formulas are there. A state is stored transposed, [V, K], and so are tiles of
values, [V, 16]: a warp then has 16 columns of S alone, and no other warp's numbers stand between two chunks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _split(x):
    """x = high + low, of which a tensor core reads 11 bits each: `high` is rounded to them, ties away from zero."""
    bits = x.to(tl.int32, bitcast=True)
    high = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def _product(high, low, to_high, to_low):
    """Sums of their own for each kind of term: three short chains at a time in place of a long one."""
    small = tl.dot(low, to_high, input_precision="tf32") + tl.dot(high, to_low, input_precision="tf32")
    return small + tl.dot(high, to_high, input_precision="tf32")


@triton.jit
def _times(x, y):
    high, low = _split(x)
    to_high, to_low = _split(y)
    return _product(high, low, to_high, to_low)


@triton.jit
def _written(state, total, u, to_end, keys):
    """The state after a whole chunk: total S + (to_end u)^T k. Products are summed before the state is added: a tensor
    core cuts its sums off, which long sums must not be."""
    high, low = _split(u * to_end[None, :])
    to_high, to_low = _split(keys)
    sums = tl.dot(low, to_high, input_precision="tf32")
    sums = tl.dot(high, to_low, sums, input_precision="tf32")
    sums = tl.dot(high, to_high, sums, input_precision="tf32")
    return state * total + sums


@triton.jit(do_not_specialize=["has_states", "sequences"])
def prepare(
    q, k, decay, beta, query_start, context, rows, states, made, begun, has_states, sequences, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, KEY: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, CORRECTS: tl.constexpr,
    KEYS: tl.constexpr, INVERSES: tl.constexpr, FADES: tl.constexpr, SINCE: tl.constexpr, SIZE: tl.constexpr,
    MADE: tl.constexpr,
):  # fmt: skip
    """Of a chunk and each head of a group, what does not depend on the state: T, W, a and the last row of D to `made`.
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
        n, i = tl.arange(0, CHUNK), tl.arange(0, K)
        row, column, of_key = n[:, None], n[None, :], (i < KEY)[None, :]
        is_old, is_new = n < old, (n >= old) & (n < upto)
        token = begin + start - known + n
        at = ((token * GROUPS + group) * KEY)[:, None] + i[None, :]
        kept_at = ((group * CHUNK + n) * KEY)[:, None] + i[None, :]
        keys = tl.load(k + at, is_new[:, None] & of_key, 0.0)
        if old > 0:
            keys += tl.load(mine + KEYS + kept_at, is_old[:, None] & of_key, 0.0)
            tl.store(begun + sequence.to(tl.int64) * (GROUPS * CHUNK * KEY) + kept_at, keys, of_key & (row >= 0))
        queries = tl.load(q + at, is_new[:, None] & of_key, 0.0)
        to_high, to_low = _split(keys.T)
        query_high, query_low = _split(queries)
        asked = _product(query_high, query_low, to_high, to_low)
        if CORRECTS:
            key_high, key_low = _split(keys)
            alike = _product(key_high, key_low, to_high, to_low)
        for member in range(SHARE):
            head = group * SHARE + member
            to = made + (slot.to(tl.int64) * HEADS + head) * MADE
            decays = tl.load(decay + token * HEADS + head, is_new, 1.0)
            last = tl.load(mine + FADES + head * SQUARE + (old - 1) * CHUNK + n, is_old, 1.0)
            before = tl.load(mine + SINCE + head * CHUNK + old - 1, old > 0, 1.0)
            fades, since = tl.broadcast_to(last[None, :], (CHUNK, CHUNK)), tl.where(n >= 0, before, 1.0)
            for t in tl.static_range(CHUNK):  # in this order
                factor = tl.sum(tl.where(n == t, decays, 0.0), 0)
                fades *= tl.where((column < t) & (row >= t), factor, 1.0)
                since *= tl.where(n >= t, factor, 1.0)
            fades = tl.where(row >= column, fades, 0.0)
            tl.store(to + SQUARE + row * CHUNK + column, asked * fades)
            tl.store(to + 2 * SQUARE + n, since)
            tl.store(to + 2 * SQUARE + CHUNK + column + 0 * row, fades, row == CHUNK - 1)
            if CORRECTS:
                betas = tl.load(beta + token * HEADS + head, is_new, 0.0)
                lower = tl.where(row > column, alike * fades * betas[:, None], 0.0)
                high, low = _split(lower)
                kept = mine + INVERSES + head * SQUARE + row * CHUNK + column
                inverse = tl.load(kept, (row < old) & (column >= 0), 0.0)
                for t in range(old, upto):
                    above_high, above_low = _split(inverse)
                    found = tl.where(row == column, 1.0, 0.0) - _product(high, low, above_high, above_low)
                    inverse = tl.where(row == t, found, inverse)
                tl.store(to + row * CHUNK + column, inverse)


@triton.jit
def _chunk(
    state, keys, queries, values, given, is_old, to, betas, whole, CHUNK: tl.constexpr, CORRECTS: tl.constexpr
):  # fmt: skip
    """-> the state after it (the same where it is not whole), outputs and r, both [V, 16]. r of old rows is `given`."""
    SQUARE: tl.constexpr = CHUNK * CHUNK
    n = tl.arange(0, CHUNK)
    square = n[None, :] * CHUNK + n[:, None]
    weights, since = tl.load(to + SQUARE + square), tl.load(to + 2 * SQUARE + n)
    to_end = tl.where(whole, tl.load(to + 2 * SQUARE + CHUNK + n), 0.0)
    total = tl.where(whole, tl.load(to + 2 * SQUARE + CHUNK - 1), 1.0)
    high, low = _split(state)
    if CORRECTS:
        key_high, key_low = _split(keys.T)
        read = _product(high, low, key_high, key_low)
        r = tl.where(is_old[None, :], given, (values - since[None, :] * read) * betas[None, :])
        u = _times(r, tl.load(to + square))
    else:
        r = tl.where(is_old[None, :], given, values * betas[None, :])
        u = r
    query_high, query_low = _split(queries.T)
    output = since[None, :] * _product(high, low, query_high, query_low) + _times(u, weights)
    return _written(high + low, total, u, to_end, keys), output, r


@triton.jit(do_not_specialize=["has_states"])
def scan_chunks(
    q, k, v, beta, query_start, context, rows, states, made, begun, out, has_states, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, CORRECTS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, INVERSES: tl.constexpr,
    FADES: tl.constexpr, SINCE: tl.constexpr, SIZE: tl.constexpr, MADE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has some columns of a head's state, and a sequence's chunks in turn."""
    SQUARE: tl.constexpr = CHUNK * CHUNK
    SHARE: tl.constexpr = HEADS // GROUPS
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = head // SHARE
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    known = begin * 0
    mine = states
    if has_states != 0:
        known = tl.load(context + sequence)
        mine = states + tl.load(rows + sequence) * SIZE
    end = known + count
    i, j, n = tl.arange(0, K), block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, CHUNK)
    of_key, of_value = (i < KEY)[None, :], (j < WIDTH)[:, None]
    state_at = mine + ((head * WIDTH + j) * KEY)[:, None] + i[None, :]
    state = tl.load(state_at, of_value & of_key & (known >= CHUNK), 0.0)
    kept_at = mine + VALUES + (head * CHUNK + n)[None, :] * WIDTH + j[:, None]
    to = made + ((begin // CHUNK + 2 * sequence).to(tl.int64) * HEADS + head) * MADE
    start = known // CHUNK * CHUNK
    if (start < known) & (count > 0):  # a chunk begun in an earlier step: some rows are kept ones
        token = begin + start - known + n
        is_old, is_new = start + n < known, (start + n >= known) & (start + n < end)
        key_at = ((token * GROUPS + group) * KEY)[:, None] + i[None, :]
        begun_at = (((sequence.to(tl.int64) * GROUPS + group) * CHUNK + n) * KEY)[:, None] + i[None, :]
        keys = tl.load(begun + begun_at, of_key & (n >= 0)[:, None], 0.0)
        queries = tl.load(q + key_at, is_new[:, None] & of_key, 0.0)
        value_at = ((token * HEADS + head) * WIDTH)[None, :] + j[:, None]
        values = tl.load(v + value_at, is_new[None, :] & of_value, 0.0)
        betas = tl.load(beta + token * HEADS + head, is_new, 0.0)
        given = tl.load(kept_at, is_old[None, :] & of_value, 0.0)
        whole = start + CHUNK <= end
        state, output, r = _chunk(state, keys, queries, values, given, is_old, to, betas, whole, CHUNK, CORRECTS)
        tl.store(out + value_at, output, is_new[None, :] & of_value)
        tl.store(kept_at, r, is_new[None, :] & of_value & (end < start + CHUNK))
        start += CHUNK
        to += HEADS * MADE
    for chunk in tl.range(start, end, CHUNK, num_stages=STAGES):
        token, is_new = begin + chunk - known + n, chunk + n < end
        key_at = ((token * GROUPS + group) * KEY)[:, None] + i[None, :]
        keys = tl.load(k + key_at, is_new[:, None] & of_key, 0.0)
        queries = tl.load(q + key_at, is_new[:, None] & of_key, 0.0)
        value_at = ((token * HEADS + head) * WIDTH)[None, :] + j[:, None]
        values = tl.load(v + value_at, is_new[None, :] & of_value, 0.0)
        betas = tl.load(beta + token * HEADS + head, is_new, 0.0)
        whole = chunk + CHUNK <= end
        state, output, r = _chunk(state, keys, queries, values, values, n < 0, to, betas, whole, CHUNK, CORRECTS)
        tl.store(out + value_at, output, is_new[None, :] & of_value)
        tl.store(kept_at, r, is_new[None, :] & of_value & (has_states != 0) & (end < chunk + CHUNK))
        to += HEADS * MADE
    if has_states != 0:
        whole_end = end // CHUNK * CHUNK
        if whole_end > known:
            tl.store(state_at, state, of_value & of_key)
        if (block == 0) & (whole_end < end) & (count > 0):  # nothing of this is read in this launch
            last = to - HEADS * MADE
            row, column = n[:, None], n[None, :]
            if CORRECTS:
                inverse = tl.load(last + row * CHUNK + column)
                tl.store(mine + INVERSES + head * SQUARE + row * CHUNK + column, inverse)
            upto = end - whole_end - 1
            faded = tl.load(last + 2 * SQUARE + CHUNK + n)
            tl.store(mine + FADES + head * SQUARE + upto * CHUNK + n, faded)
            tl.store(mine + SINCE + head * CHUNK + upto, tl.load(last + 2 * SQUARE + CHUNK - 1))
            position = whole_end + n
            keep = ((position >= known) & (position < end) & (head % SHARE == 0))[:, None] & of_key
            key_at = (((begin + position - known) * GROUPS + group) * KEY)[:, None] + i[None, :]
            tl.store(mine + KEYS + ((group * CHUNK + n) * KEY)[:, None] + i[None, :], tl.load(k + key_at, keep), keep)


@triton.jit
def decode(
    q, k, v, decay, beta, context, rows, states, out, GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr,
    WIDTH: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr,
    CORRECTS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, INVERSES: tl.constexpr, FADES: tl.constexpr,
    SINCE: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One token of each sequence, row t of its chunk, by `BLOCKS` times `COLUMNS` columns of one head. Of tiles of 16
    rows, row t is the key's and every other the query's; whatever is stored here is row t, which no program reads."""
    SQUARE: tl.constexpr = CHUNK * CHUNK
    SHARE: tl.constexpr = HEADS // GROUPS
    part, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = head // SHARE
    known = tl.load(context + sequence)
    mine = states + tl.load(rows + sequence) * SIZE
    t = (known % CHUNK).to(tl.int32)
    i, n = tl.arange(0, K), tl.arange(0, CHUNK)
    row, column, of_key = n[:, None], n[None, :], (i < KEY)[None, :]
    key_at = ((sequence * GROUPS + group) * KEY) + i[None, :]
    key, query = tl.load(k + key_at, of_key, 0.0), tl.load(q + key_at, of_key, 0.0)
    fade, factor = tl.load(decay + sequence * HEADS + head), tl.load(beta + sequence * HEADS + head)
    keys_at = mine + KEYS + ((group * CHUNK + n) * KEY)[:, None] + i[None, :]
    keys = tl.where(row == t, key, tl.load(keys_at, (row < t) & of_key, 0.0))
    fades_at = mine + FADES + head * SQUARE + t * CHUNK + n
    fades = tl.where(n < t, tl.load(fades_at - CHUNK, n < t, 0.0) * fade, tl.where(n == t, 1.0, 0.0))
    since_at = mine + SINCE + head * CHUNK + t
    since = tl.load(since_at - 1, t > 0, 1.0) * fade
    both = query + tl.zeros((CHUNK, K), tl.float32)
    if CORRECTS:
        both = tl.where(row == t, key, query)
    weights = _times(both, keys.T) * fades[None, :]
    inverse = weights
    if CORRECTS:
        inverse_at = mine + INVERSES + head * SQUARE + row * CHUNK + column
        inverse = tl.load(inverse_at, (row < t) & (column >= 0), 0.0)
        lower = tl.where((row == t) & (column < t), weights * factor, 0.0)
        found = tl.where(row == column, 1.0, 0.0) - _times(lower, inverse)
        inverse = tl.where(row == t, found, inverse)
    both_high, both_low = _split(both.T)
    weights_high, weights_low = _split(weights.T)
    inverse_high, inverse_low = _split(inverse.T)
    for block in tl.range(part * BLOCKS, part * BLOCKS + BLOCKS, num_stages=STAGES):
        j = block * COLUMNS + tl.arange(0, COLUMNS)
        of_value = (j < WIDTH)[:, None]
        state_at = mine + ((head * WIDTH + j) * KEY)[:, None] + i[None, :]
        state = tl.load(state_at, of_value & of_key & (known >= CHUNK), 0.0)
        r_at = mine + VALUES + (head * CHUNK + n)[None, :] * WIDTH + j[:, None]
        kept = tl.load(r_at, of_value & (column < t), 0.0)
        value_at = (sequence * HEADS + head) * WIDTH + j[:, None]
        values = tl.load(v + value_at, of_value, 0.0)
        high, low = _split(state)
        read = _product(high, low, both_high, both_low)
        if CORRECTS:
            r = tl.where(column == t, (values - since * read) * factor, kept)
            r_high, r_low = _split(r)
            u = _product(r_high, r_low, inverse_high, inverse_low)
        else:
            r = tl.where(column == t, values * factor, kept)
            u = r
        u_high, u_low = _split(u)
        output = since * read + _product(u_high, u_low, weights_high, weights_low)
        tl.store(out + value_at + 0 * column, output, of_value & (column == (t + 1) % CHUNK))
        tl.store(r_at, r, of_value & (column == t))
    if t == CHUNK - 1:
        tl.debug_barrier()
        for block in range(part * BLOCKS, part * BLOCKS + BLOCKS):
            j = block * COLUMNS + tl.arange(0, COLUMNS)
            of_value = (j < WIDTH)[:, None]
            state_at = mine + ((head * WIDTH + j) * KEY)[:, None] + i[None, :]
            state = tl.load(state_at, of_value & of_key & (known >= CHUNK), 0.0)
            u = tl.load(mine + VALUES + (head * CHUNK + n)[None, :] * WIDTH + j[:, None], of_value & (column >= 0), 0.0)
            if CORRECTS:
                u = _times(u, inverse.T)
            tl.store(state_at, _written(state, since, u, fades, keys), of_value & of_key)
    elif part == 0:
        if CORRECTS:
            tl.store(inverse_at, inverse, (row == t) & (column >= 0))
        tl.store(fades_at, fades)
        tl.store(since_at, since)
        if head % SHARE == 0:
            tl.store(mine + KEYS + (group * CHUNK + t) * KEY + i[None, :], key, of_key)
