import functools
import gc
import os
from pathlib import Path

import httpx._transports.default as transports
import pytest
from hypothesis import Phase, settings

# With several workers each core has one: a second thread would wait for it. Tests of threads say how many they mean.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# To read the authorities of TLS takes longer than most requests here: once, for clients that name none of their own.
_fresh_context = transports.create_ssl_context
_usual_context = functools.cache(_fresh_context)


def _context(verify=True, cert=None, trust_env=True):
    return (_usual_context if verify is True else _fresh_context)(verify, cert, trust_env)


transports.create_ssl_context = _context

# make mutate: a mutant needs one example that fails, not the smallest one
settings.register_profile("mutation", phases=[Phase.explicit, Phase.generate], database=None)

# Files that take long begin first, so that no worker waits for one that began last (make test keeps this order).
LONG = ("fault", "extension", "contract", "integration")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end, so that no later collection needs to look through their million objects."""
    gc.collect()
    gc.freeze()
