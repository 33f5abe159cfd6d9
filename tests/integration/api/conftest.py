import gc
import warnings

import pytest


@pytest.fixture(scope="module", autouse=True)
def leftovers():
    """Tinker's client leaves sockets to the garbage collector, whose warnings would fail whichever test ran by then."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
