"""Building blocks of the operations: the exponential, products at every edge of the tiles, threads."""

import threading
import weakref
from queue import SimpleQueue

import numpy as np
import pytest
import torch

from rlloop.numerics.kernels.cpu.compiled import jit, linear, tiles
from rlloop.numerics.kernels.cpu.compiled.jit import flat, kernel
from rlloop.numerics.kernels.cpu.compiled.simd import LANES, exp, load, store
from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile
from tests.support.waiting import until

OURS = ops_for(NumericsProfile())
EXACT = ops_for(NumericsProfile.preset("stock"))


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@kernel
def exponentials(values, out):
    for i in range(0, len(values), LANES):
        store(out, i, exp(load(values, i)))


def test_exp_is_within_a_unit_in_the_last_place():
    values = np.linspace(-87.33, 88.72, 1 << 20).astype(np.float32)
    out = np.empty_like(values)
    exponentials(values, out)
    exact = np.exp(values.astype(np.float64))
    assert np.abs((out - exact) / np.spacing(exact.astype(np.float32))).max() < 1
    assert (np.diff(out) >= -np.spacing(out[1:])).all()


def test_exp_at_its_limits():
    inf, nan = np.inf, np.nan
    values = np.array([-inf, -1e30, -87.34, -0.0, 0.0, 88.73, 1e30, inf, nan, *[1.0] * 7], np.float32)
    out = np.empty_like(values)
    exponentials(values, out)
    np.testing.assert_array_equal(out[:9], np.array([0, 0, 0, 1, 1, inf, inf, inf, nan], np.float32))
    assert not np.signbit(out[:3]).any()


@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 70, 700), (3, 64, 80), (130, 40, 300), (530, 33, 17)])
def test_products_and_their_gradients_past_every_edge(rows, outputs, width):
    x, weight, bias = randn(rows, width), randn(outputs, width, seed=1), randn(outputs, seed=2)
    leaves, exact = (
        [t.to(kind).requires_grad_() for t in (x, weight, bias)] for kind in (torch.float32, torch.float64)
    )
    out, expected = OURS.linear(*leaves), EXACT.linear(*exact)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    grad = randn(rows, outputs, seed=3)
    for ours, wanted in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, exact, grad.double()), strict=True
    ):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wide", [6, 12])
def test_how_many_sums_the_registers_hold_changes_no_bit(wide):
    x, weight = randn(29, 50), randn(16, 50, seed=1)
    chains = tiles.chains(wide, 1)

    @jit.njit
    def some(lanes, rows, sums):
        chains(lanes, 0, 16, rows, 0, 50, 1, 50, sums, 0, 16, True)

    sums = np.empty(wide * 16, np.float32)
    some(weight.T.contiguous().numpy().reshape(-1), flat(x), sums)
    assert same_bits(torch.from_numpy(sums).view(wide, 16), OURS.linear(x, weight)[:wide])


@pytest.mark.parametrize("tile_count", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 5, 48])
def test_how_the_work_is_cut_changes_no_bit(tile_count, chunk):
    x, weight = randn(50, 290), randn(70, 290, seed=1)
    out = torch.empty(50, 70)
    args = (
        flat(weight),
        True,
        flat(x),
        True,
        flat(weight),
        False,
        flat(out),
        50,
        70,
        290,
        linear.FORWARD,
        linear.CHAIN,
        tile_count,
        chunk,
        linear.no_further(flat(x), flat(weight)),
    )
    for threads in (1, 3):
        linear.product(threads, *args)
        assert same_bits(out, OURS.linear(x, weight))


@pytest.mark.parametrize("outputs", [64, 128, 155])
def test_a_weight_gradient_has_a_task_for_each_thread(outputs):
    tile_count, chunk = linear.plan(outputs, 64, 10_000, threads=2, kind=linear.CHAIN, rows_by_row=False)
    tasks = -(-64 // (tile_count * LANES)) * -(-outputs // chunk)
    assert tasks >= 2
    assert chunk % LANES == 0


@pytest.mark.parametrize(("heads", "groups", "width", "v_width"), [(8, 2, 80, 80), (3, 3, 40, 24), (6, 1, 128, 64)])
def test_attention_and_its_gradients_at_any_width(heads, groups, width, v_width):
    lengths = [3, 150, 64]
    shapes = (217, heads, width), (217, groups, width), (217, groups, v_width)
    inputs = [randn(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    grad, layout = randn(217, heads, v_width, seed=9), AttentionLayout.of_sequences(lengths)
    results = []
    for ops, kind in ((OURS, torch.float32), (EXACT, torch.float64)):
        leaves = [t.to(kind).requires_grad_() for t in inputs]
        out = ops.attention(*leaves, layout, width**-0.5)
        results.append([out, *torch.autograd.grad(out, leaves, grad.to(kind))])
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-4, atol=2e-5)


def test_later_tokens_do_not_reach_earlier_ones_even_when_they_are_not_finite():
    q, k, v = (randn(70, 2, 16, seed=seed) for seed in range(3))
    layout = AttentionLayout.of_sequences([70])
    before = OURS.attention(q, k, v, layout, 0.25)
    k[40], v[40] = torch.nan, torch.inf
    after = OURS.attention(q, k, v, layout, 0.25)
    assert same_bits(after[:40], before[:40])
    assert after[40:].isnan().all()


def training_step():
    """Gradients of every operation, at sizes that are worth several threads."""
    leaves = [randn(*shape, seed=i).requires_grad_() for i, shape in enumerate(((300, 128), (256, 128), (128,)))]
    x, weight, gain = leaves
    normed, stream = OURS.rms_norm(x, gain, 1e-6, x * 0.5)
    wide = OURS.linear(normed, weight)
    heads = OURS.rope(wide.view(300, 4, 64), torch.arange(300), randn(300, 32), randn(300, 32, seed=1))
    mixed = OURS.attention(heads, heads[:, :2], heads[:, 2:], AttentionLayout.of_sequences([100, 200]), 0.125)
    out = OURS.silu_mul(mixed.flatten(1), wide)
    return [out, stream, *torch.autograd.grad((out.sum() + stream.sum()), leaves)]


def test_threads_change_no_bit_of_a_training_step(threads):
    threads(1)
    alone = training_step()
    for count in (2, 5):
        threads(count)
        for a, b in zip(alone, training_step(), strict=True):
            assert same_bits(a, b)


def test_threads_change_no_bit_of_a_router_bias_gradient(threads):
    """PyTorch's own sum over rows does, with 37 columns: it cuts them between threads, and sums some in vectors."""
    x, weight, bias = randn(3000, 16), randn(37, 16, seed=1), randn(37, seed=2).requires_grad_()
    slopes, found = randn(3000, 37, seed=3), []
    for count in (1, 2, 5):
        threads(count)
        found += torch.autograd.grad(OURS.router_logits(x, weight, True, bias), bias, slopes)
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])
    torch.testing.assert_close(found[0], slopes.sum(0), rtol=1e-4, atol=1e-3)


def test_many_threads_may_launch_kernels_at_once(threads):
    threads(3)
    expected, wrong = training_step(), []

    def run():
        for _ in range(3):
            wrong.extend(
                i for i, (a, b) in enumerate(zip(expected, training_step(), strict=True)) if not same_bits(a, b)
            )

    callers = [threading.Thread(target=run) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(600)
    assert not wrong
    assert not any(caller.is_alive() for caller in callers)


class Held:
    """An argument of a job that can be watched."""


def test_a_helper_holds_nothing_of_a_job_once_its_caller_goes_on():
    pool, both, held = jit._Pool(), threading.Barrier(2), Held()
    gone = weakref.ref(held)
    pool.run(1, lambda _: both.wait(), (held,))
    del held
    assert gone() is None


def test_an_error_in_a_helper_is_its_caller_s():
    pool, both = jit._Pool(), threading.Barrier(2)

    def fails(_):
        both.wait()
        if threading.current_thread().name == "rlloop-kernel":
            raise MemoryError("no room for a helper")

    for _ in range(2):  # the helper lives on
        with pytest.raises(MemoryError, match="no room for a helper"):
            pool.run(1, fails, (None,))


def test_a_caller_that_fails_leaves_no_helper_at_work():
    pool, both, go_on, ended = jit._Pool(), threading.Barrier(2), threading.Event(), threading.Event()

    def fails(_):
        both.wait()
        if threading.current_thread().name == "rlloop-kernel":
            go_on.wait(60)
            ended.set()
        else:
            threading.Timer(0.1, go_on.set).start()
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        pool.run(1, fails, (None,))
    assert ended.is_set()


def test_a_helper_that_came_too_late_holds_nothing_of_the_job():
    pool, held = jit._Pool(), Held()
    gone = weakref.ref(held)
    pool._grow(1)
    pool.jobs.put((print, (held,), [], SimpleQueue()))  # its permit is taken
    del held
    until(lambda: gone() is None, seconds=60)
