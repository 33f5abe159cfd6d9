"""The doctor names the operation that a fault was planted in, whichever it is."""

import pytest

from tests.support.planted_faults import FAULTS, named


@pytest.mark.slow
@pytest.mark.parametrize("planted", FAULTS)
def test_the_planted_operation_is_named(planted):
    found = named(planted)
    assert (found["op"], found["where"]) == FAULTS[planted][1:]
