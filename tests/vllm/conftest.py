"""These tests run where vLLM's CPU build is: `make test-vllm`. Elsewhere they are skipped, saying why."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlloop.rollout.vllm.versions import problems

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lines = problems()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # vLLM and what it imports warn of themselves
            if lines:
                item.add_marker(pytest.mark.skip(reason="; ".join(lines)))
