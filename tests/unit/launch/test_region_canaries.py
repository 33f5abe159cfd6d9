"""The canaries of fleet=regions, which the trainer's own engines make in a cache of their size."""

import pytest

from rlloop import Engine, SamplingParams
from rlloop.launch.regions import Reference, _tokens
from tests.support.tiny_models import tiny_qwen3


@pytest.mark.parametrize("page", [16, 64, 1000])
def test_a_canary_fits_into_its_cache_whatever_the_page(page: int) -> None:
    prompts, sampling = [list(range(5, 40)), [7]], [SamplingParams(max_tokens=9, seed=1), SamplingParams(max_tokens=4)]
    for some in (0, 1, 2):
        tokens = _tokens(prompts[:some], sampling[:some], page)
        engine = Engine(tiny_qwen3(), page_size=page, max_cache_tokens=tokens)
        canary = Reference(engine, "cpu", prompts[:some], sampling[:some]).canary(3)
        assert engine.policy_version == 3
        assert [each.policy_version for each in canary.expected or ()] == [3] * some if canary else some == 0
