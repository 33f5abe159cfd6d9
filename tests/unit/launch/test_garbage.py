"""When Python's garbage collector runs."""

from __future__ import annotations

import gc
from contextlib import ExitStack

from rlloop.launch.garbage import collect_rarely


def test_what_start_up_made_is_left_out_of_collections_until_the_stack_closes() -> None:
    before = gc.get_threshold()
    with ExitStack() as stack:
        collect_rarely(stack)
        assert gc.get_threshold() == (20_000, *before[1:])
        assert gc.get_freeze_count() > 10_000
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
