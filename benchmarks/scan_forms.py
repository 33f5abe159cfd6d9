"""The scan's forms for few programs, and tiles of the backward, on one GPU: python benchmarks/scan_forms.py [--seconds 110] [--tiny]

`main`: kernel of the package, its tiles varied. `parts`: `scan_parts` below, a program's 16 columns of S in WARPS parts
along K, a warp each; S crosses once through shared memory, a warp reads 8 tokens of k or of q, T r is made by all. `own`:
outputs are made where q S is. `flat`: own, and S, split once, crosses as the left operand of one product (two barriers
a piece in place of eight a chunk). With 4 warps, `flat` is scan_parts.patch.
Prints milliseconds (median), the ratio to main as it is, and whether bits are main's ("same", or how many differ);
"steps" is outputs and stored states of sequences that come in two steps. --tiny: bits alone, small, also in Triton's interpreter
(python -c "import tests.support.interpreted_kernels, sys; sys.argv = ['x', '--tiny']; sys.path.insert(0, 'FOLDER'); import scan_forms; scan_forms.main()").
"""
import argparse, concurrent.futures, multiprocessing, os, statistics, sys, time
BEGAN = time.time()
import torch, triton, triton.language as tl
from rlloop.numerics.kernels.triton import scan as S
from rlloop.numerics.kernels.triton import recurrence_backward as B
from rlloop.numerics.kernels.triton.scan_products import split, straight, summed, turned

PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAIN = S.scan_chunks


@triton.jit
def _dots(sums, high, low, to_high, to_low):
    return (
        tl.dot(low, to_high, sums[0], input_precision="tf32", max_num_imprecise_acc=16),
        tl.dot(high, to_low, sums[1], input_precision="tf32", max_num_imprecise_acc=16),
        tl.dot(high, to_high, sums[2], input_precision="tf32", max_num_imprecise_acc=16),
    )

@triton.jit
def _none(WARPS: tl.constexpr, N: tl.constexpr):
    z = tl.zeros((WARPS, 16, N), tl.float32)
    return z, z, z

@triton.jit
def _straight(x, N: tl.constexpr):
    return x.reshape(x.shape[0], 16, N // 8, 4, 2).permute(0, 1, 2, 4, 3).reshape(x.shape[0], 16, N)

@triton.jit
def _back(x, N: tl.constexpr):
    return x.reshape(x.shape[0], 16, N // 8, 2, 4).permute(0, 1, 2, 4, 3).reshape(x.shape[0], 16, N)

@triton.jit
def _copies(x, WARPS: tl.constexpr):
    return tl.broadcast_to(x[None, :, :], (WARPS, x.shape[0], x.shape[1]))

@triton.jit
def _chunk_parts(
    state, q, k, to, values, betas, given, old_half, there_half, is_old, keys_there, whole, KEY: tl.constexpr,
    STRIDE: tl.constexpr, WARPS: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, CORRECTS: tl.constexpr,
    OWN: tl.constexpr, FLAT: tl.constexpr, chunk, old, end,
):
    CHUNK: tl.constexpr = 16
    SQUARE: tl.constexpr = CHUNK * CHUNK
    HALF: tl.constexpr = 8
    i, n = tl.arange(0, PIECE), tl.arange(0, CHUNK)
    token = turned(n)
    warp = tl.arange(0, WARPS)
    place = (warp % 2)[:, None] * HALF + tl.arange(0, HALF)[None, :]   # [W, H]
    half = turned(place)
    square = n[None, :] * CHUNK + n[:, None]
    part = place[:, None, :] * CHUNK + n[None, :, None]                  # [W, 16, H]
    weights, since_half = tl.load(to + SQUARE + part), tl.load(to + 2 * SQUARE + half)
    since = tl.load(to + 2 * SQUARE + n)
    if CORRECTS:
        to_end = tl.where(whole, tl.load(to + 2 * SQUARE + CHUNK + token), 0.0)
    else:
        to_end = tl.where(whole, tl.load(to + 2 * SQUARE + CHUNK + n), 0.0)
    total = tl.where(whole, tl.load(to + 2 * SQUARE + CHUNK - 1), 1.0)
    read_sums = _none(WARPS, HALF)
    asked_sums = read_sums
    SPAN: tl.constexpr = WARPS * PIECE
    READS: tl.constexpr = 2 * CHUNK if CORRECTS or WARPS == 4 else CHUNK  # so that each of four warps has 8 columns
    column = tl.arange(0, READS)  # of FLAT: tokens of k, then those of q; without the delta rule of q twice
    asks, number_of = (column >= CHUNK) | (not CORRECTS), turned(column) & (CHUNK - 1)
    flat_there = (chunk + number_of >= old) & (chunk + number_of < end)
    flat_there = flat_there | ((chunk + number_of < old) & ~asks)
    flat_zeros = tl.zeros((16, READS), tl.float32)
    flat_sums = (flat_zeros, flat_zeros, flat_zeros)
    for piece in tl.static_range(PIECES if FLAT else 0):
        wide = piece * SPAN + tl.arange(0, SPAN)
        of_key = ((wide < KEY) | (KEY % SPAN == 0))[:, None]
        high, low = split(state[piece].permute(1, 0, 2).reshape(16, SPAN))
        at = tl.where(asks, q, k)[None, :] + (number_of[None, :] * STRIDE + wide[:, None])
        to_high, to_low = split(tl.load(at, flat_there[None, :] & of_key, 0.0))
        flat_sums = _dots(flat_sums, high, low, to_high, to_low)
    for piece in tl.static_range(0 if FLAT else PIECES):
        wide = tl.arange(0, SPAN)
        of_key = ((piece * SPAN + wide < KEY) | (KEY % SPAN == 0))[None, :, None]
        at = half[:, None, :] * STRIDE + piece * SPAN + wide[None, :, None]
        high, low = split(_copies(state[piece].permute(1, 0, 2).reshape(16, SPAN), WARPS))
        if CORRECTS and WARPS == 4:
            reads = (warp < 2)[:, None]
            mask = (reads & old_half) | there_half
            both = tl.load(tl.where(reads[:, :, None], k, q) + at, mask[:, None, :] & of_key, 0.0)
            to_high, to_low = split(both)
            asked_sums = _dots(asked_sums, high, low, to_high, to_low)
        else:
            if CORRECTS:
                to_high, to_low = split(tl.load(k + at, (old_half | there_half)[:, None, :] & of_key, 0.0))
                read_sums = _dots(read_sums, high, low, to_high, to_low)
            to_high, to_low = split(tl.load(q + at, there_half[:, None, :] & of_key, 0.0))
            asked_sums = _dots(asked_sums, high, low, to_high, to_low)
    asked = summed(asked_sums)
    if FLAT and WARPS == 4:
        asked = summed(flat_sums).reshape(16, 4, HALF).permute(1, 0, 2)
    elif FLAT and CORRECTS:
        taken, asked = summed(flat_sums).reshape(16, 2, 2, HALF).permute(2, 0, 3, 1).split()
    elif FLAT:
        asked = summed(flat_sums).reshape(16, 2, HALF).permute(1, 0, 2)
        asked = tl.broadcast_to(asked[None, :, :, :], (WARPS // 2, 2, 16, HALF)).reshape(WARPS, 16, HALF)
    if CORRECTS and WARPS == 4:
        read, others = asked.reshape(2, 2, 16, HALF).permute(1, 2, 3, 0).split()
        if not OWN:
            asked = tl.broadcast_to(others[None, :, :, :], (2, 2, 16, HALF)).reshape(4, 16, HALF)
    elif FLAT and CORRECTS:
        read = taken
    else:
        read = summed(read_sums)
    if CORRECTS:
        read = straight(read.permute(1, 0, 2).reshape(16, CHUNK), 16, CHUNK)
        r = _copies((values - since[None, :] * read) * betas[None, :], WARPS)
        r = tl.where(is_old[None, None, :], _copies(given, WARPS), r)
        r_high, r_low = split(r)
        to_high, to_low = split(tl.load(to + square))
        u = summed(_dots(_none(WARPS, CHUNK), r_high, r_low, _copies(to_high, WARPS), _copies(to_low, WARPS)))
        u_written = _straight(u * to_end[None, None, :], CHUNK)
        u = _straight(u, CHUNK)
    else:
        r = tl.where(is_old[None, :], given, values * betas[None, :])
        u = _copies(r, WARPS)
        u_written = _copies(r * to_end[None, :], WARPS)
        r = u
    u_high, u_low = split(u_written)
    after = ()
    for piece in tl.static_range(PIECES):
        number = piece * SPAN + (tl.arange(0, WARPS)[:, None] * PIECE + i[None, :])  # [W, PIECE]
        keys = tl.load(k + n[None, :, None] * STRIDE + number[:, None, :], keys_there[None, :, None] & ((number < KEY) | (KEY % SPAN == 0))[:, None, :], 0.0)
        to_high, to_low = split(_back(keys, PIECE))
        sums = tl.dot(u_low, to_high, input_precision="tf32", max_num_imprecise_acc=16)
        sums = tl.dot(u_high, to_low, sums, input_precision="tf32", max_num_imprecise_acc=16)
        sums = tl.dot(u_high, to_high, sums, input_precision="tf32", max_num_imprecise_acc=16)
        after = after + (state[piece] * total + _straight(sums, PIECE),)
    u_high, u_low = split(u)
    to_high, to_low = split(weights)
    output = since_half[:, None, :] * asked
    output += summed(_dots(_none(WARPS, HALF), u_high, u_low, to_high, to_low))
    return after, output, r

@triton.jit(do_not_specialize=["has_states"])
def scan_parts(
    q, k, v, beta, query_start, context, rows, states, made, begun, out, has_states, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
    WARPS: tl.constexpr, CORRECTS: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, INVERSES: tl.constexpr, FADES: tl.constexpr, SINCE: tl.constexpr, SIZE: tl.constexpr,
    MADE: tl.constexpr, STAGES: tl.constexpr, OWN: tl.constexpr, FLAT: tl.constexpr,
):
    CHUNK: tl.constexpr = 16
    COLUMNS: tl.constexpr = 16
    SQUARE: tl.constexpr = CHUNK * CHUNK
    SHARE: tl.constexpr = HEADS // GROUPS
    STRIDE: tl.constexpr = GROUPS * KEY
    HALF: tl.constexpr = 8
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = head // SHARE
    begin = tl.load(query_start + sequence)
    count = (tl.load(query_start + sequence + 1) - begin).to(tl.int32)
    known = begin * 0
    mine = states
    if has_states != 0:
        known = tl.load(context + sequence)
        mine = states + tl.load(rows + sequence) * SIZE
    old = (known % CHUNK).to(tl.int32)
    end = tl.where(count > 0, old + count, 0)
    i, j, n = tl.arange(0, PIECE), block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, CHUNK)
    w = tl.arange(0, WARPS)
    of_value = (j < WIDTH)[:, None]
    SPAN: tl.constexpr = WARPS * PIECE
    number = w[:, None, None] * PIECE + i[None, None, :]
    state_at = mine + (head * WIDTH + j)[None, :, None] * KEY + number
    state = ()
    for piece in tl.static_range(PIECES):
        inside = (of_value & (known >= CHUNK))[None, :, :] & (piece * SPAN + number < KEY)
        state = state + (tl.load(state_at + piece * SPAN, inside, 0.0),)
    token = n
    half = turned((w % 2)[:, None] * HALF + tl.arange(0, HALF)[None, :])
    kept_at = mine + VALUES + (head * CHUNK + token)[None, :] * WIDTH + j[:, None]
    to = made + ((begin // CHUNK + 2 * sequence) * HEADS + head) * MADE
    q += ((begin - old) * GROUPS + group) * KEY
    k += ((begin - old) * GROUPS + group) * KEY
    v += ((begin - old) * HEADS + head) * WIDTH
    out += ((begin - old) * HEADS + head) * WIDTH
    beta += (begin - old) * HEADS + head
    value_at = token[None, :] * (HEADS * WIDTH) + j[:, None]
    out_at = half[:, None, :] * (HEADS * WIDTH) + j[None, :, None]
    keys = k
    if old > 0:
        keys = begun + (sequence * CHUNK * GROUPS + group) * KEY
    given = tl.load(kept_at, (n < old)[None, :] & of_value, 0.0)  # is_old in the first chunk alone
    last = tl.zeros((WARPS, 16, CHUNK), tl.float32)
    for chunk in tl.range(0, end, CHUNK, num_stages=STAGES):
        is_old, there = chunk + token < old, (chunk + token >= old) & (chunk + token < end)
        old_half, there_half = chunk + half < old, (chunk + half >= old) & (chunk + half < end)
        is_new = there[None, :] & of_value
        values = tl.load(v + value_at, is_new, 0.0)
        betas = tl.load(beta + token * HEADS, there, 0.0)
        state, output, r = _chunk_parts(
            state, q, keys, to, values, betas, given, old_half, there_half, is_old, chunk + n < end,
            chunk + CHUNK <= end, KEY, STRIDE, WARPS, PIECES, PIECE, CORRECTS, OWN, FLAT, chunk, old, end,
        )
        stores = w >= WARPS - 2 if OWN else w < 2  # those that have read q
        tl.store(out + out_at, output, (there_half & stores[:, None])[:, None, :] & of_value[None, :, :])
        last = r
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
                tl.store(state_at + piece * SPAN, state[piece], of_value[None, :, :] & (piece * SPAN + number < KEY))
        upto = end % CHUNK
        fresh_r = ((n < upto) & (end - upto + n >= old))[None, :] & of_value
        tl.store(kept_at[None, :, :] + (w * 0)[:, None, None], last, fresh_r[None, :, :] & (w == 0)[:, None, None])
        if (block == 0) & (upto > 0):
            to -= HEADS * MADE
            k -= CHUNK * STRIDE
            row, column = n[:, None], n[None, :]
            if CORRECTS:
                inverse = tl.load(to + row * CHUNK + column)
                tl.store(mine + INVERSES + head * SQUARE + turned(n)[:, None] * CHUNK + column, inverse)
            faded, since = tl.load(to + 2 * SQUARE + CHUNK + n), tl.load(to + 2 * SQUARE + CHUNK - 1)
            tl.store(mine + FADES + head * SQUARE + (upto - 1) * CHUNK + n, faded)
            tl.store(mine + SINCE + head * CHUNK + upto - 1, since)
            is_new = (n < upto) & ((end >= CHUNK) | (n >= old)) & (head % SHARE == 0)
            kept = mine + KEYS + group * (CHUNK * KEY) + n[:, None] * KEY + i[None, :]
            for piece in tl.static_range(PIECES * WARPS):
                mask = is_new[:, None] & (piece * PIECE + i < KEY)[None, :]
                fresh = tl.load(k + n[:, None] * STRIDE + piece * PIECE + i[None, :], mask, 0.0)
                tl.store(kept + piece * PIECE, fresh, mask)


# form: ("main", columns, warps, stages, piece, blocks), ("parts", warps, stages, piece), or likewise "own": outputs are
# made by the warps that have read q, so that q S does not cross; "flat": own, and S crosses as the operand of one product
AS_IS = None
FORMS = [
    AS_IS, ("flat", 4, 4, 16), ("flat", 4, 3, 32), ("own", 4, 4, 16), ("flat", 2, 3, 32), ("parts", 4, 4, 16),
    ("flat", 4, 3, 16), ("parts", 2, 3, 32), ("flat", 4, 2, 32), ("own", 4, 3, 32), ("flat", 2, 4, 32),
    ("parts", 2, 4, 32), ("flat", 4, 2, 16), ("flat", 2, 3, 16), ("main", 16, 2, 3, 32, 0), ("main", 16, 1, 3, 16, 1),
]
BACKWARDS = {  # of begin_states and of end_states: keys, values, warps, stages
    "as it is": {}, "begin 32 cols 3 stages": {"begin_states": (0, 32, 4, 3)}, "begin 16 cols": {"begin_states": (0, 16, 4, 2)},
    "begin 16 cols 3 stages": {"begin_states": (0, 16, 4, 3)}, "begin 8 warps": {"begin_states": (0, 32, 8, 2)},
    "begin 64 cols": {"begin_states": (0, 64, 4, 2)}, "end 16 cols": {"end_states": (0, 16, 4, 2)},
    "end 32 cols 3 stages": {"end_states": (0, 32, 4, 3)}, "end 16 cols 3 stages": {"end_states": (0, 16, 4, 3)},
    "end 8 warps": {"end_states": (0, 32, 8, 2)}, "end 64 cols": {"end_states": (0, 64, 4, 2)},
}
SHAPES = {"Qwen": (16, 32, 128, 128, True), "Nano": (8, 64, 128, 64, False)}
TINY = {"toy-delta": (1, 2, 20, 20, True), "toy-mamba": (1, 2, 64, 16, False)}
WORK = {"1x8192": (1, 8192), "8x1024": (8, 1024)}
TILES = dict(B.TILES)
KERNELS = {"begin_states": B.begin_states, "end_states": B.end_states}


class Launch:
    """In the place of `scan.scan_chunks`: launches the form that is chosen."""

    form, absent = AS_IS, False

    def __getitem__(self, grid):
        def go(*args, WIDTH, COLUMNS, BLOCKS, STAGES, num_warps, PIECES, PIECE, CHUNK, **o):
            form, key = Launch.form, o["KEY"]
            if Launch.absent:
                return
            if form is AS_IS:
                MAIN[grid](*args, WIDTH=WIDTH, COLUMNS=COLUMNS, BLOCKS=BLOCKS, STAGES=STAGES, num_warps=num_warps,
                           PIECES=PIECES, PIECE=PIECE, CHUNK=CHUNK, **o)
            elif form[0] == "main":
                _, columns, warps, stages, piece, blocks = form
                MAIN[(-(-WIDTH // columns), *grid[1:])](*args, WIDTH=WIDTH, COLUMNS=columns, BLOCKS=blocks, STAGES=stages,
                    num_warps=warps, PIECES=-(-key // piece), PIECE=piece, CHUNK=CHUNK, **o)
            else:
                _, warps, stages, piece = form
                scan_parts[(-(-WIDTH // 16), *grid[1:])](*args, WIDTH=WIDTH, WARPS=warps, STAGES=stages, num_warps=warps,
                    PIECES=-(-key // (piece * warps)), PIECE=piece, OWN=form[0] != "parts", FLAT=form[0] == "flat", **o)
        return go


S.scan_chunks = Launch()


def inputs(tokens, shape, seed=0):
    groups, heads, key, width, _ = shape
    draw = torch.Generator(PLACE).manual_seed(seed)
    def normal(*size): return torch.randn(*size, generator=draw, device=PLACE)
    q, k, v = normal(tokens, groups, key), normal(tokens, groups, key), normal(tokens, heads, width)
    return q / key**0.5, k / k.norm(dim=-1, keepdim=True), v, torch.sigmoid(normal(tokens, heads) + 4), torch.sigmoid(normal(tokens, heads))


def starts(lengths): return torch.tensor([0, *lengths], device=PLACE).cumsum(0)


def forward(given, shape, query_start, *state): return S.scan(*given, shape[4], query_start, *state)


def steps(shape, lengths=((21, 3, 1, 16, 0), (30, 14, 2, 16, 5), (2, 1, 1, 3, 40))):
    """Outputs and stored states of sequences that come in steps."""
    size, n, made = S.scan_state(*shape[:4])[0], len(lengths[0]), []
    store, rows = torch.zeros(n + 1, size, device=PLACE), torch.arange(n, device=PLACE) + 1
    done = torch.zeros(n, dtype=torch.int64, device=PLACE)
    for at, counts in enumerate(lengths):
        made.append(forward(inputs(sum(counts), shape, at + 1), shape, starts(counts), done, store, rows).clone())
        done = done + torch.tensor(counts, device=PLACE)
    return [*made, store]


def differing(a, b): return sum(int((x.view(torch.int32) != y.view(torch.int32)).sum()) for x, y in zip(a, b, strict=True))


def bits(count): return "same" if count == 0 else f"{count:,} differ"


def set_tiles(name):
    B.TILES.update(TILES)
    for kernel, tiles in BACKWARDS[name].items():
        B.TILES[KERNELS[kernel]] = B.Tiles(*tiles)


def compile_one(job):
    """In a process of its own: a small launch leaves the compiled kernel in Triton's cache on the disk."""
    kind, name, what = job
    try:
        shape = SHAPES[name]
        given = inputs(64, shape)
        if kind == "forward":
            Launch.form = what
            forward(given, shape, starts([64]))
            if what is AS_IS:  # the kernel for many programs, too
                steps(shape)
        else:
            set_tiles(what)
            B.scan_backward(*given, shape[4], starts([64]), torch.randn_like(given[2]))
        torch.cuda.synchronize()
        return job, ""
    except Exception as error:  # too much shared memory, or what the compiler refuses
        return job, f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"


def milliseconds(work, calls=3):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def timed(works, rounds=5):
    """Median milliseconds, in rounds in which all take turns."""
    times = {name: [] for name in works}
    for index in range(rounds + 1):
        for name, work in works.items():
            took = milliseconds(work)
            if index:
                times[name].append(took)
    return {name: statistics.median(each) for name, each in times.items()}


def with_form(form, work):
    def run():
        Launch.form = form
        return work()
    return run


def with_tiles(name, work):
    def run():
        set_tiles(name)
        return work()
    return run


def text(form): return "main as it is" if form is AS_IS else " ".join(map(str, form))


def tiny():
    for name, shape in TINY.items():
        Launch.form = AS_IS
        wanted = steps(shape)
        for form in [("flat", 4, 3, 16), ("own", 4, 3, 16), ("flat", 2, 3, 16), ("parts", 4, 3, 16)]:
            Launch.form = form
            print(name, text(form), bits(differing(steps(shape), wanted)), f"{time.time() - BEGAN:.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        return tiny()
    def left(): return args.seconds - (time.time() - BEGAN)
    backwards = [("backward", name, what) for what in BACKWARDS for name in SHAPES]  # those as they are compile the rest's other kernels
    jobs = [*backwards[:2], *(("forward", name, form) for form in FORMS for name in SHAPES), *backwards[2:]]
    pool = concurrent.futures.ProcessPoolExecutor(min(14, os.cpu_count() or 1), multiprocessing.get_context("spawn"))
    refused, waiting = {}, [pool.submit(compile_one, job) for job in jobs]
    try:
        for done in concurrent.futures.as_completed(waiting, timeout=max(1, left() - 30)):
            job, error = done.result()
            refused[job] = error
            if error:
                print("refused", job, error)
    except concurrent.futures.TimeoutError:
        print("not all compiled in time")
    for process in list(pool._processes.values()):  # ours alone
        process.terminate()
    ready = {job for job, error in refused.items() if not error}
    print(f"compiled {len(ready)} of {len(jobs)} in {time.time() - BEGAN:.0f} s on {torch.cuda.get_device_name()}", flush=True)
    best = {}
    for work, (sequences, length) in WORK.items():
        for name, shape in SHAPES.items():
            if left() < 8:
                print(f"no time for {name} {work}")
                continue
            given, query_start = inputs(sequences * length, shape), starts([length] * sequences)
            def run(): return forward(given, shape, query_start)
            forms = [form for form in FORMS if ("forward", name, form) in ready]
            wanted, told = None, {}
            for form in forms:
                Launch.form = form
                made, stepped = [run()], steps(shape)
                wanted = wanted or (made, stepped)
                told[form] = f"{bits(differing(made, wanted[0]))}, steps {bits(differing(stepped, wanted[1]))}"
            works = {form: with_form(form, run) for form in forms}
            times = timed(works)
            Launch.absent = True
            prepare = timed({0: run})[0]
            Launch.absent = False
            print(f"\nforward, {name}, {work}: prepare alone {prepare:.3f} ms")
            for form, took in sorted(times.items(), key=lambda each: each[1]):
                chunks = length // 16
                print(f"  {took:7.3f} ms {took / times[AS_IS]:5.2f} of main  {(took - prepare) * 1e3 / chunks:5.2f} us a chunk  {text(form):22s} {told[form]}", flush=True)
            best[name, work] = min(times, key=lambda form: times[form] if told[form] == "same, steps same" else 1e9)
    for work, (sequences, length) in WORK.items():
        for name, shape in SHAPES.items():
            if left() < 5 or (name, work) not in best:
                print(f"no time for the backward, {name} {work}")
                continue
            given, query_start = inputs(sequences * length, shape), starts([length] * sequences)
            grad = torch.randn_like(given[2])
            def back(): return B.scan_backward(*given, shape[4], query_start, grad)
            def both():
                forward(given, shape, query_start)
                return back()
            names = [what for what in BACKWARDS if ("backward", name, what) in ready]
            made = {what: with_tiles(what, back)() for what in names}
            told = {what: bits(differing(made[what], made["as it is"])) for what in names}
            del made
            times = timed({what: with_tiles(what, back) for what in names}, rounds=3)
            set_tiles("as it is")
            whole = timed({form: with_form(form, both) for form in dict.fromkeys([AS_IS, best[name, work]])}, rounds=3)
            print(f"\n{name}, {work}: forward and backward " + ", ".join(f"{text(form)} {took:.3f} ms" for form, took in whole.items()))
            for what, took in sorted(times.items(), key=lambda each: each[1]):
                print(f"  backward {took:7.3f} ms {took / times['as it is']:5.2f}  {what:24s} {told[what]}", flush=True)
    print(f"{time.time() - BEGAN:.0f} s")


if __name__ == "__main__":  # as a module of its own, whose name processes that compile give it too
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import scan_forms

    scan_forms.main()
