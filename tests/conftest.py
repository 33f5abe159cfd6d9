import functools
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx._transports.default as transports
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
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

# On a busy machine an answer may take longer than the five seconds of a client that names no limit.
for phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, phase, 120.0)

# No limit of an example's time, and the same examples in every run: a failure can be repeated. New ones are tried by
# `pytest --hypothesis-profile default`.
settings.load_profile("ci")
# make mutate: a mutant needs one example that fails, not the smallest one
settings.register_profile("mutation", phases=[Phase.explicit, Phase.generate], database=None)

# Files that take long begin first, so that no worker waits for one that began last; and those that wait for processes
# and timeouts in turn with four times as many that compute (make test keeps this order).
WAIT, COMPUTE = ("fault", "extension"), ("contract", "integration")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: a test that waits leaves its core to another."""
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files = {item.path: item.path.relative_to(Path(__file__).parent).parts[0] for item in items}
    waiting, computing = ([file for file, folder in files.items() if folder in kind] for kind in (WAIT, COMPUTE))
    places = {file: at for at, file in enumerate(computing)} | {file: 4 * at for at, file in enumerate(waiting)}
    items.sort(key=lambda item: places.get(item.path, len(items)))


@pytest.fixture(autouse=True)
def no_modules_of_other_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The command puts its working folder on Python's path; a later test has modules of the same names."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path_factory.getbasetemp())):
            del sys.modules[name]


@pytest.fixture
def heard_hangups() -> Iterator[None]:
    """Under `nohup` SIGHUP is ignored, and so it is by runs."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end, so that no later collection needs to look through their million objects."""
    gc.collect()
    gc.freeze()
