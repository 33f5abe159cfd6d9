import gc
import os
from pathlib import Path

import pytest
from hypothesis import Phase, settings

# With several workers each core has one: a second thread would wait for it. Tests of threads say how many they mean.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

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
