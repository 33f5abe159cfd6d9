from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlloop.rollout.engine.kv_cache import BlockManager
from rlloop.rollout.engine.request import Request, RequestTable
from rlloop.types import SamplingParams
from tests.support.scheduler_simulation import Simulation

TOKENS = st.integers(1, 2)  # few, so that prefixes are shared


class AnyTraffic(RuleBasedStateMachine):
    """Random requests in random order; `Simulation` has the checks."""

    @initialize(
        num_blocks=st.integers(3, 12),
        page_size=st.sampled_from([1, 2, 4]),
        max_batch_tokens=st.integers(1, 20),
        max_running=st.integers(1, 6),
        prefix_caching=st.booleans(),
        overlap=st.booleans(),
    )
    def start(self, **settings) -> None:
        self.simulation = Simulation(**settings)

    @rule(prompt=st.lists(TOKENS, min_size=1, max_size=12), max_tokens=st.integers(1, 12))
    def add(self, prompt: list[int], max_tokens: int) -> None:
        if self.simulation.fits(prompt, max_tokens):
            self.simulation.add(prompt, max_tokens)

    @rule(prompt=st.lists(TOKENS, min_size=1, max_size=6), count=st.integers(2, 4))
    def add_group(self, prompt: list[int], count: int) -> None:
        for _ in range(count):
            self.add(prompt, 4)

    @precondition(lambda self: self.simulation.scheduler.num_requests)
    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.simulation.scheduler.num_requests:
                self.simulation.step()

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.simulation.abort(data.draw(st.sampled_from(sorted(self.simulation.requests))))

    @rule()
    def new_version(self) -> None:
        self.simulation.new_version()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.check()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.finish()


AnyTraffic.TestCase.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)
TestAnyTraffic = pytest.mark.slow(AnyTraffic.TestCase)


def test_a_full_cache_preempts_and_everything_still_finishes():
    simulation = Simulation(num_blocks=6, page_size=2, max_batch_tokens=64, max_running=8)
    for first in (1, 2, 3, 4):
        simulation.add([first, 3, 3], 8)
    simulation.finish()
    assert simulation.stats.preemptions > 0
    assert len(simulation.finished) == 4


def test_decoding_goes_on_before_its_tokens_are_known():
    simulation = Simulation(num_blocks=128, page_size=2, max_batch_tokens=64, max_running=8, overlap=True)
    for last in (1, 2, 3, 4):
        simulation.add([1, 3, last], 30)
    simulation.step()
    late = simulation.add([4, 4], 3)  # comes in as soon as the step in flight is over
    simulation.step()
    simulation.step()
    assert late in simulation.running_ids()
    simulation.finish()
    assert simulation.overlapped > simulation.stats.steps / 2
    assert simulation.wasted > 0, "nobody ended while a step of theirs was in flight"


def test_one_request_alone_is_decoded_ahead_up_to_its_last_token():
    simulation = Simulation(num_blocks=8, page_size=2, max_batch_tokens=1, max_running=1, overlap=True)
    simulation.add([1], 4)
    simulation.finish()
    assert len(simulation.finished[0]) == 4
    assert (simulation.overlapped, simulation.wasted, simulation.stats.computed_tokens) == (3, 0, 4)


def test_a_step_ahead_takes_what_comes_in_and_prompts_in_chunks():
    simulation = Simulation(num_blocks=8, page_size=4, max_batch_tokens=3, max_running=3, overlap=True)
    simulation.add([1, 2], 6)
    simulation.step()  # which has begun another one
    simulation.add([3, 3, 1, 2, 3], 2)
    simulation.step()
    assert simulation.flight is not None
    batch, _ = simulation.flight
    assert (batch.counts.tolist(), batch.emits.tolist()) == ([1, 2], [True, False])
    assert batch.source is not None
    assert batch.source.tolist() == [0, -1]  # the first one's token is not known yet
    simulation.step()
    assert simulation.flight is not None
    assert simulation.flight[0].counts.tolist() == [1, 2]
    simulation.finish()


def test_nothing_is_scheduled_ahead_where_a_request_must_be_preempted():
    simulation = Simulation(num_blocks=3, page_size=2, max_batch_tokens=8, max_running=2, overlap=True)
    simulation.add([1, 2], 5)
    simulation.add([2, 1], 3)
    batch, _ = simulation.start(simulation.schedule())
    assert batch.counts.tolist() == [2, 2]  # both need a block for the next token, and one is left
    assert simulation.scheduler.schedule_ahead(batch) is None
    assert simulation.stats.preemptions == 0


@pytest.mark.parametrize("waiting", [True, False])
def test_an_abort_takes_out_that_request_and_no_other(waiting):
    simulation = Simulation(num_blocks=64, page_size=2, max_batch_tokens=64, max_running=3)
    for first in (1, 2, 3, 4):
        simulation.add([first, 3, 3], 8)
    simulation.step()
    assert simulation.scheduler.remove(99) is None
    simulation.abort(3 if waiting else 1)
    assert simulation.running_ids() == ([0, 1, 2] if waiting else [0, 2])
    assert [request.id for request in simulation.scheduler.waiting] == ([] if waiting else [3])
    simulation.check()
    simulation.finish()


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_filled_by_new_tokens_serve_the_next_turn(overlap, page_size):
    simulation = Simulation(num_blocks=64, page_size=page_size, max_batch_tokens=64, max_running=8, overlap=overlap)
    first = simulation.add([1, 2, 3], 10)
    simulation.finish()
    turn = [1, 2, 3, *simulation.finished[first]]
    assert len(turn) == 13, "it ended early"
    simulation.add([*turn, 5], 1)
    simulation.finish()
    assert simulation.stats.cached_tokens == 12  # the last token was never computed


def test_a_group_shares_its_prompt_within_one_step():
    simulation = Simulation(num_blocks=64, page_size=4, max_batch_tokens=64, max_running=8)
    for _ in range(4):
        simulation.add([1, 2, 3, 4, 4, 3, 2, 1, 1], 2)
    simulation.step()
    assert simulation.stats.computed_tokens == 9 + 3 * 1
    assert simulation.stats.cached_tokens == 3 * 8


def test_the_last_prompt_token_is_computed_even_when_all_of_it_is_cached():
    simulation = Simulation(num_blocks=64, page_size=4, max_batch_tokens=64, max_running=8)
    for _ in range(2):
        simulation.add([1, 2, 3, 4], 1)
        simulation.finish()
    assert simulation.stats.computed_tokens == 4 + 1
    assert simulation.stats.cached_tokens == 3


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [2, 4, 7])
def test_a_group_whose_prompt_ends_inside_a_block_computes_it_once(length, overlap):
    simulation = Simulation(num_blocks=64, page_size=4, max_batch_tokens=64, max_running=8, overlap=overlap)
    prompt = [1, 2, 3, 4, 5, 6, 7][:length]
    for _ in range(4):
        simulation.add(prompt, 3)
    simulation.step()
    assert simulation.stats.computed_tokens == length  # the others begin with its copies, in the next step
    simulation.step()
    simulation.add(prompt, 3)  # later than its group
    simulation.finish()
    made = sum(len(tokens) - 1 for tokens in simulation.finished.values())
    assert simulation.stats.computed_tokens == length + 4 * 1 + made
    assert simulation.stats.cached_tokens == 4 * (length - 1)


def test_a_tail_is_of_its_tokens_its_blocks_before_and_its_version():
    simulation = Simulation(num_blocks=64, page_size=4, max_batch_tokens=64, max_running=8)
    for prompt in ([1, 2, 3], [1, 3, 3], [1, 2, 3, 3, 1, 2, 3], [1, 2]):
        simulation.add(prompt, 2)
        simulation.finish()
    assert simulation.stats.cached_tokens == 0
    simulation.new_version()
    simulation.add([1, 2, 3], 2)
    simulation.finish()
    assert simulation.stats.cached_tokens == 0


def test_a_copy_is_dropped_with_its_request_and_the_rest_of_the_group_goes_on():
    simulation = Simulation(num_blocks=64, page_size=4, max_batch_tokens=64, max_running=8)
    group = [simulation.add([1, 2, 3], 6) for _ in range(3)]
    simulation.step()
    simulation.abort(group[1])
    simulation.abort(group[0])  # its block still has what the third is to copy
    simulation.finish()
    assert list(simulation.finished) == group[2:]
    assert simulation.stats.cached_tokens == 4


def test_finished_blocks_serve_a_longer_prompt_until_the_version_changes():
    simulation = Simulation(num_blocks=64, page_size=2, max_batch_tokens=64, max_running=8)
    simulation.add([1, 2, 3, 4, 1], 1)
    simulation.finish()
    simulation.add([1, 2, 3, 4, 2, 2], 1)
    simulation.finish()
    assert simulation.stats.cached_tokens == 4
    simulation.new_version()
    simulation.add([1, 2, 3, 4, 2, 2], 1)
    simulation.finish()
    assert simulation.stats.cached_tokens == 4


def test_long_prompts_are_cut_and_running_requests_go_on_meanwhile():
    simulation = Simulation(num_blocks=64, page_size=4, max_batch_tokens=5, max_running=8)
    simulation.add([1], 12)
    simulation.step()
    simulation.add([2] * 20, 1)
    batch = simulation.scheduler.schedule()
    assert batch.counts.tolist() == [1, 4]
    assert batch.emits.tolist() == [True, False]
    simulation.finish_step(*simulation.start(batch))
    simulation.finish()


def test_least_recently_freed_blocks_are_evicted_first_and_tails_before_heads():
    blocks = BlockManager(4, 1, prefix_caching=True)
    old, new = blocks.allocate([], 2), blocks.allocate([], 2)
    for name, block in zip((b"old0", b"old1", b"new0", b"new1"), old + new, strict=True):
        blocks.remember(block, name)
    blocks.deallocate(old)
    blocks.deallocate(new)
    assert blocks.match([b"old0", b"old1"]) == old
    blocks.allocate([], 1)
    assert blocks.match([b"old0", b"old1"]) == old[:1]
    blocks.allocate([], 1)
    assert blocks.match([b"old0"]) == []
    assert blocks.match([b"new0", b"new1"]) == new
    assert blocks.evictions == 2


def test_matched_blocks_nobody_uses_are_not_counted_as_free_twice():
    blocks = BlockManager(3, 1, prefix_caching=True)
    taken = blocks.allocate([], 2)
    for name, block in zip((b"a", b"b"), taken, strict=True):
        blocks.remember(block, name)
    blocks.deallocate(taken)
    assert blocks.num_free == 3
    assert blocks.can_allocate(taken, 1)
    assert not blocks.can_allocate(taken, 2)


def test_a_preempted_request_waits_in_front_and_the_oldest_is_never_preempted():
    simulation = Simulation(num_blocks=5, page_size=2, max_batch_tokens=64, max_running=3)
    for first in (1, 2, 3):
        simulation.add([first, 3], 8)
    while not simulation.stats.preemptions:
        simulation.step()
    table, scheduler = simulation.scheduler.table, simulation.scheduler
    assert table.request(int(scheduler.running[0])).id == 0
    assert [request.id for request in scheduler.waiting] == sorted(request.id for request in scheduler.waiting)
    simulation.finish()
    assert list(simulation.finished) == [0, 1, 2]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory in use is read from /proc, which Linux has")
def test_one_long_request_takes_the_memory_of_one_row():
    def used() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    table, before = RequestTable(512, 16), used()
    row = table.load(Request.of(0, [1, 2, 3], SamplingParams(max_tokens=65536, seed=0), (2,)), [0], 0)
    assert table.tokens[row, :3].tolist() == [1, 2, 3]
    assert table.tokens.nbytes + table.logprobs.nbytes > 3 << 27
    assert used() - before < 1 << 27
